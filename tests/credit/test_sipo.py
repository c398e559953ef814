"""Order statistics, slope, correction and the whole step of SIPO."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    ExpandedTrees,
    SIPOOptions,
    SlopeSums,
    blom,
    corrected_leaf_values,
    leaf_mask,
    node_surprisals,
    record_selections,
    sipo_credit,
    spread_to_tokens,
    standardized_leaf_values,
    tree_values,
)
from tests.credit.batches import assert_equal, quick
from tests.credit.misfits import assert_misfits_refused
from tests.credit.tree_reference import (
    Batch,
    batch_of,
    grow,
    reference_blom,
    reference_event,
    reference_leaf_values,
    reference_value,
    tree_batches,
    worked_tree,
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
    for skip in (torch.tensor([True]), longs([1])):
        assert corrected_leaf_values(values, longs([1]), longs([22]), -0.1, skip=skip).tolist() == [0.0]


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


def test_shares_are_over_trees_and_over_leaves():
    trees, rewards, records = worked_tree()
    parents = torch.cat([trees.parents, longs([-1, 8])])
    joined = ExpandedTrees(
        parents, torch.cat([trees.surprisals, double([NAN, 0.1])]), torch.cat([trees.fresh_rounds, longs([-1, -1])])
    )
    credit = sipo_credit(joined, torch.cat([rewards, double([NAN, 1.0])]), records, -0.12)
    assert credit.metrics == {
        "credit/zero_variance_trees": 0.5,
        "credit/corrected_leaves": 1 / 6,
        "credit/leaves_with_event": 1 / 6,
        "credit/num_trees": 2.0,
    }


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
    # The root shares among v2, v3 and f1: softmax of (.30, .40, .45).
    weights = double([0.30, 0.40, 0.45]).softmax(0)
    assert_equal(credit.values[0], float(weights @ double([0.707105, -1.414211, 0.707105])), rtol=5e-6)
    # The candidate v1 has no outcome, so its set says nothing about the slope.
    assert credit.slope_sums.count == 0
    # Copies that fill the leaf budget are kept out in the same way.
    assert torch.isfinite(credit.values).all()


# --- size


def test_a_whole_step_of_64_trees_is_fast():
    """64 trees of 22 leaves: everything but the spreading over tokens, which test_tree bounds in memory."""
    rng = random.Random(0)
    batch = batch_of([grow(rng, num_initial=10, num_rounds=2, num_chosen=3, num_fresh=2) for _ in range(64)])
    leaves = leaf_mask(batch.expanded.parents)
    assert int(leaves.sum()) == 64 * 22
    token_nodes = leaves.nonzero().expand(-1, 4096).contiguous()
    logps = torch.full(token_nodes.shape, -0.5)
    start = time.process_time()  # CPU time: the bound holds on a busy machine too
    node_surprisals(logps, token_nodes, batch.expanded.parents)
    credit = sipo_credit(batch.expanded, batch.rewards, batch.records, -0.1)
    tokens = spread_to_tokens(credit.values.float(), token_nodes)
    assert time.process_time() - start < 2.0
    assert torch.equal(tokens[:, 0], credit.values.float()[leaves])


def test_every_leaf_column_is_checked():
    assert_misfits_refused(
        corrected_leaf_values,
        "ranks",
        "set_sizes",
        "skip",
        leaf_values=double([0.0, 1.0]),
        ranks=longs([1, 0]),
        set_sizes=longs([2, 0]),
        slope=0.1,
        skip=torch.tensor([False, True]),
    )
