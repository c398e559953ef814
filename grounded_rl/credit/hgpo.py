r"""
Step credit by shared histories: groups over the last 1, 2, … observations, weighted by how much history they share.

Rows are steps as in `grounded_rl.credit.gigpo`. Shapes: `R` steps of all rollouts together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_rows, check_same_shape
from grounded_rl.credit.group import group_advantages


def history_groups(
    observations: Sequence[str], group_ids: torch.Tensor, rollout_ids: torch.Tensor, length: int
) -> torch.Tensor:
    """
    Group of every step: steps of one prompt that share their last `length` observations.

    Args:
        observations (`Sequence[str]`):
            What the policy saw last before each step; the question before the first.
        group_ids (`torch.Tensor` of shape `(R,)`, integer):
            Prompt of every step.
        rollout_ids (`torch.Tensor` of shape `(R,)`, integer):
            Rollout of every step; the steps of a rollout are in time order.
        length (`int`):
            Number of observations that must agree.

    Returns:
        `torch.Tensor` of shape `(R,)`, `torch.long`: Groups; `-1` for a step with a shorter history, or alone with its
        own.

    Raises:
        `ValueError`: If the lengths differ.

    Example:

    ```python
    >>> ids = torch.zeros(4).long(), torch.tensor([0, 0, 1, 1])
    >>> history_groups(["q", "a", "q", "b"], *ids, 1).tolist(), history_groups(["q", "a", "q", "a"], *ids, 2).tolist()
    ([0, -1, 0, -1], [-1, 0, -1, 0])

    ```
    """
    check_rows("group_ids", group_ids, len(observations))
    check_rows("rollout_ids", rollout_ids, len(observations))
    histories: dict[tuple[int, int], list[str]] = {}
    members: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for row, (text, group, rollout) in enumerate(
        zip(observations, group_ids.tolist(), rollout_ids.tolist(), strict=True)
    ):
        history = histories.setdefault((group, rollout), [])
        history.append(text)
        if len(history) >= length:
            members.setdefault((group, tuple(history[-length:])), []).append(row)
    groups = torch.full((len(observations),), -1, dtype=torch.long, device=group_ids.device)
    shared = [rows for rows in members.values() if len(rows) > 1]
    for number, rows in enumerate(shared):
        groups[rows] = number
    return groups


def hgpo_advantages(
    returns: torch.Tensor,
    history: Sequence[torch.Tensor],
    *,
    alpha: float = 1.0,
    scale: Literal["std", "none"] = "std",
    base: torch.Tensor | None = None,
    skip_zero: bool = False,
    epsilon: float = 1e-6,
) -> torch.Tensor:
    r"""
    Step advantages of HGPO: a weighted mean over history lengths.

    $$
    A = \frac{\sum_k w_k A_k}{\sum_k w_k + \epsilon}, \qquad w_k = (k + 1)^\alpha
    $$

    over the lengths k for which the step shares its history with another one; \\( A_k \\) is its return against that
    group, over the population standard deviation. A step that shares nothing has 0 (or its base). HGPO's two public
    copies differ in `skip_zero`.

    Args:
        returns (`torch.Tensor` of shape `(R,)`):
            Discounted return of every step; see `step_returns`.
        history (`Sequence` of `torch.Tensor` of shape `(R,)`, integer):
            Groups for k = 1, 2, …; see `history_groups`. `-1` marks a step without a group.
        alpha (`float`, *optional*, defaults to `1.0`):
            Preference for long shared histories; 0 weighs all lengths alike.
        scale (`str`, *optional*, defaults to `"std"`):
            `"std"` divides by the population standard deviation, `"none"` only subtracts the mean.
        base (`torch.Tensor` of shape `(R,)`, *optional*):
            Advantage of length 0, shared by all steps of a prompt, with weight 1; see `episode_advantages`.
        skip_zero (`bool`, *optional*, defaults to `False`):
            Whether an advantage of exactly 0 is left out of the weights.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviations and to the sum of weights.

    Returns:
        `torch.Tensor` of shape `(R,)`: Advantages.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> groups = [torch.tensor([0, 0, -1])]
    >>> hgpo_advantages(torch.tensor([1.0, 0.0, 1.0]), groups, scale="none")
    tensor([ 0.5000, -0.5000,  0.0000])

    ```
    """
    check_choice("scale", scale, ("std", "none"))
    terms = [] if base is None else [(0, base, torch.ones_like(returns, dtype=torch.bool))]
    for length, groups in enumerate(history, start=1):
        check_same_shape(returns=returns, history=groups)
        grouped = groups >= 0
        advantages = group_advantages(returns, groups, scale=scale, ddof=0, epsilon=epsilon, valid=grouped)
        terms.append((length, advantages, grouped))
    total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
    for length, advantages, counts in terms:
        check_same_shape(returns=returns, base=advantages)
        counts = counts & (advantages != 0) if skip_zero else counts
        weight = counts.to(returns.dtype) * float(length + 1) ** alpha
        total, weights = total + weight * advantages, weights + weight
    return total / (weights + epsilon)
