"""Order statistics, slope, correction and the whole step of SIPO."""

from __future__ import annotations

import math
import random
import time
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    RELEASE_OPTIONS,
    CorrelationSums,
    ExpandedTrees,
    SIPOOptions,
    SlopeSums,
    blom,
    candidate_mask,
    corrected_leaf_values,
    correlation_sums,
    fill_leaves,
    leaf_mask,
    node_surprisals,
    record_selections,
    selection_slope,
    sfc_scores,
    sibling_counts,
    sipo_credit,
    sipo_options,
    slope_sums,
    spread_to_tokens,
    standardized_leaf_values,
    tree_values,
)
from tests.credit.batches import assert_equal, quick
from tests.credit.tree_reference import (
    Batch,
    batch_of,
    grow,
    reference_blom,
    reference_event,
    reference_leaf_values,
    reference_slope,
    reference_value,
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


# --- Blom's approximation


def test_expected_order_statistics():
    # h(1, 2) = quantile of (2 - .375) / 2.25 = .722222.
    ranks = longs([1, 1, 2, 1, 2, 3, 1, 2, 3, 6, 1])
    sizes = longs([1, 2, 2, 5, 5, 5, 22, 22, 22, 22, 30])
    expected = [
        0, 0.589456, -0.589456, 1.179761, 0.497201, 0, 1.909638, 1.453563, 1.185158, 0.665676, 2.040281,
    ]  # fmt: skip
    assert_equal(blom(ranks, sizes), expected, rtol=2e-6)


def test_predicted_group_means_of_the_calibration_have_the_ratios_of_order_statistics():
    # Printed means -.1695, -.1184, -.0753 for ranks 1, 2-3, 4-6 stand as 1 : .6985 : .4442, which fits 23 to 24
    # candidates.
    second, third = [], []
    for size in (23, 24):
        best, middle, rest = (blom(longs(ranks), size).mean() for ranks in ([1], [2, 3], [4, 5, 6]))
        second.append(middle / best)
        third.append(rest / best)
    assert second[0] < 0.6985 < second[1]
    assert third[0] < 0.4442 < third[1]
    assert_equal((double([-0.1695]) + 2 * -0.1184 + 3 * -0.0753) / 6, [-0.1054], rtol=1e-3)


def test_ranks_outside_the_set_count_as_no_event():
    assert blom(longs([0, -1, 4]), 3).tolist() == [0.0, 0.0, 0.0]
    assert blom(0, 0).item() == 0.0
    assert blom(1, 0).item() == 0.0


@quick
@given(st.integers(1, 200), st.data())
def test_order_statistics_are_antisymmetric_decreasing_and_match_the_quantile(size, data):
    rank = data.draw(st.integers(1, size))
    assert_equal(blom(rank, size), float(-blom(size - rank + 1, size)))
    assert_equal(blom(rank, size), reference_blom(rank, size), rtol=BLOM_RTOL)
    all_ranks = blom(torch.arange(1, size + 1), size)
    assert (all_ranks.diff() < 0).all()
    assert_equal(all_ranks.sum(), 0.0, rtol=1e-11)
    if size > 1:
        assert blom(1, size + 1) > blom(1, size)


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


# --- correction


def test_a_selected_leaf_loses_slope_times_order_statistic():
    # -.816495 - 1 * -.12 * .589456 = -.816495 + .070735 = -.745760.
    corrected = corrected_leaf_values(double([-0.816495, 1.224742]), longs([1, 0]), longs([2, 0]), -0.12)
    assert_equal(corrected, [-0.745760, 1.224742], rtol=1e-6)
    half = corrected_leaf_values(double([-0.816495]), longs([1]), longs([2]), -0.12, weight=0.5)
    assert_equal(half, [-0.816495 + 0.0353674], rtol=1e-6)


def test_a_positive_slope_lowers_winners_and_raises_losers():
    corrected = corrected_leaf_values(double([0.0, 0.0]), longs([1, 2]), longs([2, 2]), 0.1)
    assert_equal(corrected, [-0.0589456, 0.0589456], rtol=1e-6)


def test_zero_variance_trees_get_reward_free_advantage_unless_skipped():
    # V = 0, a2 = -.1, r = 1, n = 22: + .1 * 1.909638 = .190964.
    values = torch.zeros(1, dtype=torch.float64)
    assert_equal(corrected_leaf_values(values, longs([1]), longs([22]), -0.1), [0.190964], rtol=3e-6)
    skipped = corrected_leaf_values(values, longs([1]), longs([22]), -0.1, skip=torch.tensor([True]))
    assert skipped.tolist() == [0.0]


def test_no_slope_or_no_weight_returns_the_values_themselves():
    values = double([0.3, -0.2])
    assert corrected_leaf_values(values, longs([1, 0]), longs([5, 0]), None) is values
    assert corrected_leaf_values(values, longs([1, 0]), longs([5, 0]), -0.1, weight=0) is values


def test_correction_keeps_the_type_and_passes_gradient_through():
    values = torch.tensor([0.5, 0.1], requires_grad=True)
    corrected = corrected_leaf_values(values, longs([1, 0]), longs([5, 0]), -0.1)
    assert corrected.dtype == torch.float32
    corrected.sum().backward()
    assert values.grad.tolist() == [1.0, 1.0]


def test_correction_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`ranks` must have the shape of `leaf_values`"):
        corrected_leaf_values(double([0.0]), longs([1, 1]), longs([5]), 0.1)
    with pytest.raises(ValueError, match="`skip` must have the shape of `leaf_values`"):
        corrected_leaf_values(double([0.0]), longs([1]), longs([5]), 0.1, skip=torch.ones(2).bool())
    with pytest.raises(ValueError, match="`slope` must be finite: got nan. Pass `None` before the first estimate"):
        corrected_leaf_values(double([0.0]), longs([1]), longs([5]), NAN)


# --- the whole step


def worked_tree():
    """
    Three first turns v1 (then leaf l1, wrong), v2 (then l2, right) and v3 (direct wrong answer); v1 chosen before v2
    in round 0, two fresh siblings f1 (right) and f2 (wrong).
    """
    #                root  v1    v2    v3    f1    f2    l1   l2
    parents = longs([-1, 0, 0, 0, 0, 0, 1, 2])
    surprisals = double([NAN, 0.55, 0.30, 0.40, 0.45, 0.35, 0.2, 0.9])
    fresh = longs([-1, -1, -1, -1, 0, 0, -1, -1])
    rewards = double([NAN, NAN, NAN, 0.0, 1.0, 0.0, 0.0, 1.0])
    at_selection = longs([-1, 0, 0, 0, 1, 2])
    candidates = candidate_mask(at_selection, torch.tensor([False] + [True] * 5)).nonzero().squeeze(1)
    assert candidates.tolist() == [1, 2]
    scores = sfc_scores(surprisals[candidates], sibling_counts(at_selection)[candidates])
    records = record_selections(
        candidates,
        longs([0, 0]),
        longs([0, 0]),
        scores=scores,
        chosen=torch.tensor([True, False]),
        surprisals=surprisals[candidates],
    )
    return ExpandedTrees(parents, surprisals, fresh), rewards, records


def test_the_worked_tree():
    trees, rewards, records = worked_tree()
    credit = sipo_credit(trees, rewards, records, -0.12)
    # mean .4, sd .489898: V = -.816495 or 1.224742; l1 has r = 1, n = 2: -.816495 + .12 * .589456 = -.745760.
    assert_equal(credit.leaf_values[3:], [-0.816495, 1.224742, -0.816495, -0.816495, 1.224742], rtol=1e-6)
    assert_equal(credit.corrected[3:], [-0.816495, 1.224742, -0.816495, -0.745760, 1.224742], rtol=1e-6)
    assert credit.events.found.tolist() == [False] * 6 + [True, False]
    # Chains copy: v1 = l1, v2 = l2. Root -.012604 (see test_tree for the weights).
    assert_equal(credit.values[1:3], [-0.745760, 1.224742], rtol=1e-6)
    assert_equal(credit.values[0], -0.012604, rtol=4e-5)
    assert_equal(sipo_credit(trees, rewards, records, None).values[0], -0.028816, rtol=2e-5)
    proportional = SIPOOptions(child_weights="proportional")
    assert_equal(sipo_credit(trees, rewards, records, -0.12, options=proportional).values[0], -0.050723, rtol=1e-5)
    # Z = (1, -1), Y = V of l1 and l2: numerator -.816495 - 1.224742 = -2.041237.
    assert_equal(credit.slope_sums.as_tensor(), [2.0, -2.041237, 2.0], rtol=1e-6)
    assert credit.metrics == {
        "credit/zero_variance_trees": 0.0,
        "credit/corrected_leaves": 0.2,
        "credit/leaves_with_event": 0.2,
        "credit/num_trees": 1.0,
    }


@quick
@given(tree_batches(), st.floats(-1, 1), st.sampled_from(["recent", "deepest", "release"]))
def test_a_step_matches_the_definitions(batch: Batch, slope: float, rule: str):
    options = SIPOOptions(event_rule=rule)
    credit = sipo_credit(batch.expanded, batch.rewards, batch.records, slope, weight=0.5, options=options)
    corrected = {}
    for tree in batch.trees:
        for leaf, value in reference_leaf_values(tree).items():
            event = reference_event(tree, leaf, rule)
            corrected[leaf] = value - (0.5 * slope * reference_blom(event[2], event[3]) if event else 0.0)
    assert_equal(credit.corrected, double([corrected.get(node, 0.0) for node in batch.nodes]), rtol=BLOM_RTOL)
    expected = double([reference_value(node, corrected) for node in batch.nodes])
    assert_equal(credit.values, expected, rtol=BLOM_RTOL)


@quick
@given(tree_batches())
def test_without_weight_or_slope_it_is_the_host(batch: Batch):
    parents, surprisals = batch.expanded.parents, batch.expanded.surprisals
    host = tree_values(parents, surprisals, standardized_leaf_values(parents, batch.rewards))
    for slope, weight in ((None, 1.0), (0.4, 0.0)):
        credit = sipo_credit(batch.expanded, batch.rewards, batch.records, slope, weight=weight)
        assert torch.equal(credit.values, host)
        assert torch.equal(credit.corrected, credit.leaf_values)
        assert credit.metrics["credit/corrected_leaves"] == 0.0


@quick
@given(tree_batches(), st.floats(-1, 1))
def test_the_new_slope_is_estimated_from_uncorrected_values(batch: Batch, slope: float):
    """The correction uses the last step's slope only; this step's slope does not see the correction."""
    sums = sipo_credit(batch.expanded, batch.rewards, batch.records, slope).slope_sums
    assert sums == sipo_credit(batch.expanded, batch.rewards, batch.records, None).slope_sums
    corrected = sipo_credit(batch.expanded, batch.rewards, batch.records, slope).corrected
    again = sipo_credit(batch.expanded, batch.rewards, batch.records, slope).corrected
    assert torch.equal(corrected, again)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(0, 3), st.integers(1, 4), st.integers(1, 3))
