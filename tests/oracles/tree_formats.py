"""Trees: AT²PO's values and selections, SIPO's released correction, the leaf budget."""

from __future__ import annotations

import torch

from grounded_rl.credit import (
    ExpandedTrees,
    blom,
    candidate_mask,
    fill_leaves,
    leaf_events,
    leaf_mask,
    node_advantages,
    record_selections,
    select_candidates,
    sfc_scores,
    sibling_counts,
    sipo_credit,
    sipo_options,
    spread_to_tokens,
    standardized_leaf_values,
    tree_values,
)
from grounded_rl.credit.events import birth_rounds
from tests.oracles.comparison import Differences

VALUE_MODES = {"child_softmax": "softmax", "child_mean": "uniform", "leaf_mean": "leaf_count"}
ADVANTAGE_MODES = {
    "node_value": "node_value",
    "diff_parent": "minus_parent",
    "diff_global": "minus_root",
    "diff_localglobal": "minus_both",
}


class RecordedTree:
    """Tensors of a recorded tree; nodes are in breadth-first order."""

    def __init__(self, record: dict) -> None:
        self.nodes = record["tree"]
        self.names = [node["id"] for node in self.nodes]
        self.index = {name: position for position, name in enumerate(self.names)}
        self.parents = torch.tensor(
            [-1 if node["parent"] is None else self.index[node["parent"]] for node in self.nodes]
        )
        self.surprisals = torch.tensor([node["entropy"] for node in self.nodes], dtype=torch.float64)
        self.fresh_rounds = torch.tensor(
            [-1 if node["created_iter"] is None else node["created_iter"] for node in self.nodes]
        )
        self.rewards = self.by_node(record["reward"])
        self.leaves = [self.index[name] for name in record["leaves"]]

    def by_node(self, entries: dict[str, float]) -> torch.Tensor:
        """Recorded entries by node, NaN where there is none."""
        return torch.tensor([entries.get(name, torch.nan) for name in self.names], dtype=torch.float64)

    def token_nodes(self, leaf: int) -> torch.Tensor:
        """Node of every completion token of a leaf's rollout, tool output included, as the recording counts them."""
        path = [leaf]
        while self.parents[path[-1]] >= 0:
            path.append(int(self.parents[path[-1]]))
        lengths = [self.nodes[node]["len"] for node in reversed(path)]
        counts = torch.tensor(lengths) - torch.tensor([0, *lengths[:-1]])
        return torch.repeat_interleave(torch.tensor(path[::-1]), counts)[None]


def compare_tokens(
    result: Differences, name: str, tree: RecordedTree, advantages: torch.Tensor, recorded: list
) -> None:
    for leaf, segments in zip(tree.leaves, recorded, strict=True):
        expected = [value for start, end, value in segments for _ in range(end - start)]
        result.compare(
            f"{name} of {tree.names[leaf]}", spread_to_tokens(advantages, tree.token_nodes(leaf))[0], expected
        )


def compare_event(
    result: Differences, name: str, tree: RecordedTree, event: dict, num_selected: int, **options
) -> None:
    """Rebuild the tree as it was at an expansion round and repeat the selection."""
    existing = birth_rounds(tree.parents, tree.fresh_rounds) < event["iter"]
    position = existing.long().cumsum(0) - 1
    parents = tree.parents[existing]
    parents = torch.where(parents >= 0, position[parents.clamp(min=0)], -1)
    names = [name for name, kept in zip(tree.names, existing.tolist(), strict=True) if kept]
    candidates = candidate_mask(parents, torch.ones_like(parents, dtype=torch.bool), root_candidate="always")
    if not candidates.any():
        candidates = parents < 0
    chosen = candidates.nonzero().squeeze(1)
    result.compare(f"{name} candidates", [names[node] for node in chosen], event["candidates"])
    counts = sibling_counts(parents)[chosen]
    result.compare(f"{name} siblings", counts, event["n_sib"])
    scores = sfc_scores(torch.tensor(event["entropy"], dtype=torch.float64), counts, **options)
    if "score" in event:
        result.compare(f"{name} score", scores, event["score"])
    picked = [event["candidates"][entry] for entry in select_candidates(scores, num_selected)]
    result.compare(f"{name} selected", picked, event["selected"])
    for new, selected, parent, *_ in event["new"]:
        source = tree.index[selected]
        expected = source if tree.parents[source] < 0 else int(tree.parents[source])
        result.compare(f"{name} parent of {new}", tree.names[expected], parent)
        result.compare(f"{name} parent of {new} in the tree", int(tree.parents[tree.index[new]]), expected)


