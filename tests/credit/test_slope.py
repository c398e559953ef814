"""Slope of outcome on selection score, as sums that add over workers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    RELEASE_OPTIONS,
    CorrelationSums,
    SIPOOptions,
    SlopeSums,
    correlation_sums,
    record_selections,
    selection_slope,
    sipo_credit,
)
from tests.credit.batches import assert_equal, quick
from tests.credit.tree_reference import (
    Batch,
    batch_of,
    reference_slope,
    tree_batches,
)

NAN = math.nan
BLOM_RTOL = 1e-11
"""Two implementations of the normal quantile differ in the last digits."""


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def longs(entries):
    return torch.tensor(entries, dtype=torch.long)


def no_records():
    return record_selections(longs([]), longs([]), longs([]), scores=double([]), chosen=torch.zeros(0).bool())


# --- slope

SCORES = [0.55, 0.30, 0.10, 0.9, 0.2]
OUTCOMES = [-0.8, 1.2, 0.4, -0.5, 0.5]
SETS = [1, 1, 1, 2, 2]


def test_slope_of_two_events():
    # Event 1: mean .316667, sd .184089, Z = (1.267500, -.090536, -1.176965); event 2: Z = (1, -1).
    # Sum ZY = -1.014000 - .108643 - .470786 - .5 - .5 = -2.593429; sum Z^2 = 3 + 2 = 5; slope -.518686.
    sums = selection_slope(double(SCORES), double(OUTCOMES), longs(SETS))
    assert_equal(double([sums.numerator, sums.denominator]), [-2.593429, 5.0], rtol=1e-6)
    assert sums.count == 5
    assert math.isclose(sums.estimate(min_count=5), -0.518686, rel_tol=1e-6)


def test_slope_is_covariance_over_variance():
    # = corr(Z, Y) * sd(Y) = -.717634 * sd(Y) as every Z has pooled variance 1.
    z = torch.cat([double([1.267500, -0.090536, -1.176965]), double([1.0, -1.0])])
    y = double(OUTCOMES)
    correlation = torch.corrcoef(torch.stack([z, y]))[0, 1]
    assert_equal(correlation, -0.717634, rtol=1e-5)
    slope = selection_slope(double(SCORES), y, longs(SETS)).estimate(min_count=1)
    assert_equal(correlation * y.std(correction=0), slope, rtol=1e-5)


def test_correlation_on_raw_scores_is_another_number():
    sums = correlation_sums(double(SCORES), double(OUTCOMES))
    assert math.isclose(sums.estimate(min_count=1), -0.692131, rel_tol=5e-6)
    assert sums.count == 5


def test_one_set_needs_no_ids():
    assert selection_slope(double([1.0, 3.0]), double([0.5, 1.5])).estimate(min_count=2) == 0.5


def test_sets_without_spread_or_rivals_contribute_nothing():
    scores, outcomes = double([0.1, 0.1, 0.1, 5.0]), double([1.0, 2.0, 3.0, 9.0])
    sums = selection_slope(scores, outcomes, longs([0, 0, 0, 1]))
    assert sums == SlopeSums(0.0, 0.0, 0.0)
    assert sums.estimate(min_count=0) is None
    assert sums.estimate(-0.3, min_count=0) == -0.3
    assert selection_slope(double([]), double([])) == SlopeSums()


def test_sets_with_an_unknown_or_excluded_candidate_are_left_out_whole():
    scores, outcomes, sets = double(SCORES), double(OUTCOMES), longs(SETS)
    only_second = selection_slope(scores[3:], outcomes[3:])
    unknown = outcomes.clone()
    unknown[1] = NAN
    assert selection_slope(scores, unknown, sets) == only_second
    keep = torch.tensor([True, True, False, True, True])
    assert selection_slope(scores, outcomes, sets, keep=keep) == only_second


def test_sums_start_at_zero_and_carry_no_gradient():
    assert SlopeSums() == SlopeSums(0.0, 0.0, 0.0)
    assert CorrelationSums() == CorrelationSums(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    scores, outcomes = double(SCORES).requires_grad_(), double(OUTCOMES).requires_grad_()
    assert selection_slope(scores, outcomes, longs(SETS)) == selection_slope(
        scores.detach(), outcomes.detach(), longs(SETS)
    )
    assert correlation_sums(scores, outcomes) == correlation_sums(scores.detach(), outcomes.detach())


def test_the_mask_of_candidates_may_hold_numbers():
    keep = longs([1, 1, 0, 1, 1])
    arguments = (double(SCORES), double(OUTCOMES), longs(SETS))
    assert selection_slope(*arguments, keep=keep) == selection_slope(*arguments, keep=keep.bool())


def test_zero_outcomes_enter_only_the_denominator():
    """A tree whose rollouts all earned the same has outcome 0 everywhere and shrinks the slope."""
    scores, sets = double([*SCORES, 0.7, 0.3]), longs([*SETS, 3, 3])
    sums = selection_slope(scores, double([*OUTCOMES, 0.0, 0.0]), sets)
    plain = selection_slope(double(SCORES), double(OUTCOMES), longs(SETS))
    assert math.isclose(sums.numerator, plain.numerator)
    assert math.isclose(sums.denominator, plain.denominator + 2)
    assert sums.count == plain.count + 2


def test_the_floor_shrinks_the_weight_of_nearly_equal_scores():
    sums = selection_slope(double([1e-3, -1e-3]), double([1.0, -1.0]), epsilon=1e-2)
    # Z = +-1e-3 / 1e-2 = +-.1: numerator .2, denominator .02.
    assert_equal(double([sums.numerator, sums.denominator]), [0.2, 0.02])
    # The default floor is 1e-6: +-1e-7 becomes +-.1.
    assert_equal(double([selection_slope(double([1e-7, -1e-7]), double([1.0, -1.0])).denominator]), [0.02])


@quick
@given(tree_batches(), st.integers(0, 1000))
def test_slope_ignores_constants_added_to_the_outcomes_of_a_set(batch: Batch, seed: int):
    records = batch.records
    generator = torch.Generator().manual_seed(seed)
    outcomes = torch.randn(len(records.scores), generator=generator, dtype=torch.float64)
    shifts = torch.randn(1000, generator=generator, dtype=torch.float64)[records.set_ids]
    plain = selection_slope(records.scores, outcomes, records.set_ids)
    shifted = selection_slope(records.scores, outcomes + shifts, records.set_ids)
    assert math.isclose(plain.numerator, shifted.numerator, rel_tol=1e-9, abs_tol=1e-9)
    assert plain.denominator == shifted.denominator


@quick
@given(tree_batches())
def test_slope_sums_match_the_definition(batch: Batch):
    credit = sipo_credit(batch.expanded, batch.rewards, batch.records, None)
    numerator, denominator, count = reference_slope(batch.trees)
    assert_equal(double([credit.slope_sums.numerator]), [numerator], rtol=1e-9)  # cancelling sums of order ten
    assert_equal(double([credit.slope_sums.denominator]), [denominator])
    assert credit.slope_sums.count == count


@quick
@given(tree_batches(), tree_batches())
def test_sums_of_two_workers_add_up_to_the_pooled_batch(first: Batch, second: Batch):
    pooled = batch_of(first.trees + second.trees)
    for options in (SIPOOptions(), RELEASE_OPTIONS):
        parts = [
            sipo_credit(b.expanded, b.rewards, b.records, None, options=options).slope_sums for b in (first, second)
        ]
        whole = sipo_credit(pooled.expanded, pooled.rewards, pooled.records, None, options=options).slope_sums
        reduced = type(whole).from_tensor(parts[0].as_tensor() + parts[1].as_tensor())
        assert_equal(reduced.as_tensor(), whole.as_tensor(), rtol=1e-9)
        assert_equal((parts[0] + parts[1]).as_tensor(), reduced.as_tensor())


def test_an_estimate_needs_enough_candidates():
    sums = SlopeSums(numerator=-5.0, denominator=50.0, count=50.0)
    assert sums.estimate() == -0.1
    assert sums.estimate(0.7) == -0.1
    assert SlopeSums(numerator=0.1, denominator=0.5, count=50.0).estimate() == 0.2
    few = replace(sums, count=49.0)
    assert few.estimate() is None
    assert few.estimate(0.7) == 0.7
    assert few.estimate(0.7, min_count=49) == -0.1


def test_a_correlation_without_spread_is_no_estimate():
    assert correlation_sums(double([1.0, 1.0]), double([0.0, 1.0])).estimate(0.2, min_count=1) == 0.2
    assert correlation_sums(double([0.0, 1.0]), double([1.0, 1.0])).estimate(min_count=1) is None
    dropped = correlation_sums(double([0.0, 1.0, NAN, 2.0]), double([1.0, 2.0, 5.0, NAN]))
    assert dropped.count == 2
    assert math.isclose(dropped.estimate(min_count=2), 1.0)


def test_sums_of_different_kinds_do_not_mix():
    with pytest.raises(TypeError):
        SlopeSums() + CorrelationSums()
    with pytest.raises(ValueError, match=r"`sums` must have shape \(3,\): got \(6,\)"):
        SlopeSums.from_tensor(CorrelationSums().as_tensor())
    assert CorrelationSums.from_tensor(double([1, 2, 3, 4, 5, 6])) == CorrelationSums(1, 2, 3, 4, 5, 6)


def test_slope_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`outcomes` must have the shape of `scores`"):
        selection_slope(double([1.0]), double([1.0, 2.0]))
    with pytest.raises(ValueError, match="`keep` must have the shape of `scores`"):
        selection_slope(double([1.0]), double([1.0]), keep=torch.ones(2).bool())
    with pytest.raises(ValueError, match="`outcomes` must have the shape of `scores`"):
        correlation_sums(double([1.0]), double([1.0, 2.0]))
