"""From nodes to tokens and back: advantages, surprisals, spreading."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from grounded_rl.credit import (
    NO_NODE,
    node_advantages,
    node_surprisals,
    spread_to_tokens,
)
from tests.credit.batches import assert_equal, quick
from tests.credit.tree_reference import (
    Batch,
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


# --- advantages


def test_advantage_modes():
    parents, values = torch.tensor([-1, 0, 0, 1]), double([0.5, 0.75, 0.25, 1.0])
    assert node_advantages(parents, values) is values
    assert_equal(node_advantages(parents, values, mode="minus_parent"), [0.5, 0.25, -0.25, 0.25])
    assert_equal(node_advantages(parents, values, mode="minus_root"), [0.5, 0.25, -0.25, 0.5])
    assert_equal(node_advantages(parents, values, mode="minus_both"), [0.5, 0.5, -0.5, 0.75])


def test_differences_in_a_forest_stay_within_trees():
    parents, values = torch.tensor([-1, -1, 0, 1]), double([1.0, 10.0, 2.0, 30.0])
    assert_equal(node_advantages(parents, values, mode="minus_root"), [1.0, 10.0, 1.0, 20.0])


def test_unknown_advantage_modes_are_refused():
    with pytest.raises(ValueError, match="`mode` must be one of 'node_value', .*: got 'ratio'"):
        node_advantages(torch.tensor([-1]), torch.zeros(1), mode="ratio")
    with pytest.raises(ValueError, match="`values` must hold one entry per node"):
        node_advantages(torch.tensor([-1]), torch.zeros(2))


# --- tokens


def test_surprisal_is_the_mean_over_the_nodes_own_tokens():
    # node 1: (.2 + .4) / 2 = .3, node 2: .5; the tool token (NaN) between them belongs to no node.
    parents = torch.tensor([-1, 0, 1])
    logps = double([[-0.2, -0.4, NAN, -0.5]])
    surprisals, has_tokens = node_surprisals(logps, torch.tensor([[1, 1, NO_NODE, 2]]), parents)
    assert_equal(surprisals, [0.0, 0.3, 0.5])
    assert has_tokens.tolist() == [False, True, True]


def test_tokens_without_a_finite_log_probability_are_dropped():
    parents = torch.tensor([-1, 0])
    surprisals, has_tokens = node_surprisals(double([[-0.2, -math.inf, NAN]]), torch.tensor([[1, 1, 1]]), parents)
    assert_equal(surprisals, [0.0, 0.2])
    assert has_tokens.tolist() == [False, True]


def test_a_node_without_scored_tokens_inherits_from_its_parent():
    parents = torch.tensor([-1, 0, 1, 2])
    surprisals, has_tokens = node_surprisals(double([[-0.5, NAN]]), torch.tensor([[1, 3]]), parents)
    assert_equal(surprisals, [0.0, 0.5, 0.5, 0.5])
    assert has_tokens.tolist() == [False, True, False, False]


def test_children_of_a_root_with_tokens_inherit_from_it():
    surprisals, _ = node_surprisals(double([[-0.5]]), torch.tensor([[0]]), torch.tensor([-1, 0]))
    assert_equal(surprisals, [0.5, 0.5])


def test_repeating_a_shared_prefix_in_every_row_changes_nothing():
    parents = torch.tensor([-1, 0, 1, 1])
    once = node_surprisals(
        double([[-0.2, -0.4, -0.5], [NAN, NAN, -0.1]]), torch.tensor([[1, 1, 2], [-1, -1, 3]]), parents
    )
    twice = node_surprisals(
        double([[-0.2, -0.4, -0.5], [-0.2, -0.4, -0.1]]), torch.tensor([[1, 1, 2], [1, 1, 3]]), parents
    )
    assert_equal(twice[0], once[0])


def test_no_gradient_flows_through_surprisals():
    logps = double([[-0.2]]).requires_grad_()
    surprisals, _ = node_surprisals(logps, torch.tensor([[1]]), torch.tensor([-1, 0]))
    assert not surprisals.requires_grad


@quick
@given(tree_batches(), st.integers(0, 1000))
def test_spreading_and_averaging_invert_each_other(batch: Batch, seed: int):
    generator = torch.Generator().manual_seed(seed)
    num_nodes = len(batch.nodes)
    # Every node owns at least one token, in a random order among tokens that belong to none.
    owners = torch.cat([torch.arange(num_nodes), torch.randint(-1, num_nodes, (num_nodes,), generator=generator)])
    token_nodes = owners[torch.randperm(len(owners), generator=generator)].reshape(2, -1)
    expected = torch.rand(num_nodes, generator=generator, dtype=torch.float64)
    tokens = spread_to_tokens(expected, token_nodes)
    assert (tokens[token_nodes < 0] == 0).all()
    surprisals, has_tokens = node_surprisals(-tokens, token_nodes, batch.expanded.parents)
    assert_equal(surprisals, expected)
    assert has_tokens.all()


def test_tokens_without_a_node_get_exactly_zero_whatever_the_advantages():
    tokens = spread_to_tokens(double([NAN, math.inf, -2.0]), torch.tensor([[-1, 2, -1]]))
    assert tokens.tolist() == [[0.0, -2.0, 0.0]]


def test_gradients_of_spreading_are_exact():
    token_nodes = torch.tensor([[0, 1, -1], [1, 1, 2]])
    advantages = torch.randn(3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: spread_to_tokens(a, token_nodes), (advantages,))
    spread_to_tokens(advantages, token_nodes).sum().backward()
    assert advantages.grad.tolist() == [1, 3, 1]


def test_node_indices_outside_the_tree_are_refused():
    with pytest.raises(ValueError, match=r"`token_nodes` must lie in \[-1, 2\): got a range of \[0, 2\]"):
        spread_to_tokens(torch.zeros(2), torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match=r"got a range of \[-2, 0\]"):
        spread_to_tokens(torch.zeros(2), torch.tensor([[0, -2]]))
    with pytest.raises(ValueError, match=r"`token_nodes` must lie in \[-1, 1\)"):
        node_surprisals(torch.zeros(1, 1), torch.tensor([[1]]), torch.tensor([-1]))
    with pytest.raises(ValueError, match="`token_nodes` must have the shape of `logps`"):
        node_surprisals(torch.zeros(1, 2), torch.tensor([[0]]), torch.tensor([-1]))


def test_a_token_without_a_node_has_no_advantage():
    assert spread_to_tokens(torch.tensor([3.0, 4.0]), torch.tensor([[1, NO_NODE, 0]])).tolist() == [[4.0, 0.0, 3.0]]


def test_an_empty_batch_of_tokens_is_allowed():
    assert spread_to_tokens(torch.zeros(2), torch.zeros(0, 5, dtype=torch.long)).shape == (0, 5)


def test_spreading_allocates_the_result_and_nothing_else_of_its_size():
    token_nodes = torch.zeros(22, 4096, dtype=torch.long)
    allocated = []

    class Allocations(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            allocated.append(result.nbytes if isinstance(result, torch.Tensor) else 0)
            return result

    with Allocations():
        tokens = spread_to_tokens(torch.ones(55), token_nodes)
    assert sum(allocated) < 1.01 * tokens.nbytes
