"""Advantages against groups: GRPO and its relatives, trees of a prompt, steps that share a state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grounded_rl.credit import (
    episode_advantages,
    gigpo_advantages,
    group_advantages,
    hgpo_advantages,
    history_groups,
    observation_clusters,
    rloo_advantages,
    step_returns,
    tree_grpo_advantages,
    tree_grpo_token_advantages,
)
from tests.oracles.comparison import Differences

SCALES = {"mean_std_norm": "std", "mean_norm": "none"}


def numbered(names: Sequence[str]) -> torch.Tensor:
    """Ids of names in the order of their first occurrence."""
    known: dict[str, int] = {}
    return torch.tensor([known.setdefault(name, len(known)) for name in names])


def matrix(entries: list) -> torch.Tensor:
    return torch.tensor(entries, dtype=torch.float64)


def without_rounding_noise(recorded: torch.Tensor, rewards: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """
    Recorded advantages with those of groups of equal rewards set to zero.

    There the recorded number is single-precision rounding divided by 1e-6, which no other implementation can repeat.
    """
    cleaned = recorded.clone()
    for group in ids.unique():
        members = ids == group
        if members.sum() > 1 and rewards[members].max() - rewards[members].min() < 1e-6:
            cleaned[members] = 0.0
    return cleaned


def verl_grpo(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        ids, mask, token_rewards = (
            numbered(case["index"]),
            matrix(case["response_mask"]),
            matrix(case["token_level_rewards"]),
        )
        rewards = token_rewards.sum(1)
        ours = {
            "grpo": group_advantages(rewards, ids, singleton="raw"),
            "grpo_no_std": group_advantages(rewards, ids, scale="none", singleton="raw"),
            "rloo": rloo_advantages(rewards, ids, singleton="raw"),
        }
        for name, advantages in ours.items():
            recorded = without_rounding_noise(matrix(case[name]), rewards, ids)
            result.compare(f"case {number} {name}", advantages[:, None] * mask, recorded)
    return result


def tree_grpo(oracle: dict) -> Differences:
    result = Differences()
    levels = {"inter": "inter", "intra": "intra", "tree_sum": "sum", "tree_2norm": "nested"}
    for number, case in enumerate(oracle["cases"]):
        prompts, trees, mask = numbered(case["index"]), numbered(case["tree_index"]), matrix(case["response_mask"])
        rewards = matrix(case["reward"])
        for name, level in levels.items():
            advantages = tree_grpo_advantages(rewards, prompts, trees, level=level, singleton="raw")
            result.compare(f"case {number} {name}", advantages[:, None] * mask, case[name])
        tokens = tree_grpo_token_advantages(matrix(case["token_level_rewards"]), mask, prompts, trees)
        result.compare(f"case {number} tree_per_token", tokens, case["tree_per_token"])
    return result


def gigpo(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        ids, rollouts, mask = numbered(case["index"]), numbered(case["traj"]), matrix(case["response_mask"])
        returns = step_returns(matrix(case["step_env_reward"]), rollouts, gamma=case["gamma"])
        result.compare(f"case {number} step_returns", returns, case["step_returns"])
        clusters = {}
        for name, similarity in (("exact", None), ("sim0.9", 0.9), ("sim0.95", 0.95)):
            clusters[name] = observation_clusters(case["obs"], ids, similarity=similarity)
            result.compare(f"case {number} partition_{name}", clusters[name], case[f"partition_{name}"])
        outcome = matrix(case["episode_reward"])
        for mode, scale in SCALES.items():
            episode = episode_advantages(outcome, ids, scale=scale, singleton="raw")
            result.compare(f"case {number} episode_{mode}", episode, case[f"episode_{mode}"])
            once = episode_advantages(outcome, ids, rollout_ids=rollouts, scale=scale, singleton="raw")
            result.compare(f"case {number} episode_per_traj_{mode}", once, case[f"episode_per_traj_{mode}"])
            zero = torch.zeros_like(episode)
            steps = gigpo_advantages(zero, returns, clusters["sim0.9"], scale=scale)
            result.compare(f"case {number} step_{mode}", steps, case[f"step_sim0.9_{mode}"])
            for weight in (1.0, 0.5):
                total = gigpo_advantages(episode, returns, clusters["sim0.9"], step_weight=weight, scale=scale)
                recorded = case[f"total_w{weight}_sim0.9_{mode}"]
                result.compare(f"case {number} total_{weight}_{mode}", total[:, None] * mask, recorded)
    return result


def hgpo(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        ids, rollouts = numbered(case["index"]), numbered(case["traj"])
        returns, outcome = matrix(case["step_returns"]), matrix(case["episode_reward"])
        for entry in case["out"]:
            scale = SCALES[entry["mode"]]
            groups = [history_groups(case["obs"], ids, rollouts, length) for length in range(1, entry["K"] + 2)]
            base = episode_advantages(outcome, ids, scale=scale, singleton="raw") if entry["base_group"] else None
            for name, skip in (("adv", False), ("adv_skip_zero", True)):
                ours = hgpo_advantages(returns, groups, alpha=entry["alpha"], scale=scale, base=base, skip_zero=skip)
                label = f"case {number} K={entry['K']} alpha={entry['alpha']} {entry['mode']} {name}"
                result.compare(label, ours, entry[name])
    return result
