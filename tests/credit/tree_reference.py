"""
Trees, selections and their credit as naive loops over Python objects, straight from the definitions.

`grow` simulates the rollout engine: initial rollouts, then rounds of ranking, choosing and branching. What it returns
in tensors is what the package sees; everything else is recomputed here node by node.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist

import torch
from hypothesis import strategies as st

from grounded_rl.credit import (
    ExpandedTrees,
    SelectionRecords,
    candidate_mask,
    record_selections,
    sfc_scores,
    sibling_counts,
)


@dataclass(eq=False, repr=False)
class RefNode:
    parent: RefNode | None
    surprisal: float
    fresh_round: int = -1
    ended: bool = False
    children: list[RefNode] = field(default_factory=list)
    reward: float = math.nan

    def path(self) -> list[RefNode]:
        """The node and its ancestors, the root last."""
        return [self] + (self.parent.path() if self.parent else [])

    def leaves(self) -> list[RefNode]:
        return [leaf for child in self.children for leaf in child.leaves()] if self.children else [self]

    def birth(self) -> int:
        return max(node.fresh_round for node in self.path())


@dataclass
class RefSet:
    """A candidate set: one tree at one round."""

    round: int
    nodes: list[RefNode]
    scores: list[float]
    chosen: list[RefNode]
    leaves: list[list[RefNode]]  # of every candidate, at the moment of selection

    def rank(self, node: RefNode) -> int:
        mine = self.nodes.index(node)
        ahead = [s > self.scores[mine] or (s == self.scores[mine] and i < mine) for i, s in enumerate(self.scores)]
        return 1 + sum(ahead)


@dataclass
class RefTree:
    root: RefNode
    sets: list[RefSet]
    fresh: list[tuple[RefNode, list[RefNode]]]  # incumbent (or the root) and its fresh siblings

    def nodes(self) -> list[RefNode]:
        """Breadth-first, children in the order of creation."""
        order = [self.root]
        for node in order:
            order.extend(node.children)
        return order


def grow(
    rng: random.Random,
    *,
    num_initial: int = 4,
    num_rounds: int = 2,
    num_chosen: int = 2,
    num_fresh: int = 2,
    depth: int = 4,
) -> RefTree:
    """Simulate a tree; every turn ends the rollout with some probability, and always at `depth`."""

    def roll_on(node: RefNode) -> None:
        while not node.ended:
            child = RefNode(node, round(rng.uniform(0.05, 1.5), 3))
            child.ended = len(child.path()) > depth or rng.random() < 0.4
            node.children.append(child)
            node = child
        node.reward = float(rng.random() < 0.4)

    def branch(parent: RefNode, fresh_round: int) -> RefNode:
        child = RefNode(parent, round(rng.uniform(0.05, 1.5), 3), fresh_round)
        child.ended = len(child.path()) > depth or rng.random() < 0.4
        parent.children.append(child)
        roll_on(child)
        return child

    tree = RefTree(RefNode(None, math.nan), [], [])
    for _ in range(num_initial):
        branch(tree.root, -1)
    for expansion in range(num_rounds):
        candidates = [node for node in tree.nodes() if node.children and node.parent] or [tree.root]
        scores = reference_scores(candidates)
        order = sorted(range(len(candidates)), key=lambda i: (-scores[i], i))
        slots = [candidates[order[slot % len(order)]] for slot in range(num_chosen)]
        leaves = [node.leaves() for node in candidates]
        tree.sets.append(RefSet(expansion, candidates, scores, slots, leaves))
        for node in slots:
            tree.fresh.append((node, [branch(node.parent or node, expansion) for _ in range(num_fresh)]))
    return tree


def reference_scores(candidates: list[RefNode], penalty: float = 0.05) -> list[float]:
    surprisals = [0.0 if node.parent is None else node.surprisal for node in candidates]
    mean = sum(surprisals) / len(surprisals)
    spread = math.sqrt(sum((s - mean) ** 2 for s in surprisals) / len(surprisals))
    flat = max(surprisals) == min(surprisals)
    siblings = [len((node.parent or node).children) - 1 for node in candidates]
    return [
        (0.0 if flat else (s - mean) / max(spread, 1e-6)) - penalty * b
        for s, b in zip(surprisals, siblings, strict=True)
    ]


@dataclass
class Batch:
    """The tensors of several trees as one forest, with the nodes they came from."""

    trees: list[RefTree]
    nodes: list[RefNode]
    expanded: ExpandedTrees
    rewards: torch.Tensor
    records: SelectionRecords


def batch_of(trees: list[RefTree]) -> Batch:
    nodes = [node for tree in trees for node in tree.nodes()]
    index = {id(node): position for position, node in enumerate(nodes)}
    columns: dict[str, list] = {name: [] for name in ("nodes", "set_ids", "rounds", "scores", "surprisals", "chosen")}
    for number, tree in enumerate(trees):
        for candidate_set in tree.sets:
            for node, score in zip(candidate_set.nodes, candidate_set.scores, strict=True):
                columns["nodes"].append(index[id(node)])
                columns["set_ids"].append(100 * number + candidate_set.round)
                columns["rounds"].append(candidate_set.round)
                columns["scores"].append(score)
                columns["surprisals"].append(node.surprisal)
                columns["chosen"].append(node in candidate_set.chosen)
    longs = {name: torch.tensor(columns[name], dtype=torch.long) for name in ("nodes", "set_ids", "rounds")}
    records = record_selections(
        **longs,
        scores=torch.tensor(columns["scores"], dtype=torch.float64),
        surprisals=torch.tensor(columns["surprisals"], dtype=torch.float64),
        chosen=torch.tensor(columns["chosen"], dtype=torch.bool),
    )
    expanded = ExpandedTrees(
        parents=torch.tensor([-1 if node.parent is None else index[id(node.parent)] for node in nodes]),
        surprisals=torch.tensor([node.surprisal for node in nodes], dtype=torch.float64),
        fresh_rounds=torch.tensor([node.fresh_round for node in nodes]),
    )
    rewards = torch.tensor([node.reward for node in nodes], dtype=torch.float64)
    return Batch(trees, nodes, expanded, rewards, records)


@st.composite
def tree_batches(draw: st.DrawFn, max_trees: int = 3) -> Batch:
    """Batches of ragged trees: shallow and deep, without any search, with one candidate, with equal rewards."""
    rng = random.Random(draw(st.integers(0, 2**32 - 1)))
    trees = [
        grow(
            rng,
            num_initial=draw(st.integers(1, 5)),
            num_rounds=draw(st.integers(0, 3)),
            num_chosen=draw(st.integers(1, 3)),
            num_fresh=draw(st.integers(1, 3)),
            depth=draw(st.integers(1, 5)),
        )
        for _ in range(draw(st.integers(1, max_trees)))
    ]
    return batch_of(trees)


def reference_leaf_values(tree: RefTree, epsilon: float = 1e-6) -> dict[RefNode, float]:
    leaves = tree.root.leaves()
    mean = sum(leaf.reward for leaf in leaves) / len(leaves)
    spread = math.sqrt(sum((leaf.reward - mean) ** 2 for leaf in leaves) / len(leaves))
    if max(leaf.reward for leaf in leaves) == min(leaf.reward for leaf in leaves):
        return dict.fromkeys(leaves, 0.0)
    return {leaf: (leaf.reward - mean) / (spread + epsilon) for leaf in leaves}


def reference_weights(node: RefNode, kind: str) -> list[float]:
    """Shares of a node's children."""
    surprisals = [child.surprisal for child in node.children]
    if kind == "softmax":
        masses = [math.exp(s) for s in surprisals]
    elif kind == "proportional":
        masses = surprisals
    elif kind == "leaf_count":
        masses = [float(len(child.leaves())) for child in node.children]
    else:
        masses = [1.0] * len(surprisals)
    return [mass / sum(masses) for mass in masses]


