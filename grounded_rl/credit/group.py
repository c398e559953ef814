r"""
Advantages of whole rollouts against the other rollouts of their group.

Statistics are taken over *valid* rollouts only: a rollout that failed for infrastructural reasons has no reward, and a
placeholder in its place would shift the baseline of its siblings.

Shapes: `N` rollouts. The rows of a group need not be adjacent.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from grounded_rl.credit._checks import (
    check_at_least,
    check_choice,
    check_dimensions,
    check_rows,
    check_same_shape,
    full_precision,
)

RANGE_TOLERANCE = 1e-8
"""Groups whose rewards differ by less than this have no reward variance."""


class _Groups(NamedTuple):
    """What every rollout needs to know about its group; all tensors have shape `(N,)`."""

    rewards: torch.Tensor  # 0.0 at invalid rollouts
    valid: torch.Tensor
    inverse: torch.Tensor  # position of the group among the distinct ones
    num_valid: torch.Tensor  # valid rollouts of the group
    deviation: torch.Tensor  # reward minus group mean
    has_variance: torch.Tensor


def group_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None = None,
    *,
    scale: Literal["std", "none"] = "std",
    singleton: Literal["zero", "raw"] = "zero",
    ddof: int = 1,
    epsilon: float = 1e-6,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Reward of every rollout, centred and scaled within its group.

    $$
    \hat A_i = \frac{R_i - \mu_{\mathcal{G}(i)}}{\sigma_{\mathcal{G}(i)} + \epsilon}
    $$

    This is the advantage of GRPO ([Sec. 4.1](https://huggingface.co/papers/2402.03300)); with `scale="none"` it is
    \\( R_i - \mu \\), the advantage of Dr. GRPO ([Sec. 3](https://huggingface.co/papers/2503.20783)). A group whose
    rewards differ by less than `1e-8` (or by less than the resolution of the float type) gets exactly zero, so
    rounding noise is never divided by a vanishing deviation.

    Shapes: `N` rollouts.

    Args:
        rewards (`torch.Tensor` of shape `(N,)`):
            Reward of every rollout. No gradient is meant to flow. Ignored at invalid rollouts, even when it is NaN.
        group_ids (`torch.Tensor` of shape `(N,)`, integer, *optional*):
            Group of every rollout; any integers, in any order. One group when not given.
        scale (`str`, *optional*, defaults to `"std"`):
            `"std"` divides by the standard deviation of the group, `"none"` does not.
        singleton (`str`, *optional*, defaults to `"zero"`):
            What a group with a single valid rollout gets: `"zero"`, or `"raw"`, its reward under mean `0` and
            deviation `1`, as in verl.
        ddof (`int`, *optional*, defaults to `1`):
            `1` for the sample, `0` for the population standard deviation.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation, in units of the reward.
        valid (`torch.Tensor` of shape `(N,)`, bool, *optional*):
            False at rollouts without a reward. They stay out of the statistics and get `0.0`. All are valid when not
            given.

    Returns:
        `torch.Tensor` of shape `(N,)`: The advantages. They sum to zero over every group without a raw singleton.

    Raises:
        `ValueError`: If the shapes differ, if a valid reward is not finite, or if an option is not an accepted one.

    Example:

    ```python
    >>> group_advantages(torch.tensor([1.0, 0.0, 1.0, 0.0]), torch.tensor([7, 7, 7, 7]))
    tensor([ 0.8660, -0.8660,  0.8660, -0.8660])
    >>> has_reward = torch.tensor([True, True, True, False])
    >>> group_advantages(torch.tensor([1.0, 3.0, 2.0, 0.0]), scale="none", valid=has_reward)
    tensor([-1.,  1.,  0.,  0.])

    ```
    """
    check_choice("scale", scale, ("std", "none"))
    check_choice("ddof", ddof, (0, 1))
    check_at_least("epsilon", epsilon, 0.0)
    groups = _group(rewards, group_ids, valid)
    advantages, raw = groups.deviation, groups.rewards
    if scale == "std":
        squares = _group_sums(groups.deviation.square(), groups.inverse)
        deviation = (squares / (groups.num_valid - ddof).clamp(min=1)).sqrt()
        advantages, raw = advantages / (deviation + epsilon), raw / (1.0 + epsilon)
    return _settle(advantages, raw, groups, singleton)


