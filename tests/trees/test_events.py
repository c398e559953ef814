"""The event rules on whole trees with their records: the worked examples that tell the rules apart."""

from __future__ import annotations

import pytest
import torch

from grounded_rl.credit import leaf_events, sipo_options
from grounded_rl.rollouts import (
    Candidate,
    FinishReason,
    Leaf,
    Node,
    RolloutTree,
    Selection,
    StopReason,
    Turn,
    TurnKind,
)
from grounded_rl.sampling import build_forest


def turn() -> Turn:
    return Turn((1,), "", TurnKind.ANSWER, FinishReason.STOP)


def make_tree(parents, chosen=(), *, fresh=None, surprisals=None, losers=()) -> RolloutTree:
    """
    A tree from the parents of its nodes.

    `chosen` holds `(round, node)`, `losers` the same for candidates that were not chosen; within a round the chosen
    rank first. `fresh` gives the round of every fresh head.
    """
    fresh, surprisals = fresh or {}, surprisals or {}
    nodes = [Node(-1, None)] + [
        Node(parent, turn(), surprisal=surprisals.get(number, 0.5), created_round=fresh.get(number, -1))
        for number, parent in enumerate(parents, start=1)
    ]
    selections = []
    for played in sorted({played for played, _ in chosen}):
        best = [node for own, node in chosen if own == played]
        ranked = best + [node for own, node in losers if own == played]
        candidates = tuple(
            Candidate(node, surprisals.get(node, 0.5), 0, -float(rank), rank)
            for rank, node in enumerate(ranked, start=1)
        )
        selections += [
            Selection(0, 0, played, max(0, nodes[node].parent), node, candidates, fresh=(), boundary=1)
            for node in best
        ]
    leaves = tuple(
        Leaf(number, StopReason.ANSWER)
        for number in range(1, len(nodes))
        if number not in {node.parent for node in nodes}
    )
    return RolloutTree("q", "?", ("a",), (0,), tuple(nodes), leaves, tuple(selections))


def events(tree: RolloutTree, rule: str) -> dict[int, tuple[int, int] | None]:
    """Selected node and round of every leaf's event."""
    forest = build_forest([tree])
    found = leaf_events(forest.trees.parents, forest.trees.fresh_rounds, forest.records, rule=rule)
    pairs = zip(found.nodes.tolist(), found.rounds.tolist(), strict=True)
    by_node = {number: None if node < 0 else (node, played) for number, (node, played) in enumerate(pairs)}
    return {leaf.node: by_node[leaf.node] for leaf in tree.leaves}


@pytest.mark.parametrize("rule", ["recent", "deepest", "release"])
def test_a_leaf_below_an_incumbent_inherits_its_event_and_a_fresh_one_does_not(rule):
    # v = 1 with leaf 2; fresh sibling 3.
    tree = make_tree([0, 1, 0], [(0, 1)], fresh={3: 0})
    assert events(tree, rule) == {2: (1, 0), 3: None}


@pytest.mark.parametrize(("rule", "expected"), [("recent", (3, 1)), ("deepest", (3, 1)), ("release", None)])
def test_a_fresh_branch_that_is_selected_later_has_an_event_in_the_paper_only(rule, expected):
    # f = 3 (fresh from round 0) with leaf 4 is selected in round 1; its own fresh sibling is 5.
    tree = make_tree([0, 1, 0, 3, 0], [(0, 1), (1, 3)], fresh={3: 0, 5: 1})
    assert events(tree, rule) == {2: (1, 0), 4: expected, 5: None}


@pytest.mark.parametrize(("rule", "expected"), [("recent", (1, 1)), ("deepest", (2, 0)), ("release", (2, 0))])
def test_the_latest_selection_on_a_path_counts_or_the_deepest(rule, expected):
    # Path 1 - 2 - 3: node 2 is selected first, its parent a round later.
    tree = make_tree([0, 1, 2], [(0, 2), (1, 1)])
    assert events(tree, rule) == {3: expected}


@pytest.mark.parametrize(("rule", "expected"), [("recent", (1, 1)), ("deepest", None), ("release", None)])
def test_a_later_selection_above_a_fresh_branch_covers_it_or_not(rule, expected):
    # Below node 1 the fresh branch 3 was drawn in round 0; node 1 is selected in round 1.
    tree = make_tree([0, 1, 1], [(0, 2), (1, 1)], fresh={3: 0})
    assert events(tree, rule)[3] == expected


@pytest.mark.parametrize("rule", ["recent", "deepest"])
def test_two_selections_of_one_round_on_a_path_count_at_the_deeper_node(rule):
    tree = make_tree([0, 1, 2], [(1, 1), (1, 2)])
    assert events(tree, rule) == {3: (2, 1)}


def test_a_node_selected_twice_has_its_last_rank_and_set():
    tree = make_tree([0, 1, 0, 3], [(0, 1), (1, 3), (1, 1)], losers=[(0, 3)])
    forest = build_forest([tree])
    found = leaf_events(forest.trees.parents, forest.trees.fresh_rounds, forest.records)
    # Round 1 ranks node 3 before node 1.
    assert (int(found.rounds[2]), int(found.ranks[2]), int(found.set_sizes[2])) == (1, 2, 2)


def test_a_direct_answer_has_no_event():
    tree = make_tree([0, 1, 0], [(0, 1)])
    assert events(tree, "recent")[3] is None


def test_the_worked_tree_of_one_round_is_corrected_and_valued_as_by_hand():
    # v1 -> l1 (wrong), v2 -> l2 (right), v3 (wrong) answers at once; v1 is chosen among {v1, v2}; f1 right, f2 wrong.
    tree = make_tree(
        [0, 0, 0, 1, 2, 0, 0],
        [(0, 1)],
        losers=[(0, 2)],
        fresh={6: 0, 7: 0},
        surprisals={1: 0.55, 2: 0.30, 3: 0.40, 6: 0.45, 7: 0.35},
    )
    rewards = {4: 0.0, 5: 1.0, 3: 0.0, 6: 1.0, 7: 0.0}
    forest = build_forest([tree])
    credit = forest.credit(
        torch.tensor([rewards[leaf.node] for leaf in tree.leaves]), -0.12, weight=1.0, options=sipo_options()
    )
    # mean 0.4, sd 0.489898; h(1, 2) = 0.589456, so l1 moves by 0.12 * 0.589456.
    assert credit.corrected[[4, 5, 3, 6, 7]].tolist() == pytest.approx(
        [-0.745760, 1.224742, -0.816495, 1.224742, -0.816495], abs=2e-6
    )
    # Chains of one child copy their leaf; the root weighs by the softmax of (0.55, 0.30, 0.40, 0.45, 0.35).
    assert credit.values[[1, 2]].tolist() == pytest.approx([-0.745760, 1.224742], abs=2e-6)
    assert credit.values[0].item() == pytest.approx(-0.012604, abs=2e-6)
