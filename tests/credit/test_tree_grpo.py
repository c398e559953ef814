"""Group advantages over the leaves of a prompt and of a tree."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import group_advantages, tree_grpo_advantages, tree_grpo_token_advantages
from tests.credit.batches import Batch, assert_equal, batches, quick
from tests.credit.misfits import assert_misfits_refused

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


REWARDS = double([1.0, 0.0, 0.0, 0.0])
PROMPTS, TREES = torch.zeros(4).long(), torch.tensor([4, 4, 9, 9])


def test_levels_of_two_trees():
    # Prompt: mean .25, sample sd .5 -> (1.5, -.5, -.5, -.5). Tree 4: mean .5, sd .707107 -> (.707107, -.707107); tree
    # 9: 0.
    inter, intra = [1.5, -0.5, -0.5, -0.5], [0.5**0.5, -(0.5**0.5), 0.0, 0.0]
    exact = {"epsilon": 0.0}
    assert_equal(tree_grpo_advantages(REWARDS, PROMPTS, TREES, level="inter", **exact), inter)
    assert_equal(tree_grpo_advantages(REWARDS, PROMPTS, TREES, level="intra", **exact), intra)
    assert_equal(tree_grpo_advantages(REWARDS, PROMPTS, TREES, **exact), double(inter) + double(intra))
    # Nested: (1.5, -.5) has mean .5 and sd sqrt(2) -> (.707107, -.707107); (-.5, -.5) -> 0.
    assert_equal(tree_grpo_advantages(REWARDS, PROMPTS, TREES, level="nested", **exact), intra)
    # epsilon 1e-6 in both divisors.
    assert_equal(tree_grpo_advantages(REWARDS, PROMPTS, TREES)[0], 0.75 / 0.500001 + 0.5 / (0.5**0.5 + 1e-6))


def test_a_tree_of_one_leaf_adds_nothing_or_its_raw_reward():
    rewards, trees = double([1.0, 0.25]), torch.tensor([0, 1])
    prompts = torch.zeros(2).long()
    inter = group_advantages(rewards, prompts)
    assert_equal(tree_grpo_advantages(rewards, prompts, trees), inter)
    raw = tree_grpo_advantages(rewards, prompts, trees, singleton="raw")
    assert_equal(raw, inter + rewards / 1.000001)


def test_leaves_that_do_not_count_are_left_out():
    valid = torch.tensor([True, True, True, False])
    rewards = double([1.0, 0.0, 0.0, NAN])
    ours = tree_grpo_advantages(rewards, PROMPTS, TREES, valid=valid)
    kept = tree_grpo_advantages(rewards[:3], PROMPTS[:3], TREES[:3])
    assert_equal(ours, [*kept.tolist(), 0.0])


@quick
@given(batches(), st.integers(0, 100))
def test_reductions_and_invariance(batch: Batch, seed: int):
    rewards = batch.normal(batch.rows)
    prompts = batch.integers(0, 2, batch.rows)
    trees = 2 * prompts + batch.integers(0, 2, batch.rows)
    inter = group_advantages(rewards, prompts)
    # One tree per prompt: twice the group advantage.
    assert_equal(tree_grpo_advantages(rewards, prompts, prompts), 2 * inter)
    ours = tree_grpo_advantages(rewards, prompts, trees)
    assert_equal(ours, inter + group_advantages(rewards, trees))
    order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(seed))
    assert_equal(tree_grpo_advantages(rewards[order], prompts[order], trees[order]), ours[order])
    assert_equal(tree_grpo_advantages(rewards + 3.0, prompts, trees), ours, rtol=1e-9)
    assert_equal(tree_grpo_advantages(torch.ones_like(rewards), prompts, trees), torch.zeros_like(rewards))


def test_a_tree_of_two_prompts_is_refused():
    with pytest.raises(
        ValueError, match="`tree_ids` must name trees within one prompt: got tree 9 in several prompts"
    ):
        tree_grpo_advantages(REWARDS, torch.tensor([0, 0, 0, 1]), TREES)
    with pytest.raises(ValueError, match="`level` must be one of 'sum', 'inter', 'intra', 'nested': got 'both'"):
        tree_grpo_advantages(REWARDS, PROMPTS, TREES, level="both")
    with pytest.raises(ValueError, match="`tree_ids` must have the shape of `rewards`"):
        tree_grpo_advantages(REWARDS, PROMPTS, TREES[:2])


def test_token_rewards_are_normalised_over_tokens():
    # Tokens of the prompt (0, 0, .8 | .2): mean .25, sample sd .378594; trees: (0, 0, .8) mean .266667, sd .461880,
    # and (.2) alone.
    token_rewards, mask = double([[0.0, 0.0, 0.8], [0.2, NAN, NAN]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    ours = tree_grpo_token_advantages(token_rewards, mask, torch.zeros(2).long(), torch.tensor([0, 1]))
    prompt = [(entry - 0.25) / (0.378594 + 1e-6) for entry in (0.0, 0.0, 0.8, 0.2)]
    tree = [(entry - 0.8 / 3) / (0.461880 + 1e-6) for entry in (0.0, 0.0, 0.8)]
    assert_equal(ours[0], [a + b for a, b in zip(prompt[:3], tree, strict=True)], rtol=2e-6)
    assert_equal(ours[1], [prompt[3] + 0.2 / 1.000001, 0.0, 0.0], rtol=2e-5)  # a small difference of rounded numbers
    with pytest.raises(ValueError, match="`sampled_mask` must have the shape of `token_rewards`"):
        tree_grpo_token_advantages(token_rewards, mask[:1], torch.zeros(2).long(), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"`token_rewards` must have the shape \(B, T\)"):
        tree_grpo_token_advantages(token_rewards[0], mask[0], torch.zeros(3).long(), torch.zeros(3).long())


def test_every_column_is_checked():
    assert_misfits_refused(
        tree_grpo_advantages, "prompt_ids", "tree_ids", rewards=REWARDS, prompt_ids=PROMPTS, tree_ids=TREES
    )