def test_every_expansion_adds_exactly_its_leaves(seed, num_initial, num_rounds, num_chosen, num_fresh):
    tree = grow(
        random.Random(seed), num_initial=num_initial, num_rounds=num_rounds, num_chosen=num_chosen, num_fresh=num_fresh
    )
    batch = batch_of([tree])
    assert int(leaf_mask(batch.expanded.parents).sum()) == num_initial + num_rounds * num_chosen * num_fresh


@quick
@given(tree_batches(), st.integers(0, 1000), st.floats(-1, 1))
def test_node_order_does_not_matter(batch: Batch, seed: int, slope: float):
    """Renumbering the nodes (parents still first) permutes the result."""
    order = torch.argsort(torch.rand(len(batch.nodes), generator=torch.Generator().manual_seed(seed)))
    depth = longs([len(node.path()) for node in batch.nodes])
    order = order[torch.argsort(depth[order], stable=True)]
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    parents = batch.expanded.parents[order]
    shuffled = ExpandedTrees(
        torch.where(parents >= 0, position[parents.clamp(min=0)], -1),
        batch.expanded.surprisals[order],
        batch.expanded.fresh_rounds[order],
    )
    records = replace(batch.records, nodes=position[batch.records.nodes])
    plain = sipo_credit(batch.expanded, batch.rewards, batch.records, slope)
    moved = sipo_credit(shuffled, batch.rewards[order], records, slope)
    assert_equal(moved.values, plain.values[order])
    assert_equal(moved.corrected, plain.corrected[order])


