r"""
Pieces of a policy loss: clipped surrogate, divergence estimators, and the ways to average over tokens.

Everything here is an objective to *maximise*; a trainer negates it. No reduction divides by zero: a rollout without a
trained token counts for nothing, and a batch without any gives `0.0` with zero gradient.

Shapes: `B` rollouts, `T` completion tokens (right-padded).
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_at_least, check_choice, check_dimensions, check_same_shape, full_precision
from grounded_rl.credit.masked import masked_mean, masked_sum


def clipped_surrogate(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    keep_clipped_gradient: bool = False,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Clipped objective of every token.

    $$
    \psi_t = \min\big( r_t A_t,\ \mathrm{clip}(r_t, 1 - \epsilon_{\text{low}}, 1 + \epsilon_{\text{high}}) A_t \big)
    $$

    For \\( A_t > 0 \\) this is \\( A_t \min(r_t, 1 + \epsilon_{\text{high}}) \\), for \\( A_t < 0 \\) it is
    \\( A_t \max(r_t, 1 - \epsilon_{\text{low}}) \\): which branch is active depends on the sign of the advantage
    alone, so credit that rescales advantages without flipping signs leaves every clip decision as it was. The clip is
    that of PPO ([Sec. 3](https://huggingface.co/papers/1707.06347)), the two bounds are those of DAPO ([Sec.
    3.1](https://huggingface.co/papers/2503.14476)).

    Shapes: `B` rollouts, `T` completion tokens (right-padded).

    Args:
        ratio (`torch.Tensor` of shape `(B, T)`):
            Importance ratios. Carries gradient.
        advantages (`torch.Tensor` of shape `(B, T)`, or broadcastable to it):
            Advantages. No gradient flows.
        clip_low (`float`, *optional*, defaults to `0.2`):
            Distance from `1.0` to the lower bound.
        clip_high (`float`, *optional*, defaults to `0.2`):
            Distance from `1.0` to the upper bound.
        dual_clip (`float`, *optional*):
            Where advantages are negative, the objective is kept at or above `dual_clip * advantage`; must exceed
            `1.0`. Off when not given.
        keep_clipped_gradient (`bool`, *optional*, defaults to `False`):
            Whether a ratio clipped at the *upper* bound keeps a gradient, scaled to the bound: the bound becomes
            \\( (1 + \epsilon_{\text{high}})\, r_t / \mathrm{sg}[r_t] \\), as in AEPO. Values do not change.
        mask (`torch.Tensor` of shape `(B, T)`, *optional*):
            Non-zero at trained tokens. Elsewhere ratio and advantage are ignored, even when they are NaN.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The objective of every token, `0.0` outside the mask.

    Raises:
        `ValueError`: If the shapes do not fit, or if a bound lies outside its range.

    Example:

    ```python
    >>> clipped_surrogate(torch.tensor([[1.5, 1.5, 0.5]]), torch.tensor([[1.0, -1.0, -1.0]]))
    tensor([[ 1.2000, -1.5000, -0.8000]])

    ```
    """
    check_at_least("clip_low", clip_low, 0.0)
    check_at_least("clip_high", clip_high, 0.0)
    if dual_clip is not None:
        check_at_least("dual_clip", dual_clip, 1.0, exclusive=True)
    advantages = torch.broadcast_to(advantages.detach(), ratio.shape)
    if mask is not None:
        check_same_shape(ratio=ratio, mask=mask)
        trained = mask.bool()
        ratio = torch.where(trained, ratio, 1.0)
    ratio = _clipped(ratio, advantages < 0, 1.0 - clip_low, 1.0 + clip_high, dual_clip, keep_clipped_gradient)
    if mask is not None:
        advantages = torch.where(trained, advantages, 0.0)
    return ratio * advantages


def _clipped(
    ratio: torch.Tensor,
    is_negative: torch.Tensor,
    low: float,
    high: float,
    dual_clip: float | None,
    keep_clipped_gradient: bool,
) -> torch.Tensor:
    """Ratio at the bounds that are active for the sign of the advantage; two products would hold twice the memory."""
    bound: float | torch.Tensor = high
    is_above = ~is_negative & (ratio > high)
    if keep_clipped_gradient:
        above = ratio.clamp(min=high)  # a ratio that underflowed to zero must not be divided by
        bound = high * above / above.detach()
    ratio = torch.where(is_above, bound, ratio)
    ratio = torch.where(is_negative & (ratio < low), low, ratio)
    if dual_clip is not None:
        ratio = torch.where(is_negative & (ratio > dual_clip), dual_clip, ratio)
    return ratio


