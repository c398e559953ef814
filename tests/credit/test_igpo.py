"""Information gains as turn rewards, and their accumulation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import igpo_advantages, information_gains, last_turns
from tests.credit.batches import Batch, assert_equal, batches, quick
from tests.credit.misfits import assert_misfits_refused

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def test_gains_are_differences_of_log_probability_or_probability():
    answer, mask = double([[-3.0, -1.0, -1.5]]), torch.ones(1, 2)
    assert_equal(information_gains(answer, mask), [[2.0, -0.5]])
    # e^-1 - e^-3 = .318092, e^-1.5 - e^-1 = -.144749.
    assert_equal(information_gains(answer, mask, measure="prob"), [[0.318092, -0.144749]], rtol=3e-6)


def test_turns_that_do_not_exist_have_no_gain():
    gains = information_gains(double([[-3.0, -1.0, NAN], [NAN, NAN, NAN]]), torch.tensor([[1, 0], [0, 0]]))
    assert gains.tolist() == [[2.0, 0.0], [0.0, 0.0]]


@quick
@given(batches())
def test_gains_in_log_probability_telescope(batch: Batch):
    levels = -batch.uniform(batch.rows, batch.columns + 1)
    gains = information_gains(levels, torch.ones(batch.rows, batch.columns))
    assert_equal(gains.sum(1), levels[:, -1] - levels[:, 0])


GAINS, OUTCOMES = double([[0.5, NAN, NAN], [-0.5, 0.1, NAN]]), double([1.0, 0.0])
MASK, IDS = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([0, 0])


def test_joint_pool_of_outcomes_and_gains():
    # Pool (.5, 1, -.5, .1, 0): mean .22. Rollout 0: r = (.28, .78); rollout 1: (-.72, -.12, -.22).
    # gamma 1: (1.06, .78) and (-1.06, -.34, -.22); gamma .5: (.67, .78) and (-.835, -.23, -.22).
    plain = igpo_advantages(GAINS, OUTCOMES, MASK, IDS, scale="none")
    assert_equal(plain, [[1.06, 0.78, 0.0], [-1.06, -0.34, -0.22]])
    half = igpo_advantages(GAINS, OUTCOMES, MASK, IDS, scale="none", gamma=0.5)
    assert_equal(half, [[0.67, 0.78, 0.0], [-0.835, -0.23, -0.22]])
    # Population variance: (.0784 + .6084 + .5184 + .0144 + .0484) / 5 = .2536.
    divisor = math.sqrt(0.2536 + 1e-8) + 1e-6
    assert_equal(igpo_advantages(GAINS, OUTCOMES, MASK, IDS), plain / divisor)
    assert_equal(igpo_advantages(GAINS, OUTCOMES, MASK, IDS, epsilon=1.0), plain / (math.sqrt(0.2536 + 1e-8) + 1))


def test_separate_pools():
    # Outcomes (1, 0): mean .5; gains (.5, -.5, .1): mean 1/30. Rollout 0: (.466667, .5); rollout 1: (-.533333,
    # .066667, -.5).
    ours = igpo_advantages(GAINS, OUTCOMES, MASK, IDS, pooling="separate", scale="none")
    assert_equal(ours, [[14 / 30 + 0.5, 0.5, 0.0], [-16 / 30 + 2 / 30 - 0.5, 2 / 30 - 0.5, -0.5]])
    scaled = igpo_advantages(GAINS, OUTCOMES, MASK, IDS, pooling="separate")
    assert_equal(scaled[0, 1], 0.5 / (math.sqrt(0.25 + 1e-8) + 1e-6))


def test_prompts_do_not_share_pools():
    both = igpo_advantages(
        torch.cat([GAINS, 5 * GAINS]),
        torch.cat([OUTCOMES, 9 * OUTCOMES]),
        torch.cat([MASK, MASK]),
        torch.tensor([8, 8, 1, 1]),
    )
    assert_equal(both[:2], igpo_advantages(GAINS, OUTCOMES, MASK, IDS))
    separate = igpo_advantages(GAINS, OUTCOMES, MASK, torch.tensor([0, 1]), pooling="separate", scale="none")
    # Alone in its pool an outcome or gain has 0; rollout 1's gains (-.5, .1) have mean -.2.
    assert_equal(separate, [[0.0, 0.0, 0.0], [0.0, 0.3, 0.0]])


def test_a_gain_at_the_last_turn_is_replaced_by_the_outcome():
    noisy = GAINS.clone()
    noisy[0, 1] = noisy[1, 2] = 99.0
    assert_equal(igpo_advantages(noisy, OUTCOMES, MASK, IDS), igpo_advantages(GAINS, OUTCOMES, MASK, IDS))


def test_equal_rewards_have_no_advantage():
    ours = igpo_advantages(torch.full((2, 2), 0.5), torch.full((2,), 0.5), torch.ones(2, 2), torch.tensor([0, 0]))
    assert ours.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@quick
@given(batches(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from(["joint", "separate"]))
def test_advantages_match_the_definition(batch: Batch, gamma: float, pooling: str):
    gains, outcomes = batch.normal(), batch.normal(batch.rows)
    ids = batch.integers(0, 2, batch.rows)
    ours = igpo_advantages(batch.garbage(gains), outcomes, batch.mask, ids, pooling=pooling, gamma=gamma)
    rewards, pools = {}, {}
    for row in range(batch.rows):
        turns = [turn for turn in range(batch.columns) if batch.mask[row, turn]]
        for turn in turns:
            is_last = turn == turns[-1]
            rewards[row, turn] = float(outcomes[row] if is_last else gains[row, turn])
            pools[row, turn] = (int(ids[row]), pooling == "separate" and is_last)
    expected = torch.zeros_like(gains)
    for row in range(batch.rows):
        running = 0.0
        for turn in reversed(range(batch.columns)):
            if (row, turn) in rewards:
                pool = [rewards[cell] for cell in rewards if pools[cell] == pools[row, turn]]
                mean = sum(pool) / len(pool)
                spread = math.sqrt(sum((entry - mean) ** 2 for entry in pool) / len(pool) + 1e-8)
                running = (rewards[row, turn] - mean) / (spread + 1e-6) + gamma * running
                expected[row, turn] = running
    assert_equal(ours, expected, rtol=1e-9)  # a pool of nearly equal entries divides rounding by 1e-4
    assert (ours[~batch.mask] == 0).all()
    if pooling == "joint" and gamma == 0.0:
        assert abs(float(ours.sum())) < 1e-9
    assert last_turns(batch.mask).sum(1).tolist() == batch.mask.any(1).long().tolist()


def test_igpo_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`answer_logps` must have the shape of `turn_mask`"):
        information_gains(torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"`answer_logps` must have the shape \(B, S \+ 1\)"):
        information_gains(torch.zeros(2), torch.ones(1))
    with pytest.raises(ValueError, match="`measure` must be one of 'log_prob', 'prob': got 'bits'"):
        information_gains(torch.zeros(1, 2), torch.ones(1, 1), measure="bits")
    with pytest.raises(ValueError, match="`turn_mask` must have the shape of `gains`"):
        igpo_advantages(GAINS, OUTCOMES, MASK[:1], IDS)
    with pytest.raises(ValueError, match="`outcomes` must have the shape of `rollouts`"):
        igpo_advantages(GAINS, OUTCOMES[:1], MASK, IDS)
    with pytest.raises(ValueError, match=r"`gains` must have the shape \(B, S\)"):
        igpo_advantages(GAINS[0], OUTCOMES, MASK, IDS)
    with pytest.raises(ValueError, match="`pooling` must be one of 'joint', 'separate': got 'all'"):
        igpo_advantages(GAINS, OUTCOMES, MASK, IDS, pooling="all")
    with pytest.raises(ValueError, match="`scale` must be one of 'std', 'none': got 'mean'"):
        igpo_advantages(GAINS, OUTCOMES, MASK, IDS, scale="mean")


def test_every_column_is_checked():
    assert_misfits_refused(
        igpo_advantages,
        "turn_mask",
        "outcomes",
        "group_ids",
        gains=torch.nan_to_num(GAINS),
        outcomes=OUTCOMES,
        turn_mask=MASK,
        group_ids=IDS,
    )
