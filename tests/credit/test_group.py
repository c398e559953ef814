import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import group_advantages, has_reward_variance, rloo_advantages
from tests.credit import reference
from tests.credit.batches import assert_equal, quick

# The recorded vectors were computed in float32 and printed with nine digits.
ORACLE_RTOL = 1e-4
NAN = float("nan")


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def groups(draw):
    """Rewards that tie often, group ids in any order, some rollouts without a reward."""
    size = draw(st.integers(1, 9))
    rewards = draw(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.8, 1.0, -1.0]), min_size=size, max_size=size))
    ids = draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size))
    valid = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return rewards, ids, valid


def with_placeholders(rewards, valid):
    """NaN wherever a rollout has no reward."""
    return torch.where(torch.tensor(valid), tensor(*rewards), NAN)


def test_binary_rewards_of_five_rollouts_give_the_worked_advantages():
    rewards = tensor(1, 1, 0, 0, 0)
    # mean 0.4; squares 2 * 0.36 + 3 * 0.16 = 1.2; population sigma sqrt(1.2 / 5), sample sigma sqrt(1.2 / 4)
    population, sample = 0.24**0.5 + 1e-6, 0.3**0.5 + 1e-6
    assert_equal(group_advantages(rewards, ddof=0), [0.6 / population] * 2 + [-0.4 / population] * 3)
    assert_equal(group_advantages(rewards), [0.6 / sample] * 2 + [-0.4 / sample] * 3)
    assert_equal(group_advantages(rewards, ddof=0), [1.224742] * 2 + [-0.816495] * 3, rtol=1e-6)
    assert_equal(group_advantages(rewards), [1.095443] * 2 + [-0.730295] * 3, rtol=1e-6)
    assert_equal(group_advantages(rewards, epsilon=0.1), [0.6 / (0.3**0.5 + 0.1)] * 2 + [-0.4 / (0.3**0.5 + 0.1)] * 3)


def test_without_scaling_the_advantage_is_the_distance_to_the_group_mean():
    assert_equal(group_advantages(tensor(1, 3, 2), scale="none"), [-1.0, 1.0, 0.0])


def test_the_leave_one_out_baseline_is_the_mean_of_the_others():
    # 1 - (0 + 0.5) / 2, 0 - (1 + 0.5) / 2, 0.5 - (1 + 0) / 2
    assert_equal(rloo_advantages(tensor(1, 0, 0.5)), [0.75, -0.75, 0.0])


def test_rollouts_are_compared_within_their_prompt_after_any_reordering():
    rewards, ids = tensor(1, 0, 1, 0), torch.tensor([5, -3, 5, -3])
    # Both groups have no variance although the batch has.
    assert group_advantages(rewards, ids).tolist() == [0.0] * 4
    # (1 - 0.5) / sqrt(4 * 0.25 / 3)
    assert_equal(group_advantages(rewards), [0.866024] * 1 + [-0.866024, 0.866024, -0.866024], rtol=1e-6)


def test_a_rollout_without_a_reward_leaves_the_statistics():
    valid = torch.tensor([True, True, True, False])
    for placeholder in (0.0, 100.0, NAN, float("inf")):
        rewards = tensor(1, 3, 2, placeholder)
        assert_equal(group_advantages(rewards, scale="none", valid=valid), [-1.0, 1.0, 0.0, 0.0])
        assert_equal(rloo_advantages(rewards, valid=valid), [-1.5, 1.5, 0.0, 0.0])
        assert has_reward_variance(rewards, None, valid).tolist() == [True, True, True, False]


@pytest.mark.parametrize("reward", [1.0, -1.0, 0.2])
def test_a_lonely_rollout_gets_nothing_unless_raw_rewards_are_asked_for(reward):
    rewards, ids = tensor(reward, 0, 1), torch.tensor([0, 1, 1])
    assert group_advantages(rewards, ids)[0].item() == 0.0
    assert rloo_advantages(rewards, ids)[0].item() == 0.0
    # verl: mean 0, deviation 1
    assert_equal(group_advantages(rewards, ids, singleton="raw")[0], reward / (1 + 1e-6))
    assert group_advantages(rewards, ids, scale="none", singleton="raw")[0].item() == reward
    assert rloo_advantages(rewards, ids, singleton="raw")[0].item() == reward
    assert not has_reward_variance(rewards, ids)[0]


