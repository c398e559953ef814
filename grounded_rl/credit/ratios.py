r"""
Importance ratios between the current policy and the policy that started the update.

Four levels are offered. `"token"` and `"sequence"` are the plain ratios of PPO and GSPO. `"turn"` and
`"sequence_token"` keep the *value* of a length-normalised ratio while the gradient of every token stays its own,

$$
r_t = \exp\big( \ell_t - \mathrm{sg}[\ell_t] + \mathrm{sg}[\bar\ell] \big),
\qquad \ell_t = \log \pi_\theta(y_t) - \log \pi_{\text{old}}(y_t),
$$

which is what advantages that differ from token to token need: under the plain sequence ratio every token of a rollout
receives the same gradient, and credit collapses to its mean.

Shapes: `B` rollouts, `T` completion tokens (right-padded), `S` segments.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import (
    check_at_least,
    check_choice,
    check_dimensions,
    check_ids,
    check_same_shape,
    full_precision,
)
from grounded_rl.credit.masked import (
    NO_SEGMENT,
    contiguous_segments,
    masked_mean,
    row_chunks,
    segment_means,
    spread_segments,
)

MAX_LOG_RATIO = 10.0
"""Log-ratios above this are capped before they are exponentiated."""

RatioLevel = Literal["token", "sequence", "sequence_token", "turn"]
RATIO_LEVELS: tuple[RatioLevel, ...] = ("token", "sequence", "sequence_token", "turn")


def segment_importance_ratio(
    logps: torch.Tensor, old_logps: torch.Tensor, segment_ids: torch.Tensor, num_segments: int
) -> torch.Tensor:
    r"""
    Length-normalised importance ratio of every segment.

    The geometric mean of the token ratios of segment \\( k \\), whose sampled tokens are \\( \mathcal{T}_k \\):

    $$
    \rho_k = \exp\Big( \frac{1}{|\mathcal{T}_k|} \sum_{t \in \mathcal{T}_k}
             \log \pi_\theta(y_t \mid y_{<t}) - \log \pi_{\text{old}}(y_t \mid y_{<t}) \Big)
    $$

    One segment per rollout gives the sequence ratio of GSPO ([Sec. 4.1](https://huggingface.co/papers/2507.18071)),
    one segment per token the ratio of PPO.

    Shapes: `B` rollouts, `T` completion tokens (right-padded), `S` segments.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the current policy, in nats. Carries gradient.
        old_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the same tokens under the policy that started the update, in nats. No gradient flows.
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Segment of every token, in `[0, num_segments)`, or `-1` for tokens the policy did not sample (tool output,
            padding), whose log-probabilities are ignored, even when they are NaN.
        num_segments (`int`):
            Number of columns `S` of the result. Must exceed every entry of `segment_ids`.

    Returns:
        `torch.Tensor` of shape `(B, S)`: The ratios; `1.0`, with zero gradient, for a segment without tokens.

    Raises:
        `ValueError`: If the shapes differ, or if a segment id lies outside `[-1, num_segments)`.

    Example:

    ```python
    >>> logps = torch.tensor([[-0.5, -1.0, 0.0, -3.0]])
    >>> old_logps = torch.tensor([[-1.0, -1.5, 0.0, -3.0]])
    >>> segment_ids = torch.tensor([[0, 0, -1, 1]])  # token 2 is tool output
    >>> segment_importance_ratio(logps, old_logps, segment_ids, num_segments=2)
    tensor([[1.6487, 1.0000]])

    ```
    """
    check_same_shape(logps=logps, old_logps=old_logps, segment_ids=segment_ids)
    return segment_means(full_precision(logps) - old_logps.detach(), segment_ids, num_segments).exp()


def importance_ratio(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    *,
    mask: torch.Tensor,
    turn_ids: torch.Tensor | None = None,
    level: RatioLevel = "token",
    max_log_ratio: float = MAX_LOG_RATIO,
) -> torch.Tensor:
    r"""
    Importance ratio at every token, at one of four levels.

    | level | value at a token | gradient |
    |---|---|---|
    | `"token"` | its own ratio | its own |
    | `"sequence"` | geometric mean over the rollout | of the mean: every token of the rollout |
    | `"sequence_token"` | geometric mean over the rollout | its own |
    | `"turn"` | geometric mean over its turn | its own |

    With one turn per rollout `"turn"` is `"sequence_token"` (the token form of GSPO,
    [Sec. 4.3](https://huggingface.co/papers/2507.18071)); with one token per turn it is `"token"`.

    Shapes: `B` rollouts, `T` completion tokens (right-padded).

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the current policy, in nats. Carries gradient; ignored
            outside the mask, even when they are NaN.
        old_logps (`torch.Tensor` of shape `(B, T)`):
            The same under the policy that started the update. No gradient flows.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at sampled tokens.
        turn_ids (`torch.Tensor` of shape `(B, T)`, integer, *optional*):
            Turn of every token, numbered from zero in every rollout, `-1` for none; only read at level `"turn"` and
            inside the mask, where a sampled token without a turn is refused. Contiguous runs of the mask when not
            given.
        level (`str`, *optional*, defaults to `"token"`):
            `"token"`, `"sequence"`, `"sequence_token"` or `"turn"`.
        max_log_ratio (`float`, *optional*, defaults to `10.0`):
            Cap of the log-ratio, in nats. A capped ratio has zero gradient.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The ratios; `1.0`, with zero gradient, outside the mask.

    Raises:
        `ValueError`: If the shapes differ, if the level is unknown, or if a sampled token has no turn.

    Example:

    ```python
    >>> logps = torch.tensor([[-0.99, -0.51, -0.19, 0.0, -2.03, -0.10]])
    >>> old_logps = torch.tensor([[-1.0, -0.5, -0.2, 0.0, -2.0, -0.1]])
    >>> mask = torch.tensor([[1, 1, 1, 0, 1, 1]])
    >>> importance_ratio(logps, old_logps, mask=mask, level="turn")
    tensor([[1.0033, 1.0033, 1.0033, 1.0000, 0.9851, 0.9851]])

    ```
    """
    sampled = _check_ratio(logps, old_logps, mask, level, max_log_ratio)
    log_ratio = torch.where(sampled, full_precision(logps) - old_logps.detach(), 0.0)
    if level == "sequence":
        shared = masked_mean(log_ratio, sampled, dim=1, keepdim=True).clamp(max=max_log_ratio).exp()
        return torch.where(sampled, shared, 1.0)
    if level != "token":
        shared = _shared_log_ratio(log_ratio.detach(), sampled, turn_ids, level)
        # Zero in value, one in gradient, plus the shared value. In place: batches are large.
        log_ratio = (log_ratio - log_ratio.detach()).add_(shared)
        del shared
    return log_ratio.clamp(max=max_log_ratio).exp_()


@torch.no_grad()
def equivalent_old_logps(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    *,
    mask: torch.Tensor,
    turn_ids: torch.Tensor | None = None,
    level: RatioLevel = "turn",
    max_log_ratio: float = MAX_LOG_RATIO,
) -> torch.Tensor:
    r"""
    Reference log-probabilities against which the plain *token* ratio equals the ratio of another level.

    $$
    \log \pi'_{\text{old}}(y_t) = \mathrm{sg}[\log \pi_\theta(y_t)] - \min\big( \mathrm{sg}[\bar\ell],\ \ell_{\max}
    \big)
    $$

    A loss that only knows `exp(logps - old_logps)` thereby computes the ratio of [`importance_ratio`], values and
    gradients, as long as the cap is not reached (a capped ratio keeps its gradient here). The values depend on
    `logps`, so they must be computed anew in every forward pass.

    Shapes: `B` rollouts, `T` completion tokens (right-padded).

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the current policy, in nats. No gradient flows.
        old_logps (`torch.Tensor` of shape `(B, T)`):
            The same under the policy that started the update.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at sampled tokens.
        turn_ids (`torch.Tensor` of shape `(B, T)`, integer, *optional*):
            Turn of every token, `-1` for none. Contiguous runs of the mask when not given.
        level (`str`, *optional*, defaults to `"turn"`):
            `"token"`, `"sequence_token"` or `"turn"`. At level `"token"` the result is `old_logps`, cap included.
        max_log_ratio (`float`, *optional*, defaults to `10.0`):
            Cap of the log-ratio, in nats.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The log-probabilities; `old_logps` outside the mask.

    Raises:
        `ValueError`: As in [`importance_ratio`], and at level `"sequence"`, whose gradient no reference can imitate.

    Example:

    ```python
    >>> logps, old_logps = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.1]])
    >>> equivalent_old_logps(logps, old_logps, mask=torch.ones(1, 2))  # both tokens keep a log-ratio of 0.3
    tensor([[-1.3000, -2.3000]])

    ```
    """
    sampled = _check_ratio(logps, old_logps, mask, level, max_log_ratio)
    if level == "sequence":
        raise ValueError(
            "`level` must be one of 'token', 'sequence_token', 'turn': got 'sequence'. "
            "Use `importance_ratio`, whose gradient covers the whole rollout."
        )
    log_ratio = torch.where(sampled, full_precision(logps) - old_logps, 0.0)
    if level != "token":
        log_ratio = _shared_log_ratio(log_ratio, sampled, turn_ids, level)
    return torch.where(sampled, logps - log_ratio.clamp(max=max_log_ratio), old_logps)


def _check_ratio(
    logps: torch.Tensor, old_logps: torch.Tensor, mask: torch.Tensor, level: str, max_log_ratio: float
) -> torch.Tensor:
    """Check the arguments both functions share; return the mask as booleans."""
    check_dimensions("logps", logps, "B", "T")
    check_same_shape(logps=logps, old_logps=old_logps, mask=mask)
    check_choice("level", level, RATIO_LEVELS)
    check_at_least("max_log_ratio", max_log_ratio, 0.0, exclusive=True)
    return mask.bool()


def _shared_log_ratio(
    log_ratio: torch.Tensor, sampled: torch.Tensor, turn_ids: torch.Tensor | None, level: str
) -> torch.Tensor:
    """Mean log-ratio of the rollout or turn of every token, `0.0` outside the mask."""
    if level == "sequence_token":
        return torch.where(sampled, masked_mean(log_ratio, sampled, dim=1, keepdim=True), 0.0)
    if turn_ids is not None:
        check_same_shape(logps=log_ratio, turn_ids=turn_ids)
        check_ids("turn_ids", turn_ids)
        if (sampled & (turn_ids < 0)).any():
            raise ValueError(
                "`turn_ids` must be at least 0 at every sampled token: got -1 inside the mask. "
                "Give the token a turn, or take it out of `mask`."
            )
    shared = torch.zeros_like(log_ratio)
    for rows in row_chunks(*log_ratio.shape) if log_ratio.numel() else ():
        if turn_ids is None:
            segment_ids = contiguous_segments(sampled[rows])
        else:
            segment_ids = torch.where(sampled[rows], turn_ids[rows], NO_SEGMENT)
        means = segment_means(log_ratio[rows], segment_ids, int(segment_ids.max()) + 1)
        shared[rows] = spread_segments(means, segment_ids)
    return shared
