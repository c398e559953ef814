"""Step credit by shared observations (GiGPO) and shared histories (HGPO)."""

from __future__ import annotations

from difflib import SequenceMatcher

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    episode_advantages,
    gigpo_advantages,
    group_advantages,
    hgpo_advantages,
    history_groups,
    observation_clusters,
    step_returns,
)
from tests.credit.batches import assert_equal, quick
from tests.credit.misfits import assert_misfits_refused


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def longs(entries):
    return torch.tensor(entries, dtype=torch.long)


# Two prompts; rollouts 0 and 1 of prompt 0 (three and two steps), rollout 2 of prompt 1.
GROUPS, ROLLOUTS = longs([0, 0, 0, 0, 0, 1]), longs([0, 0, 0, 1, 1, 2])
OBSERVATIONS = ["q", "rome", "paris", "q", "rome", "q"]


def test_step_returns_are_discounted_within_a_rollout():
    # Rollout 0: r = (0, .5, 1), gamma .5: 1; .5 + .5; 0 + .5. Rollout 1: r = (.25, 0). Rollout 2: 1.
    returns = step_returns(double([0.0, 0.5, 1.0, 0.25, 0.0, 1.0]), ROLLOUTS, gamma=0.5)
    assert_equal(returns, [0.5, 1.0, 1.0, 0.25, 0.0, 1.0])


def test_steps_of_rollouts_may_interleave():
    returns = step_returns(double([0.0, 0.0, 1.0, 2.0]), longs([7, 3, 7, 3]), gamma=0.5)
    assert_equal(returns, [0.5, 1.0, 1.0, 2.0])
    assert_equal(step_returns(double([0.0, 1.0]), longs([0, 0])), [0.95, 1.0])


def test_clusters_share_text_within_a_prompt():
    assert observation_clusters(OBSERVATIONS, GROUPS).tolist() == [0, 1, 2, 0, 1, 3]


def test_no_observations_have_no_clusters():
    labels = observation_clusters([], longs([]).long())
    assert (labels.shape, labels.dtype) == ((0,), torch.long)


def test_similar_texts_join_the_first_cluster_that_fits():
    texts = ["the capital of France", "the capital of France?", "something else", "the capital of Franco?"]
    exact = observation_clusters(texts, longs([0] * 4))
    assert exact.tolist() == [0, 1, 2, 3]
    # The last text is compared with the founder of cluster 0 (ratio .93), not with its nearer second member.
    assert SequenceMatcher(None, texts[3], texts[0]).ratio() < 0.94 < SequenceMatcher(None, texts[3], texts[1]).ratio()
    assert observation_clusters(texts, longs([0] * 4), similarity=0.9).tolist() == [0, 0, 1, 0]
    assert observation_clusters(texts, longs([0] * 4), similarity=0.94).tolist() == [0, 0, 1, 2]
    assert observation_clusters(texts, longs([0, 1, 0, 1]), similarity=0.9).tolist() == [0, 1, 2, 1]


def test_similarity_is_inclusive():
    texts = ["ab", "ac"]
    assert SequenceMatcher(None, "ac", "ab").ratio() == 0.5
    assert observation_clusters(texts, longs([0, 0]), similarity=0.5).tolist() == [0, 0]


def test_episode_credit_per_step_and_per_rollout():
    # Outcomes: rollout 0 (three steps) 1, rollout 1 (two steps) 0; prompt 1 alone.
    outcome = double([1.0, 1.0, 1.0, 0.0, 0.0, 0.7])
    # Per step: mean .6 -> .4, -.6; per rollout: mean .5 -> .5, -.5.
    per_step = episode_advantages(outcome, GROUPS, scale="none")
    assert_equal(per_step, [0.4, 0.4, 0.4, -0.6, -0.6, 0.0])
    per_rollout = episode_advantages(outcome, GROUPS, rollout_ids=ROLLOUTS, scale="none")
    assert_equal(per_rollout, [0.5, 0.5, 0.5, -0.5, -0.5, 0.0])
    raw = episode_advantages(outcome, GROUPS, rollout_ids=ROLLOUTS, scale="none", singleton="raw")
    assert_equal(raw, [0.5, 0.5, 0.5, -0.5, -0.5, 0.7])
    # Sample sd of five entries: sqrt(1.2 / 4); of two: sqrt(.5).
    assert_equal(episode_advantages(outcome, GROUPS, epsilon=0.0)[0], 0.4 / 0.3**0.5)
    assert_equal(episode_advantages(outcome, GROUPS, rollout_ids=ROLLOUTS, epsilon=0.0)[0], 0.5 / 0.5**0.5)
    assert_equal(episode_advantages(outcome, GROUPS, singleton="raw", epsilon=0.0)[5], 0.7)


