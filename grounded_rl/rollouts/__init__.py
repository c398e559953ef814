"""Rollouts as data: types, invariants and JSON Lines."""

from grounded_rl.rollouts.io import iterate_rollouts, load_rollouts, save_rollouts
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
    "FinishReason",
    "Group",
    "Rollout",
    "ShownPassage",
    "StopReason",
    "Turn",
    "TurnKind",
    "iterate_rollouts",
    "load_rollouts",
    "save_rollouts",
]
