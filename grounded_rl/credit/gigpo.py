r"""
Step credit by shared states: steps that saw the same observation form a group of their own.

A *step* is one turn; a row here is one turn of one rollout, the rows of a rollout in time order. In a search task two
rollouts rarely see the same observation beyond the question, so the step term mostly compares first turns.

Shapes: `R` steps of all rollouts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Literal

import torch

from grounded_rl.credit._checks import check_rows, check_same_shape
from grounded_rl.credit.group import group_advantages


def step_returns(step_rewards: torch.Tensor, rollout_ids: torch.Tensor, *, gamma: float = 0.95) -> torch.Tensor:
    r"""
    Discounted return of every step, \\( G_t = r_t + \gamma G_{t+1} \\).

    Args:
        step_rewards (`torch.Tensor` of shape `(R,)`):
            Reward of every step, the outcome on the last step of a rollout.
        rollout_ids (`torch.Tensor` of shape `(R,)`, integer):
            Rollout of every step; the steps of a rollout are in time order, not necessarily adjacent.
        gamma (`float`, *optional*, defaults to `0.95`):
            Discount per step.

    Returns:
        `torch.Tensor` of shape `(R,)`: Returns.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> step_returns(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([7, 8, 7]), gamma=0.5)
    tensor([0.5000, 0.0000, 1.0000])

    ```
    """
    check_same_shape(step_rewards=step_rewards, rollout_ids=rollout_ids)
    _, rollouts = rollout_ids.unique(return_inverse=True)
    running: dict[int, torch.Tensor] = {}
    returns = torch.empty_like(step_rewards)
    for row in reversed(range(len(step_rewards))):
        rollout = int(rollouts[row])
        following = running.get(rollout)
        running[rollout] = step_rewards[row] if following is None else step_rewards[row] + gamma * following
        returns[row] = running[rollout]
    return returns


def observation_clusters(
    observations: Sequence[str], group_ids: torch.Tensor, *, similarity: float | None = None
) -> torch.Tensor:
    """
    Cluster of every step: steps of one prompt that saw the same observation.

    Args:
        observations (`Sequence[str]`):
            What the policy saw last before each step; the question before the first.
        group_ids (`torch.Tensor` of shape `(R,)`, integer):
            Prompt of every step.
        similarity (`float`, *optional*):
            With a number, a step joins the first cluster of its prompt whose *first* member is at least this similar
            (`difflib.SequenceMatcher.ratio`); the result depends on the order of the steps and the cost grows with the
            square of the number of steps. Without, only equal texts share a cluster.

    Returns:
        `torch.Tensor` of shape `(R,)`, `torch.long`: Clusters, numbered in the order of their first member.

    Raises:
        `ValueError`: If the lengths differ.

    Example:

    ```python
    >>> observation_clusters(["where?", "where?", "Paris is"], torch.tensor([0, 0, 0])).tolist()
    [0, 0, 1]

    ```
    """
    check_rows("group_ids", group_ids, len(observations))
    founders: dict[int, list[tuple[str, int]]] = {}
    labels: list[int] = []
    num_clusters = 0
    for text, group in zip(observations, group_ids.tolist(), strict=True):
        known = founders.setdefault(group, [])
        label = next((number for founder, number in known if _same(founder, text, similarity)), None)
        if label is None:
            label = num_clusters
            num_clusters += 1
            known.append((text, label))
        labels.append(label)
    return torch.tensor(labels, dtype=torch.long, device=group_ids.device)


def _same(founder: str, text: str, similarity: float | None) -> bool:
    if similarity is None:
        return founder == text
    # The order of the two arguments changes the ratio of long texts; the new text comes first, as in the released
    # code.
    return SequenceMatcher(None, text, founder).ratio() >= similarity


def episode_advantages(
    episode_rewards: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    rollout_ids: torch.Tensor | None = None,
    scale: Literal["std", "none"] = "std",
    singleton: Literal["zero", "raw"] = "zero",
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """
    Outcome of a step's rollout against the other outcomes of its prompt.

    Args:
        episode_rewards (`torch.Tensor` of shape `(R,)`):
            Outcome of the rollout, repeated at every step.
        group_ids (`torch.Tensor` of shape `(R,)`, integer):
            Prompt of every step.
        rollout_ids (`torch.Tensor` of shape `(R,)`, integer, *optional*):
            With it, every rollout counts once in mean and standard deviation. Without, every step counts, so that long
            rollouts weigh more, as in the released code.
        scale (`str`, *optional*, defaults to `"std"`):
            `"std"` divides by the sample standard deviation, `"none"` only subtracts the mean.
        singleton (`str`, *optional*, defaults to `"zero"`):
            Advantage where the prompt has a single entry: 0, or the `"raw"` reward.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation.

    Returns:
        `torch.Tensor` of shape `(R,)`: Advantages.

    Raises:
        `ValueError`: If the shapes differ.
    """
    check_same_shape(episode_rewards=episode_rewards, group_ids=group_ids)
    if rollout_ids is None:
        return group_advantages(episode_rewards, group_ids, scale=scale, singleton=singleton, epsilon=epsilon)
    check_same_shape(episode_rewards=episode_rewards, rollout_ids=rollout_ids)
    _, rollouts = rollout_ids.unique(return_inverse=True)
    rows = torch.arange(len(rollouts), device=rollouts.device)
    first = torch.full((int(rollouts.max()) + 1,), len(rollouts), device=rollouts.device)
    first = first.scatter_reduce(0, rollouts, rows, "amin")
    once = group_advantages(
        episode_rewards[first], group_ids[first], scale=scale, singleton=singleton, epsilon=epsilon
    )
    return once[rollouts]


def gigpo_advantages(
    episode: torch.Tensor,
    returns: torch.Tensor,
    clusters: torch.Tensor,
    *,
    step_weight: float = 1.0,
    scale: Literal["std", "none"] = "std",
    epsilon: float = 1e-6,
) -> torch.Tensor:
    r"""
    Step advantages of GiGPO, \\( A = A^{\text{episode}} + w\, A^{\text{step}} \\).

    The step term compares a step's return with those of its cluster; a cluster of one has 0. With `step_weight=0` it
    is the episode term alone. GiGPO (arXiv 2505.10978).

    Args:
        episode (`torch.Tensor` of shape `(R,)`):
            Episode advantage of every step; see `episode_advantages`.
        returns (`torch.Tensor` of shape `(R,)`):
            Discounted return of every step; see `step_returns`.
        clusters (`torch.Tensor` of shape `(R,)`, integer):
            Cluster of every step; see `observation_clusters`.
        step_weight (`float`, *optional*, defaults to `1.0`):
            \\( w \\).
        scale (`str`, *optional*, defaults to `"std"`):
            `"std"` divides the step term by the sample standard deviation, `"none"` only subtracts the mean.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation.

    Returns:
        `torch.Tensor` of shape `(R,)`: Advantages.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> episode, returns = torch.tensor([0.5, -0.5, 0.5]), torch.tensor([1.0, 0.0, 1.0])
    >>> gigpo_advantages(episode, returns, torch.tensor([0, 0, 1]), scale="none")
    tensor([ 1.0000, -1.0000,  0.5000])

    ```
    """
    check_same_shape(episode=episode, returns=returns, clusters=clusters)
    return episode + step_weight * group_advantages(returns, clusters, scale=scale, epsilon=epsilon)