@quick
@given(tree_batches(), st.floats(0.1, 10), st.floats(-5, 5))
def test_rewards_may_be_shifted_and_scaled(batch: Batch, scale: float, shift: float):
    plain = sipo_credit(batch.expanded, batch.rewards, batch.records, 0.3)
    mapped = sipo_credit(batch.expanded, scale * batch.rewards + shift, batch.records, 0.3)
    # epsilon = 1e-6 in the divisor breaks exact scale invariance by 1e-6 over the deviation.
    assert_equal(mapped.values, plain.values, rtol=1e-4)


def test_trees_with_equal_rewards_can_be_left_uncorrected():
    trees, _, records = worked_tree()
    rewards = torch.ones(8, dtype=torch.float64)
    literal = sipo_credit(trees, rewards, records, -0.1)
    assert_equal(literal.corrected[6], 0.0589456, rtol=1e-6)
    assert literal.metrics["credit/zero_variance_trees"] == 1.0
    skipped = sipo_credit(trees, rewards, records, -0.1, options=SIPOOptions(on_zero_variance="skip"))
    assert skipped.corrected.tolist() == [0.0] * 8
    assert skipped.metrics["credit/leaves_with_event"] == 0.2
    varied = sipo_credit(trees, worked_tree()[1], records, -0.12, options=SIPOOptions(on_zero_variance="skip"))
    assert_equal(varied.corrected[6], -0.745760, rtol=1e-6)


