"""The residual on nodes: means over shared tokens, and the page that documents them."""

from __future__ import annotations

import doctest
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.trainers.gca_sipo_trainer import shared_token_means

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gca_on_trees.md"


def test_every_number_on_the_page_is_what_the_code_prints():
    try:
        result = doctest.testfile(str(PAGE), module_relative=False, globs={}, raise_on_error=False)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_printoptions(profile="default")
    assert result.failed == 0
    assert result.attempted > 15


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 5), columns=st.integers(1, 6), slots=st.integers(1, 8))
def test_means_over_shared_tokens_are_those_of_a_loop(seed, rows, columns, slots):
    generator = torch.Generator().manual_seed(seed)
    token_slots = torch.randint(-1, slots, (rows, columns), generator=generator)
    values = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    counted = torch.rand(rows, generator=generator) < 0.7
    means = shared_token_means(values, token_slots, counted)
    for row in range(rows):
        for column in range(columns):
            slot = token_slots[row, column]
            copies = [
                values[i, j].item()
                for i in range(rows)
                for j in range(columns)
                if counted[i] and slot >= 0 and token_slots[i, j] == slot
            ]
            expected = sum(copies) / len(copies) if copies else 0.0
            assert abs(means[row, column].item() - expected) < 1e-12


def test_a_rollout_that_does_not_count_changes_no_mean_even_when_it_is_nan():
    slots = torch.tensor([[0, 1], [0, 2]])
    values = torch.tensor([[0.5, 0.25], [torch.nan, torch.nan]])
    means = shared_token_means(values, slots, torch.tensor([True, False]))
    assert means.tolist() == [[0.5, 0.25], [0.5, 0.0]]
