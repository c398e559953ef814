"""Switches of SIPO one by one, and the preset of its released code."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given

from grounded_rl.credit import (
    RELEASE_OPTIONS,
    CorrelationSums,
    ExpandedTrees,
    SIPOOptions,
    SlopeSums,
    correlation_sums,
    fill_leaves,
    record_selections,
    selection_slope,
    sipo_credit,
    sipo_options,
    slope_sums,
    standardized_leaf_values,
)
from tests.credit.batches import assert_equal, quick
from tests.credit.tree_reference import (
    Batch,
    batch_of,
    grow,
    reference_leaf_values,
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


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("ranked", ("chosen", "candidates")),
        ("event_rule", ("recent", "deepest", "release")),
        ("slope_estimator", ("regression", "correlation")),
        ("slope_population", ("selection", "final")),
        ("slope_leaves", ("selection", "final")),
        ("slope_scope", ("batch", "worker")),
        ("root_candidate", ("fallback_only", "always")),
        ("reward", ("em", "em_format_penalty")),
        ("score_spread", ("floor", "absolute")),
        ("slope_rounds", ("all", "last")),
        ("on_zero_variance", ("apply", "skip")),
        ("child_weights", ("softmax", "proportional", "uniform", "leaf_count")),
    ],
)
def test_every_documented_switch_value_is_accepted(field: str, values: tuple[str, ...]):
    assert [getattr(SIPOOptions(**{field: value}), field) for value in values] == list(values)
    assert getattr(SIPOOptions(), field) == values[0]


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


def test_switch_4_outcomes_are_means_over_the_leaves_that_count():
    parents, valid = longs([-1, 0, 0, 1, 1, 2, 2]), torch.ones(7, dtype=torch.bool)
    valid[6] = False
    trees = ExpandedTrees(parents, torch.ones(7, dtype=torch.float64), longs([-1] * 7), valid)
    rewards = double([NAN, NAN, NAN, 1.0, 0.0, 0.0, NAN])
    values = standardized_leaf_values(parents, rewards, valid=valid)
    options = SIPOOptions(slope_population="final", slope_estimator="correlation")
    sums = sipo_credit(trees, rewards, no_records(), None, options=options).slope_sums
    # The counted values of the root have mean 0; then two leaves and one.
    assert_equal(double([sums.y]), [float((values[3] + values[4]) / 2 + values[5])])
    assert_equal(double([sums.yy]), [float(((values[3] + values[4]) / 2) ** 2 + values[5] ** 2)])


def test_switch_4_sets_of_the_final_population_are_whole_trees():
    first, second = worked_tree(), worked_tree()
    parents = torch.cat([first[0].parents, torch.where(second[0].parents >= 0, second[0].parents + 8, -1)])
    joined = ExpandedTrees(parents, first[0].surprisals.repeat(2), first[0].fresh_rounds.repeat(2))
    options = SIPOOptions(slope_population="final")
    one = sipo_credit(*first, None, options=options).slope_sums
    two = sipo_credit(joined, first[1].repeat(2), no_records(), None, options=options).slope_sums
    assert_equal(two.as_tensor(), 2 * one.as_tensor())


@quick
@given(tree_batches())
def test_switch_4_matches_a_list_of_all_inner_nodes(batch: Batch):
    values, inner = {}, [node for node in batch.nodes if node.children]
    for tree in batch.trees:
        values.update(reference_leaf_values(tree))
    outcomes = [sum(values[leaf] for leaf in node.leaves()) / len(node.leaves()) for node in inner]
    surprisals = [node.surprisal if node.parent else 0.0 for node in inner]
    options = SIPOOptions(slope_population="final", slope_estimator="correlation")
    sums = sipo_credit(batch.expanded, batch.rewards, batch.records, None, options=options).slope_sums
    assert_equal(sums.as_tensor(), correlation_sums(double(surprisals), double(outcomes)).as_tensor())


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