def test_trees_with_equal_rewards_can_be_left_out_of_the_slope():
    trees, _, records = worked_tree()
    flat = torch.ones(8, dtype=torch.float64)
    literal = sipo_credit(trees, flat, records, None).slope_sums
    assert (literal.numerator, literal.denominator, literal.count) == (0.0, 2.0, 2.0)
    options = SIPOOptions(slope_skip_zero_variance=True)
    assert sipo_credit(trees, flat, records, None, options=options).slope_sums == SlopeSums(0.0, 0.0, 0.0)
    varied = sipo_credit(trees, worked_tree()[1], records, None, options=options).slope_sums
    assert varied.count == 2
    correlated = replace(options, slope_estimator="correlation")
    assert sipo_credit(trees, flat, records, None, options=correlated).slope_sums.count == 0


def test_a_tree_without_any_search_only_has_plain_credit():
    """Root fallback: fresh rollouts from the prompt, no event, nothing for the slope."""
    parents, fresh = longs([-1, 0, 0, 0]), longs([-1, -1, 0, 0])
    records = record_selections(
        longs([0]), longs([0]), longs([0]), scores=double([0.0]), chosen=torch.tensor([True]), surprisals=double([0.0])
    )
    trees = ExpandedTrees(parents, double([NAN, 0.1, 0.2, 0.3]), fresh)
    credit = sipo_credit(trees, double([NAN, 1.0, 0.0, 0.0]), records, -0.5)
    assert torch.equal(credit.corrected, credit.leaf_values)
    assert credit.slope_sums == SlopeSums(0.0, 0.0, 0.0)
    without = sipo_credit(trees, double([NAN, 1.0, 0.0, 0.0]), no_records(), -0.5)
    assert torch.equal(without.values, credit.values)


def test_a_single_candidate_is_not_corrected():
    parents, fresh = longs([-1, 0, 1, 0]), longs([-1, -1, -1, 0])
    records = record_selections(longs([1]), longs([0]), longs([0]), scores=double([0.0]), chosen=torch.tensor([True]))
    trees = ExpandedTrees(parents, double([NAN, 0.1, 0.2, 0.3]), fresh)
    credit = sipo_credit(trees, double([NAN, NAN, 1.0, 0.0]), records, -0.5)
    assert credit.events.found[2]
    assert torch.equal(credit.corrected, credit.leaf_values)


def test_failed_leaves_leave_statistics_values_and_correction():
    trees, rewards, records = worked_tree()
    valid = torch.ones(8, dtype=torch.bool)
    valid[[5, 6]] = False  # f2 and l1, the corrected leaf
    rewards[[5, 6]] = NAN
    credit = sipo_credit(replace(trees, valid=valid), rewards, records, -0.12)
    # Left: v3 0, f1 1, l2 1: mean 2/3, sd .471405.
    assert_equal(credit.leaf_values[[3, 4, 7]], [-1.414211, 0.707105, 0.707105], rtol=2e-6)
    assert credit.corrected[[1, 5, 6]].tolist() == [0.0, 0.0, 0.0]
    assert credit.values[[1, 5, 6]].tolist() == [0.0, 0.0, 0.0]
    # The candidate v1 has no outcome, so its set says nothing about the slope.
    assert credit.slope_sums.count == 0
    # Copies that fill the leaf budget are kept out in the same way.
    assert torch.isfinite(credit.values).all()


# --- switches


def test_the_preset_flips_exactly_the_nine_differences():
    paper, release = sipo_options(), sipo_options("release")
    changed = [
        field.name for field in fields(SIPOOptions) if getattr(paper, field.name) != getattr(release, field.name)
    ]
    assert changed == [
        "ranked",
        "event_rule",
        "slope_estimator",
        "slope_population",
        "slope_leaves",
        "slope_scope",
        "root_candidate",
        "reward",
        "score_spread",
    ]
    assert paper == SIPOOptions()
    assert release == RELEASE_OPTIONS
    assert sipo_options("release", reward="em").reward == "em"