def at2po_tree(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        tree = RecordedTree(case)
        for event in case["events"]:
            compare_event(result, f"case {number}, round {event['iter']}", tree, event, case["K"], standardize=False)
        values = standardized_leaf_values(tree.parents, tree.rewards)
        normalised = [values[tree.index[name]] for name in case["leaf_norm"]]
        result.compare(f"case {number} leaf_norm", normalised, list(case["leaf_norm"].values()))
        for modes, recorded in case["out"].items():
            value_mode, advantage_mode = modes.split("/")
            backed = tree_values(tree.parents, tree.surprisals, values, weights=VALUE_MODES[value_mode])
            advantages = node_advantages(tree.parents, backed, mode=ADVANTAGE_MODES[advantage_mode])
            result.compare(f"case {number} {modes} value", backed, tree.by_node(recorded["value"]))
            result.compare(f"case {number} {modes} advantage", advantages, tree.by_node(recorded["advantage"]))
            compare_tokens(result, f"case {number} {modes}", tree, advantages, recorded["token_segments"])
    return result


def at2po_leaf_budget(oracle: dict) -> Differences:
    """Only the leaves and their parents are recorded; any tree with these leaves in this order will do."""
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        originals = case["result_parent"][: len(case["leaves"])]
        inner = list(dict.fromkeys(originals))
        # A chain of inner nodes, each keeping the breadth-first order of the leaves that follow it.
        parents = torch.tensor([-1, *range(len(inner) - 1), *[inner.index(parent) for parent in originals]])
        filled, copies = fill_leaves(parents, case["n"])
        names = [*inner, *case["leaves"]]
        added = [f"{names[source]}_dup{count}" for count, source in enumerate(copies[len(parents) :], start=1)]
        result.compare(f"case {number} leaves", case["leaves"] + added, case["result"])
        owners = [inner[parent] for parent in filled[len(inner) :]]
        result.compare(f"case {number} parents", owners, case["result_parent"])
        result.compare(f"case {number} count", int(leaf_mask(filled).sum()), len(case["result"]))
    return result


def forest(trees: list[RecordedTree]) -> tuple[ExpandedTrees, torch.Tensor, torch.Tensor]:
    sizes = torch.tensor([len(tree.parents) for tree in trees])
    offsets = sizes.cumsum(0) - sizes
    parents = [
        torch.where(tree.parents >= 0, tree.parents + offset, -1) for tree, offset in zip(trees, offsets, strict=True)
    ]
    expanded = ExpandedTrees(
        torch.cat(parents),
        torch.cat([tree.surprisals for tree in trees]),
        torch.cat([tree.fresh_rounds for tree in trees]),
    )
    return expanded, torch.cat([tree.rewards for tree in trees]), offsets


def selection_rows(trees: list[RecordedTree], records: list[dict], offsets: torch.Tensor):
    """Selection records of a recorded batch, scores as recorded."""
    columns: dict[str, list] = {name: [] for name in ("nodes", "set_ids", "rounds", "scores", "surprisals", "chosen")}
    for number, (tree, record) in enumerate(zip(trees, records, strict=True)):
        for event in record["events"]:
            columns["nodes"] += [int(offsets[number]) + tree.index[name] for name in event["candidates"]]
            columns["set_ids"] += [number * 1000 + event["iter"]] * len(event["candidates"])
            columns["rounds"] += [event["iter"]] * len(event["candidates"])
            columns["scores"] += event["score"]
            columns["surprisals"] += event["entropy"]
            columns["chosen"] += [name in event["selected"] for name in event["candidates"]]
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    return record_selections(
        tensors["nodes"],
        tensors["set_ids"],
        tensors["rounds"],
        scores=tensors["scores"].double(),
        chosen=tensors["chosen"].bool(),
        surprisals=tensors["surprisals"].double(),
    )


def sipo(oracle: dict) -> Differences:
    """The released code's behaviour: every switch on `release`."""
    result = Differences()
    for entry in oracle["blom"]:
        result.compare(f"h({entry['r']}, {entry['n']})", blom(entry["r"], entry["n"]), entry["h"])
    for number, case in enumerate(oracle["cases"]):
        trees = [RecordedTree(record) for record in case["trees"]]
        for position, (tree, record) in enumerate(zip(trees, case["trees"], strict=True)):
            for event in record["events"]:
                name = f"case {number}, tree {position}, round {event['iter']}"
                compare_event(result, name, tree, event, case["K"], spread="absolute")
        expanded, rewards, offsets = forest(trees)
        records = selection_rows(trees, case["trees"], offsets)
        credit = sipo_credit(
            expanded, rewards, records, case["a2_in"], weight=case["weight"], options=sipo_options("release")
        )
        for position, (tree, record) in enumerate(zip(trees, case["trees"], strict=True)):
            compare_sipo_tree(result, f"case {number}, tree {position}", tree, record, credit, int(offsets[position]))
        compare_last_ranks(result, f"case {number}", trees, expanded, records, offsets)
        result.compare(f"case {number} a2_next", credit.slope_sums.estimate(), case["a2_next"])
        result.compare(f"case {number} a2_n", credit.slope_sums.count, case["a2_n"])
        result.compare(
            f"case {number} a2 without floor", credit.slope_sums.estimate(min_count=1), case["a2_next_if_min1"]
        )
    return result


def compare_sipo_tree(result: Differences, name: str, tree: RecordedTree, record: dict, credit, offset: int) -> None:
    rows = [offset + tree.index[leaf] for leaf in record["leaves"]]
    result.compare(
        f"{name} leaf_norm", credit.leaf_values[rows], [record["leaf_norm"][leaf] for leaf in record["leaves"]]
    )
    units = [None if node < 0 else tree.names[node - offset] for node in credit.events.nodes[rows].tolist()]
    result.compare(f"{name} unit", units, [record["official_osc_unit"][leaf] for leaf in record["leaves"]])
    corrected = [record["leaf_corrected"][leaf] for leaf in record["leaves"]]
    result.compare(f"{name} leaf_corrected", credit.corrected[rows], corrected)
    values = credit.values[offset : offset + len(tree.names)]
    result.compare(f"{name} value", values, tree.by_node(record["value"]))
    compare_tokens(result, name, tree, values, record["token_segments"])


def compare_last_ranks(result: Differences, name: str, trees, expanded, records, offsets) -> None:
    """
    Rank and set size of the last ranking every node took part in, read off a forest in which each node is a leaf.
    """
    num_nodes = len(expanded.parents)
    nodes_as_leaves = torch.cat([torch.full((1,), -1), torch.zeros(num_nodes, dtype=torch.long)])
    shifted = record_selections(
        records.nodes + 1, records.set_ids, records.rounds, scores=records.scores, chosen=records.chosen
    )
    never_fresh = torch.full_like(nodes_as_leaves, -1)
    events = leaf_events(nodes_as_leaves, never_fresh, shifted, rule="release", ranked="candidates")
    for tree, offset in zip(trees, offsets.tolist(), strict=True):
        rows = slice(1 + offset, 1 + offset + len(tree.names))
        result.compare(f"{name} sel_rank", events.ranks[rows], [node["sel_rank"] or 0 for node in tree.nodes])
        result.compare(f"{name} sel_ncand", events.set_sizes[rows], [node["sel_ncand"] or 0 for node in tree.nodes])
