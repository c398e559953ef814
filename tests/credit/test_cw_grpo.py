"""Contribution-weighted credit of search rounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import contribution_weights, cw_grpo_advantages, last_turns, spread_segments
from tests.credit.batches import Batch, assert_equal, batches, quick

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


MARKS, SEARCHED = double([[1.0, 0.0, NAN], [0.0, 1.0, 1.0]]), torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_shares_are_a_softmax_of_the_marks():
    # e / (e + 1) = .731059; e / (2 e + 1) = .422319.
    assert_equal(
        contribution_weights(MARKS, SEARCHED), [[0.731059, 0.268941, 0], [0.155362, 0.422319, 0.422319]], rtol=3e-6
    )
    # gamma 2: e^2 / (e^2 + 1) = .880797.
    assert_equal(contribution_weights(MARKS, SEARCHED, gamma=2.0)[0], [0.880797, 0.119203, 0], rtol=3e-6)


def test_from_a_sharpness_of_ten_shares_are_proportions():
    assert_equal(contribution_weights(MARKS, SEARCHED, gamma=10.0), [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]])
    below = contribution_weights(MARKS, SEARCHED, gamma=9.99)
    assert 0 < below[0, 1] < 1e-4


def test_rounds_without_any_mark_share_evenly_unless_the_official_quirk_is_asked_for():
    marks, searched = torch.zeros(1, 3, dtype=torch.float64), torch.tensor([[1, 1, 1]])
    for gamma in (1.0, 10.0):
        assert_equal(contribution_weights(marks, searched, gamma=gamma), [[1 / 3, 1 / 3, 1 / 3]])
    assert contribution_weights(marks, searched, gamma=10.0, without_marks="zero").tolist() == [[0.0, 0.0, 0.0]]
    assert_equal(contribution_weights(marks, searched, without_marks="zero"), [[1 / 3, 1 / 3, 1 / 3]])


def test_the_only_search_round_has_the_whole_share():
    for gamma in (1.0, 10.0):
        assert contribution_weights(torch.zeros(1, 2), torch.tensor([[1, 0]]), gamma=gamma).tolist() == [[1.0, 0.0]]


def test_tiny_marks_are_divided_by_the_floor_in_the_official_quirk_only_below_it():
    shares = contribution_weights(double([[5e-7, 0.0]]), torch.ones(1, 2), gamma=10.0, without_marks="zero")
    assert_equal(shares, [[0.5, 0.0]])


def test_a_rollout_without_search_has_no_shares():
    for gamma in (1.0, 10.0):
        shares = contribution_weights(double([[NAN, NAN]]), torch.tensor([[0, 0]]), gamma=gamma)
        assert shares.tolist() == [[0.0, 0.0]]


@quick
@given(batches(), st.sampled_from([0.5, 3.0, 10.0, 50.0]))
def test_shares_sum_to_one_over_the_search_rounds(batch: Batch, gamma: float):
    marks = batch.integers(0, 2).double()
    shares = contribution_weights(batch.garbage(marks), batch.mask, gamma=gamma)
    assert_equal(shares.sum(1), batch.mask.any(1).double())
    assert (shares[~batch.mask] == 0).all()
    assert (shares >= 0).all()


SEGMENTS = torch.tensor([[0, -1, 1, 2], [0, 0, -1, 1], [0, 0, 0, -1]])
ROUNDS = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]])


def test_a_correct_rollout_spreads_its_advantage_by_the_marks():
    marks = double([[1.0, 0.0, NAN], [0.0, NAN, NAN], [NAN, NAN, NAN]])
    ours = cw_grpo_advantages(double([0.5, 0.5, 0.5]), marks, ROUNDS, SEGMENTS)
    # Row 0: .5 * .731059 * 2 = .731059 and .268941, answer .5. One search round keeps .5. No search: .5.
    assert_equal(ours, [[0.731059, 0, 0.268941, 0.5], [0.5, 0.5, 0, 0.5], [0.5, 0.5, 0.5, 0]], rtol=3e-6)


def test_masks_may_hold_floats():
    marks = double([[1.0, 0.0, NAN], [0.0, NAN, NAN], [NAN, NAN, NAN]])
    advantages = double([0.5, 0.5, 0.5])
    plain = cw_grpo_advantages(advantages, marks, ROUNDS, SEGMENTS)
    assert_equal(cw_grpo_advantages(advantages, marks, ROUNDS.double(), SEGMENTS), plain)
    assert_equal(contribution_weights(MARKS, SEARCHED.double()), contribution_weights(MARKS, SEARCHED))


def test_a_wrong_rollout_is_uniform_and_a_zero_one_stays_zero():
    marks = double([[1.0, 0.0, NAN], [1.0, NAN, NAN], [NAN, NAN, NAN]])
    ours = cw_grpo_advantages(double([-0.5, 0.0, -1.0]), marks, ROUNDS, SEGMENTS)
    assert_equal(ours, [[-0.5, 0, -0.5, -0.5], [0, 0, 0, 0], [-1.0, -1.0, -1.0, 0]])


def test_the_official_quirk_erases_search_credit_without_marks():
    marks = torch.zeros(1, 3, dtype=torch.float64)
    arguments = (double([0.5]), marks, ROUNDS[:1], SEGMENTS[:1])
    assert_equal(cw_grpo_advantages(*arguments, gamma=10.0), [[0.5, 0, 0.5, 0.5]])
    assert_equal(cw_grpo_advantages(*arguments, gamma=10.0, without_marks="zero"), [[0.0, 0, 0.0, 0.5]])


@quick
@given(batches(), st.sampled_from([1.0, 10.0]))
def test_equal_marks_are_group_credit(batch: Batch, gamma: float):
    advantages = batch.normal(batch.rows)
    rounds = batch.mask
    segments = torch.where(batch.integers(0, 2).bool(), torch.arange(batch.columns).expand_as(rounds), -1)
    segments = torch.where(rounds, segments, -1)
    marks = torch.ones(batch.rows, batch.columns, dtype=torch.float64)
    ours = cw_grpo_advantages(advantages, batch.garbage(marks), rounds, segments, gamma=gamma)
    assert_equal(ours, spread_segments(advantages[:, None].expand_as(marks), segments))


@quick
@given(batches())
def test_the_mean_factor_of_search_rounds_is_one(batch: Batch):
    """Credit is moved between search rounds, never made."""
    marks = batch.integers(0, 2).double()
    every_round = torch.arange(batch.columns).expand(batch.rows, -1)
    segments = torch.where(batch.mask, every_round, -1)
    ours = cw_grpo_advantages(torch.ones(batch.rows, dtype=torch.float64), batch.garbage(marks), batch.mask, segments)
    assert_equal(ours.sum(1), batch.mask.sum(1).double())
    assert_equal(ours[last_turns(batch.mask)], torch.ones(int(batch.mask.any(1).sum()), dtype=torch.float64))


def test_contribution_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`search_mask` must have the shape of `contributions`"):
        contribution_weights(torch.zeros(1, 2), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"`contributions` must have the shape \(B, S\)"):
        contribution_weights(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match="`without_marks` must be one of 'uniform', 'zero': got 'raw'"):
        contribution_weights(torch.zeros(1, 2), torch.ones(1, 2), without_marks="raw")
    with pytest.raises(ValueError, match="`round_mask` must have the shape of `contributions`"):
        cw_grpo_advantages(torch.zeros(3), MARKS, ROUNDS, SEGMENTS)
    with pytest.raises(ValueError, match=r"`advantages` must have the shape \(3,\)"):
        cw_grpo_advantages(torch.zeros(2), ROUNDS.double(), ROUNDS, SEGMENTS)
