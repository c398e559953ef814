"""Entropy-weighted advantages and the branching decisions of ARPO and AEPO."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from grounded_rl.credit import (
    aepo_branches,
    aepo_initial_rollouts,
    arpo_branches,
    branching_entropy,
    clipped_surrogate,
    entropy_weighted_advantages,
)
from tests.credit.batches import Batch, assert_equal, batches, quick
from tests.credit.misfits import assert_misfits_refused

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def test_uncertain_tokens_weigh_more():
    # Entropies (0, 1, 2): mean 1, sample sd 1: factors .8, 1, 1.2 and with weight .5: .5, 1, 1.5.
    advantages, entropy, mask = double([[1.0, -2.0, 3.0]]), double([[0.0, 1.0, 2.0]]), torch.ones(1, 3)
    assert_equal(entropy_weighted_advantages(advantages, entropy, mask), [[0.8, -2.0, 3.6]])
    assert_equal(entropy_weighted_advantages(advantages, entropy, mask, weight=0.5), [[0.5, -2.0, 4.5]])
    # (0, 1): mean .5, sample sd .707107: factors 1 -+ .141421.
    two = entropy_weighted_advantages(double([[1.0, 1.0]]), double([[0.0, 1.0]]), torch.ones(1, 2))
    assert_equal(two, [[1 - 0.1 * 2**0.5, 1 + 0.1 * 2**0.5]])
    # Twice the spread and a shift give the same factors.
    assert_equal(entropy_weighted_advantages(advantages, 2 * entropy + 3, mask), [[0.8, -2.0, 3.6]])


def test_statistics_are_over_all_rows_and_the_mask_only():
    advantages, entropy = double([[1.0, NAN], [1.0, 1.0]]), double([[0.0, NAN], [1.0, 2.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    assert_equal(entropy_weighted_advantages(advantages, entropy, mask), [[0.8, 0.0], [1.0, 1.2]])


@pytest.mark.parametrize("entropy", [[[0.5, 0.5]], [[0.1 + 0.2, 0.3 + 5e-17]]])
def test_without_spread_or_rivals_advantages_stay(entropy):
    advantages = double([[1.0, -2.0]])
    assert entropy_weighted_advantages(advantages, double(entropy), torch.ones(1, 2)).tolist() == [[1.0, -2.0]]
    single = entropy_weighted_advantages(advantages, double(entropy), torch.tensor([[0, 1]]))
    assert single.tolist() == [[0.0, -2.0]]
    assert entropy_weighted_advantages(advantages, double(entropy), torch.zeros(1, 2)).tolist() == [[0.0, 0.0]]


@quick
@given(batches())
def test_no_weight_changes_nothing_and_the_mean_weight_is_one(batch: Batch):
    advantages, entropy = batch.normal(), batch.uniform()
    masked = torch.where(batch.mask, advantages, 0.0)
    noisy = (batch.garbage(advantages), batch.garbage(entropy), batch.mask)
    assert_equal(entropy_weighted_advantages(*noisy, weight=0.0), masked)
    factors = entropy_weighted_advantages(batch.garbage(torch.ones_like(entropy)), noisy[1], batch.mask)
    assert_equal(factors.sum(), float(batch.mask.sum()))


def test_entropy_is_a_constant():
    advantages = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    entropy = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    entropy_weighted_advantages(advantages, entropy, mask).sum().backward()
    assert entropy.grad is None
    assert advantages.grad[0, 2] == 0
    assert torch.autograd.gradcheck(lambda a: entropy_weighted_advantages(a, entropy.detach(), mask), (advantages,))


def test_the_upper_clip_keeps_its_gradient():
    ratio = double([[2.0]]).requires_grad_()
    objective = clipped_surrogate(ratio, double([[1.0]]), clip_high=0.28, keep_clipped_gradient=True)
    objective.sum().backward()
    # Value 1.28; gradient 1.28 / 2.
    assert_equal(objective.detach(), [[1.28]])
    assert_equal(ratio.grad, [[0.64]])


def test_branching_entropy_is_a_sum_over_the_leading_tokens():
    # Four candidates of probability .25: entropy log 4 per token, over log 16 = .5; three tokens: 1.5.
    uniform = torch.log(torch.full((3, 4), 0.25, dtype=torch.float64))
    assert_equal(branching_entropy(uniform, 16), 1.5)
    assert_equal(branching_entropy(uniform, 16, num_tokens=2), 1.0)
    assert_equal(branching_entropy(uniform.repeat(10, 1), 16), 10.0)
    assert branching_entropy(torch.zeros(0, 4), 16).item() == 0.0


def test_impossible_candidates_add_nothing():
    assert branching_entropy(double([[0.0, -math.inf]]), 16).item() == 0.0


def test_branching_entropy_refuses_odd_input():
    with pytest.raises(ValueError, match=r"`top_logps` must have the shape \(T, K\)"):
        branching_entropy(torch.zeros(3), 16)
    with pytest.raises(ValueError, match="`vocabulary_size` must be at least 2: got 1"):
        branching_entropy(torch.zeros(1, 1), 1)
    assert branching_entropy(torch.zeros(1, 1), 2).item() == 0.0


def test_arpo_branches_when_entropy_rose_or_the_draw_is_low():
    # .6 - .2 * (1 - .5) = .5 <= .5: branch; with a smaller rise not.
    assert arpo_branches(1.0, 0.5, 0.6)
    assert not arpo_branches(0.99, 0.5, 0.6)
    assert arpo_branches(0.9, 0.5, 0.6, entropy_weight=0.25)
    # The score is clamped to [0, 1]: a huge rise still branches, a huge fall never does.
    assert arpo_branches(1e9, 0.0, 0.99)
    assert not arpo_branches(0.0, 1e9, 0.0)


def test_aepo_branches_when_entropy_rose_and_is_tired_by_consecutive_branches():
    # .4 + .2 * .5 = .5 >= .5: branch; one consecutive branching costs 5 %.
    assert aepo_branches(1.0, 0.5, 0.4)
    assert not aepo_branches(0.99, 0.5, 0.4)
    assert not aepo_branches(1.0, 0.5, 0.4, num_consecutive=1)
    assert aepo_branches(1.0, 0.5, 0.4, num_consecutive=1, penalty=0.0)
    assert aepo_branches(1.0, 0.5, 0.5, num_consecutive=1, entropy_weight=0.1)
    # 20 consecutive branchings at 5 % leave no factor, more do not turn it negative.
    assert not aepo_branches(100.0, 0.0, 0.9, num_consecutive=20)
    assert not aepo_branches(-100.0, 0.0, 0.0, num_consecutive=60)


def test_the_number_of_initial_rollouts_follows_the_entropies():
    # Equal entropies: 16 / 2 + 1; a root entropy higher by 2: floor(16 * .731059) + 1 = 12; far higher: all 16.
    assert aepo_initial_rollouts(16, 1.0, 1.0) == 9
    assert aepo_initial_rollouts(16, 3.0, 1.0) == 12
    assert aepo_initial_rollouts(16, 1.0, 3.0) == 5
    assert aepo_initial_rollouts(16, 100.0, 0.0) == 16


def test_entropy_weighting_refuses_misfits():
    with pytest.raises(ValueError, match="`entropy` must have the shape of `advantages`"):
        entropy_weighted_advantages(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"`advantages` must have the shape \(B, T\)"):
        entropy_weighted_advantages(torch.zeros(2), torch.zeros(2), torch.ones(2))


def test_every_token_table_is_checked():
    table = double([[1.0, 0.5]])
    assert_misfits_refused(entropy_weighted_advantages, "entropy", "mask", advantages=table, entropy=table, mask=table)
