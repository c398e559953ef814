"""Rollouts as data: types, invariants and JSON Lines."""

from grounded_rl.rollouts.io import iterate_rollouts, load_rollouts, load_trees, save_rollouts, save_trees
from grounded_rl.rollouts.tree import Candidate, Leaf, Node, RolloutTree, Selection
from grounded_rl.rollouts.types import (
    Call,
    CallStatus,
    FinishReason,
    Group,
    Rollout,
    ShownPassage,
    StopReason,
    Turn,
    TurnKind,
)

__all__ = [
    "Call",
    "CallStatus",
    "Candidate",
    "FinishReason",
    "Group",
    "Leaf",
    "Node",
    "Rollout",
    "RolloutTree",
    "Selection",
    "ShownPassage",
    "StopReason",
    "Turn",
    "TurnKind",
    "iterate_rollouts",
    "load_rollouts",
    "load_trees",
    "save_rollouts",
    "save_trees",
]
