r"""
Generalised advantage estimation over tokens, for runs with a critic.

Shapes: `B` rollouts, `T` completion tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_dimensions, check_same_shape

WHITENING_EPSILON = 1e-8
"""Added to the variance when advantages are whitened."""


def gae_advantages(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    sampled_mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    observations: Literal["skip", "through"] = "skip",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Advantages and returns of every sampled token.

    $$
    A_t = \delta_t + \gamma \lambda A_{t+1}, \qquad \delta_t = r_t + \gamma V_{t+1} - V_t
    $$

    where t + 1 is the next *sampled* token, so that tool output neither carries a value nor costs a discount.

    Args:
        token_rewards (`torch.Tensor` of shape `(B, T)`):
            Reward of every token; turn rewards sit on the last sampled token of their turn.
        values (`torch.Tensor` of shape `(B, T)`):
            Critic's value before every token.
        sampled_mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at sampled tokens. Under `"skip"` the other entries are ignored, even when NaN.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per token.
        lam (`float`, *optional*, defaults to `1.0`):
            \\( \lambda \\), which trades bias for variance.
        observations (`str`, *optional*, defaults to `"skip"`):
            `"skip"`, or `"through"`: tool output and padding count as tokens with values and errors of their own, as
            in Search-R1.

    Returns:
        `tuple` of two `torch.Tensor` of shape `(B, T)`: Advantages and returns (advantage plus value); 0 at unsampled
        positions.

    Raises:
        `ValueError`: If the shapes differ or an option is unknown.

    Example:

    ```python
    >>> advantages, returns = gae_advantages(
    ...     torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.25]]), torch.tensor([[1, 0, 1]])
    ... )
    >>> advantages, returns
    (tensor([[0.5000, 0.0000, 0.7500]]), tensor([[1., 0., 1.]]))

    ```
    """
    check_choice("observations", observations, ("skip", "through"))
    check_dimensions("token_rewards", token_rewards, "B", "T")
    check_same_shape(token_rewards=token_rewards, values=values, sampled_mask=sampled_mask)
    sampled = sampled_mask.bool()
    counted = sampled if observations == "skip" else torch.ones_like(sampled)
    rewards, values = torch.where(counted, token_rewards, 0.0), torch.where(counted, values, 0.0)
    next_value, running = values.new_zeros(len(values)), values.new_zeros(len(values))
    advantages = torch.zeros_like(values)
    for token in reversed(range(values.shape[1])):
        error = rewards[:, token] + gamma * next_value - values[:, token]
        running = torch.where(counted[:, token], error + gamma * lam * running, running)
        next_value = torch.where(counted[:, token], values[:, token], next_value)
        advantages[:, token] = running
    returns = torch.where(sampled, advantages + values, 0.0)
    return torch.where(sampled, advantages, 0.0), returns


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Values with mean 0 and sample variance 1 over the mask.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            What is whitened. Ignored outside the mask, even when NaN.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at tokens that count.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Whitened values; 0 outside the mask, and everywhere if fewer than two tokens
        count.

    Raises:
        `ValueError`: If the shapes differ.
    """
    check_same_shape(values=values, mask=mask)
    chosen = values[mask.bool()]
    result = torch.zeros_like(values)
    if chosen.numel() > 1:
        result[mask.bool()] = (chosen - chosen.mean()) / (chosen.var() + WHITENING_EPSILON).sqrt()
    return result
