"""
Turn credit of MT-GRPO: the first search gets an advantage of its own.

Shapes: `B` rollouts, `T` completion tokens.
"""

from __future__ import annotations

import torch

from grounded_rl.credit._checks import check_dimensions, check_rows


def mt_grpo_advantages(
    turn_advantages: torch.Tensor,
    outcome_advantages: torch.Tensor,
    combined_advantages: torch.Tensor,
    segment_ids: torch.Tensor,
    first_result_turn: torch.Tensor,
    *,
    coefficient: float = 1.0,
) -> torch.Tensor:
    r"""
    Token advantages of MT-GRPO.

    $$
    A_{i,t} = A^{\text{outcome}}_i + c\, A^{\text{turn}}_i \,[\text{t lies before the first tool result}]
    $$

    A rollout without a tool result gets its combined advantage (that of the summed reward) everywhere. With
    `coefficient=0` and equal outcome and combined advantages it is GRPO. MT-GRPO (arXiv 2505.11821).

    Args:
        turn_advantages (`torch.Tensor` of shape `(B,)`):
            Group advantage of the turn reward.
        outcome_advantages (`torch.Tensor` of shape `(B,)`):
            Group advantage of the outcome reward.
        combined_advantages (`torch.Tensor` of shape `(B,)`):
            Group advantage of the sum of both rewards.
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Turn of every sampled token, `-1` for tool output and padding.
        first_result_turn (`torch.Tensor` of shape `(B,)`, integer):
            Turn that the first tool result follows, `-1` in a rollout without one.
        coefficient (`float`, *optional*, defaults to `1.0`):
            \\( c \\).

    Returns:
        `torch.Tensor` of shape `(B, T)`: Advantages; 0 where `segment_ids` is `-1`.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> turn, outcome, combined = torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([9.0])
    >>> mt_grpo_advantages(turn, outcome, combined, torch.tensor([[0, -1, 1]]), torch.tensor([0]))
    tensor([[1.5000, 0.0000, 1.0000]])

    ```
    """
    check_dimensions("segment_ids", segment_ids, "B", "T")
    columns = {
        "turn_advantages": turn_advantages,
        "outcome_advantages": outcome_advantages,
        "combined_advantages": combined_advantages,
        "first_result_turn": first_result_turn,
    }
    for name, column in columns.items():
        check_rows(name, column, len(segment_ids))
    has_result = first_result_turn >= 0
    base = torch.where(has_result, outcome_advantages, combined_advantages)
    # Where no result exists no turn lies before it, so that the turn advantage, which may be NaN there, is not read.
    early = segment_ids <= first_result_turn[:, None]
    advantages = base[:, None] + torch.where(early, coefficient * turn_advantages[:, None], 0.0)
    return torch.where(segment_ids >= 0, advantages, 0.0)