def test_a_lonely_valid_rollout_is_a_group_of_one():
    rewards, valid = tensor(100, 1), torch.tensor([False, True])
    assert group_advantages(rewards, valid=valid).tolist() == [0.0, 0.0]
    assert group_advantages(rewards, scale="none", singleton="raw", valid=valid).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_rewards_closer_than_the_tolerance_give_exactly_zero(scale):
    assert group_advantages(tensor(0.5, 0.5 + 9e-9), scale=scale).tolist() == [0.0, 0.0]
    assert rloo_advantages(tensor(0.5, 0.5 + 9e-9)).tolist() == [0.0, 0.0]
    assert not has_reward_variance(tensor(0.5, 0.5 + 9e-9)).any()
    assert has_reward_variance(tensor(0.5, 0.5 + 1.1e-8)).all()
    assert (group_advantages(tensor(0.5, 0.5 + 1.1e-8), scale=scale) != 0).all()


def test_rounding_noise_of_single_precision_is_no_variance():
    # 0.1 + 0.7 and 0.8 differ by one unit in the last place: 6e-8, above the absolute tolerance.
    rewards = torch.tensor([0.1]) + torch.tensor([0.7, 0.70000005])
    assert rewards[0] != rewards[1]
    for signed in (rewards, -rewards, 1000 * rewards):
        assert group_advantages(signed).tolist() == [0.0, 0.0]
    assert has_reward_variance(torch.tensor([1000.0, 1000.01])).all()


def test_integer_and_half_precision_rewards_are_promoted():
    assert group_advantages(torch.tensor([1, 0])).dtype == torch.float32
    assert_equal(group_advantages(torch.tensor([1, 0], dtype=torch.bfloat16), scale="none"), [0.5, -0.5])
    # In bfloat16 the two would be four units of the last place apart.
    assert has_reward_variance(torch.tensor([1.0, 0.99], dtype=torch.bfloat16)).all()


def test_no_rollouts_give_no_advantages():
    empty = torch.zeros(0)
    assert group_advantages(empty).tolist() == []
    assert rloo_advantages(empty, torch.zeros(0, dtype=torch.long)).tolist() == []


@quick
@given(groups(), st.sampled_from(["std", "none"]), st.sampled_from(["zero", "raw"]), st.sampled_from([0, 1]))
def test_advantages_equal_the_loops(group, scale, singleton, ddof):
    rewards, ids, valid = group
    options = {"scale": scale, "singleton": singleton, "ddof": ddof, "epsilon": 1e-3}
    given_rewards, given_ids, given_valid = with_placeholders(rewards, valid), torch.tensor(ids), torch.tensor(valid)
    actual = group_advantages(given_rewards, given_ids, valid=given_valid, **options)
    assert_equal(actual, reference.group_advantages(rewards, ids, valid, **options))
    actual = rloo_advantages(given_rewards, given_ids, valid=given_valid, singleton=singleton)
    assert_equal(actual, reference.rloo_advantages(rewards, ids, valid, singleton=singleton))


@quick
@given(groups())
def test_reward_variance_is_what_makes_advantages_differ(group):
    rewards, ids, valid = with_placeholders(group[0], group[2]), torch.tensor(group[1]), torch.tensor(group[2])
    has_variance = has_reward_variance(rewards, ids, valid)
    advantages = group_advantages(rewards, ids, scale="none", valid=valid)
    members = reference.group_members(group[1], group[2])
    for row in range(len(rewards)):
        own = [group[0][other] for other in members.get(group[1][row], [])]
        assert has_variance[row].item() == (group[2][row] and max(own) != min(own))
    assert (advantages[~has_variance] == 0).all()


@quick
@given(groups(), st.floats(-3, 3), st.floats(0.5, 4), st.randoms())
def test_advantages_ignore_shifts_and_follow_permutations_and_sum_to_zero(group, shift, factor, random):
    rewards, ids, valid = tensor(*group[0]), torch.tensor(group[1]), torch.tensor(group[2])
    advantages = group_advantages(rewards, ids, epsilon=0.0, valid=valid)
    for id_ in set(group[1]):
        assert_equal(advantages[ids == id_].sum(), 0.0, rtol=1e-11)
    # Shifted and scaled rewards are rounded, which the small deviations of a group amplify.
    shifted = group_advantages(rewards * factor + shift, ids, epsilon=0.0, valid=valid)
    assert_equal(shifted, advantages, rtol=1e-11)
    unscaled = group_advantages(rewards * factor + shift, ids, scale="none", valid=valid)
    assert_equal(unscaled, factor * group_advantages(rewards, ids, scale="none", valid=valid), rtol=1e-11)
    order = list(range(len(rewards)))
    random.shuffle(order)
    assert_equal(group_advantages(rewards[order], ids[order], epsilon=0.0, valid=valid[order]), advantages[order])
    # What the groups are called does not matter.
    assert_equal(group_advantages(rewards, 7 - 3 * ids, epsilon=0.0, valid=valid), advantages)