@pytest.mark.parametrize(
    "field", [field.name for field in fields(SIPOOptions) if field.name != "slope_skip_zero_variance"]
)
def test_unknown_switch_values_are_refused(field: str):
    with pytest.raises(ValueError, match=f"`{field}` must be one of .*: got 'maybe'"):
        SIPOOptions(**{field: "maybe"})


def test_unknown_presets_are_refused():
    with pytest.raises(ValueError, match="`compat` must be one of 'paper', 'release': got 'official'"):
        sipo_options("official")


def test_switch_1_losers_are_corrected_upwards_for_a_negative_slope():
    trees, rewards, records = worked_tree()
    credit = sipo_credit(trees, rewards, records, -0.12, options=SIPOOptions(ranked="candidates"))
    # l2 under the loser v2: r = 2, n = 2: 1.224742 - .12 * .589456 = 1.154007.
    assert_equal(credit.corrected[6:], [-0.745760, 1.154007], rtol=1e-6)


def test_switch_2_a_fresh_branch_chosen_later_is_not_corrected():
    parents, fresh = longs([-1, 0, 0, 1, 2, 0]), longs([-1, -1, 0, -1, -1, 1])
    records = record_selections(
        longs([1, 2]), longs([0, 0]), longs([1, 1]), scores=double([0.1, 0.9]), chosen=torch.tensor([False, True])
    )
    trees = ExpandedTrees(parents, torch.ones(6, dtype=torch.float64), fresh)
    rewards = double([NAN, NAN, NAN, 1.0, 0.0, 1.0])
    for rule, corrected in (("recent", True), ("deepest", True), ("release", False)):
        credit = sipo_credit(trees, rewards, records, -0.5, options=SIPOOptions(event_rule=rule))
        assert bool(credit.corrected[4] != credit.leaf_values[4]) == corrected


def test_switch_3_correlates_surprisal_instead_of_standardised_scores():
    trees, rewards, records = worked_tree()
    sums = sipo_credit(trees, rewards, records, None, options=SIPOOptions(slope_estimator="correlation")).slope_sums
    # Two points: (.55, -.816495) and (.30, 1.224742) correlate perfectly and negatively.
    assert isinstance(sums, CorrelationSums)
    assert_equal(double([sums.x, sums.xx]), [0.85, 0.3925])
    assert math.isclose(sums.estimate(min_count=2), -1.0, rel_tol=1e-9)


def test_switch_4_pools_all_inner_nodes_of_the_final_tree_with_the_root_at_zero():
    trees, rewards, records = worked_tree()
    options = SIPOOptions(slope_population="final", slope_estimator="correlation")
    sums = sipo_credit(trees, rewards, records, None, options=options).slope_sums
    # Inner nodes: root (s = 0, Y = mean of all leaves = 0), v1 (.55, -.816495), v2 (.30, 1.224742).
    assert sums.count == 3
    assert_equal(double([sums.x, sums.xx, sums.y]), [0.85, 0.3925, -0.816495 + 1.224742], rtol=2e-6)
    regression = sipo_credit(trees, rewards, records, None, options=SIPOOptions(slope_population="final")).slope_sums
    expected = selection_slope(double([0.0, 0.55, 0.30]), double([0.0, *credit_outcomes(trees, rewards)]))
    assert_equal(regression.as_tensor(), expected.as_tensor())
    # An empty set of records changes nothing: the population is the tree's.
    assert sipo_credit(trees, rewards, no_records(), None, options=options).slope_sums == sums


def credit_outcomes(trees, rewards):
    values = standardized_leaf_values(trees.parents, rewards)
    return [float(values[6]), float(values[7])]


def test_switch_4_sets_of_the_final_population_are_whole_trees():
    first, second = worked_tree(), worked_tree()
    parents = torch.cat([first[0].parents, torch.where(second[0].parents >= 0, second[0].parents + 8, -1)])
    joined = ExpandedTrees(parents, first[0].surprisals.repeat(2), first[0].fresh_rounds.repeat(2))
    options = SIPOOptions(slope_population="final")
    one = sipo_credit(*first, None, options=options).slope_sums
    two = sipo_credit(joined, first[1].repeat(2), no_records(), None, options=options).slope_sums
    assert_equal(two.as_tensor(), 2 * one.as_tensor())


