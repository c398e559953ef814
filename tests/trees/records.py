"""A tree small enough to count."""

from __future__ import annotations

from grounded_rl.rollouts import Candidate, Leaf, Node, RolloutTree, Selection, StopReason
from tests.builders import answer_turn, search_turn

FIRST = search_turn("Paris is the capital.", ids=(1, 2), logps=(-0.5, -1.5))
SECOND = search_turn(ids=(3,))


def make_tree(**fields) -> RolloutTree:
    """Root, a search with two continuations, and a direct answer; node 5 is fresh from round 0."""
    candidates = (Candidate(1, 1.0, 1, 0.4, 1, leaves=(4,)), Candidate(3, 0.25, 0, -0.5, 2, leaves=(4,)))
    values = {
        "question_id": "q1",
        "question": "What is the capital of France?",
        "answers": ("Paris",),
        "prompt_ids": (50, 51),
        "nodes": (
            Node(-1, None),
            Node(0, FIRST, surprisal=1.0, advantage=0.5),
            Node(0, answer_turn("Lyon", ids=(4, 5, 6)), surprisal=0.1, advantage=-1.0),
            Node(1, SECOND, surprisal=0.25, advantage=0.5),
            Node(3, answer_turn("Paris", ids=(7,), advantages=(0.75,)), advantage=0.5),
            Node(1, answer_turn("Rome", ids=(8, 9)), created_round=0),
        ),
        "leaves": (
            Leaf(4, StopReason.ANSWER, "Paris", {"em": 1.0}, value=1.0, corrected=1.1),
            Leaf(2, StopReason.ANSWER, "Lyon", {"em": 0.0, "format": None}, masked=True),
            Leaf(5, StopReason.FAILED, error="no index"),
        ),
        "selections": (Selection(7, 2, 0, 1, 3, candidates, fresh=(5,), boundary=6),),
        "step": 7,
        "number": 2,
        "question_kind": "capital",
        "extras": {"slope": -0.1},
        **fields,
    }
    return RolloutTree(**values)
