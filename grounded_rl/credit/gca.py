r"""
Credit of GCA (grounded credit assignment): routed by what a rollout did, concentrated on the tokens that decided it.

A rollout is diagnosed by whether an observation contained the answer (hit, `H`) and whether its answer is right (`C`):

|  | right | not right |
|---|---|---|
| **hit** | A | B |
| **no hit** | D | C |

Its tokens fall into three segments: searches up to the first hit (`V_SEARCH`), other searches and malformed calls
(`R_SEARCH`), and the answer (`ANSWER`). A cell is a pair of both; it has a polarity (which way its tokens are pushed)
and a magnitude (how far).

Shapes: `B` rollouts, `T` completion tokens (right-padded); tables have shape `(4, 3)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

from grounded_rl.credit._checks import (
    check_at_least,
    check_choice,
    check_dimensions,
    check_ids,
    check_rows,
    check_same_shape,
    full_precision,
)
from grounded_rl.credit.masked import NO_SEGMENT, row_chunks, segment_medians, spread_segments
from grounded_rl.credit.salience import SalienceWeights, salience_of_centred

TYPE_A, TYPE_B, TYPE_C, TYPE_D = range(4)
NO_TYPE = -1
"""Type of a rollout that was not diagnosed, for example because it failed."""

V_SEARCH, R_SEARCH, ANSWER = range(3)
NUM_SEGMENTS = 3

Table = tuple[tuple[float, float, float], ...]

POLARITY: Table = (
    (+1, -1, +1),
    (+1, -1, -1),
    (0, 0, 0),
    (0, -1, -1),
)
"""Direction of every cell: types A to D down, `V_SEARCH`, `R_SEARCH`, `ANSWER` across."""

LAMBDA_TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "default": ((1.0, 0.5, 0.5), (0.5, 0.25, 1.0), (0.0, 0.0, 0.0), (0.0, 0.5, 0.25)),
        "ans_first": ((0.5, 0.5, 1.0), (0.5, 0.25, 1.0), (0.0, 0.0, 0.0), (0.0, 0.5, 0.25)),
        "flat": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), (0.0, 0.0, 0.0), (0.0, 0.5, 0.5)),
    }
)
"""Magnitudes of every cell, by name. The paper pins their signs and order; the values are choices of this package."""


def lambda_table(name: str = "default", scale: float = 1.0) -> torch.Tensor:
    """
    A named table of magnitudes, scaled and capped at one.

    Args:
        name (`str`, *optional*, defaults to `"default"`):
            A key of [`LAMBDA_TABLES`]: `"default"`, `"ans_first"` or `"flat"`.
        scale (`float`, *optional*, defaults to `1.0`):
            Factor on every magnitude; products above `1.0` are capped, so that the bound on the credit holds.

    Returns:
        `torch.Tensor` of shape `(4, 3)`, `torch.float64`: The magnitudes, in `[0, 1]`.

    Raises:
        `ValueError`: If the name is unknown, or if the scale is negative.

    Example:

    ```python
    >>> lambda_table("default", scale=1.5)[0]
    tensor([1.0000, 0.7500, 0.7500], dtype=torch.float64)

    ```
    """
    check_choice("name", name, tuple(LAMBDA_TABLES))
    check_at_least("scale", scale, 0.0)
    return (torch.tensor(LAMBDA_TABLES[name], dtype=torch.float64) * scale).clamp(max=1.0)


@dataclass(frozen=True, eq=False)
class Routing:
    r"""
    Everything of [`gca_token_advantages`] that is fixed for a run.

    Args:
        lambdas (`torch.Tensor` of shape `(4, 3)`, *optional*):
            Magnitude of every cell, in `[0, 1]`. The default table when not given.
        polarity (`torch.Tensor` of shape `(4, 3)`, *optional*):
            Direction of every cell; only its sign counts. [`POLARITY`] when not given.
        eta (`float`, *optional*, defaults to `0.2`):
            Scale of the residual, as a share of the advantage.
        weights (`SalienceWeights`, *optional*):
            Coefficients of the salience.
        mean_salience (`torch.Tensor` of shape `(4, 3)`, *optional*):
            Constant that replaces the salience of every token of a cell (the ablation without salience,
            [`cell_means`]).

    Raises:
        `ValueError`: If a table has another shape or entries out of range, or if
            \\( \eta \lambda_{\max} c_{\max} \ge 1 \\), under which credit could flip the sign of an advantage.

    Example:

    ```python
    >>> Routing(lambda_table("flat"), eta=0.1).bound
    0.025

    ```
    """

    lambdas: torch.Tensor = field(default_factory=lambda_table)
    polarity: torch.Tensor = field(default_factory=lambda: torch.tensor(POLARITY))
    eta: float = 0.2
    weights: SalienceWeights = field(default_factory=SalienceWeights)
    mean_salience: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("lambdas", "polarity", "mean_salience"):
            table = getattr(self, name)
            if table is not None and tuple(table.shape) != (4, NUM_SEGMENTS):
                raise ValueError(
                    f"`{name}` must have the shape (4, {NUM_SEGMENTS}): got {tuple(table.shape)}. "
                    "Pass one row per type A to D and one column per segment."
                )
        low, high = (float(end) for end in self.lambdas.detach().aminmax())
        if not 0.0 <= low <= high <= 1.0:
            raise ValueError(
                f"`lambdas` must lie in [0, 1]: got a range of [{low}, {high}]. Clip the table, or lower its scale."
            )
        if self.mean_salience is not None:
            check_at_least("mean_salience", float(self.mean_salience.min()), 0.0)
        check_at_least("eta", self.eta, 0.0)
        if self.bound >= 1.0:
            raise ValueError(
                f"`eta` times the largest magnitude times `c_max` must be below 1: got {self.bound}. Credit could "
                f"flip the sign of an advantage. Lower `eta` or `c_max`."
            )

    @property
    def bound(self) -> float:
        r"""Largest relative change of an advantage, \\( \kappa = \eta \lambda_{\max} c_{\max} \\)."""
        largest = self.weights.c_max if self.mean_salience is None else float(self.mean_salience.max())
        return self.eta * float(self.lambdas.detach().max()) * largest


class GCACredit(NamedTuple):
    """
    Result of [`gca_token_advantages`]; `cells` is what per-cell statistics group by.

    `polarity` and `magnitude` are computed on demand, so that the credit of a large batch stays small.
    """

    advantages: torch.Tensor  # (B, T)
    salience: torch.Tensor  # (B, T), 0.0 where the gate is closed
    cells: torch.Tensor  # (B, T) int8, 3 * type + segment, or -1 where the gate is closed
    routing: Routing

    @property
    def polarity(self) -> torch.Tensor:
        """Direction of every token's cell, `(B, T)`; zero where the gate is closed."""
        return _spread_table(self.routing.polarity.sign().to(self.salience), self.cells)

    @property
    def magnitude(self) -> torch.Tensor:
        """Magnitude of every token's cell, `(B, T)`; zero where the gate is closed."""
        return _spread_table(self.routing.lambdas.to(self.salience), self.cells)