@pytest.mark.parametrize("rollout_ids", [None, torch.arange(2)])
def test_outcomes_are_standardised_with_1e_6_added_to_the_deviation(rollout_ids):
    # Sample deviation of (0, 2e-6): sqrt(2) * 1e-6.
    advantages = episode_advantages(double([0.0, 2e-6]), longs([0, 0]), rollout_ids=rollout_ids)
    assert_equal(advantages[1], 1 / (2**0.5 + 1))


def test_rollout_ids_may_come_in_any_order():
    outcome, groups, rollouts = double([0.0, 1.0, 0.0, 1.0]), longs([5, 5, 5, 5]), longs([9, 2, 9, 2])
    assert_equal(episode_advantages(outcome, groups, rollout_ids=rollouts, scale="none"), [-0.5, 0.5, -0.5, 0.5])


def test_the_step_term_compares_returns_of_one_cluster():
    episode, returns = double([0.5, -0.5, 0.5]), double([1.0, 0.0, 1.0])
    clusters = longs([0, 0, 1])
    assert_equal(gigpo_advantages(episode, returns, clusters, scale="none"), [1.0, -1.0, 0.5])
    assert_equal(gigpo_advantages(episode, returns, clusters, scale="none", step_weight=0.5), [0.75, -0.75, 0.5])
    # Sample sd of (1, 0) is .707107: .5 + .5 / .707107.
    assert_equal(gigpo_advantages(episode, returns, clusters, epsilon=0.0)[0], 0.5 + 0.5**0.5)
    assert_equal(gigpo_advantages(episode, returns, clusters)[0], 0.5 + 0.5 / (0.5**0.5 + 1e-6))


@quick
@given(st.lists(st.tuples(st.floats(-2, 2), st.integers(0, 2)), min_size=1, max_size=10))
def test_without_weight_or_in_one_cluster_it_is_group_credit(rows):
    returns, clusters = double([entry for entry, _ in rows]), longs([cluster for _, cluster in rows])
    episode = torch.linspace(-1, 1, len(rows), dtype=torch.float64)
    assert_equal(gigpo_advantages(episode, returns, clusters, step_weight=0.0), episode)
    everyone = torch.zeros_like(clusters)
    expected = group_advantages(returns)
    assert_equal(gigpo_advantages(torch.zeros_like(returns), returns, everyone), expected)


def test_histories_group_steps_that_share_their_last_observations():
    assert history_groups(OBSERVATIONS, GROUPS, ROLLOUTS, 1).tolist() == [0, 1, -1, 0, 1, -1]
    assert history_groups(OBSERVATIONS, GROUPS, ROLLOUTS, 2).tolist() == [-1, 0, -1, -1, 0, -1]
    assert history_groups(OBSERVATIONS, GROUPS, ROLLOUTS, 3).tolist() == [-1] * 6


def test_equal_observations_after_unequal_histories_are_apart():
    texts, rollouts = ["q", "x", "z", "q", "y", "z"], longs([0, 0, 0, 1, 1, 1])
    groups = longs([0] * 6)
    assert history_groups(texts, groups, rollouts, 1).tolist() == [0, -1, 1, 0, -1, 1]
    assert history_groups(texts, groups, rollouts, 2).tolist() == [-1] * 6


def test_a_step_may_share_its_history_with_its_own_rollout():
    assert history_groups(["z", "z"], longs([0, 0]), longs([4, 4]), 1).tolist() == [0, 0]


