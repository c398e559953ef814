"""GCA on trees: the residual of grounded credit on top of the advantage of a token's node."""

from __future__ import annotations

from typing import ClassVar

import torch

from grounded_rl.sampling.forest import Forest
from grounded_rl.trainers._trl import GenerationBatch
from grounded_rl.trainers.gca_trainer import GCATrainer
from grounded_rl.trainers.sipo_config import GCASIPOConfig
from grounded_rl.trainers.sipo_trainer import SIPOTrainer


def shared_token_means(values: torch.Tensor, token_slots: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """
    Mean of a per-token value over the rollouts that share the token.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            One value per token and rollout.
        token_slots (`torch.Tensor` of shape `(B, T)`, `torch.long`):
            Number of every token among the distinct ones, `-1` for tokens the policy did not sample.
        counted (`torch.Tensor` of shape `(B,)`, `torch.bool`):
            Rollouts that count.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The means, the same at every copy of a token; 0 where no rollout counts and
        where `token_slots` is `-1`.

    Example:

    ```python
    >>> slots = torch.tensor([[0, -1, 1], [0, -1, 2]])
    >>> shared_token_means(torch.tensor([[0.1, 9.0, 0.2], [0.3, 9.0, 0.4]]), slots, torch.tensor([True, True]))
    tensor([[0.2000, 0.0000, 0.2000],
            [0.2000, 0.0000, 0.4000]])

    ```
    """
    contributes = (token_slots >= 0) & counted.unsqueeze(1)
    num_slots = int(token_slots.max()) + 1 if token_slots.numel() else 0
    slots = token_slots[contributes]
    sums = values.new_zeros(num_slots + 1).index_add(0, slots, values[contributes])
    counts = values.new_zeros(num_slots + 1).index_add(0, slots, torch.ones_like(values[contributes]))
    # Slot -1 is the appended entry, which nothing is added to.
    return (sums / counts.clamp(min=1))[token_slots]


class GCASIPOTrainer(SIPOTrainer, GCATrainer):
    r"""
    SIPO with grounded credit assignment.

    A token's advantage is the advantage of its node, plus GCA's residual in proportion to it,

    $$
    A_t = A_{n(t)} + |A_{n(t)}|\, \bar\rho_t, \qquad
    \bar\rho_t = \operatorname{mean}_{u \ni t} \, e_{u,t}\, \eta\, P_{T_u, S_u(t)}\, \lambda_{T_u, S_u(t)}\, c_{u,t},
    $$

    with the mean over the counted leaves whose path holds the token: every leaf is diagnosed on its own, and a token
    shared by several leaves still has one advantage. As in GCA no advantage changes its sign or moves by more than the
    share \\( \eta \lambda_{\max} c_{\max} \\); trees without reward variance get no residual, whatever the correction
    for selection gave their nodes; right answers that no search could have found leave the loss, not the tree.
    `docs/gca_on_trees.md` works an example. Neither paper defines this.

    Args:
        *args, **kwargs:
            As for [`SIPOTrainer`], with a [`GCASIPOConfig`] as `args`.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "gca", "sipo", "grounded-rl"]
    _name = "GCA on SIPO"
    config_class: ClassVar[type[GCASIPOConfig]] = GCASIPOConfig

    def spread_credit(self, batch: GenerationBatch, forest: Forest, advantages: torch.Tensor) -> None:
        """Advantages of the nodes at their tokens, each with its residual."""
        super().spread_credit(batch, forest, advantages)
        # With an advantage of one, what the routing adds is the residual's share.
        ones = torch.ones(len(batch.rollouts), dtype=torch.float64, device=batch.turn_ids.device)
        shares = self.route(batch, ones).advantages - 1.0
        slots = forest.token_slots(self._trees, batch.turn_ids.size(1)).to(shares.device)
        shares = shared_token_means(shares, slots, batch.valid & ~batch.masked)
        moved = shares != 0
        against = (shares * batch.advantages < 0) & moved
        batch.metrics["credit/conflict_share"] = (
            against.sum().item() / moved.sum().item() if moved.any() else float("nan")
        )
        batch.advantages = batch.advantages + (batch.advantages.abs() * shares).to(batch.advantages.dtype)