@torch.no_grad()
def gca_token_advantages(
    advantages: torch.Tensor,
    types: torch.Tensor,
    segments: torch.Tensor,
    margins: torch.Tensor,
    entropies: torch.Tensor,
    *,
    eligible: torch.Tensor,
    gate_open: torch.Tensor,
    routing: Routing | None = None,
) -> GCACredit:
    r"""
    Advantage of every token: the advantage of its rollout plus a bounded residual of its cell.

    $$
    A_{i,t} = \hat A_i + e_{i,t}\, \eta\, |\hat A_i|\, P_{T_i, S(t)}\, \lambda_{T_i, S(t)}\, c_{i,t}
    $$

    with polarity \\( P \\), magnitude \\( \lambda \\), salience \\( c \\) and gate \\( e \\). The gate is open at a
    token when it is eligible, the gate of its rollout is open, and its cell has a polarity and a magnitude (type C has
    neither). Since \\( \eta \lambda c \le \kappa < 1 \\), no advantage changes its sign or moves by more than the
    share \\( \kappa \\), a zero advantage stays zero, and with \\( \eta = 0 \\) every token has exactly the advantage
    of its rollout. Sec. 4 of GCA.

    Shapes: `B` rollouts, `T` completion tokens (right-padded).

    Args:
        advantages (`torch.Tensor` of shape `(B,)`):
            Advantage of every rollout ([`group_advantages`]).
        types (`torch.Tensor` of shape `(B,)`, integer):
            Type of every rollout, `TYPE_A` to `TYPE_D`, or `-1` for one that was not diagnosed.
        segments (`torch.Tensor` of shape `(B, T)`, integer):
            `V_SEARCH`, `R_SEARCH` or `ANSWER`, or `-1` for none.
        margins (`torch.Tensor` of shape `(B, T)`):
            Margins in nats ([`token_margin`]). Ignored at tokens that are not eligible, even when they are NaN.
        entropies (`torch.Tensor` of shape `(B, T)`):
            Normalised entropies ([`topk_entropy`]). Ignored at tokens that are not eligible, even when they are NaN.
        eligible (`torch.Tensor` of shape `(B, T)`, bool):
            Tokens that may receive a residual: trained, and no part of a structural tag. They are also the tokens the
            median margin of a segment is taken over.
        gate_open (`torch.Tensor` of shape `(B,)`, bool):
            False for rollouts whose group has no reward variance or that are masked from the loss.
        routing (`Routing`, *optional*):
            Tables and coefficients. The defaults of [`Routing`] when not given.

    Returns:
        `GCACredit`: Token advantages and what they are made of, all of shape `(B, T)` and without gradient. Tokens
        with a closed gate have the advantage of their rollout; positions outside the loss are not zeroed.

    Raises:
        `ValueError`: If the shapes do not fit, or if a type or a segment lies outside its range.

    Example:

    ```python
    >>> credit = gca_token_advantages(
    ...     torch.tensor([1.0]),
    ...     torch.tensor([TYPE_A]),
    ...     torch.tensor([[V_SEARCH, -1, ANSWER]]),
    ...     margins=torch.zeros(1, 3),
    ...     entropies=torch.zeros(1, 3),
    ...     eligible=torch.tensor([[True, False, True]]),
    ...     gate_open=torch.tensor([True]),
    ... )
    >>> credit.advantages  # salience 0.6 * 0.5 = 0.3; magnitudes 1.0 and 0.5
    tensor([[1.0600, 1.0000, 1.0300]])

    ```
    """
    _check_batch(advantages, types, segments, margins, entropies, eligible, gate_open)
    routing = routing or Routing()
    dtype = torch.promote_types(full_precision(advantages).dtype, full_precision(margins).dtype)
    advantages = advantages.to(dtype)
    # Sign and magnitude of every cell in one table, as a share of the advantage before salience.
    signed = routing.polarity.sign().to(advantages) * routing.lambdas.to(advantages) * routing.eta
    is_active = ((routing.polarity != 0) & (routing.lambdas != 0)).to(segments.device)
    credit = GCACredit(
        advantages.unsqueeze(1).expand(segments.shape).clone(),
        torch.zeros(segments.shape, dtype=dtype, device=segments.device),
        torch.full(segments.shape, -1, dtype=torch.int8, device=segments.device),
        routing,
    )
    for rows in row_chunks(*segments.shape):
        is_open = eligible[rows].bool() & gate_open[rows].bool().unsqueeze(1) & (segments[rows] >= 0)
        cells = _cells(types[rows], segments[rows], is_open, is_active)
        credit.cells[rows] = cells
        credit.salience[rows] = _cell_salience(margins[rows], entropies[rows], cells, routing)
        residual = credit.advantages[rows].abs() * _spread_table(signed, cells) * credit.salience[rows]
        credit.advantages[rows] += torch.where(cells >= 0, residual, 0.0)
    return credit


