"""Backup over trees: hand-checked numbers, equality with recursion over nodes, and the identities that define it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    child_weights,
    group_advantages,
    leaf_mask,
    node_depths,
    standardized_leaf_values,
    subtree_sums,
    tree_ids,
    tree_values,
    zero_variance_trees,
)
from grounded_rl.credit.tree import node_levels
from tests.credit.batches import assert_equal, quick
from tests.credit.misfits import assert_misfits_refused
from tests.credit.tree_reference import (
    Batch,
    reference_leaf_values,
    reference_value,
    reference_weights,
    tree_batches,
)

KINDS = ("softmax", "proportional", "uniform", "leaf_count")
NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


#        root
#      /  |   \
#     1   2    3        1: leaves 4, 5;  2: leaf;  3: chain 6 - 7
PARENTS = torch.tensor([-1, 0, 0, 0, 1, 1, 3, 6])
SURPRISALS = double([NAN, 0.5, 0.4, 0.3, 0.2, 0.6, 0.7, 0.9])


# --- structure


def test_leaves_depths_levels_and_trees_of_a_forest():
    parents = torch.tensor([-1, 0, 0, 1, -1, -1, 5])
    assert leaf_mask(parents).tolist() == [False, False, True, True, True, False, True]
    assert node_depths(parents).tolist() == [0, 1, 1, 2, 0, 0, 1]
    assert [level.tolist() for level in node_levels(parents)] == [[0, 4, 5], [1, 2, 6], [3]]
    assert tree_ids(parents).tolist() == [0, 0, 0, 0, 1, 2, 2]


def test_subtree_sums_include_the_node_itself():
    assert subtree_sums(PARENTS, torch.arange(8)).tolist() == [28, 10, 2, 16, 4, 5, 13, 7]


@quick
@given(tree_batches())
def test_structure_matches_the_nodes(batch: Batch):
    parents = batch.expanded.parents
    assert leaf_mask(parents).tolist() == [not node.children for node in batch.nodes]
    assert node_depths(parents).tolist() == [len(node.path()) - 1 for node in batch.nodes]
    roots = [tree.root for tree in batch.trees]
    assert tree_ids(parents).tolist() == [roots.index(node.path()[-1]) for node in batch.nodes]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (torch.tensor([-1, 0, 2]), r"parents\[2\] = 2. Number the nodes breadth-first"),
        (torch.tensor([0]), r"parents\[0\] = 0"),
        (torch.tensor([-1, -2]), r"parents\[1\] = -2"),
        (torch.tensor([-1.0]), "`parents` must be a non-empty `torch.long` vector: got .* of torch.float32"),
        (torch.tensor([[-1]]), r"`parents` must be a non-empty `torch.long` vector: got \(1, 1\)"),
        (torch.zeros(0, dtype=torch.long), r"got \(0,\)"),
    ],
)
def test_parents_that_are_no_forest_are_refused(parents, message):
    for function in (leaf_mask, node_depths):
        with pytest.raises(ValueError, match=message):
            function(parents)


def test_per_node_tensors_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"`entries` must hold one entry per node, \(8,\): got \(7,\)"):
        subtree_sums(PARENTS, torch.zeros(7))
    with pytest.raises(ValueError, match=r"`rewards` must hold one entry per node"):
        standardized_leaf_values(PARENTS, torch.zeros(3))
    with pytest.raises(ValueError, match=r"`rewards` must hold one entry per node"):
        zero_variance_trees(PARENTS, torch.zeros(3))
    with pytest.raises(ValueError, match=r"`surprisals` must hold one entry per node"):
        tree_values(PARENTS, torch.zeros(3), torch.zeros(8))
    with pytest.raises(ValueError, match=r"`valid` must hold one entry per node"):
        child_weights(PARENTS, SURPRISALS, valid=torch.ones(3, dtype=torch.bool))


# --- leaf values


def test_leaf_values_are_rewards_in_population_deviations():
    # R = (0, 1, 0, 1, 0): mean .4, population sd sqrt(.24) = .489898, V = -.4 / .489899 = -.816495 and .6 / .489899 =
    # 1.224742.
    rewards = double([NAN, 0, 1, 0, 1, 0])
    values = standardized_leaf_values(torch.tensor([-1, 0, 0, 0, 0, 0]), rewards)
    assert_equal(values, [0, -0.816495, 1.224742, -0.816495, 1.224742, -0.816495], rtol=1e-6)


def test_one_correct_leaf_of_22_has_an_unclipped_value():
    # mean 1/22, sd sqrt(21)/22 = .208299: V = (21/22)/.2083 = 4.582554 (4.582576 without epsilon), others -.218218.
    parents = torch.tensor([-1] + [0] * 22)
    values = standardized_leaf_values(parents, double([0.0, 1.0] + [0.0] * 21))
    assert_equal(values[1:3], [4.582554, -0.218217], rtol=2e-6)
    assert_equal(values[1], (21 / 22) / (math.sqrt(21) / 22 + 1e-6))


def test_a_malformed_answer_pulls_the_baseline():
    # R = (1, 0, 0, -1): mean 0, sd sqrt(1/2) = .707107, V = 1/.707108 = 1.414212.
    values = standardized_leaf_values(torch.tensor([-1, 0, 0, 0, 0]), double([0, 1, 0, 0, -1]))
    assert_equal(values[1:], [1.414212, 0, 0, -1.414212], rtol=1e-6)


def test_a_tree_of_equal_rewards_has_leaf_values_of_exactly_zero():
    parents = torch.tensor([-1, 0, 0, 0])
    values = standardized_leaf_values(parents, double([NAN, 0.1 + 0.2, 0.3, 0.3]))
    assert values.tolist() == [0, 0, 0, 0]
    assert standardized_leaf_values(torch.tensor([-1]), double([1.0])).tolist() == [0]


def test_leaves_that_do_not_count_enter_no_statistic():
    parents = torch.tensor([-1, 0, 0, 0])
    valid = torch.tensor([True, True, True, False])
    values = standardized_leaf_values(parents, double([0, 1, 0, NAN]), valid=valid)
    # mean .5, sd .5: V = .5 / .500001.
    assert_equal(values, [0, 0.5 / 0.500001, -0.5 / 0.500001, 0])


def test_epsilon_enters_the_divisor():
    values = standardized_leaf_values(torch.tensor([-1, 0, 0]), double([0, 1, 0]), epsilon=0.5)
    assert_equal(values, [0, 0.5, -0.5])


@quick
@given(tree_batches())
def test_leaf_values_match_every_tree_on_its_own(batch: Batch):
    expected = {}
    for tree in batch.trees:
        expected.update(reference_leaf_values(tree))
    values = standardized_leaf_values(batch.expanded.parents, batch.rewards)
    assert_equal(values, double([expected.get(node, 0.0) for node in batch.nodes]))
    for number, tree in enumerate(batch.trees):
        mine = tree_ids(batch.expanded.parents) == number
        total = float(values[mine].sum())
        assert abs(total) < 1e-9 * len(tree.root.leaves())


@quick
@given(tree_batches())
def test_zero_variance_trees_are_those_with_equal_rewards(batch: Batch):
    flags = zero_variance_trees(batch.expanded.parents, batch.rewards).tolist()
    for node, flag in zip(batch.nodes, flags, strict=True):
        rewards = {leaf.reward for leaf in node.path()[-1].leaves()}
        assert flag == (len(rewards) == 1)


def test_a_tree_without_counted_leaf_has_no_variance():
    parents, valid = torch.tensor([-1, 0, 0]), torch.zeros(3, dtype=torch.bool)
    assert zero_variance_trees(parents, double([NAN, NAN, 1.0]), valid=valid).tolist() == [True] * 3
    valid[1:] = True
    assert zero_variance_trees(parents, double([NAN, 0.0, 1.0]), valid=valid).tolist() == [False] * 3


# --- weights and values


def test_softmax_weights_of_three_siblings():
    # s = (.5, .4, .3): e^s = 1.648721, 1.491825, 1.349859, sum 4.490405 -> .367165, .332225, .300610;
    # V = (-.3, 1.2, .4) -> -.110150 + .398670 + .120244 = .408764.
    parents, surprisals = torch.tensor([-1, 0, 0, 0]), double([NAN, 0.5, 0.4, 0.3])
    assert_equal(child_weights(parents, surprisals), [0, 0.367165, 0.332225, 0.300610], rtol=2e-6)
    assert_equal(tree_values(parents, surprisals, double([NAN, -0.3, 1.2, 0.4]))[0], 0.408764, rtol=2e-6)


def test_root_value_of_the_worked_tree_under_both_weightings():
    # Root children s = (.55, .30, .40, .45, .35): softmax w = (.229196, .178498, .197271, .207385, .187650).
    parents, surprisals = torch.tensor([-1, 0, 0, 0, 0, 0]), double([NAN, 0.55, 0.30, 0.40, 0.45, 0.35])
    weights = child_weights(parents, surprisals)[1:]
    assert_equal(weights, [0.229196, 0.178498, 0.197271, 0.207385, 0.187650], rtol=3e-6)
    # Uncorrected V = (-.816495, 1.224742, -.816495, 1.224742, -.816495) -> -.028816.
    low, high = -0.4 / (math.sqrt(0.24) + 1e-6), 0.6 / (math.sqrt(0.24) + 1e-6)
    uncorrected = double([low, high, low, high, low])
    corrected = double([low + 0.12 * 0.589455798, high, low, high, low])
    assert_equal(tree_values(parents, surprisals, uncorrected)[0], -0.028816, rtol=2e-5)
    assert_equal(tree_values(parents, surprisals, corrected)[0], -0.012604, rtol=4e-5)
    # Proportional: (.55*-.745760 + .30*1.224742 + .40*-.816495 + .45*1.224742 + .35*-.816495) / 2.05 = -.050723.
    assert_equal(tree_values(parents, surprisals, corrected, weights="proportional")[0], -0.050723, rtol=1e-5)


def test_chains_copy_and_inner_nodes_mix():
    leaf_values = double([NAN, NAN, 1.0, NAN, -1.0, 3.0, NAN, 0.25])
    values = tree_values(PARENTS, SURPRISALS, leaf_values, weights="uniform")
    # node 1 = (-1 + 3) / 2 = 1, node 3 = node 6 = leaf 7 = .25, root = (1 + 1 + .25) / 3 = .75.
    assert_equal(values, [0.75, 1, 1, 0.25, -1, 3, 0.25, 0.25])
    by_leaves = tree_values(PARENTS, SURPRISALS, leaf_values, weights="leaf_count")
    # root = mean of the leaves = (1 - 1 + 3 + .25) / 4.
    assert_equal(by_leaves[0], 0.8125)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(batch=tree_batches(), seed=st.integers(0, 1000))
def test_values_match_recursion_over_the_nodes(kind: str, batch: Batch, seed: int):
    drawn = torch.randn(len(batch.nodes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    leaf_values = {node: float(value) for node, value in zip(batch.nodes, drawn, strict=True)}
    noisy = torch.where(leaf_mask(batch.expanded.parents), drawn, NAN)
    values = tree_values(batch.expanded.parents, batch.expanded.surprisals, noisy, weights=kind)
    assert_equal(values, double([reference_value(node, leaf_values, kind) for node in batch.nodes]))


def test_an_only_child_without_surprisal_has_all_the_weight():
    weights = child_weights(torch.tensor([-1, 0, 1]), double([NAN, 0.0, 0.0]), weights="proportional")
    assert_equal(weights, [0.0, 1.0, 1.0])


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(batch=tree_batches())
def test_weights_of_siblings_sum_to_one_and_match_their_definition(kind: str, batch: Batch):
    weights = child_weights(batch.expanded.parents, batch.expanded.surprisals, weights=kind).tolist()
    position = {id(node): index for index, node in enumerate(batch.nodes)}
    for node in batch.nodes:
        if node.children:
            shares = [weights[position[id(child)]] for child in node.children]
            assert math.isclose(sum(shares), 1.0, rel_tol=1e-12)
            assert_equal(double(shares), double(reference_weights(node, kind)))
    assert all(weights[position[id(tree.root)]] == 0.0 for tree in batch.trees)


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(batch=tree_batches())
def test_single_child_edges_copy_values_exactly(kind: str, batch: Batch):
    values = tree_values(batch.expanded.parents, batch.expanded.surprisals, batch.rewards, weights=kind).tolist()
    position = {id(node): index for index, node in enumerate(batch.nodes)}
    for node in batch.nodes:
        if len(node.children) == 1:
            assert values[position[id(node)]] == values[position[id(node.children[0])]]


@quick
@given(tree_batches())
def test_a_star_is_plain_group_credit(batch: Batch):
    """One turn per rollout: the tree backup is GRPO with the population deviation."""
    rewards = batch.rewards[torch.isfinite(batch.rewards)]
    parents = torch.tensor([-1] + [0] * len(rewards))
    by_node = torch.cat([double([NAN]), rewards])
    values = tree_values(parents, torch.zeros_like(by_node), standardized_leaf_values(parents, by_node))
    assert_equal(values[1:], group_advantages(rewards, ddof=0))


def test_values_of_a_batch_are_those_of_its_trees():
    other = torch.tensor([-1, 0, 0])
    joined = torch.cat([PARENTS, torch.where(other >= 0, other + 8, -1)])
    surprisals = torch.cat([SURPRISALS, double([NAN, 0.1, 2.0])])
    leaves = double([NAN, NAN, 1.0, NAN, -1.0, 3.0, NAN, 0.25, NAN, 1.0, 0.0])
    values = tree_values(joined, surprisals, leaves)
    assert_equal(values[:8], tree_values(PARENTS, SURPRISALS, leaves[:8]))
    assert_equal(values[8:], tree_values(other, double([NAN, 0.1, 2.0]), leaves[8:]))


def test_leaf_values_may_be_given_per_leaf():
    by_node = double([NAN, NAN, 1.0, NAN, -1.0, 3.0, NAN, 0.25])
    by_leaf = double([1.0, -1.0, 3.0, 0.25])
    assert_equal(tree_values(PARENTS, SURPRISALS, by_leaf), tree_values(PARENTS, SURPRISALS, by_node))
    with pytest.raises(
        ValueError, match=r"`leaf_values` must have one entry per node \(8\) or per leaf \(4\): got \(5,\)"
    ):
        tree_values(PARENTS, SURPRISALS, torch.zeros(5))


def test_a_lone_root_keeps_its_value():
    assert tree_values(torch.tensor([-1]), double([NAN]), double([2.0])).tolist() == [2.0]


def test_softmax_survives_large_surprisals():
    parents = torch.tensor([-1, 0, 0])
    weights = child_weights(parents, double([NAN, 1000.0, 1000.0 + math.log(3)]))
    assert_equal(weights, [0, 0.25, 0.75], rtol=1e-10)  # 1000 + log 3 itself is rounded at 1e-13


def test_softmax_weights_ignore_a_common_shift():
    weights = child_weights(PARENTS, SURPRISALS)
    assert_equal(child_weights(PARENTS, SURPRISALS + 0.75), weights)


def test_proportional_weights_are_uniform_when_all_surprisals_are_zero():
    weights = child_weights(torch.tensor([-1, 0, 0, 1]), torch.zeros(4, dtype=torch.float64), weights="proportional")
    assert weights.tolist() == [0, 0.5, 0.5, 1]


def test_proportional_weights_of_zero_surprisals_have_a_finite_gradient():
    surprisals = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    child_weights(torch.tensor([-1, 0, 0, 1]), surprisals, weights="proportional")[1].backward()
    assert surprisals.grad.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_leaves_that_do_not_count_leave_the_whole_to_their_siblings(kind: str):
    valid = torch.ones(8, dtype=torch.bool)
    valid[[5, 7]] = False  # leaf 5 beside leaf 4, and the only leaf of the chain under 3
    leaf_values = double([NAN, NAN, 1.0, NAN, -1.0, NAN, NAN, NAN])
    weights = child_weights(PARENTS, SURPRISALS, weights=kind, valid=valid)
    assert weights[[3, 5, 6, 7]].tolist() == [0, 0, 0, 0]
    assert_equal(weights[1] + weights[2], 1.0)
    values = tree_values(PARENTS, SURPRISALS, leaf_values, weights=kind, valid=valid)
    assert values[1] == -1.0
    assert values[[3, 5, 6, 7]].tolist() == [0, 0, 0, 0]
    assert_equal(values[0], float(weights[2] - weights[1]))


def test_leaf_count_weights_count_only_what_counts():
    valid = torch.ones(8, dtype=torch.bool)
    valid[5] = False
    weights = child_weights(PARENTS, SURPRISALS, weights="leaf_count", valid=valid)
    assert_equal(weights[1:4], [1 / 3, 1 / 3, 1 / 3])


def test_surprisals_that_are_not_finite_are_refused_except_at_roots():
    broken = SURPRISALS.clone()
    broken[2:4] = double([math.inf, NAN])
    with pytest.raises(ValueError, match="`surprisals` must be finite at every node but the roots: got 2 entries"):
        tree_values(PARENTS, broken, torch.zeros(8))


def test_negative_surprisals_are_refused_by_proportional_weights_only():
    shifted = SURPRISALS - 0.55
    with pytest.raises(ValueError, match='`surprisals` must not be negative when `weights="proportional"`: got -0.3'):
        child_weights(PARENTS, shifted, weights="proportional")
    assert_equal(child_weights(PARENTS, shifted), child_weights(PARENTS, SURPRISALS))


def test_unknown_weights_are_refused():
    with pytest.raises(ValueError, match="`weights` must be one of 'softmax', 'proportional', .*: got 'max'"):
        child_weights(PARENTS, SURPRISALS, weights="max")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_values_are_exact(kind: str):
    leaf_values = torch.linspace(-1, 1, 8, dtype=torch.float64).requires_grad_()
    surprisals = torch.nan_to_num(SURPRISALS).requires_grad_()
    assert torch.autograd.gradcheck(lambda s, v: tree_values(PARENTS, s, v, weights=kind), (surprisals, leaf_values))


def test_no_gradient_reaches_inner_leaf_values_or_root_surprisals():
    leaf_values = torch.full((8,), NAN, dtype=torch.float64)
    leaf_values[[2, 4, 5, 7]] = double([1.0, -1.0, 3.0, 0.25])
    leaf_values.requires_grad_()
    surprisals = SURPRISALS.clone().requires_grad_()
    tree_values(PARENTS, surprisals, leaf_values)[0].backward()
    assert leaf_values.grad[[0, 1, 3, 6]].tolist() == [0, 0, 0, 0]
    assert surprisals.grad[0] == 0
    # The gradient of a convex combination: weights along the path, which sum to one over the leaves.
    assert_equal(leaf_values.grad.sum(), 1.0)
    assert torch.isfinite(surprisals.grad).all()
    # Softmax weights do not change under a common shift of siblings.
    assert_equal(surprisals.grad[1:4].sum(), 0.0)


def test_every_node_column_is_checked():
    parents, valid, rewards = torch.tensor([-1, 0, 0]), torch.tensor([False, True, True]), double([0.0, 1.0, 0.0])
    columns = {"parents": parents, "rewards": rewards, "valid": valid}
    assert_misfits_refused(standardized_leaf_values, "rewards", "valid", **columns)
    assert_misfits_refused(zero_variance_trees, "rewards", "valid", **columns)
    assert_misfits_refused(child_weights, "surprisals", "valid", parents=parents, surprisals=rewards, valid=valid)
    assert_misfits_refused(
        tree_values,
        "surprisals",
        "valid",
        "leaf_values",
        parents=parents,
        surprisals=rewards,
        leaf_values=rewards,
        valid=valid,
    )