def approximate_kl(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    *,
    mask: torch.Tensor,
    estimator: Literal["k1", "k3"] = "k3",
) -> torch.Tensor:
    r"""
    Estimate of the divergence of the current policy from a reference, from the sampled tokens alone.

    With \\( x_t = \log \pi_{\text{ref}}(y_t) - \log \pi_\theta(y_t) \\), `"k1"` is \\( -x_t \\) and `"k3"` is
    \\( e^{x_t} - x_t - 1 \\), which is never negative and has a lower variance. Both are unbiased in value on samples
    of the current policy.

    Shapes: `B` rollouts, `T` completion tokens (right-padded).

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the current policy, in nats. Carries gradient; ignored
            outside the mask, even when they are NaN.
        ref_logps (`torch.Tensor` of shape `(B, T)`):
            The same under the frozen reference. No gradient flows.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at sampled tokens.
        estimator (`str`, *optional*, defaults to `"k3"`):
            `"k1"` or `"k3"`.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The estimates in nats, `0.0` outside the mask.

    Raises:
        `ValueError`: If the shapes differ, or if the estimator is unknown.

    Example:

    ```python
    >>> approximate_kl(torch.tensor([[-1.0]]), torch.tensor([[-2.0]]), mask=torch.ones(1, 1))  # exp(-1) + 1 - 1
    tensor([[0.3679]])

    ```
    """
    check_same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    check_choice("estimator", estimator, ("k1", "k3"))
    excess = torch.where(mask.bool(), ref_logps.detach() - full_precision(logps), 0.0)
    return -excess if estimator == "k1" else excess.expm1() - excess


def token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Mean over all trained tokens of the batch: every *token* weighs the same, long rollouts more than short ones.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            One number per token. Carries gradient; ignored outside the mask, even when it is NaN.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at trained tokens.

    Returns:
        `torch.Tensor` of shape `()`: The mean, `0.0` with zero gradient when no token is trained.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> token_mean(torch.tensor([[1.0, 0.0], [4.0, 4.0]]), torch.tensor([[1, 0], [1, 1]]))
    tensor(3.)

    ```
    """
    return masked_mean(values, mask)


def seq_mean_token_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Mean over rollouts of the mean over their trained tokens: every *rollout* weighs the same.

    A rollout without a trained token is left out of the outer mean. Args and errors are those of [`token_mean`].

    Returns:
        `torch.Tensor` of shape `()`: The mean, `0.0` with zero gradient when no token is trained.

    Example:

    ```python
    >>> seq_mean_token_mean(torch.tensor([[1.0, 0.0], [4.0, 4.0]]), torch.tensor([[1, 0], [1, 1]]))
    tensor(2.5000)

    ```
    """
    check_dimensions("values", values, "B", "T")
    return masked_mean(masked_mean(values, mask, dim=1), mask.bool().any(1))


def seq_mean_token_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Mean over rollouts of the sum over their trained tokens.

    A rollout without a trained token is left out of the mean. Args and errors are those of [`token_mean`].

    Returns:
        `torch.Tensor` of shape `()`: The mean, `0.0` with zero gradient when no token is trained.

    Example:

    ```python
    >>> seq_mean_token_sum(torch.tensor([[1.0, 0.0], [4.0, 4.0]]), torch.tensor([[1, 0], [1, 1]]))
    tensor(4.5000)

    ```
    """
    check_dimensions("values", values, "B", "T")
    return masked_mean(masked_sum(values, mask, dim=1), mask.bool().any(1))


def token_sum_norm(values: torch.Tensor, mask: torch.Tensor, *, max_tokens: int) -> torch.Tensor:
    r"""
    Sum over all trained tokens, divided by the constant \\( B \cdot T_{\max} \\).

    The normaliser of Dr. GRPO ([Sec. 3](https://huggingface.co/papers/2503.20783)): it depends neither on how long the
    rollouts are nor on how many of their tokens are trained, so no length is favoured.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            One number per token. Carries gradient; ignored outside the mask, even when it is NaN.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at trained tokens.
        max_tokens (`int`):
            The constant \\( T_{\max} \\), usually the longest completion allowed.

    Returns:
        `torch.Tensor` of shape `()`: The normalised sum, `0.0` with zero gradient when no token is trained.

    Raises:
        `ValueError`: If the shapes differ, or if `max_tokens` is not positive.

    Example:

    ```python
    >>> token_sum_norm(torch.tensor([[1.0, 0.0], [4.0, 4.0]]), torch.tensor([[1, 0], [1, 1]]), max_tokens=3)
    tensor(1.5000)

    ```
    """
    check_dimensions("values", values, "B", "T")
    check_at_least("max_tokens", max_tokens, 1)
    return masked_sum(values, mask) / (max(1, len(values)) * max_tokens)
