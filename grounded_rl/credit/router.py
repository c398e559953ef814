r"""
The constrained router: learns the magnitudes of GCA's cells within the budget of a fixed table.

It is an ablation: polarity, diagnosis, salience and the bound on the credit stay as they are, and every type keeps the
total credit the table gave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from grounded_rl.credit._checks import check_at_least, check_dimensions, check_rows, check_same_shape, full_precision
from grounded_rl.credit.gca import NUM_SEGMENTS, Routing
from grounded_rl.credit.gca_ablations import cell_counts, cell_means


def project_to_budget(values: torch.Tensor, weights: torch.Tensor, budgets: torch.Tensor) -> torch.Tensor:
    r"""
    Nearest magnitudes in \\( [0, 1] \\) whose weighted sum is the budget: the projection onto a capped simplex.

    $$
    \lambda_S = \mathrm{clip}(v_S - \nu w_S, 0, 1), \qquad \nu \text{ such that } \sum_S w_S \lambda_S = B
    $$

    The sum is piecewise linear and decreasing in \\( \nu \\), so \\( \nu \\) is found exactly, between two of its
    knots.

    Args:
        values (`torch.Tensor` of shape `(R, S)`):
            Points to project, one per row.
        weights (`torch.Tensor` of shape `(R, S)`):
            Weights, not negative. An entry of weight zero is only clipped.
        budgets (`torch.Tensor` of shape `(R,)`):
            Weighted sum of every row, between `0` and the sum of its weights.

    Returns:
        `torch.Tensor` of shape `(R, S)`: The projections.

    Raises:
        `ValueError`: If the shapes do not fit, if a weight is negative, or if a budget cannot be reached.

    Example:

    ```python
    >>> v, w = torch.tensor([[1.1, 0.7, 0.3]]), torch.tensor([[0.5, 0.2, 0.3]])
    >>> project_to_budget(v, w, torch.tensor([0.75]))
    tensor([[1.0000, 0.7308, 0.3462]])

    ```
    """
    check_dimensions("values", values, "R", "S")
    check_same_shape(values=values, weights=weights)
    check_rows("budgets", budgets, len(values), per="row of `values`")
    if not (weights >= 0).all():
        raise ValueError(
            f"`weights` must not be negative: got a minimum of {float(weights.min())}. Clip them at zero."
        )
    capacity, slack = weights.sum(1), 1e-6 * weights.sum(1)
    if not ((budgets >= -slack) & (budgets <= capacity + slack)).all():
        raise ValueError(
            f"`budgets` must lie between 0 and the sum of the weights, {capacity.tolist()}: got {budgets.tolist()}. "
            "Compute them from magnitudes in [0, 1] and the same weights."
        )
    # Knots: where an entry leaves 1, and where it reaches 0. An entry of weight zero has none; 0 stands in for them.
    divisor = torch.where(weights > 0, weights, 1.0)
    knots = torch.cat([torch.where(weights > 0, (values - end) / divisor, 0.0) for end in (1.0, 0.0)], dim=1)
    knots = knots.sort(dim=1).values
    sums = (weights.unsqueeze(1) * _clipped(values, weights, knots)).sum(2)
    # The last knot whose sum still covers the budget starts the linear piece.
    start = (sums >= budgets.unsqueeze(1)).sum(1, keepdim=True).clamp(1, knots.shape[1] - 1) - 1
    left, right = knots.gather(1, start), knots.gather(1, start + 1)
    high, low = sums.gather(1, start), sums.gather(1, start + 1)
    drop = high - low
    share = torch.where(drop > 0, (high - budgets.unsqueeze(1)) / torch.where(drop > 0, drop, 1.0), 0.0)
    return _clipped(values, weights, left + share.clamp(0.0, 1.0) * (right - left)).squeeze(1)


def _clipped(values: torch.Tensor, weights: torch.Tensor, multipliers: torch.Tensor) -> torch.Tensor:
    """`clip(v - nu * w, 0, 1)` for every multiplier of every row, shape `(R, K, S)`."""
    return (values.unsqueeze(1) - multipliers.unsqueeze(2) * weights.unsqueeze(1)).clamp(0.0, 1.0)


def magnitude_gains(
    sensitivities: torch.Tensor,
    advantages: torch.Tensor,
    salience: torch.Tensor,
    cells: torch.Tensor,
    polarity: torch.Tensor,
    *,
    eta: float = 0.2,
    learning_rate: float = 1.0,
) -> torch.Tensor:
    r"""
    First-order effect of every magnitude on a calibration objective, through one step of the actor.

    $$
    \frac{\partial J}{\partial \lambda_{T,S}} \approx \alpha \Big\langle \nabla_\theta J_{\text{cal}},
    \sum_{(i,t) \in (T,S)} \eta |\hat A_i| P_{T,S}\, c_{i,t} \nabla_\theta \log \pi_\theta(y_{i,t}) \Big\rangle
    $$

    The inner products enter as the sensitivity of every token, so no gradient per cell is ever stored.

    Shapes: `B` rollouts, `T` completion tokens (right-padded).

    Args:
        sensitivities (`torch.Tensor` of shape `(B, T)`):
            \\( \langle \nabla_\theta J_{\text{cal}}, \nabla_\theta \log \pi_\theta(y_{i,t}) \rangle \\): the change of
            the token's log-probability per unit of a step along the calibration gradient. Ignored where the gate is
            closed.
        advantages (`torch.Tensor` of shape `(B,)`):
            Advantage of every rollout.
        salience (`torch.Tensor` of shape `(B, T)`):
            `GCACredit.salience`.
        cells (`torch.Tensor` of shape `(B, T)`, integer):
            `GCACredit.cells`.
        polarity (`torch.Tensor` of shape `(4, 3)`):
            Direction of every cell.
        eta (`float`, *optional*, defaults to `0.2`):
            Scale of the residual.
        learning_rate (`float`, *optional*, defaults to `1.0`):
            Step size \\( \alpha \\) of the actor, times the weight of a token in its loss.

    Returns:
        `torch.Tensor` of shape `(4, 3)`: The gains, `0.0` for a cell without tokens.

    Raises:
        `ValueError`: If the shapes do not fit.

    Example:

    ```python
    >>> one = torch.ones(1, 1)
    >>> gains = magnitude_gains(0.5 * one, torch.tensor([-2.0]), 0.3 * one, torch.tensor([[5]]), -torch.ones(4, 3))
    >>> gains[1, 2]  # 0.2 * |-2| * (-1) * 0.3 * 0.5
    tensor(-0.0600)

    ```
    """
    check_same_shape(sensitivities=sensitivities, salience=salience, cells=cells)
    check_rows("advantages", advantages, len(cells))
    weighted = full_precision(sensitivities) * advantages.abs().unsqueeze(1) * salience
    return learning_rate * eta * polarity.sign().to(weighted) * cell_means(weighted, cells) * cell_counts(cells)


@dataclass(frozen=True)
class RouterSchedule:
    """
    When and how fast a [`ConstrainedRouter`] learns.

    Args:
        num_actor_steps (`int`, *optional*, defaults to `1005`):
            Length of the run, in optimiser steps of the actor; the end of the cosine.
        num_frozen_steps (`int`, *optional*, defaults to `20`):
            Actor steps before the router starts to count.
        interval (`int`, *optional*, defaults to `5`):
            Actor steps per step of the router.
        learning_rate (`float`, *optional*, defaults to `5e-5`):
            Peak learning rate of AdamW, which then follows a cosine down to zero.
        weight_decay (`float`, *optional*, defaults to `1e-4`):
            Weight decay of AdamW.
        max_grad_norm (`float`, *optional*, defaults to `1.0`):
            Cap of the norm of the gradient.

    Raises:
        `ValueError`: If a value lies outside its range.

    Example:

    ```python
    >>> RouterSchedule(num_actor_steps=120).num_router_steps
    20

    ```
    """

    num_actor_steps: int = 1005
    num_frozen_steps: int = 20
    interval: int = 5
    learning_rate: float = 5e-5
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        check_at_least("num_frozen_steps", self.num_frozen_steps, 0)
        check_at_least("interval", self.interval, 1)
        check_at_least("num_actor_steps", self.num_actor_steps, self.num_frozen_steps + self.interval)
        check_at_least("learning_rate", self.learning_rate, 0.0)
        check_at_least("weight_decay", self.weight_decay, 0.0)
        check_at_least("max_grad_norm", self.max_grad_norm, 0.0, exclusive=True)

    @property
    def num_router_steps(self) -> int:
        """Steps the router takes in a whole run."""
        return (self.num_actor_steps - self.num_frozen_steps) // self.interval


class ConstrainedRouter:
    r"""
    Learns the magnitudes of the active cells by gradient ascent, within the budget of the table it starts from.

    Every cell has a logit, initialised from the table. After a step the magnitudes are the logistic of the logits,
    projected type by type so that \\( \sum_S w_S \lambda_S \\) is what it was ([`project_to_budget`]). Before the
    first step they are exactly the table. Sec. 5.4 of GCA; the gradient is the caller's ([`magnitude_gains`]).

    Args:
        lambdas (`torch.Tensor` of shape `(4, 3)`):
            Magnitudes to start from, in `[0, 1]`. Cells of magnitude zero stay zero.
        weights (`torch.Tensor` of shape `(4, 3)`):
            What a unit of magnitude costs in every cell: its share of tokens times its mean salience.
        schedule (`RouterSchedule`, *optional*):
            When and how fast to learn.

    Raises:
        `ValueError`: If a table has another shape, a magnitude lies outside `[0, 1]`, or a weight is negative.

    Example:

    ```python
    >>> from grounded_rl.credit import lambda_table
    >>> router = ConstrainedRouter(lambda_table(), torch.full((4, 3), 0.1))
    >>> router.update(torch.ones(4, 3))  # still frozen
    False
    >>> torch.equal(router.magnitudes, lambda_table())
    True

    ```
    """

    LOGIT_MARGIN = 1e-3
    """Magnitudes are kept this far from 0 and 1 before they become logits."""

    def __init__(self, lambdas: torch.Tensor, weights: torch.Tensor, schedule: RouterSchedule | None = None) -> None:
        for name, table in (("lambdas", lambdas), ("weights", weights)):
            if tuple(table.shape) != (4, NUM_SEGMENTS):
                raise ValueError(
                    f"`{name}` must have the shape (4, {NUM_SEGMENTS}): got {tuple(table.shape)}. "
                    "Pass one row per type A to D and one column per segment."
                )
        self.schedule = schedule or RouterSchedule()
        Routing(lambdas)  # refuses magnitudes outside [0, 1]
        self.magnitudes = lambdas.detach().to(torch.float64).clone()
        self.num_actor_steps = 0
        self._is_active = self.magnitudes > 0
        self._weights = torch.where(self._is_active, weights.detach().to(torch.float64), 0.0)
        self._budgets = (self._weights * self.magnitudes).sum(1)
        # Projecting the table onto its own budget refuses negative weights.
        project_to_budget(self.magnitudes, self._weights, self._budgets)
        self._logits = self.magnitudes.clamp(self.LOGIT_MARGIN, 1.0 - self.LOGIT_MARGIN).logit().requires_grad_()
        self._optimizer = torch.optim.AdamW(
            [self._logits], lr=self.schedule.learning_rate, weight_decay=self.schedule.weight_decay
        )

    def update(self, gains: torch.Tensor | None) -> bool:
        """
        Count one optimiser step of the actor, and take a step of the router when one is due.

        Args:
            gains (`torch.Tensor` of shape `(4, 3)`):
                Derivative of the objective (to be maximised) with respect to every magnitude. May be `None` in actor
                steps in which no router step is due ([`ConstrainedRouter.is_due`]).

        Returns:
            `bool`: Whether the magnitudes changed.

        Raises:
            `ValueError`: If a step is due and no finite gains of the right shape were given.
        """
        is_due = self.is_due()
        is_usable = gains is not None and gains.shape == self.magnitudes.shape and bool(gains.isfinite().all())
        if is_due and not is_usable:
            raise ValueError(
                f"`gains` must be finite and of shape (4, {NUM_SEGMENTS}) when a router step is due: got {gains}. "
                f"Compute them with `magnitude_gains` whenever `is_due()` is true."
            )
        self.num_actor_steps += 1
        if gains is None or not is_due:
            return False
        self._take_step(gains)
        return True

    def is_due(self) -> bool:
        """Whether the next call of `update` takes a router step."""
        counted = self.num_actor_steps + 1 - self.schedule.num_frozen_steps
        return counted > 0 and counted % self.schedule.interval == 0

    def _take_step(self, gains: torch.Tensor) -> None:
        """One step of AdamW on the logits, then the projection."""
        taken = (self.num_actor_steps - self.schedule.num_frozen_steps) // self.schedule.interval - 1
        progress = min(1.0, taken / self.schedule.num_router_steps)
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.schedule.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
        squashed = torch.sigmoid(self._logits)
        objective = (torch.where(self._is_active, gains.detach().to(torch.float64), 0.0) * squashed).sum()
        self._optimizer.zero_grad()
        (-objective).backward()
        torch.nn.utils.clip_grad_norm_([self._logits], self.schedule.max_grad_norm)
        self._optimizer.step()
        proposed = torch.where(self._is_active, torch.sigmoid(self._logits.detach()), 0.0)
        self.magnitudes = project_to_budget(proposed, self._weights, self._budgets)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs to continue as if it had not stopped."""
        return {
            "magnitudes": self.magnitudes.clone(),
            "logits": self._logits.detach().clone(),
            "optimizer": self._optimizer.state_dict(),
            "num_actor_steps": self.num_actor_steps,
            "schedule": asdict(self.schedule),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Restore what [`ConstrainedRouter.state_dict`] returned.

        Args:
            state (`Mapping[str, Any]`):
                The saved state.

        Raises:
            `ValueError`: If it was saved under another schedule.
        """
        if state["schedule"] != asdict(self.schedule):
            raise ValueError(
                f"`schedule` must be the one the state was saved under, {state['schedule']}: "
                f"got {asdict(self.schedule)}. Build the router with the saved schedule."
            )
        self.magnitudes = state["magnitudes"].clone()
        self.num_actor_steps = state["num_actor_steps"]
        with torch.no_grad():
            self._logits.copy_(state["logits"])
        self._optimizer.load_state_dict(state["optimizer"])
