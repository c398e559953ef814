r"""
Contribution-weighted credit: a judge's marks decide which search rounds share the advantage of a correct rollout.

Shapes: `B` rollouts, `S` rounds (right-padded; the last is the answer), `T` completion tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_dimensions, check_rows, check_same_shape
from grounded_rl.credit.masked import spread_segments
from grounded_rl.credit.turns import last_turns

HARD_GAMMA = 10.0
"""From this sharpness on the marks are normalised by their sum instead of a softmax."""
SUM_FLOOR = 1e-6
"""Smallest divisor of the hard normalisation."""


def contribution_weights(
    contributions: torch.Tensor,
    search_mask: torch.Tensor,
    *,
    gamma: float = 1.0,
    without_marks: Literal["uniform", "zero"] = "uniform",
) -> torch.Tensor:
    r"""
    Share of every search round, \\( \operatorname{softmax}(\gamma c) \\), or \\( c / \sum c \\) for \\( \gamma \ge 10
    \\).

    Args:
        contributions (`torch.Tensor` of shape `(B, S)`):
            Mark of every search round, usually 0 or 1. Ignored where `search_mask` is zero, even when NaN.
        search_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at search rounds (all rounds but the last).
        gamma (`float`, *optional*, defaults to `1.0`):
            Sharpness.
        without_marks (`str`, *optional*, defaults to `"uniform"`):
            Shares under a hard `gamma` when no round has a mark. `"uniform"`, which is what the softmax gives at any
            sharpness; `"zero"` erases the search credit of the rollout, as in the released code.

    Returns:
        `torch.Tensor` of shape `(B, S)`: Shares, which sum to 1 over the search rounds; 0 elsewhere.

    Raises:
        `ValueError`: If the shapes differ or an option is unknown.

    Example:

    ```python
    >>> contribution_weights(torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[1, 1, 0]]))
    tensor([[0.7311, 0.2689, 0.0000]])

    ```
    """
    check_choice("without_marks", without_marks, ("uniform", "zero"))
    check_dimensions("contributions", contributions, "B", "S")
    check_same_shape(contributions=contributions, search_mask=search_mask)
    searched = search_mask.bool()
    marks = torch.where(searched, contributions, 0.0)
    counts = searched.to(marks.dtype).sum(1, keepdim=True)
    if gamma < HARD_GAMMA:
        scaled = torch.where(searched, gamma * marks, -torch.inf)
        # A row without a search round would be the softmax of nothing, which is NaN.
        return torch.where(searched, torch.where(counts > 0, scaled, 0.0).softmax(1), 0.0)
    totals = marks.sum(1, keepdim=True)
    shares = marks / totals.clamp(min=SUM_FLOOR)
    if without_marks == "uniform":
        shares = torch.where(totals > 0, shares, 1.0 / counts.clamp(min=1))
    return torch.where(searched, shares, 0.0)


def cw_grpo_advantages(
    advantages: torch.Tensor,
    contributions: torch.Tensor,
    round_mask: torch.Tensor,
    segment_ids: torch.Tensor,
    *,
    gamma: float = 1.0,
    without_marks: Literal["uniform", "zero"] = "uniform",
) -> torch.Tensor:
    r"""
    Token advantages of CW-GRPO.

    A rollout whose advantage A is not negative gives round k \\( A\, w_k\, n \\), with n search rounds and \\( w_k \\)
    its share, and its last round A; any other rollout gives A everywhere. Equal marks give GRPO. CW-GRPO (arXiv
    2604.14267).

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            Group advantage of every rollout.
        contributions (`torch.Tensor` of shape `(B, S)`):
            Mark of every search round; see `contribution_weights`. Ignored at the last round.
        round_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at rounds that exist, the last included.
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Round of every sampled token, `-1` for tool output and padding.
        gamma (`float`, *optional*, defaults to `1.0`):
            Sharpness of the shares.
        without_marks (`str`, *optional*, defaults to `"uniform"`):
            See `contribution_weights`.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Advantages; 0 where `segment_ids` is `-1`.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> marks, rounds, segments = torch.tensor([[1.0, 0.0, 0.0]]), torch.ones(1, 3), torch.tensor([[0, -1, 1, 2]])
    >>> cw_grpo_advantages(torch.tensor([0.5]), marks, rounds, segments)
    tensor([[0.7311, 0.0000, 0.2689, 0.5000]])

    ```
    """
    check_same_shape(contributions=contributions, round_mask=round_mask)
    check_rows("advantages", advantages, len(round_mask))
    is_last = last_turns(round_mask)
    searched = round_mask.bool() & ~is_last
    shares = contribution_weights(contributions, searched, gamma=gamma, without_marks=without_marks)
    scaled = shares * searched.sum(1, keepdim=True)
    factors = torch.where(is_last | (advantages < 0)[:, None], 1.0, scaled)
    return spread_segments(advantages[:, None] * factors, segment_ids)