def rloo_advantages(
    rewards: torch.Tensor,
    group_ids: torch.Tensor | None = None,
    *,
    singleton: Literal["zero", "raw"] = "zero",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Reward of every rollout minus the mean reward of the *other* rollouts of its group.

    $$
    \hat A_i = R_i - \frac{1}{n - 1} \sum_{j \in \mathcal{G}(i),\, j \ne i} R_j = \frac{n}{n - 1} (R_i -
    \mu_{\mathcal{G}(i)})
    $$

    The leave-one-out baseline of RLOO ([Sec. 3](https://huggingface.co/papers/2402.14740)).

    Shapes: `N` rollouts.

    Args:
        rewards (`torch.Tensor` of shape `(N,)`):
            Reward of every rollout, ignored at invalid ones.
        group_ids (`torch.Tensor` of shape `(N,)`, integer, *optional*):
            Group of every rollout. One group when not given.
        singleton (`str`, *optional*, defaults to `"zero"`):
            What a group with a single valid rollout gets: `"zero"`, or `"raw"`, its reward.
        valid (`torch.Tensor` of shape `(N,)`, bool, *optional*):
            False at rollouts without a reward. All are valid when not given.

    Returns:
        `torch.Tensor` of shape `(N,)`: The advantages, `0.0` at invalid rollouts and in groups without reward
        variance.

    Raises:
        `ValueError`: As in [`group_advantages`].

    Example:

    ```python
    >>> rloo_advantages(torch.tensor([1.0, 0.0, 0.5]))
    tensor([ 0.7500, -0.7500,  0.0000])

    ```
    """
    groups = _group(rewards, group_ids, valid)
    scaled = groups.deviation * (groups.num_valid / (groups.num_valid - 1).clamp(min=1))
    return _settle(scaled, groups.rewards, groups, singleton)


def has_reward_variance(
    rewards: torch.Tensor, group_ids: torch.Tensor | None = None, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Whether the valid rewards of a rollout's group differ, that is whether the group teaches anything.

    Args:
        rewards (`torch.Tensor` of shape `(N,)`):
            Reward of every rollout, ignored at invalid ones.
        group_ids (`torch.Tensor` of shape `(N,)`, integer, *optional*):
            Group of every rollout. One group when not given.
        valid (`torch.Tensor` of shape `(N,)`, bool, *optional*):
            False at rollouts without a reward. All are valid when not given.

    Returns:
        `torch.Tensor` of shape `(N,)`, bool: False at invalid rollouts and in groups of one.

    Raises:
        `ValueError`: As in [`group_advantages`].

    Example:

    ```python
    >>> has_reward_variance(torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1]))
    tensor([ True,  True, False, False])

    ```
    """
    groups = _group(rewards, group_ids, valid)
    return groups.has_variance & groups.valid


def _group(rewards: torch.Tensor, group_ids: torch.Tensor | None, valid: torch.Tensor | None) -> _Groups:
    """Check the arguments and gather the statistics of every rollout's group."""
    check_dimensions("rewards", rewards, "N")
    rows = len(rewards)
    if group_ids is None:
        index = torch.zeros(rows, dtype=torch.long, device=rewards.device)
    else:
        check_same_shape(rewards=rewards, group_ids=group_ids)
        if group_ids.dtype.is_floating_point:
            raise TypeError(f"`group_ids` must hold integers: got {group_ids.dtype}. Convert it with `.long()`.")
        index = torch.unique(group_ids, return_inverse=True)[1]
    if valid is None:
        valid = torch.ones(rows, dtype=torch.bool, device=rewards.device)
    check_rows("valid", valid, rows)
    valid = valid.bool()
    rewards = torch.where(valid, full_precision(rewards), 0.0)
    if not rewards.isfinite().all():
        raise ValueError(
            f"`rewards` must be finite at valid rollouts: got {rewards[~rewards.isfinite()].tolist()}. "
            "Mark rollouts without a reward with `valid=False`."
        )
    num_valid = _group_sums(valid.long(), index)
    deviation = torch.where(valid, rewards - _group_sums(rewards, index) / num_valid.clamp(min=1), 0.0)
    low, high = (_group_extremes(rewards, index, valid, extreme) for extreme in ("amin", "amax"))
    resolution = 4 * torch.finfo(rewards.dtype).eps * torch.maximum(low.abs(), high.abs())
    has_variance = high - low >= resolution.clamp(min=RANGE_TOLERANCE)
    return _Groups(rewards, valid, index, num_valid, deviation, has_variance)


def _group_sums(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Sum over the group of every rollout."""
    return torch.zeros_like(values).index_add(0, index, values)[index]


def _group_extremes(rewards: torch.Tensor, index: torch.Tensor, valid: torch.Tensor, extreme: str) -> torch.Tensor:
    """Smallest or largest valid reward of the group of every rollout, `0.0` where none is valid."""
    outside = float("inf") if extreme == "amin" else -float("inf")
    candidates = torch.where(valid, rewards, outside)
    extremes = torch.full_like(rewards, outside).scatter_reduce(0, index, candidates, extreme)[index]
    return torch.where(extremes.isinf(), 0.0, extremes)


def _settle(advantages: torch.Tensor, raw: torch.Tensor, groups: _Groups, singleton: str) -> torch.Tensor:
    """Zero where there is no variance or no reward, and the chosen rule for groups of one."""
    check_choice("singleton", singleton, ("zero", "raw"))
    settled = torch.where(groups.has_variance & groups.valid, advantages, 0.0)
    if singleton == "raw":
        settled = torch.where((groups.num_valid == 1) & groups.valid, raw, settled)
    return settled
