r"""
Selective-inference credit for trees of rollouts (SIPO).

A branch that was chosen for expansion by its own score is not comparable with the fresh branches drawn after the
choice. SIPO shifts the values of leaves under a chosen branch by the displacement that the choice explains, then
propagates values as usual.

Shapes: `N` tree nodes, `C` candidates of all sets together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grounded_rl.credit._checks import check_same_shape
from grounded_rl.credit.events import LeafEvents, leaf_events
from grounded_rl.credit.release import SIPOOptions, slope_sums
from grounded_rl.credit.selection import SelectionRecords
from grounded_rl.credit.slope import CorrelationSums, SlopeSums
from grounded_rl.credit.tree import leaf_mask, standardized_leaf_values, tree_values, zero_variance_trees


def blom(ranks: torch.Tensor | int, set_sizes: torch.Tensor | int) -> torch.Tensor:
    r"""
    Blom's approximation to the expected standard-normal order statistic.

    $$
    h(r, n) = \Phi^{-1}\Big( \frac{n - r + 1 - 0.375}{n + 0.25} \Big)
    $$

    for the r-th largest of n. Antisymmetric: \\( h(r, n) = -h(n - r + 1, n) \\).
    SIPO ([Eq. 11](https://huggingface.co/papers/2609.34805)).

    Args:
        ranks (`torch.Tensor` or `int`):
            Ranks, 1 for the largest. Broadcast against `set_sizes`.
        set_sizes (`torch.Tensor` or `int`):
            Number of candidates.

    Returns:
        `torch.Tensor`, `torch.float64`: Expected scores; 0 where the rank is outside `[1, n]`, so that 0 can stand for
        "no event".

    Example:

    ```python
    >>> blom(torch.tensor([1, 3, 5, 0]), 5)
    tensor([ 1.1798,  0.0000, -1.1798,  0.0000], dtype=torch.float64)

    ```
    """
    ranks = torch.as_tensor(ranks).double()
    sizes = torch.as_tensor(set_sizes).double()
    inside = (ranks >= 1) & (ranks <= sizes)
    share = torch.where(inside, (sizes - ranks + 1 - 0.375) / (sizes + 0.25), 0.5)
    return torch.special.ndtri(share)


def corrected_leaf_values(
    leaf_values: torch.Tensor,
    ranks: torch.Tensor,
    set_sizes: torch.Tensor,
    slope: float | None,
    *,
    weight: float = 1.0,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Leaf values less the displacement that selection explains.

    $$
    \widetilde V_u = V_u - w\, \hat a_2\, h(r_e, n_e)
    $$

    for leaves with a selection event, \\( V_u \\) otherwise. The tree mean may leave 0; nothing is standardised again.
    With `weight=0` or without a slope the values are returned as they are. SIPO ([Eq.
    5](https://huggingface.co/papers/2609.34805)).

    Args:
        leaf_values (`torch.Tensor`):
            Standardised leaf values of any shape; see `standardized_leaf_values`. Gradient flows.
        ranks (`torch.Tensor` of the same shape, `torch.long`):
            Rank of the leaf's selection event, 0 for none; see `leaf_events`.
        set_sizes (`torch.Tensor` of the same shape, `torch.long`):
            Number of candidates of the event.
        slope (`float` or `None`):
            Slope estimated at the *previous* step; `None` before the first estimate.
        weight (`float`, *optional*, defaults to `1.0`):
            Strength of the correction.
        skip (`torch.Tensor` of the same shape, `torch.bool`, *optional*):
            Leaves that are not corrected, such as those of trees with equal rewards.

    Returns:
        `torch.Tensor` of the same shape: Corrected values.

    Raises:
        `ValueError`: If the shapes differ or the slope is not finite.

    Example:

    ```python
    >>> corrected_leaf_values(torch.tensor([-0.8165, 1.2247]), torch.tensor([1, 0]), torch.tensor([2, 0]), -0.12)
    tensor([-0.7458,  1.2247])

    ```
    """
    skip = torch.zeros_like(leaf_values, dtype=torch.bool) if skip is None else skip.bool()
    check_same_shape(leaf_values=leaf_values, ranks=ranks, set_sizes=set_sizes, skip=skip)
    if slope is None or weight == 0:
        return leaf_values
    if not torch.isfinite(torch.tensor(slope)):
        raise ValueError(f"`slope` must be finite: got {slope}. Pass `None` before the first estimate.")
    shift = torch.where(skip, 0.0, (weight * slope) * blom(ranks, set_sizes))
    return leaf_values - shift.to(leaf_values.dtype)


@dataclass(frozen=True)
class ExpandedTrees:
    """A batch of finished trees as one forest; see `grounded_rl.credit.tree` for the numbering."""

    parents: torch.Tensor  # (N,) long, -1 for a root
    surprisals: torch.Tensor  # (N,) nats per generated token; ignored at roots
    fresh_rounds: torch.Tensor  # (N,) long, round that drew a fresh branch at this node, else -1
    valid: torch.Tensor | None = None  # (N,) bool, leaves that count; None: all


@dataclass(frozen=True)
class SIPOCredit:
    """Everything one step of SIPO computes from its trees."""

    leaf_values: torch.Tensor  # (N,) uncorrected, 0 at inner nodes
    corrected: torch.Tensor  # (N,) corrected, 0 at inner nodes
    values: torch.Tensor  # (N,) node values, also the advantages of the nodes
    events: LeafEvents
    slope_sums: SlopeSums | CorrelationSums  # of this step, for the next one
    metrics: dict[str, float]


def sipo_credit(
    trees: ExpandedTrees,
    rewards: torch.Tensor,
    records: SelectionRecords,
    slope: float | None,
    *,
    weight: float = 1.0,
    options: SIPOOptions | None = None,
) -> SIPOCredit:
    """
    Credit of one step: standardise, estimate, correct with the previous slope, propagate.

    The slope of this step comes back as sums; add them over processes, call `.estimate(slope)` and use the result at
    the next step. With `weight=0`, or before the first estimate, this is AT²PO. SIPO ([Alg.
    1](https://huggingface.co/papers/2609.34805)).

    Args:
        trees (`ExpandedTrees`):
            The finished trees.
        rewards (`torch.Tensor` of shape `(N,)`):
            Terminal reward of every leaf; other entries are ignored, even when NaN.
        records (`SelectionRecords`):
            Candidate sets of all expansion rounds.
        slope (`float` or `None`):
            Slope estimated at the previous step; `None` at the first.
        weight (`float`, *optional*, defaults to `1.0`):
            Strength of the correction.
        options (`SIPOOptions`, *optional*):
            Switches; the paper's if omitted.

    Returns:
        `SIPOCredit`: Values and advantages per node, events per leaf, sums of the new slope, and the shares of
        zero-variance trees and of corrected leaves.

    Raises:
        `ValueError`: If the shapes differ or `parents` is not a forest.
    """
    options = SIPOOptions() if options is None else options
    parents, fresh_rounds, valid = trees.parents, trees.fresh_rounds, trees.valid
    counted = leaf_mask(parents) if valid is None else leaf_mask(parents) & valid
    uncorrected = standardized_leaf_values(parents, rewards, valid=valid)
    flat = zero_variance_trees(parents, rewards, valid=valid)
    sums = slope_sums(
        parents,
        fresh_rounds,
        uncorrected,
        records,
        surprisals=trees.surprisals,
        options=options,
        valid=valid,
        zero_variance=flat,
    )
    events = leaf_events(parents, fresh_rounds, records, rule=options.event_rule, ranked=options.ranked)
    skip = ~counted | flat if options.on_zero_variance == "skip" else ~counted
    corrected = corrected_leaf_values(uncorrected, events.ranks, events.set_sizes, slope, weight=weight, skip=skip)
    values = tree_values(parents, trees.surprisals, corrected, weights=options.child_weights, valid=valid)
    trees_of_roots = flat[parents < 0].double()
    metrics = {
        "credit/zero_variance_trees": float(trees_of_roots.mean()),
        "credit/corrected_leaves": float((corrected != uncorrected)[counted].double().mean()),
        "credit/leaves_with_event": float(events.found[counted].double().mean()),
        "credit/num_trees": float((parents < 0).sum()),
    }
    return SIPOCredit(uncorrected, corrected, values, events, sums, metrics)
