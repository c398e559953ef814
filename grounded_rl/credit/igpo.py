r"""
Information gain as turn reward: how much likelier a turn made the gold answer.

Shapes: `B` rollouts, `S` turns (right-padded).
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_dimensions, check_same_shape
from grounded_rl.credit.turns import last_turns, turn_returns

VARIANCE_FLOOR = 1e-8
"""Added to the variance before the root, as in the released IGPO code."""


def information_gains(
    answer_logps: torch.Tensor, turn_mask: torch.Tensor, *, measure: Literal["log_prob", "prob"] = "log_prob"
) -> torch.Tensor:
    r"""
    Information gain of every turn, from length-normalised log-probabilities of the gold answer.

    With p the exponential of the mean log-probability of the answer's tokens, `"prob"` is \\( p_t - p_{t-1} \\) and
    `"log_prob"` is \\( \log p_t - \log p_{t-1} \\). IGPO (arXiv 2510.14967).

    Args:
        answer_logps (`torch.Tensor` of shape `(B, S + 1)`):
            Mean log-probability of the answer's tokens before the first turn and after every turn, in nats. Ignored
            after turns that do not exist, even when NaN.
        turn_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at turns that exist.
        measure (`str`, *optional*, defaults to `"log_prob"`):
            `"log_prob"` or `"prob"`.

    Returns:
        `torch.Tensor` of shape `(B, S)`: Gains, 0 where there is no turn.

    Raises:
        `ValueError`: If the shapes do not fit.

    Example:

    ```python
    >>> information_gains(torch.tensor([[-3.0, -1.0, -1.5]]), torch.ones(1, 2))
    tensor([[ 2.0000, -0.5000]])

    ```
    """
    check_choice("measure", measure, ("log_prob", "prob"))
    check_dimensions("answer_logps", answer_logps, "B", "S + 1")
    check_same_shape(turn_mask=turn_mask, answer_logps=answer_logps[:, 1:])
    levels = answer_logps if measure == "log_prob" else answer_logps.exp()
    return torch.where(turn_mask.bool(), levels.diff(dim=1), 0.0)


def igpo_advantages(
    gains: torch.Tensor,
    outcomes: torch.Tensor,
    turn_mask: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    pooling: Literal["joint", "separate"] = "joint",
    gamma: float = 1.0,
    scale: Literal["std", "none"] = "std",
    epsilon: float = 1e-6,
) -> torch.Tensor:
    r"""
    Turn advantages of IGPO: normalise turn rewards within the prompt, then accumulate them backwards.

    $$
    A_k = \tilde r_k + \gamma A_{k+1}, \qquad \tilde r = \frac{r - \mu}{\sqrt{\sigma^2 + 10^{-8}} + \epsilon}
    $$

    The reward of the last turn is the outcome, of every earlier turn its gain. A pool of one entry has 0. Spread the
    result with `spread_segments`. IGPO (arXiv 2510.14967).

    Args:
        gains (`torch.Tensor` of shape `(B, S)`):
            Information gain of every turn; see `information_gains`. Ignored at the last turn and where there is none.
        outcomes (`torch.Tensor` of shape `(B,)`):
            Outcome reward, such as the F1 of the answer.
        turn_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at turns that exist.
        group_ids (`torch.Tensor` of shape `(B,)`, integer):
            Prompt of every rollout.
        pooling (`str`, *optional*, defaults to `"joint"`):
            `"joint"`: outcomes and gains of a prompt share mean and standard deviation. `"separate"`: each has its
            own.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per turn.
        scale (`str`, *optional*, defaults to `"std"`):
            `"std"` divides by the population standard deviation, `"none"` only subtracts the mean.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation.

    Returns:
        `torch.Tensor` of shape `(B, S)`: Advantages, 0 where there is no turn.

    Raises:
        `ValueError`: If the shapes differ or an option is unknown.

    Example:

    ```python
    >>> gains, outcomes = torch.tensor([[0.5, 0.0], [-0.5, 0.0]]), torch.tensor([1.0, 0.0])
    >>> igpo_advantages(gains, outcomes, torch.ones(2, 2), torch.tensor([0, 0]), scale="none")
    tensor([[ 1.0000,  0.7500],
            [-1.0000, -0.2500]])

    ```
    """
    check_choice("pooling", pooling, ("joint", "separate"))
    check_choice("scale", scale, ("std", "none"))
    check_dimensions("gains", gains, "B", "S")
    check_same_shape(gains=gains, turn_mask=turn_mask)
    check_same_shape(rollouts=gains[:, 0], outcomes=outcomes, group_ids=group_ids)
    exists, is_last = turn_mask.bool(), last_turns(turn_mask)
    rewards = torch.where(is_last, outcomes[:, None], torch.where(exists, gains, 0.0))
    _, prompts = group_ids.unique(return_inverse=True)
    pools = prompts[:, None].expand_as(rewards)
    if pooling == "separate":
        pools = 2 * pools + is_last.long()
    normalised = torch.zeros_like(rewards)
    normalised[exists] = _normalise(rewards[exists], pools[exists], scale == "std", epsilon)
    return turn_returns(normalised, turn_mask, gamma=gamma)


def _normalise(rewards: torch.Tensor, pools: torch.Tensor, divide: bool, epsilon: float) -> torch.Tensor:
    """Rewards less the mean of their pool, over its population standard deviation."""
    _, slots, sizes = pools.unique(return_inverse=True, return_counts=True)
    zeros = rewards.new_zeros(len(sizes))
    deviations = rewards - (zeros.index_add(0, slots, rewards) / sizes)[slots]
    if not divide:
        return deviations
    spreads = (zeros.index_add(0, slots, deviations**2) / sizes + VARIANCE_FLOOR).sqrt()
    return deviations / (spreads[slots] + epsilon)