def reference_value(node: RefNode, leaf_values: dict[RefNode, float], kind: str = "softmax") -> float:
    if not node.children:
        return leaf_values[node]
    shares = reference_weights(node, kind)
    return sum(
        share * reference_value(child, leaf_values, kind) for share, child in zip(shares, node.children, strict=True)
    )


Event = tuple[RefNode, int, int, int]
"""Node, round, rank, set size."""


def reference_events(tree: RefTree, node: RefNode, ranked: str = "chosen") -> list[Event]:
    """Every event of a node, earliest first."""
    return [
        (node, group.round, group.rank(node), len(group.nodes))
        for group in tree.sets
        if node in (group.chosen if ranked == "chosen" else group.nodes)
    ]


def reference_event(tree: RefTree, leaf: RefNode, rule: str, ranked: str = "chosen") -> Event | None:
    """The event of a leaf by the definition of the rule."""
    path = leaf.path()
    if rule == "recent":
        applicable = []
        for depth, node in enumerate(path[:-1]):
            fresh = [below.fresh_round for below in path[: depth + 1] if below.fresh_round >= 0]
            applicable += [
                (event[1], -depth, event)
                for event in reference_events(tree, node, ranked)
                if all(event[1] > drawn for drawn in fresh)
            ]
        return max(applicable, key=lambda entry: entry[:2])[2] if applicable else None
    for node in path if rule == "release" else path[:-1]:
        is_fresh = node.fresh_round >= 0
        if rule == "release" and is_fresh:
            return None
        events = [event for event in reference_events(tree, node, ranked) if event[1] > node.fresh_round]
        if events:
            return events[-1]
        if is_fresh:
            return None
    return None


