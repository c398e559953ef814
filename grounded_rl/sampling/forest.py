"""Trees as the tensors that credit reads: one forest for a whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grounded_rl.credit.release import SIPOOptions
from grounded_rl.credit.selection import SelectionRecords, record_selections
from grounded_rl.credit.sipo import ExpandedTrees, SIPOCredit, sipo_credit
from grounded_rl.credit.tree import NO_NODE
from grounded_rl.rollouts.tree import Candidate, RolloutTree
from grounded_rl.rollouts.types import StopReason


@dataclass(frozen=True)
class Forest:
    """
    A batch of trees as one forest.

    Node `i` of tree `k` is node `starts[k] + i` of the forest. Leaves are in the order of the trees' leaves, which is
    the order of the rollouts.
    """

    trees: ExpandedTrees
    records: SelectionRecords
    starts: list[int]
    leaf_nodes: torch.Tensor  # (B,) node of every leaf

    def at_leaves(self, values: torch.Tensor) -> torch.Tensor:
        """Entries of a `(B,)` tensor at the nodes of their leaves, `(N,)`; NaN elsewhere."""
        spread = torch.full((len(self.trees.parents),), torch.nan, dtype=torch.float64)
        spread[self.leaf_nodes] = values.detach().cpu().double()
        return spread

    def credit(self, rewards: torch.Tensor, slope: float | None, *, weight: float, options: SIPOOptions) -> SIPOCredit:
        """Credit of the batch from the rewards of its leaves, `(B,)`; see `sipo_credit`."""
        return sipo_credit(self.trees, self.at_leaves(rewards), self.records, slope, weight=weight, options=options)

    def token_nodes(self, trees: Sequence[RolloutTree], length: int) -> torch.Tensor:
        """Forest node that sampled every completion token, `-1` for observations and padding, `(B, length)`."""
        owners = [
            [start + number] * len(node.turn.ids) + [NO_NODE] * len(node.turn.observation_ids)
            if node.turn is not None
            else []
            for tree, start in zip(trees, self.starts, strict=True)
            for number, node in enumerate(tree.nodes)
        ]
        return self._along_paths(trees, owners, length)

    def token_slots(self, trees: Sequence[RolloutTree], length: int) -> torch.Tensor:
        """Number of every sampled token among the distinct ones of the batch, `-1` elsewhere, `(B, length)`."""
        slots, first = [], 0
        for node in (node for tree in trees for node in tree.nodes):
            count = 0 if node.turn is None else len(node.turn.ids)
            observed = 0 if node.turn is None else len(node.turn.observation_ids)
            slots.append([*range(first, first + count), *([NO_NODE] * observed)])
            first += count
        return self._along_paths(trees, slots, length)

    def _along_paths(self, trees: Sequence[RolloutTree], entries: list[list[int]], length: int) -> torch.Tensor:
        """Entries of the tokens of every node, strung together along the path of every leaf."""
        rows = [
            [entry for node in tree.leaf_path(number) for entry in entries[start + node]]
            for tree, start in zip(trees, self.starts, strict=True)
            for number in range(len(tree.leaves))
        ]
        tensor = torch.full((len(rows), length), NO_NODE)
        for number, row in enumerate(rows):
            tensor[number, : len(row)] = torch.tensor(row, dtype=torch.long)
        return tensor


def build_forest(trees: Sequence[RolloutTree], valid: torch.Tensor | None = None) -> Forest:
    """
    The forest of a batch of trees.

    Args:
        trees (`Sequence[RolloutTree]`):
            The trees, finished.
        valid (`torch.Tensor` of shape `(B,)`, `torch.bool`, *optional*):
            Leaves that count, in the order of the trees' leaves. Those that did not fail if omitted.

    Returns:
        `Forest`: A turn without a surprisal has that of its parent; roots have 0.
    """
    parents: list[int] = []
    surprisals: list[float] = []
    starts: list[int] = []
    leaf_nodes: list[int] = []
    for tree in trees:
        start = len(parents)
        starts.append(start)
        for node in tree.nodes:
            parents.append(node.parent if node.parent < 0 else start + node.parent)
            inherited = 0.0 if node.parent < 0 else surprisals[start + node.parent]
            surprisals.append(inherited if node.surprisal is None else node.surprisal)
        leaf_nodes += [start + leaf.node for leaf in tree.leaves]
    if valid is None:
        valid = torch.tensor([leaf.stop is not StopReason.FAILED for tree in trees for leaf in tree.leaves])
    counted = torch.zeros(len(parents), dtype=torch.bool)
    counted[torch.tensor(leaf_nodes)] = valid.cpu().bool()
    expanded = ExpandedTrees(
        parents=torch.tensor(parents),
        surprisals=torch.tensor(surprisals, dtype=torch.float64),
        fresh_rounds=torch.tensor([node.created_round for tree in trees for node in tree.nodes]),
        valid=counted,
    )
    return Forest(expanded, _records(trees, starts), starts, torch.tensor(leaf_nodes))


def candidate_sets(tree: RolloutTree) -> dict[int, tuple[Candidate, ...]]:
    """The candidate set of every round, by rank."""
    return {selection.round: selection.candidates for selection in tree.selections}


def _records(trees: Sequence[RolloutTree], starts: list[int]) -> SelectionRecords:
    rows: list[tuple[int, int, int, float, float, bool]] = []
    num_sets = 0
    for tree, start in zip(trees, starts, strict=True):
        for played, candidates in candidate_sets(tree).items():
            chosen = {selection.incumbent for selection in tree.selections if selection.round == played}
            rows += [
                (start + each.node, num_sets, played, each.score, each.surprisal, each.node in chosen)
                for each in candidates
            ]
            num_sets += 1
    nodes, set_ids, rounds, scores, surprisals, is_chosen = zip(*rows, strict=True) if rows else ((),) * 6
    return record_selections(
        torch.tensor(nodes, dtype=torch.long),
        torch.tensor(set_ids, dtype=torch.long),
        torch.tensor(rounds, dtype=torch.long),
        scores=torch.tensor(scores, dtype=torch.float64),
        chosen=torch.tensor(is_chosen, dtype=torch.bool),
        surprisals=torch.tensor(surprisals, dtype=torch.float64),
    )