def test_history_advantages_are_a_weighted_mean():
    returns = double([1.0, 0.0, 1.0, 0.0])
    groups = [longs([0, 0, 1, 1]), longs([0, 0, -1, -1])]
    # alpha 1: w_1 = 2, w_2 = 3. Step 0: A_1 = A_2 = .5; step 2 only A_1 = .5.
    ours = hgpo_advantages(returns, groups, scale="none", epsilon=0.0)
    assert_equal(ours, [0.5, -0.5, 0.5, -0.5])
    base = double([2.0, 0.0, 0.0, 0.0])
    # Step 0 with base: (1 * 2 + 2 * .5 + 3 * .5) / 6 = .75; step 2: (0 + 2 * .5) / 3.
    with_base = hgpo_advantages(returns, groups, scale="none", base=base, epsilon=0.0)
    assert_equal(with_base, [0.75, -2.5 / 6, 1 / 3, -1 / 3])
    skipped = hgpo_advantages(returns, groups, scale="none", base=base, skip_zero=True, epsilon=0.0)
    # Zero bases leave the weights: step 1: (-1 - 1.5) / 5; step 2: 1 / 2.
    assert_equal(skipped, [0.75, -0.5, 0.5, -0.5])
    flat = hgpo_advantages(returns, groups, scale="none", base=base, alpha=0.0, epsilon=0.0)
    assert_equal(flat[0], 1.0)
    rooted = hgpo_advantages(returns, groups, scale="none", base=base, alpha=0.5, epsilon=0.0)
    weights = (1, 2**0.5, 3**0.5)
    assert_equal(rooted[0], (2 * weights[0] + 0.5 * weights[1] + 0.5 * weights[2]) / sum(weights))


def test_history_advantages_use_the_population_deviation_and_epsilon_twice():
    # (1, 0): population sd .5 -> .5 / (.5 + e); then w A / (w + e) with w = 2.
    ours = hgpo_advantages(double([1.0, 0.0]), [longs([0, 0])], epsilon=0.1)
    assert_equal(ours[0], 2 * (0.5 / 0.6) / 2.1)
    assert_equal(hgpo_advantages(double([1.0, 0.0]), [longs([0, 0])])[0], 2 * (0.5 / 0.500001) / 2.000001)


def test_a_step_that_shares_nothing_has_zero():
    ours = hgpo_advantages(double([1.0, 3.0, 0.0]), [longs([0, -1, 0])], scale="none")
    assert ours[1] == 0.0
    assert hgpo_advantages(double([1.0]), [], scale="none").tolist() == [0.0]


def test_step_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`rollout_ids` must have the shape of `step_rewards`"):
        step_returns(double([1.0]), longs([0, 1]))
    with pytest.raises(ValueError, match=r"`group_ids` must have the shape \(2,\): got \(1,\)"):
        observation_clusters(["a", "b"], longs([0]))
    with pytest.raises(ValueError, match=r"`rollout_ids` must have the shape \(1,\)"):
        history_groups(["a"], longs([0]), longs([0, 1]), 1)
    with pytest.raises(ValueError, match=r"`group_ids` must have the shape \(1,\)"):
        history_groups(["a"], longs([0, 1]), longs([0]), 1)
    with pytest.raises(ValueError, match="`group_ids` must have the shape of `episode_rewards`"):
        episode_advantages(double([1.0]), longs([0, 1]))
    with pytest.raises(ValueError, match="`rollout_ids` must have the shape of `episode_rewards`"):
        episode_advantages(double([1.0]), longs([0]), rollout_ids=longs([0, 1]))
    with pytest.raises(ValueError, match="`clusters` must have the shape of `episode`"):
        gigpo_advantages(double([1.0]), double([1.0]), longs([0, 1]))
    with pytest.raises(ValueError, match="`scale` must be one of 'std', 'none': got 'mean'"):
        gigpo_advantages(double([1.0]), double([1.0]), longs([0]), scale="mean")
    with pytest.raises(ValueError, match="`history` must have the shape of `returns`"):
        hgpo_advantages(double([1.0]), [longs([0, 0])])
    with pytest.raises(ValueError, match="`base` must have the shape of `returns`"):
        hgpo_advantages(double([1.0]), [], base=double([1.0, 2.0]))
    with pytest.raises(ValueError, match="`scale` must be one of 'std', 'none': got 'mean'"):
        hgpo_advantages(double([1.0]), [], scale="mean")


def test_every_step_column_is_checked():
    row, ids = double([1.0, 0.0]), longs([0, 0])
    assert_misfits_refused(gigpo_advantages, "returns", "clusters", episode=row, returns=row, clusters=ids)
    assert_misfits_refused(step_returns, "rollout_ids", step_rewards=row, rollout_ids=ids)
    assert_misfits_refused(
        episode_advantages, "group_ids", "rollout_ids", episode_rewards=row, group_ids=ids, rollout_ids=ids
    )
