r"""
Potential-based turn rewards: how much closer a turn brought a frozen teacher to the gold answer.

Shapes: `B` rollouts, `S` turns (right-padded), `A` aliases of the answer.
"""

from __future__ import annotations

import torch

from grounded_rl.credit._checks import check_dimensions, check_same_shape


def alias_potentials(mean_logps: torch.Tensor, alias_mask: torch.Tensor | None = None) -> torch.Tensor:
    r"""
    Potential of a context, \\( \Phi = \log \sum_a \exp \bar\ell_a \\) over the aliases of the answer.

    Args:
        mean_logps (`torch.Tensor` of shape `(..., A)`):
            Length-normalised log-probability of every alias in the context, under the teacher, in nats.
        alias_mask (`torch.Tensor` of the same shape, *optional*):
            Non-zero at aliases that exist. Elsewhere `mean_logps` is ignored, even when NaN.

    Returns:
        `torch.Tensor` of shape `(...)`: Potentials; `-inf` without an alias.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> alias_potentials(torch.log(torch.tensor([0.2, 0.3])))
    tensor(-0.6931)

    ```
    """
    if alias_mask is not None:
        check_same_shape(mean_logps=mean_logps, alias_mask=alias_mask)
        mean_logps = torch.where(alias_mask.bool(), mean_logps, -torch.inf)
    return mean_logps.logsumexp(-1)


def potential_rewards(potentials: torch.Tensor, turn_mask: torch.Tensor, *, scale: float = 0.02) -> torch.Tensor:
    r"""
    Turn rewards of TIPS, \\( c\, (\Phi_k - \Phi_{k-1}) \\).

    They telescope: the rewards of a rollout sum to the scaled difference of its last and first potential. TIPS (arXiv
    2603.22293).

    Args:
        potentials (`torch.Tensor` of shape `(B, S + 1)`):
            Potential before the first turn and after every turn. Ignored after turns that do not exist, even when NaN.
        turn_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at turns that exist; they come first.
        scale (`float`, *optional*, defaults to `0.02`):
            \\( c \\).

    Returns:
        `torch.Tensor` of shape `(B, S)`: Rewards, 0 where there is no turn.

    Raises:
        `ValueError`: If the shapes do not fit.

    Example:

    ```python
    >>> potential_rewards(torch.tensor([[-4.0, -1.0, -2.0]]), torch.tensor([[1, 1]]), scale=1.0)
    tensor([[ 3., -1.]])

    ```
    """
    check_dimensions("potentials", potentials, "B", "S + 1")
    check_same_shape(turn_mask=turn_mask, potentials=potentials[:, 1:])
    return torch.where(turn_mask.bool(), scale * potentials.diff(dim=1), 0.0)