def _check_batch(
    advantages: torch.Tensor,
    types: torch.Tensor,
    segments: torch.Tensor,
    margins: torch.Tensor,
    entropies: torch.Tensor,
    eligible: torch.Tensor,
    gate_open: torch.Tensor,
) -> None:
    """Check the shapes and ranges of one batch."""
    check_dimensions("segments", segments, "B", "T")
    check_same_shape(segments=segments, margins=margins, entropies=entropies, eligible=eligible)
    for name, vector in (("advantages", advantages), ("types", types), ("gate_open", gate_open)):
        check_rows(name, vector, len(segments))
    check_ids("types", types, 4, hint="Use 0 to 3 for types A to D, or `-1` for none.")
    check_ids("segments", segments, NUM_SEGMENTS, hint="Use `V_SEARCH`, `R_SEARCH` or `ANSWER`, or `-1` for none.")


def _cells(
    types: torch.Tensor, segments: torch.Tensor, is_open: torch.Tensor, is_active: torch.Tensor
) -> torch.Tensor:
    """Cell of every token with an open gate and an active cell, `-1` elsewhere."""
    has_cell = is_open & (types >= 0).unsqueeze(1)
    cells = torch.where(has_cell, NUM_SEGMENTS * types.unsqueeze(1) + segments, NO_SEGMENT)
    return torch.where(_spread_table(is_active, cells), cells, NO_SEGMENT)


def _cell_salience(
    margins: torch.Tensor, entropies: torch.Tensor, cells: torch.Tensor, routing: Routing
) -> torch.Tensor:
    """Salience of the tokens of a few rollouts, or the constants that replace it."""
    margins = full_precision(margins)
    if routing.mean_salience is not None:
        return _spread_table(routing.mean_salience.to(margins), cells)
    # A rollout has one type, so its cells and its segments group the same tokens.
    segments = torch.where(cells >= 0, cells % NUM_SEGMENTS, NO_SEGMENT)
    centred = margins - spread_segments(segment_medians(margins, segments, NUM_SEGMENTS), segments)
    signs = _spread_table(routing.polarity.sign().to(margins), cells)
    return salience_of_centred(centred, full_precision(entropies), signs, routing.weights)


def _spread_table(table: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """Entry of a `(4, 3)` table at every token, `0` where it has no cell."""
    # Index -1 reads the zero behind the table.
    return torch.nn.functional.pad(table.flatten(), (0, 1))[cells.int()]
