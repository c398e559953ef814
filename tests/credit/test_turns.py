"""Turn returns and the methods built on them: MT-style turn rewards, MT-GRPO, generalised advantage estimation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    desa_rewards,
    gae_advantages,
    group_advantages,
    last_turns,
    mt_grpo_advantages,
    search_key_score,
    search_turn_rewards,
    spread_segments,
    turn_return_advantages,
    turn_returns,
    whitened,
)
from tests.credit.batches import Batch, assert_equal, batches, quick
from tests.credit.misfits import assert_misfits_refused

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


# --- returns


def test_returns_sum_what_is_still_to_come():
    # r = (.5, 0, 1), gamma .5: 1; 0 + .5; .5 + .25.
    assert_equal(turn_returns(double([[0.5, 0.0, 1.0]]), torch.ones(1, 3), gamma=0.5), [[0.75, 0.5, 1.0]])
    assert_equal(turn_returns(double([[0.5, 0.0, 1.0]]), torch.ones(1, 3)), [[1.5, 1.0, 1.0]])


def test_turns_that_do_not_exist_neither_count_nor_discount():
    mask = torch.tensor([[1, 0, 1, 0]])
    assert_equal(turn_returns(double([[1.0, NAN, 2.0, NAN]]), mask, gamma=0.5), [[2.0, 0.0, 2.0, 0.0]])


def test_last_turns_are_found_behind_gaps():
    mask = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1]])
    assert last_turns(mask).long().tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 1]]


@quick
@given(batches(), st.sampled_from([0.0, 0.5, 1.0]))
def test_returns_match_the_sum(batch: Batch, gamma: float):
    rewards = batch.normal()
    ours = turn_returns(batch.garbage(rewards), batch.mask, gamma=gamma)
    for row in range(batch.rows):
        turns = [turn for turn in range(batch.columns) if batch.mask[row, turn]]
        for place, turn in enumerate(turns):
            later = [gamma**step * float(rewards[row, next_turn]) for step, next_turn in enumerate(turns[place:])]
            assert_equal(ours[row, turn], sum(later))
    assert (ours[~batch.mask] == 0).all()


def test_gradients_of_returns_are_exact():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rewards = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda r: turn_returns(r, mask, gamma=0.7), (rewards,))


def test_the_baseline_of_a_turn_is_the_same_turn_of_the_group():
    # Returns: rollout 0 (1.5, 1), rollout 1 (0, -), rollout 2 of another prompt (4, 2).
    rewards, mask = double([[0.5, 1.0], [0.0, NAN], [2.0, 2.0]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    ids = torch.tensor([7, 7, 3])
    plain = turn_return_advantages(rewards, mask, ids, scale="none")
    assert_equal(plain, [[0.75, 0.0], [-0.75, 0.0], [0.0, 0.0]])
    raw = turn_return_advantages(rewards, mask, ids, scale="none", singleton="raw")
    assert_equal(raw, [[0.75, 1.0], [-0.75, 0.0], [4.0, 2.0]])
    # Sample deviation of (1.5, 0) is 1.060660.
    scaled = turn_return_advantages(rewards, mask, ids, epsilon=0.0)
    assert_equal(scaled, [[0.75 / 1.125**0.5, 0.0], [-0.75 / 1.125**0.5, 0.0], [0.0, 0.0]])
    discounted = turn_return_advantages(rewards, mask, ids, scale="none", gamma=0.0)
    assert_equal(discounted, [[0.25, 0.0], [-0.25, 0.0], [0.0, 0.0]])


@quick
@given(batches())
def test_with_one_turn_it_is_group_credit(batch: Batch):
    rewards, ids = batch.normal(batch.rows), batch.integers(0, 2, batch.rows)
    ours = turn_return_advantages(rewards[:, None], torch.ones(batch.rows, 1), ids)
    assert_equal(ours[:, 0], group_advantages(rewards, ids))


@quick
@given(batches(), st.integers(0, 100))
def test_permuting_rollouts_permutes_turn_advantages(batch: Batch, seed: int):
    order = torch.randperm(batch.rows, generator=torch.Generator().manual_seed(seed))
    rewards, ids = batch.garbage(batch.normal()), batch.integers(0, 2, batch.rows)
    ours = turn_return_advantages(rewards, batch.mask, ids)
    assert_equal(turn_return_advantages(rewards[order], batch.mask[order], ids[order]), ours[order])


def test_turn_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`turn_mask` must have the shape of `turn_rewards`"):
        turn_returns(torch.zeros(1, 2), torch.ones(1, 3))
    with pytest.raises(ValueError, match=r"`turn_rewards` must have the shape \(B, S\)"):
        turn_returns(torch.zeros(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"`turn_mask` must have the shape \(B, S\)"):
        last_turns(torch.ones(2))
    with pytest.raises(ValueError, match="`group_ids` must have the shape of `rollouts`"):
        turn_return_advantages(torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(2).long())


# --- MT-PPO's rewards


def test_search_turn_rewards_of_a_four_turn_rollout():
    # Search 1: miss, malformed: -.2 - .1 = -.3. Search 2: hit, well formed: .3 + .1 - .2 = .2.
    # Search 3: miss, well formed: .1 - .3 = -.2. Answer: 1, whatever its other columns hold.
    hits, formed = torch.tensor([[0, 1, 0, 1]]), torch.tensor([[0, 1, 1, 0]])
    rewards = search_turn_rewards(hits, formed, torch.ones(1, 4), double([1.0]))
    assert_equal(rewards, [[-0.3, 0.2, -0.2, 1.0]])
    assert_equal(search_turn_rewards(3 * hits, formed, torch.ones(1, 4), double([1.0])), rewards)
    # A turn that does not exist is no search: the third turn pays for two.
    gap = search_turn_rewards(hits, formed, torch.tensor([[1, 0, 1, 1]]), double([1.0]))
    assert_equal(gap, [[-0.3, 0.0, -0.1, 1.0]])


def test_a_rollout_of_one_turn_has_its_outcome_only():
    one = torch.ones(2, 1)
    assert search_turn_rewards(one, one, one, double([0.2, -1.0])).tolist() == [[0.2], [-1.0]]
    assert turn_return_advantages(double([[1.0], [0.0]]), one, torch.tensor([0, 0]), scale="none").tolist() == [
        [0.5],
        [-0.5],
    ]


def test_search_turn_rewards_follow_their_settings_and_the_mask():
    hits, formed, mask = torch.tensor([[1, 0, 1], [1, 1, 1]]), torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 0, 0]])
    rewards = search_turn_rewards(
        hits,
        formed,
        mask,
        double([-1.0, 0.2]),
        hit_reward=1.0,
        format_reward=0.5,
        format_penalty=9.0,
        search_cost=0.25,
    )
    assert_equal(rewards, [[1.25, -1.0, 0.0], [0.2, 0.0, 0.0]])
    with pytest.raises(ValueError, match="`well_formed` must have the shape of `hits`"):
        search_turn_rewards(hits, formed[:1], mask, double([1.0, 1.0]))
    with pytest.raises(ValueError, match="`outcomes` must have the shape of `rollouts`"):
        search_turn_rewards(hits, formed, mask, double([1.0]))
    with pytest.raises(ValueError, match=r"`hits` must have the shape \(B, S\)"):
        search_turn_rewards(hits[0], formed[0], mask[0], double([1.0]))


# --- MT-GRPO

SEGMENTS = torch.tensor([[0, 0, -1, 1, 1, -1], [0, -1, -1, 1, -1, 2]])


def test_only_tokens_before_the_first_result_get_the_turn_advantage():
    turn, outcome, combined = double([0.5, NAN]), double([1.0, NAN]), double([NAN, -2.0])
    ours = mt_grpo_advantages(turn, outcome, combined, SEGMENTS, torch.tensor([0, -1]), coefficient=0.4)
    # Row 0: 1 + .4 * .5 = 1.2 on turn 0, 1 on turn 1. Row 1 has no result: combined everywhere.
    assert_equal(ours, [[1.2, 1.2, 0, 1.0, 1.0, 0], [-2.0, 0, 0, -2.0, 0, -2.0]])


def test_a_later_first_result_extends_the_credit():
    turn, outcome = double([0.5, 0.5]), double([1.0, 1.0])
    ours = mt_grpo_advantages(turn, outcome, outcome, SEGMENTS, torch.tensor([1, 1]))
    assert_equal(ours, [[1.5, 1.5, 0, 1.5, 1.5, 0], [1.5, 0, 0, 1.5, 0, 1.0]])


@quick
@given(batches())
def test_without_coefficient_it_is_outcome_credit(batch: Batch):
    segments = torch.where(batch.mask, batch.integers(0, 3), -1)
    outcome, turn = batch.normal(batch.rows), batch.normal(batch.rows)
    first = batch.integers(-1, 3, batch.rows)
    ours = mt_grpo_advantages(turn, outcome, outcome, segments, first, coefficient=0.0)
    assert_equal(ours, spread_segments(outcome[:, None].expand(-1, 3), segments))


def test_mt_grpo_input_that_does_not_fit_is_refused():
    good = torch.zeros(2)
    with pytest.raises(ValueError, match=r"`outcome_advantages` must have the shape \(2,\): got \(1,\)"):
        mt_grpo_advantages(good, good[:1], good, SEGMENTS, torch.tensor([0, 0]))
    with pytest.raises(ValueError, match=r"`segment_ids` must have the shape \(B, T\)"):
        mt_grpo_advantages(good, good, good, SEGMENTS[0], torch.tensor([0, 0]))


# --- GAE


def test_tool_tokens_carry_no_value_and_cost_no_discount():
    # Sampled: V = (.5, .25), r = (0, 1). A_2 = 1 - .25 = .75; A_1 = 0 + .25 - .5 + .75 = .5 with gamma = lambda = 1.
    mask = torch.tensor([[1, 0, 1]])
    advantages, returns = gae_advantages(double([[0, NAN, 1]]), double([[0.5, NAN, 0.25]]), mask)
    assert_equal(advantages, [[0.5, 0.0, 0.75]])
    assert_equal(returns, [[1.0, 0.0, 1.0]])
    # gamma .5, lambda .5: A_1 = .5 * .25 - .5 + .25 * .75 = -.1875.
    advantages, returns = gae_advantages(double([[0, NAN, 1]]), double([[0.5, NAN, 0.25]]), mask, gamma=0.5, lam=0.5)
    assert_equal(advantages, [[-0.1875, 0.0, 0.75]])
    assert_equal(returns, [[0.3125, 0.0, 1.0]])


def test_through_mode_lets_tool_tokens_take_part():
    # V of the tool token 2: d_3 = 1 - .25 = .75; d_2 = 0 + .25 - 2 = -1.75; d_1 = 2 - .5 = 1.5; A_1 = 1.5 - 1.75 + .75
    # = .5 at lambda 1; at lambda 0 A_1 = 1.5.
    rewards, values, mask = double([[0, 0, 1]]), double([[0.5, 2.0, 0.25]]), torch.tensor([[1, 0, 1]])
    full, _ = gae_advantages(rewards, values, mask, observations="through")
    assert_equal(full, [[0.5, 0.0, 0.75]])
    myopic, returns = gae_advantages(rewards, values, mask, lam=0.0, observations="through")
    assert_equal(myopic, [[1.5, 0.0, 0.75]])
    assert_equal(returns, [[2.0, 0.0, 1.0]])


@quick
@given(batches(), st.sampled_from([0.5, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_skipping_equals_cutting_the_tool_tokens_out(batch: Batch, gamma: float, lam: float):
    rewards, values = batch.normal(), batch.normal()
    ours, returns = gae_advantages(batch.garbage(rewards), batch.garbage(values), batch.mask, gamma=gamma, lam=lam)
    for row in range(batch.rows):
        kept = batch.mask[row]
        if kept.any():
            short = (rewards[row, kept][None], values[row, kept][None], torch.ones(1, int(kept.sum())))
            alone, alone_returns = gae_advantages(*short, gamma=gamma, lam=lam, observations="through")
            assert_equal(ours[row, kept], alone[0])
            assert_equal(returns[row, kept], alone_returns[0])
    assert (ours[~batch.mask] == 0).all()
    assert (returns[~batch.mask] == 0).all()


@quick
@given(batches())
def test_without_critic_and_discount_the_return_is_the_sum_of_rewards_to_come(batch: Batch):
    rewards = batch.normal()
    ours, returns = gae_advantages(batch.garbage(rewards), torch.zeros_like(rewards), batch.mask)
    assert_equal(ours, turn_returns(batch.garbage(rewards), batch.mask))
    assert_equal(returns, ours)


def test_whitened_values_have_mean_zero_and_sample_variance_one():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    result = whitened(double([[1.0, 2.0, NAN], [3.0, NAN, NAN]]), mask)
    # (1, 2, 3): mean 2, sample variance 1 (+ 1e-8).
    assert_equal(result, [[-1 / (1 + 1e-8) ** 0.5, 0, 0], [1 / (1 + 1e-8) ** 0.5, 0, 0]])
    # (0, 2): mean 1, sample variance 2.
    assert_equal(whitened(double([[0.0, 2.0]]), torch.ones(1, 2))[0, 1], 1 / (2 + 1e-8) ** 0.5)
    assert whitened(double([[5.0, NAN]]), torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whitened(double([[NAN]]), torch.tensor([[0]])).tolist() == [[0.0]]
    with pytest.raises(ValueError, match="`mask` must have the shape of `values`"):
        whitened(torch.zeros(1, 2), torch.ones(1, 3))


def test_gae_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`values` must have the shape of `token_rewards`"):
        gae_advantages(torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))
    with pytest.raises(ValueError, match="`observations` must be one of 'skip', 'through': got 'drop'"):
        gae_advantages(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2), observations="drop")
    with pytest.raises(ValueError, match=r"`token_rewards` must have the shape \(B, T\)"):
        gae_advantages(torch.zeros(2), torch.zeros(2), torch.ones(2))


# --- DeSA and StepSearch


def test_the_stage_decides_what_is_rewarded():
    hits, matches = torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1])
    assert desa_rewards(2 * hits, matches, stage="search").tolist() == [1, 0, 1]
    assert desa_rewards(hits, matches, stage="answer").tolist() == [0, 1, 1]
    charged = desa_rewards(hits, matches, stage="search", violations=torch.tensor([2, 1, 0]), penalty=0.25)
    assert charged.tolist() == [0.5, -0.25, 1.0]
    assert_equal(desa_rewards(hits, matches, stage="search", violations=torch.tensor([1, 0, 0]))[0], 0.8, rtol=1e-7)
    with pytest.raises(ValueError, match="`stage` must be one of 'search', 'answer': got 'both'"):
        desa_rewards(hits, matches, stage="both")
    with pytest.raises(ValueError, match="`exact_matches` must have the shape of `hits`"):
        desa_rewards(hits, matches[:1], stage="search")
    with pytest.raises(ValueError, match="`violations` must have the shape of `hits`"):
        desa_rewards(hits, matches, stage="search", violations=torch.zeros(2))


def test_search_keys_are_scored_by_the_query_that_matches_them_best():
    # Query 1 matches key 0 with .75, query 2 key 1 with .5 (not key 0 with .25), query 3 key 0 with .25; key 2 has
    # none.
    matches = double([[0.75, 0.0, 0.0], [0.25, 0.5, 0.0], [0.25, 0.0, 0.0]])
    assert_equal(search_key_score(matches), 1.25 / 3)
    assert_equal(search_key_score(matches, repeated="last"), 0.75 / 3)


def test_a_query_that_matches_nothing_is_assigned_to_nothing():
    assert search_key_score(double([[0.5, 0.0], [0.0, 0.0]]), repeated="last").item() == 0.25
    assert search_key_score(double([[0.0, 0.0]])).item() == 0.0
    assert search_key_score(double([[0.5]])).item() == 0.5


def test_ties_between_keys_go_to_the_earlier_one():
    assert search_key_score(double([[0.5, 0.5], [0.25, 0.0]]), repeated="last").item() == 0.125


def test_no_queries_or_no_keys_score_zero():
    assert search_key_score(torch.zeros(0, 3)).item() == 0.0
    assert search_key_score(torch.zeros(2, 0)).item() == 0.0
    with pytest.raises(ValueError, match=r"`matches` must have the shape \(Q, P\)"):
        search_key_score(torch.zeros(3))
    with pytest.raises(ValueError, match="`repeated` must be one of 'best', 'last': got 'first'"):
        search_key_score(torch.zeros(1, 1), repeated="first")


def test_every_turn_column_is_checked():
    table, column, ids = double([[1.0, 0.0]]), double([1.0]), torch.tensor([0])
    assert_misfits_refused(
        search_turn_rewards,
        "well_formed",
        "turn_mask",
        "outcomes",
        hits=table,
        well_formed=table,
        turn_mask=table,
        outcomes=column,
    )
    columns = ("turn_advantages", "outcome_advantages", "combined_advantages")
    assert_misfits_refused(
        mt_grpo_advantages,
        *columns,
        "first_result_turn",
        **dict.fromkeys(columns, column),
        segment_ids=torch.tensor([[0, 1]]),
        first_result_turn=ids,
    )
    assert_misfits_refused(
        gae_advantages, "values", "sampled_mask", token_rewards=table, values=table, sampled_mask=table
    )
    assert_misfits_refused(
        turn_return_advantages, "turn_mask", "group_ids", turn_rewards=table, turn_mask=table, group_ids=ids
    )
