r"""
Which selection a leaf inherits, and what a candidate was worth when it was selected.

A *selection event* is a chosen candidate with its rank and set size. The first node of a fresh branch remembers the
round that drew it (`fresh_rounds`); such a node is a boundary: it was drawn after the choices of that round and
before, so they say nothing about it.

Shapes: `N` tree nodes, `C` candidates of all sets together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice
from grounded_rl.credit.selection import SelectionRecords
from grounded_rl.credit.tree import check_per_node, leaf_mask, node_levels, subtree_sums

NOT_FRESH = -1
"""`fresh_rounds` of a node that does not start a fresh branch."""
NO_EVENT = -1
"""`rounds` of a leaf without a selection event."""

EventRule = Literal["recent", "deepest", "release"]
RankedNodes = Literal["chosen", "candidates"]


@dataclass(frozen=True)
class LeafEvents:
    """The selection event of every leaf; 0 ranks and sizes and `-1` nodes and rounds where there is none."""

    nodes: torch.Tensor  # (N,) selected node
    rounds: torch.Tensor  # (N,) round of the selection
    ranks: torch.Tensor  # (N,) rank in its candidate set
    set_sizes: torch.Tensor  # (N,) size of the set

    @property
    def found(self) -> torch.Tensor:
        """`(N,)` mask of leaves with an event."""
        return self.rounds > NO_EVENT


def leaf_events(
    parents: torch.Tensor,
    fresh_rounds: torch.Tensor,
    records: SelectionRecords,
    *,
    rule: EventRule = "recent",
    ranked: RankedNodes = "chosen",
) -> LeafEvents:
    """
    Most recent applicable selection of every leaf.

    Walk from the leaf to the root, the root excluded under the first two rules (choosing a root means new rollouts,
    which have no incumbent):

    - `"recent"`: a selection of round `l` applies if every fresh branch passed so far was drawn before `l`. The latest
      applicable selection counts, the deeper node on a tie.
    - `"deepest"`: the first node that was selected counts, with its latest selection after it was drawn; a fresh node
      that was not selected ends the walk.
    - `"release"`: a fresh node ends the walk even if it was selected later; otherwise the first ranked node counts
      with its last ranking. Roots take part.

    SIPO ([Sec. 4.4](https://huggingface.co/papers/2609.34805), "Only actual selections qualify …").

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node of the final forest, `-1` for a root.
        fresh_rounds (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Round that drew the node as the head of a fresh branch, `-1` for all other nodes.
        records (`SelectionRecords`):
            Candidate sets of all rounds.
        rule (`str`, *optional*, defaults to `"recent"`):
            `"recent"`, `"deepest"` or `"release"`.
        ranked (`str`, *optional*, defaults to `"chosen"`):
            Which candidates carry an event: `"chosen"`, or all `"candidates"` of their last ranking, as in the
            released code.

    Returns:
        `LeafEvents`: Events per node; inner nodes have none.

    Raises:
        `ValueError`: If the shapes differ or an option is unknown.
    """
    check_per_node(parents, fresh_rounds=fresh_rounds)
    check_choice("rule", rule, ("recent", "deepest", "release"))
    check_choice("ranked", ranked, ("chosen", "candidates"))
    kept = records if ranked == "candidates" else records.where(records.chosen)
    last_row = _last_rows(kept, len(parents))
    if rule != "release":
        last_row = torch.where(parents >= 0, last_row, NO_EVENT)
    rows = _walk(parents, fresh_rounds, kept, last_row, rule)
    rows = torch.where(leaf_mask(parents), rows, NO_EVENT)
    found = rows >= 0
    if len(kept.nodes) == 0:
        absent = torch.full_like(parents, NO_EVENT)
        return LeafEvents(absent, absent, torch.zeros_like(parents), torch.zeros_like(parents))
    rows = rows.clamp(min=0)
    return LeafEvents(
        nodes=torch.where(found, kept.nodes[rows], NO_EVENT),
        rounds=torch.where(found, kept.rounds[rows], NO_EVENT),
        ranks=torch.where(found, kept.ranks[rows], 0),
        set_sizes=torch.where(found, kept.set_sizes[rows], 0),
    )


def _last_rows(records: SelectionRecords, num_nodes: int) -> torch.Tensor:
    """Row of the latest record of every node, `-1` where there is none."""
    order = torch.argsort(records.rounds, stable=True)
    last = torch.full((num_nodes,), NO_EVENT, dtype=torch.long, device=records.nodes.device)
    positions = torch.arange(len(order), device=order.device)
    last = last.scatter_reduce(0, records.nodes[order], positions, "amax")
    found = last >= 0
    last[found] = order[last[found]]
    return last


def _walk(
    parents: torch.Tensor, fresh_rounds: torch.Tensor, records: SelectionRecords, last_row: torch.Tensor, rule: str
) -> torch.Tensor:
    """Row of the event that every node inherits when it is the start of the walk, `-1` for none."""
    event_round = torch.full_like(parents, NO_EVENT)
    has_row = last_row >= 0
    event_round[has_row] = records.rounds[last_row[has_row]]
    # Parents come first, so what a node inherits from above is known when the node is reached. The walk up from a node
    # meets the node itself first: its own event wins on ties ("recent") or at once ("deepest", "release").
    inherited = torch.full_like(parents, NO_EVENT)
    inherited_round = torch.full_like(parents, NO_EVENT)
    for level in node_levels(parents):
        own, own_round, fresh = last_row[level], event_round[level], fresh_rounds[level]
        above = parents[level].clamp(min=0)
        is_root = parents[level] < 0
        up = torch.where(is_root, NO_EVENT, inherited[above])
        up_round = torch.where(is_root, NO_EVENT, inherited_round[above])
        own = torch.where(own_round > fresh, own, NO_EVENT)
        if rule == "recent":
            # A fresh node lets through only selections made after it was drawn.
            up = torch.where(up_round > fresh, up, NO_EVENT)
            take_own = (own >= 0) & (own_round >= up_round)
        else:
            is_fresh = fresh > NOT_FRESH
            up = torch.where(is_fresh, NO_EVENT, up)
            own = torch.where(is_fresh, NO_EVENT, own) if rule == "release" else own
            take_own = own >= 0
        inherited[level] = torch.where(take_own, own, up)
        inherited_round[level] = torch.where(take_own, own_round, torch.where(up >= 0, up_round, NO_EVENT))
    return inherited


def birth_rounds(parents: torch.Tensor, fresh_rounds: torch.Tensor) -> torch.Tensor:
    """
    Round in which every node was generated: the latest fresh branch on its path.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.
        fresh_rounds (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Round that drew the node as the head of a fresh branch, `-1` for all other nodes.

    Returns:
        `torch.Tensor` of shape `(N,)`, `torch.long`: Rounds; `-1` for nodes of the initial rollouts.
    """
    check_per_node(parents, fresh_rounds=fresh_rounds)
    births = fresh_rounds.clone()
    for level in node_levels(parents)[1:]:
        births[level] = torch.maximum(births[level], births[parents[level]])
    return births


def candidate_outcomes(
    parents: torch.Tensor,
    fresh_rounds: torch.Tensor,
    leaf_values: torch.Tensor,
    records: SelectionRecords,
    *,
    leaves: Literal["selection", "final"] = "selection",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Mean leaf value below every candidate.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node of the final forest, `-1` for a root.
        fresh_rounds (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Round that drew the node as the head of a fresh branch, `-1` for all other nodes.
        leaf_values (`torch.Tensor` of shape `(N,)`):
            Uncorrected value of every leaf; other entries are ignored, even when NaN.
        records (`SelectionRecords`):
            Candidate sets.
        leaves (`str`, *optional*, defaults to `"selection"`):
            `"selection"`: leaves that existed when the candidate was ranked. `"final"`: all leaves of the final tree.
        valid (`torch.Tensor` of shape `(N,)`, `torch.bool`, *optional*):
            Leaves that count.

    Returns:
        `torch.Tensor` of shape `(C,)`: Outcomes; NaN for a candidate without a counted leaf.

    Raises:
        `ValueError`: If the shapes differ or `leaves` is unknown.
    """
    check_per_node(parents, leaf_values=leaf_values, valid=valid)
    check_choice("leaves", leaves, ("selection", "final"))
    counted = leaf_mask(parents) if valid is None else leaf_mask(parents) & valid
    births = birth_rounds(parents, fresh_rounds)
    outcomes = leaf_values.new_full((len(records.nodes),), torch.nan)
    for selection_round in records.rounds.unique().tolist():
        alive = counted & (births < selection_round) if leaves == "selection" else counted
        sums = subtree_sums(parents, torch.where(alive, leaf_values, 0.0))
        means = sums / subtree_sums(parents, alive.to(sums.dtype))
        rows = records.rounds == selection_round
        outcomes[rows] = means[records.nodes[rows]]
    return outcomes