def reference_blom(rank: int, size: int) -> float:
    if not 1 <= rank <= size:
        return 0.0
    return NormalDist().inv_cdf((size - rank + 1 - 0.375) / (size + 0.25))


def reference_slope(trees: list[RefTree]) -> tuple[float, float, int]:
    """Numerator, denominator and number of candidates over selection-time sets."""
    numerator = denominator = 0.0
    count = 0
    for tree in trees:
        values = reference_leaf_values(tree)
        for group in tree.sets:
            if max(group.scores) == min(group.scores):
                continue
            mean = sum(group.scores) / len(group.scores)
            spread = math.sqrt(sum((score - mean) ** 2 for score in group.scores) / len(group.scores))
            for score, leaves in zip(group.scores, group.leaves, strict=True):
                z = (score - mean) / max(spread, 1e-6)
                numerator += z * sum(values[leaf] for leaf in leaves) / len(leaves)
                denominator += z * z
                count += 1
    return numerator, denominator, count


def worked_tree() -> tuple[ExpandedTrees, torch.Tensor, SelectionRecords]:
    """
    Three first turns v1 (then leaf l1, wrong), v2 (then l2, right) and v3 (direct wrong answer); v1 chosen before v2
    in round 0, two fresh siblings f1 (right) and f2 (wrong).
    """
    #                root  v1    v2    v3    f1    f2    l1   l2
    parents = torch.tensor([-1, 0, 0, 0, 0, 0, 1, 2])
    surprisals = torch.tensor([math.nan, 0.55, 0.30, 0.40, 0.45, 0.35, 0.2, 0.9], dtype=torch.float64)
    fresh = torch.tensor([-1, -1, -1, -1, 0, 0, -1, -1])
    rewards = torch.tensor([math.nan, math.nan, math.nan, 0.0, 1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    at_selection = torch.tensor([-1, 0, 0, 0, 1, 2])
    candidates = candidate_mask(at_selection, torch.tensor([False] + [True] * 5)).nonzero().squeeze(1)
    scores = sfc_scores(surprisals[candidates], sibling_counts(at_selection)[candidates])
    records = record_selections(
        candidates,
        torch.tensor([0, 0]),
        torch.tensor([0, 0]),
        scores=scores,
        chosen=torch.tensor([True, False]),
        surprisals=surprisals[candidates],
    )
    return ExpandedTrees(parents, surprisals, fresh), rewards, records