def test_switch_5_outcomes_over_the_final_leaves():
    # v(1): leaf 3 at selection, leaf 4 fresh below it later; w(2): leaf 5.
    parents, fresh = longs([-1, 0, 0, 1, 1, 2]), longs([-1, -1, -1, -1, 1, -1])
    records = record_selections(
        longs([1, 2]), longs([0, 0]), longs([0, 0]), scores=double([0.9, 0.1]), chosen=torch.tensor([True, False])
    )
    trees = ExpandedTrees(parents, torch.ones(6, dtype=torch.float64), fresh)
    rewards = double([NAN, NAN, NAN, 1.0, 0.0, 0.0])
    values = standardized_leaf_values(parents, rewards)
    at_selection = sipo_credit(trees, rewards, records, None).slope_sums
    assert_equal(double([at_selection.numerator]), [float(values[3] - values[5])])
    final = sipo_credit(trees, rewards, records, None, options=SIPOOptions(slope_leaves="final")).slope_sums
    assert_equal(double([final.numerator]), [float((values[3] + values[4]) / 2 - values[5])])


def test_only_the_last_round_of_every_tree_can_be_pooled():
    rng = random.Random(3)
    trees = [grow(rng, num_initial=4, num_rounds=rounds) for rounds in (1, 3)]
    batch = batch_of(trees)
    last = batch_of([replace(tree, sets=tree.sets[-1:]) for tree in trees])
    pooled = sipo_credit(batch.expanded, batch.rewards, batch.records, None, options=SIPOOptions(slope_rounds="last"))
    expected = sipo_credit(last.expanded, last.rewards, last.records, None)
    assert_equal(pooled.slope_sums.as_tensor(), expected.slope_sums.as_tensor())
    everything = sipo_credit(batch.expanded, batch.rewards, batch.records, None)
    assert everything.slope_sums.count > pooled.slope_sums.count
    empty = sipo_credit(batch.expanded, batch.rewards, no_records(), None, options=SIPOOptions(slope_rounds="last"))
    assert empty.slope_sums == SlopeSums()


@quick
@given(tree_batches())
def test_every_combination_of_slope_switches_is_defined(batch: Batch):
    values = standardized_leaf_values(batch.expanded.parents, batch.rewards)
    for population in ("selection", "final"):
        for estimator in ("regression", "correlation"):
            options = SIPOOptions(slope_population=population, slope_estimator=estimator, slope_leaves="final")
            sums = slope_sums(
                batch.expanded.parents,
                batch.expanded.fresh_rounds,
                values,
                batch.records,
                surprisals=batch.expanded.surprisals,
                options=options,
            )
            assert torch.isfinite(sums.as_tensor()).all()
            inner = sum(bool(node.children) for node in batch.nodes)
            assert sums.count <= (inner if population == "final" else len(batch.records.nodes))


def test_the_last_leaf_is_copied_until_the_budget_is_met():
    parents, copies = fill_leaves(longs([-1, 0, 0, 1]), 4)
    assert parents.tolist() == [-1, 0, 0, 1, 1, 1]
    assert copies.tolist() == [-1, -1, -1, -1, 3, 3]
    unchanged, none = fill_leaves(longs([-1, 0, 0, 1]), 2)
    assert unchanged.tolist() == [-1, 0, 0, 1]
    assert none.tolist() == [-1] * 4
    with pytest.raises(ValueError, match="`num_leaves` must not be less than the 2 leaves of the tree: got 1"):
        fill_leaves(longs([-1, 0, 0, 1]), 1)


# --- size


def test_a_whole_step_of_64_trees_is_fast():
    """64 trees of 22 leaves: everything but the spreading over tokens, which test_tree bounds in memory."""
    rng = random.Random(0)
    batch = batch_of([grow(rng, num_initial=10, num_rounds=2, num_chosen=3, num_fresh=2) for _ in range(64)])
    leaves = leaf_mask(batch.expanded.parents)
    assert int(leaves.sum()) == 64 * 22
    token_nodes = leaves.nonzero().expand(-1, 4096).contiguous()
    logps = torch.full(token_nodes.shape, -0.5)
    start = time.perf_counter()
    node_surprisals(logps, token_nodes, batch.expanded.parents)
    credit = sipo_credit(batch.expanded, batch.rewards, batch.records, -0.1)
    tokens = spread_to_tokens(credit.values.float(), token_nodes)
    assert time.perf_counter() - start < 2.0
    assert torch.equal(tokens[:, 0], credit.values.float()[leaves])
