"""Potential-based turn rewards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given

from grounded_rl.credit import alias_potentials, potential_rewards
from tests.credit.batches import Batch, assert_equal, batches, quick

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def test_potential_is_the_log_of_the_summed_alias_probabilities():
    # log(.2 + .3) = -.693147.
    assert_equal(alias_potentials(torch.log(double([[0.2, 0.3]]))), [math.log(0.5)])
    assert_equal(alias_potentials(double([-1.25])), -1.25)


def test_missing_aliases_do_not_count():
    potentials = alias_potentials(double([[-1.0, NAN], [NAN, NAN]]), torch.tensor([[1, 0], [0, 0]]))
    assert potentials.tolist() == [-1.0, -math.inf]
    with pytest.raises(ValueError, match="`alias_mask` must have the shape of `mean_logps`"):
        alias_potentials(torch.zeros(1, 2), torch.ones(1, 3))


def test_rewards_are_scaled_differences_of_potentials():
    potentials, mask = double([[-4.0, -1.0, -2.0], [-3.0, -2.5, NAN]]), torch.tensor([[1, 1], [1, 0]])
    assert_equal(potential_rewards(potentials, mask), [[0.06, -0.02], [0.01, 0.0]])
    assert_equal(potential_rewards(potentials, mask, scale=1.0), [[3.0, -1.0], [0.5, 0.0]])


@quick
@given(batches())
def test_rewards_telescope(batch: Batch):
    """Potential shaping moves reward between turns; its total depends on the ends only."""
    potentials = batch.normal(batch.rows, batch.columns + 1)
    rewards = potential_rewards(potentials, torch.ones(batch.rows, batch.columns), scale=0.5)
    assert_equal(rewards.sum(1), 0.5 * (potentials[:, -1] - potentials[:, 0]), rtol=1e-11)


@quick
@given(batches())
def test_an_alias_can_only_raise_the_potential(batch: Batch):
    logps = -batch.uniform()
    assert (alias_potentials(logps) >= logps.max(-1).values).all()
    noisy = alias_potentials(batch.garbage(logps), batch.mask)
    kept = torch.where(batch.mask, logps, -math.inf)
    assert_equal(noisy.exp(), kept.exp().sum(-1))


def test_gradients_of_rewards_are_exact():
    logps = torch.randn(1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: potential_rewards(alias_potentials(x), torch.ones(1, 2)), (logps,))


def test_potential_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`potentials` must have the shape of `turn_mask`"):
        potential_rewards(torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"`potentials` must have the shape \(B, S \+ 1\)"):
        potential_rewards(torch.zeros(2), torch.ones(1))
