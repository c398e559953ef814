"""
Two-stage reward of DeSA: first learn to find the answer, then to give it.

Shapes: `B` rollouts.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_same_shape


def desa_rewards(
    hits: torch.Tensor,
    exact_matches: torch.Tensor,
    *,
    stage: Literal["search", "answer"],
    violations: torch.Tensor | None = None,
    penalty: float = 0.2,
) -> torch.Tensor:
    """
    Rollout rewards of one stage.

    In the `"search"` stage a rollout earns 1 if an answer occurs in what its searches returned, in the `"answer"`
    stage 1 for an exact match. DeSA (arXiv 2510.04695).

    Args:
        hits (`torch.Tensor` of shape `(B,)`):
            Non-zero where a search returned an answer.
        exact_matches (`torch.Tensor` of shape `(B,)`):
            Non-zero where the final answer is right.
        stage (`str`):
            `"search"` or `"answer"`.
        violations (`torch.Tensor` of shape `(B,)`, *optional*):
            Number of penalised events of a rollout (malformed action, repeated query, no search, no reworded query).
            None are charged if omitted.
        penalty (`float`, *optional*, defaults to `0.2`):
            Cost of one violation.

    Returns:
        `torch.Tensor` of shape `(B,)`: Rewards.

    Raises:
        `ValueError`: If the shapes differ or the stage is unknown.

    Example:

    ```python
    >>> hits, matches = torch.tensor([1, 0]), torch.tensor([0, 1])
    >>> desa_rewards(hits, matches, stage="search", violations=torch.tensor([1, 0]))
    tensor([0.8000, 0.0000])

    ```
    """
    check_choice("stage", stage, ("search", "answer"))
    check_same_shape(hits=hits, exact_matches=exact_matches)
    earned = (hits if stage == "search" else exact_matches).bool().to(torch.get_default_dtype())
    if violations is None:
        return earned
    check_same_shape(hits=hits, violations=violations)
    return earned - penalty * violations