@pytest.mark.parametrize(
    ("rewards", "hits", "expected"),
    [
        # n p_H (1 - p_H) (Pr[C|H] - Pr[C|not H]) / sigma = 5 * 0.6 * 0.4 * (1/3 - 1/2) / 0.489898
        ((1, 1, 0, 0, 0), (1, 0, 1, 1, 0), -0.408248),
        # n Cov(H, R) / sigma: mean R 0.44, Cov = 1.4 / 5 - 0.6 * 0.44 = 0.016, sigma = 0.387814
        ((1, 0.8, 0.2, 0.2, 0), (1, 0, 1, 1, 0), 0.206284),
    ],
)
def test_outcome_credit_of_hits_is_their_covariance_with_the_reward(rewards, hits, expected):
    advantages = group_advantages(tensor(*rewards), ddof=0)
    assert_equal((advantages * tensor(*hits)).sum(), expected, rtol=1e-5)


@quick
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=9))
def test_proposition_1_holds_on_random_groups(rollouts):
    hits, right = (tensor(*map(float, column)) for column in zip(*rollouts, strict=True))
    summed = (group_advantages(right, ddof=0, epsilon=0.0) * hits).sum()
    share = hits.mean()
    if right.std() == 0 or share in (0, 1):
        assert_equal(summed, 0.0, rtol=1e-11)
        return
    difference = right[hits == 1].mean() - right[hits == 0].mean()
    expected = len(rollouts) * share * (1 - share) * difference / right.std(unbiased=False)
    assert_equal(summed, expected, rtol=1e-11)


def test_recorded_advantages_of_verl_are_reproduced(shared_dir):
    cases = json.loads((shared_dir / "oracles" / "verl_grpo.json").read_text())["cases"]
    assert len(cases) == 20
    for case in cases:
        names = list(dict.fromkeys(case["index"]))
        ids = torch.tensor([names.index(name) for name in case["index"]])
        rewards = torch.tensor(case["token_level_rewards"], dtype=torch.float64).sum(1)
        mask = torch.tensor(case["response_mask"])
        rows = {
            "grpo": group_advantages(rewards, ids, singleton="raw"),
            "grpo_no_std": group_advantages(rewards, ids, scale="none", singleton="raw"),
            "rloo": rloo_advantages(rewards, ids, singleton="raw"),
        }
        for name, advantages in rows.items():
            expected = torch.tensor(case[name], dtype=torch.float64)
            assert_equal(advantages.unsqueeze(1) * mask, expected, rtol=ORACLE_RTOL)


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages, has_reward_variance])
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"rewards": torch.zeros(2, 1)},
            ValueError,
            "`rewards` must have the shape (N): got (2, 1). Reshape it to 1 dimension(s).",
        ),
        (
            {"rewards": torch.zeros(2), "group_ids": torch.zeros(3)},
            ValueError,
            "`group_ids` must have the shape of `rewards`, (2,): got (3,). "
            "Pass one entry of `group_ids` per entry of `rewards`.",
        ),
        (
            {"rewards": torch.zeros(2), "group_ids": torch.zeros(2)},
            TypeError,
            "`group_ids` must hold integers: got torch.float32. Convert it with `.long()`.",
        ),
        (
            {"rewards": torch.zeros(2), "valid": torch.ones(3)},
            ValueError,
            "`valid` must have the shape (2,): got (3,). Pass one entry per rollout.",
        ),
        (
            {"rewards": torch.tensor([0.0, NAN, 1.0])},
            ValueError,
            "`rewards` must be finite at valid rollouts: got [nan]. "
            "Mark rollouts without a reward with `valid=False`.",
        ),
    ],
)
def test_rewards_that_do_not_fit_are_refused_with_what_to_do(function, arguments, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(message)}$"):
        function(**arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "batch"}, "`scale` must be one of 'std', 'none': got 'batch'. Pick one of them."),
        ({"singleton": "drop"}, "`singleton` must be one of 'zero', 'raw': got 'drop'. Pick one of them."),
        ({"ddof": 2}, "`ddof` must be one of 0, 1: got 2. Pick one of them."),
        (
            {"epsilon": -1e-6},
            "`epsilon` must be finite and at least 0.0: got -1e-06. Choose a larger finite value.",
        ),
        ({"epsilon": NAN}, "`epsilon` must be finite and at least 0.0: got nan. Choose a larger finite value."),
        (
            {"epsilon": float("inf")},
            "`epsilon` must be finite and at least 0.0: got inf. Choose a larger finite value.",
        ),
    ],
)
def test_options_out_of_range_are_refused_with_what_is_accepted(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        group_advantages(tensor(1, 0), **options)
