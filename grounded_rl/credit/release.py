"""
Switches of SIPO, and the preset that reproduces its released code.

The released code differs from the paper in nine places; each is one field of `SIPOOptions`, so that they can be
studied one by one. `sipo_options("release")` flips all nine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from grounded_rl.credit._checks import check_choice
from grounded_rl.credit.events import EventRule, RankedNodes, candidate_outcomes
from grounded_rl.credit.selection import RootCandidate, ScoreSpread, SelectionRecords
from grounded_rl.credit.slope import CorrelationSums, SlopeSums, correlation_sums, selection_slope
from grounded_rl.credit.tree import NO_NODE, ChildWeights, leaf_mask, subtree_sums, tree_ids

_CHOICES = {
    "ranked": ("chosen", "candidates"),
    "event_rule": ("recent", "deepest", "release"),
    "slope_estimator": ("regression", "correlation"),
    "slope_population": ("selection", "final"),
    "slope_leaves": ("selection", "final"),
    "slope_scope": ("batch", "worker"),
    "root_candidate": ("fallback_only", "always"),
    "reward": ("em", "em_format_penalty"),
    "score_spread": ("floor", "absolute"),
    "slope_rounds": ("all", "last"),
    "on_zero_variance": ("apply", "skip"),
    "child_weights": ("softmax", "proportional", "uniform", "leaf_count"),
}


@dataclass(frozen=True)
class SIPOOptions:
    """
    Switches of SIPO; the defaults are the paper's.

    The first nine are the places where the released code departs from the paper. `slope_scope`, `root_candidate`,
    `reward` and `score_spread` act outside the credit computation (all-reduce of the sums, `candidate_mask`, the
    reward function, `sfc_scores`) and are carried here so that one object names the variant.
    """

    ranked: RankedNodes = "chosen"
    """1. Which candidates carry an event: actual selections, or every candidate of its last ranking."""
    event_rule: EventRule = "recent"
    """2. Which event a leaf inherits; `"release"` also ends at a fresh branch that was selected later."""
    slope_estimator: Literal["regression", "correlation"] = "regression"
    """3. Slope on standardised scores, or Pearson correlation with raw surprisals."""
    slope_population: Literal["selection", "final"] = "selection"
    """4. Candidate sets at selection time, or all inner nodes of the final trees, roots included."""
    slope_leaves: Literal["selection", "final"] = "selection"
    """5. Outcomes over leaves that existed at selection, or over all leaves."""
    slope_scope: Literal["batch", "worker"] = "batch"
    """6. One coefficient for the batch (all-reduce the sums), or one per rollout worker."""
    root_candidate: RootCandidate = "fallback_only"
    """7. Whether the root competes with the other candidates."""
    reward: Literal["em", "em_format_penalty"] = "em"
    """8. Exact match, or -1 for a malformed answer."""
    score_spread: ScoreSpread = "floor"
    """9. Floor under the standard deviation, or fall back to unstandardised surprisal."""
    slope_rounds: Literal["all", "last"] = "all"
    """Rounds pooled by the slope."""
    slope_skip_zero_variance: bool = False
    """Leave candidate sets of trees with equal rewards out of the slope."""
    on_zero_variance: Literal["apply", "skip"] = "apply"
    """
    Whether trees with equal rewards are corrected; the literal formula gives them an advantage without any outcome.
    """
    child_weights: ChildWeights = "softmax"
    """How siblings share their parent."""

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            check_choice(name, getattr(self, name), accepted)


RELEASE_OPTIONS = SIPOOptions(
    ranked="candidates",
    event_rule="release",
    slope_estimator="correlation",
    slope_population="final",
    slope_leaves="final",
    slope_scope="worker",
    root_candidate="always",
    reward="em_format_penalty",
    score_spread="absolute",
)
"""All nine differences of the released code."""


def sipo_options(compat: Literal["paper", "release"] = "paper", **overrides: Any) -> SIPOOptions:
    """
    Preset of SIPO switches.

    Args:
        compat (`str`, *optional*, defaults to `"paper"`):
            `"paper"` or `"release"`.
        overrides:
            Fields of `SIPOOptions` that differ from the preset.

    Returns:
        `SIPOOptions`: The switches.

    Raises:
        `ValueError`: If the preset or a value is unknown.

    Example:

    ```python
    >>> sipo_options("release", event_rule="recent").ranked
    'candidates'

    ```
    """
    presets = {"paper": SIPOOptions(), "release": RELEASE_OPTIONS}
    check_choice("compat", compat, tuple(presets))
    return replace(presets[compat], **overrides)


def slope_sums(
    parents: torch.Tensor,
    fresh_rounds: torch.Tensor,
    leaf_values: torch.Tensor,
    records: SelectionRecords,
    *,
    surprisals: torch.Tensor,
    options: SIPOOptions,
    valid: torch.Tensor | None = None,
    zero_variance: torch.Tensor | None = None,
) -> SlopeSums | CorrelationSums:
    """
    Sums of the slope under any combination of switches.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node of the final forest, `-1` for a root.
        fresh_rounds (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Round that drew the node as the head of a fresh branch, `-1` for all other nodes.
        leaf_values (`torch.Tensor` of shape `(N,)`):
            Uncorrected value of every leaf.
        records (`SelectionRecords`):
            Candidate sets of all rounds.
        surprisals (`torch.Tensor` of shape `(N,)`):
            Surprisal of every node; read only with `slope_population="final"`, where a root counts with 0.
        options (`SIPOOptions`):
            The switches.
        valid (`torch.Tensor` of shape `(N,)`, `torch.bool`, *optional*):
            Leaves that count.
        zero_variance (`torch.Tensor` of shape `(N,)`, `torch.bool`, *optional*):
            Nodes of trees with equal rewards; read only with `slope_skip_zero_variance`.

    Returns:
        `SlopeSums` or `CorrelationSums`: Sums to add over processes.
    """
    if options.slope_population == "final":
        counted = leaf_mask(parents) if valid is None else leaf_mask(parents) & valid
        nodes = (~leaf_mask(parents)).nonzero().squeeze(1)
        totals = subtree_sums(parents, torch.where(counted, leaf_values, 0.0))
        outcomes = (totals / subtree_sums(parents, counted.to(totals.dtype)))[nodes]
        scores = raw = torch.where(parents < 0, 0.0, surprisals)[nodes]
        set_ids = tree_ids(parents)[nodes]
    else:
        if options.slope_rounds == "last" and len(records.nodes) > 0:
            trees = tree_ids(parents)[records.nodes]
            last = torch.full((int(trees.max()) + 1,), -1, dtype=torch.long, device=trees.device)
            last = last.scatter_reduce(0, trees, records.rounds, "amax")
            records = records.where(records.rounds == last[trees])
        outcomes = candidate_outcomes(
            parents, fresh_rounds, leaf_values, records, leaves=options.slope_leaves, valid=valid
        )
        nodes, scores, raw, set_ids = records.nodes, records.scores, records.surprisals, records.set_ids
    keep = torch.ones_like(nodes, dtype=torch.bool)
    if options.slope_skip_zero_variance and zero_variance is not None:
        keep = ~zero_variance[nodes]
    if options.slope_estimator == "correlation":
        return correlation_sums(raw[keep], outcomes[keep])
    return selection_slope(scores, outcomes, set_ids, keep=keep)


def fill_leaves(parents: torch.Tensor, num_leaves: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Tree padded to a leaf budget by copies of its last leaf, as in the released AT²PO code.

    Flag the copies and keep them out of statistics and loss (`valid`); counting them, as the released code does,
    weighs one rollout several times.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node of one tree in breadth-first order.
        num_leaves (`int`):
            Leaf budget.

    Returns:
        `tuple` of two `torch.Tensor`, `torch.long`: Parents with the copies appended as siblings of the last leaf,
        and for every node the node it copies, `-1` for originals. Unchanged when the budget is met.

    Raises:
        `ValueError`: If the tree already has more leaves.

    Example:

    ```python
    >>> fill_leaves(torch.tensor([-1, 0, 0, 1]), 4)
    (tensor([-1,  0,  0,  1,  1,  1]), tensor([-1, -1, -1, -1,  3,  3]))

    ```
    """
    missing = num_leaves - int(leaf_mask(parents).sum())
    if missing < 0:
        raise ValueError(
            f"`num_leaves` must not be less than the {num_leaves - missing} leaves of the tree: got {num_leaves}. "
            "Lower the number of expansions."
        )
    # The last node in breadth-first order is always a leaf, and siblings appended to it keep the order.
    last = len(parents) - 1
    copies = parents.new_full((missing,), last)
    return torch.cat([parents, parents[copies]]), torch.cat([torch.full_like(parents, NO_NODE), copies])
