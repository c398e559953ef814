r"""
Salience of the tokens of a segment: which of them the credit of the segment should concentrate on.

Two quantities of the policy that sampled the tokens decide: the *margin* of the sampled token over its competitors and
the normalised *entropy* of the distribution it was drawn from. Nothing in this module carries gradient into credit.

Both quantities are unchanged when a constant is added to all logits of a position, so raw logits and log-probabilities
give the same result. Logits must already be divided by the sampling temperature.

Shapes: `B` rollouts, `T` completion tokens (right-padded), `V` vocabulary, `M` most probable tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from grounded_rl.credit.masked import row_chunks, segment_medians, spread_segments

MARGIN_LIMIT = 50.0
"""Margins are clamped to plus or minus this many nats."""

Margin = Literal["lse", "mean", "max"]


@dataclass(frozen=True)
class SalienceWeights:
    """
    Coefficients of [`salience`].

    Args:
        alpha (`float`, *optional*, defaults to `0.6`):
            Weight of the margin term.
        beta (`float`, *optional*, defaults to `0.3`):
            Weight of the entropy term.
        gamma (`float`, *optional*, defaults to `0.1`):
            Weight of their product.
        tau (`float`, *optional*, defaults to `0.5`):
            Temperature of the margin term, in nats.
        c_max (`float`, *optional*, defaults to `0.5`):
            Largest salience of a token.

    Raises:
        `ValueError`: If a weight is negative, or if `tau` or `c_max` is not positive.

    Example:

    ```python
    >>> SalienceWeights(tau=1.0)
    SalienceWeights(alpha=0.6, beta=0.3, gamma=0.1, tau=1.0, c_max=0.5)

    ```
    """

    alpha: float = 0.6
    beta: float = 0.3
    gamma: float = 0.1
    tau: float = 0.5
    c_max: float = 0.5

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            check_at_least(name, getattr(self, name), 0.0)
        for name in ("tau", "c_max"):
            check_at_least(name, getattr(self, name), 0.0, exclusive=True)


def token_margin(
    logits_or_logps: torch.Tensor, token_ids: torch.Tensor, *, num_competitors: int = 3, margin: Margin = "lse"
) -> torch.Tensor:
    r"""
    Log-probability of the sampled token minus that of its most probable competitors taken together.

    $$
    \delta_t = \log \pi(y_t) - \log \sum_{v \in \mathcal{C}_t} \pi(v)
    $$

    where \\( \mathcal{C}_t \\) holds the `num_competitors` most probable tokens other than \\( y_t \\). Eq. 8 of GCA.
    `margin="mean"` subtracts the mean of their log-probabilities instead, `margin="max"` the largest.

    Shapes: `V` vocabulary; any leading dimensions.

    Args:
        logits_or_logps (`torch.Tensor` of shape `(..., V)`):
            Logits, already divided by the sampling temperature, or log-probabilities.
        token_ids (`torch.Tensor` of shape `(...)`, `torch.long`):
            Sampled tokens, in `[0, V)`.
        num_competitors (`int`, *optional*, defaults to `3`):
            Size of the set of competitors. A smaller vocabulary gives all its other tokens.
        margin (`str`, *optional*, defaults to `"lse"`):
            `"lse"`, `"mean"` or `"max"`.

    Returns:
        `torch.Tensor` of shape `(...)`: Margins in nats, clamped to \\( \pm 50 \\), the upper end included when the
        vocabulary holds no competitor.

    Raises:
        `ValueError`: If the shapes do not fit, if `num_competitors` is not positive, or if `margin` is unknown.

    Example:

    ```python
    >>> logps = torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05]).log()
    >>> token_margin(logps, torch.tensor(0))  # log 0.5 - log(0.3 + 0.1 + 0.05)
    tensor(0.1054)

    ```
    """
    if logits_or_logps.shape[:-1] != token_ids.shape:
        raise ValueError(
            f"`token_ids` must have the shape of `logits_or_logps` without its last dimension, "
            f"{tuple(logits_or_logps.shape[:-1])}: got {tuple(token_ids.shape)}. Pass one sampled token per position."
        )
    check_at_least("num_competitors", num_competitors, 1)
    top = logits_or_logps.topk(min(num_competitors + 1, logits_or_logps.shape[-1]), dim=-1)
    token_logits = logits_or_logps.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    return margin_from_topk(
        token_logits, top.values, top.indices, token_ids, num_competitors=num_competitors, margin=margin
    )


def margin_from_topk(
    token_logits: torch.Tensor,
    top_values: torch.Tensor,
    top_ids: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    num_competitors: int = 3,
    margin: Margin = "lse",
) -> torch.Tensor:
    r"""
    [`token_margin`] when only the most probable tokens of every position are known.

    Of the first `num_competitors + 1` candidates the sampled token is left out, or the last one where it is not among
    them.

    Shapes: `M` most probable tokens; any leading dimensions.

    Args:
        token_logits (`torch.Tensor` of shape `(...)`):
            Logit of the sampled token.
        top_values (`torch.Tensor` of shape `(..., M)`):
            Largest logits of every position, on the same scale, in descending order. `M` must exceed `num_competitors`
            unless the vocabulary has only `M` tokens.
        top_ids (`torch.Tensor` of shape `(..., M)`, `torch.long`):
            Their tokens.
        token_ids (`torch.Tensor` of shape `(...)`, `torch.long`):
            Sampled tokens.
        num_competitors (`int`, *optional*, defaults to `3`):
            Size of the set of competitors.
        margin (`str`, *optional*, defaults to `"lse"`):
            `"lse"`, `"mean"` or `"max"`.

    Returns:
        `torch.Tensor` of shape `(...)`: Margins in nats, clamped to \\( \pm 50 \\).

    Raises:
        `ValueError`: If the shapes do not fit, if `num_competitors` is not positive, or if `margin` is unknown.

    Example:

    ```python
    >>> top = torch.tensor([0.6, 0.2, 0.08, 0.05]).log()
    >>> margin_from_topk(top[2], top, torch.arange(4), torch.tensor(2))  # log 0.08 - log(0.6 + 0.2 + 0.05)
    tensor(-2.3632)

    ```
    """
    check_same_shape(token_logits=token_logits, token_ids=token_ids)
    check_same_shape(top_values=top_values, top_ids=top_ids)
    if top_values.shape[:-1] != token_logits.shape:
        raise ValueError(
            f"`top_values` must have the shape of `token_logits`, {tuple(token_logits.shape)}, plus one dimension: "
            f"got {tuple(top_values.shape)}. Pass the candidates of every position."
        )
    check_at_least("num_competitors", num_competitors, 1)
    check_choice("margin", margin, ("lse", "mean", "max"))
    values, ids = (top[..., : num_competitors + 1] for top in (full_precision(top_values), top_ids))
    left_out = ids == token_ids.unsqueeze(-1)
    if values.shape[-1] > num_competitors:
        left_out[..., -1] |= ~left_out.any(-1)
    competitors = torch.where(left_out, -torch.inf, values)
    if margin == "lse":
        strength = competitors.logsumexp(-1)
    elif margin == "max":
        strength = competitors.amax(-1)
    else:
        counts = (~left_out).sum(-1)
        mean = torch.where(left_out, 0.0, values).sum(-1) / counts.clamp(min=1)
        strength = torch.where(counts > 0, mean, -torch.inf)
    return (full_precision(token_logits) - strength).clamp(-MARGIN_LIMIT, MARGIN_LIMIT)


def topk_entropy(logits: torch.Tensor, *, top_m: int = 32) -> torch.Tensor:
    r"""
    Entropy of the `top_m` most probable tokens, renormalised, as a share of the largest possible one.

    $$
    \hat H_t = - \frac{1}{\log M} \sum_{v \in \mathcal{V}^M_t} q(v) \log q(v),
    \qquad q = \frac{\pi|_{\mathcal{V}^M_t}}{\sum_{v \in \mathcal{V}^M_t} \pi(v)}
    $$

    Eq. 9 and 10 of GCA. A uniform distribution gives `1.0`, a one-hot distribution `0.0`.

    Shapes: `V` vocabulary; any leading dimensions.

    Args:
        logits (`torch.Tensor` of shape `(..., V)`):
            Logits, already divided by the sampling temperature, or log-probabilities.
        top_m (`int`, *optional*, defaults to `32`):
            Number \\( M \\) of tokens. A smaller vocabulary is taken whole, and normalised by its own size.

    Returns:
        `torch.Tensor` of shape `(...)`: Entropies in \\( [0, 1] \\), `0.0` for a single token.

    Raises:
        `ValueError`: If `top_m` is not positive.

    Example:

    ```python
    >>> topk_entropy(torch.tensor([0.5, 0.3, 0.1, 0.1]).log())
    tensor(0.8427)

    ```
    """
    check_at_least("top_m", top_m, 1)
    return entropy_from_topk(logits.topk(min(top_m, logits.shape[-1]), dim=-1).values)


def entropy_from_topk(top_values: torch.Tensor) -> torch.Tensor:
    r"""
    [`topk_entropy`] when the logits of the most probable tokens are known.

    Args:
        top_values (`torch.Tensor` of shape `(..., M)`):
            Logits of the `M` most probable tokens, in any order.

    Returns:
        `torch.Tensor` of shape `(...)`: Entropies in \\( [0, 1] \\), `0.0` for a single token.

    Example:

    ```python
    >>> entropy_from_topk(torch.tensor([3.0, 3.0, -torch.inf])).item() < 1.0  # two of three tokens possible
    True

    ```
    """
    size = top_values.shape[-1]
    probabilities = full_precision(top_values).softmax(-1)
    if size == 1:
        return torch.zeros_like(probabilities[..., 0])
    # Rounding alone can leave the unit interval.
    return (torch.special.entr(probabilities).sum(-1) / math.log(size)).clamp(0.0, 1.0)


@torch.no_grad()
def salience(
    margins: torch.Tensor,
    entropies: torch.Tensor,
    segment_ids: torch.Tensor,
    polarity: torch.Tensor,
    **weights: float,
) -> torch.Tensor:
    r"""
    Share of a segment's credit that each of its tokens attracts.

    With \\( \bar\delta_t \\) the margin minus the median margin of the token's segment in its own rollout and
    \\( \sigma \\) the logistic function,

    $$
    \begin{aligned}
    c^+_t &= \min\{ c_{\max},\ \alpha d^+_t + \beta \hat H_t + \gamma d^+_t \hat H_t \},
        & d^+_t &= \sigma(-\bar\delta_t / \tau) \\
    c^-_t &= \min\{ c_{\max},\ \alpha d^-_t + \beta (1 - \hat H_t) + \gamma d^-_t (1 - \hat H_t) \},
        & d^-_t &= \sigma(+\bar\delta_t / \tau)
    \end{aligned}
    $$

    Positive polarity takes \\( c^+ \\), which favours hesitant choices, negative polarity \\( c^- \\), which favours
    confident ones; before the cap the two are mirror images,
    \\( c^-(\bar\delta, \hat H) = c^+(-\bar\delta, 1 - \hat H) \\). Eq. 11 to 15 of GCA. The median averages the two
    middle values over an even count, so a segment of one token has \\( \bar\delta = 0 \\).

    Shapes: `B` rollouts, `T` completion tokens (right-padded).

    Args:
        margins (`torch.Tensor` of shape `(B, T)`):
            Margins in nats ([`token_margin`]). Ignored outside segments, even when they are NaN.
        entropies (`torch.Tensor` of shape `(B, T)`):
            Normalised entropies ([`topk_entropy`]). Ignored outside segments, even when they are NaN.
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Segment of every token, numbered from zero in every rollout, or `-1` for tokens that neither receive
            salience nor enter a median. The tokens of a segment need not touch.
        polarity (`torch.Tensor` of shape `(B, T)`):
            Its sign selects the formula; salience is `0.0` where it is zero.
        weights (`float`, *optional*):
            Fields of [`SalienceWeights`]: `alpha` (`0.6`), `beta` (`0.3`), `gamma` (`0.1`), `tau` (`0.5`), `c_max`
            (`0.5`).

    Returns:
        `torch.Tensor` of shape `(B, T)`: Salience in \\( [0, c_{\max}] \\), `0.0` outside segments. Carries no
        gradient.

    Raises:
        `ValueError`: If the shapes differ, if a segment id is below `-1`, or if a weight lies outside its range.

    Example:

    ```python
    >>> margins = torch.tensor([[4.0, 2.0, 0.0, float("nan")]])
    >>> entropies = torch.tensor([[0.05, 0.20, 0.70, float("nan")]])
    >>> salience(margins, entropies, torch.tensor([[0, 0, 0, -1]]), torch.tensor([[1, 1, 1, 0]]))
    tensor([[0.0259, 0.3700, 0.5000, 0.0000]])

    ```
    """
    check_dimensions("margins", margins, "B", "T")
    check_same_shape(margins=margins, entropies=entropies, segment_ids=segment_ids, polarity=polarity)
    check_ids("segment_ids", segment_ids)
    coefficients = SalienceWeights(**weights)
    filled = torch.zeros_like(full_precision(margins))
    num_segments = int(segment_ids.max()) + 1 if segment_ids.numel() else 0
    for rows in row_chunks(*margins.shape):
        medians = segment_medians(margins[rows], segment_ids[rows], num_segments)
        centred = full_precision(margins[rows]) - spread_segments(medians, segment_ids[rows])
        signs = torch.where(segment_ids[rows] >= 0, polarity[rows].sign(), 0)
        filled[rows] = salience_of_centred(centred, entropies[rows], signs, coefficients)
    return filled


def salience_of_centred(
    centred: torch.Tensor, entropies: torch.Tensor, polarity: torch.Tensor, weights: SalienceWeights
) -> torch.Tensor:
    r"""
    [`salience`] of margins that are already centred.

    Args:
        centred (`torch.Tensor`):
            Margins minus the median of their segment, in nats, any shape. Ignored where the polarity is zero.
        entropies (`torch.Tensor` of the same shape):
            Normalised entropies. Ignored where the polarity is zero.
        polarity (`torch.Tensor` of the same shape):
            \\( +1 \\), \\( -1 \\), or zero for no salience.
        weights (`SalienceWeights`):
            Coefficients.

    Returns:
        `torch.Tensor` of the same shape: Salience in \\( [0, c_{\max}] \\).

    Example:

    ```python
    >>> one = torch.tensor(1)
    >>> salience_of_centred(torch.tensor(0.0), torch.tensor(0.2), one, SalienceWeights())
    tensor(0.3700)

    ```
    """
    positive = polarity > 0
    closeness = torch.sigmoid(torch.where(positive, -centred, centred) / weights.tau)
    breadth = torch.where(positive, entropies, 1.0 - entropies)
    raw = weights.alpha * closeness + breadth * (weights.beta + weights.gamma * closeness)
    return torch.where(polarity == 0, 0.0, raw.clamp(0.0, weights.c_max))
