"""
Reinforcement learning of LLM search agents on TRL, with credit for every token of a rollout.

The names below load on first use, so that importing the package costs nothing and needs no accelerator library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from grounded_rl.trainers import (
        GCAConfig,
        GCATrainer,
        SearchAgentConfig,
        SearchAgentTrainer,
        SIPOConfig,
        SIPOTrainer,
    )

__all__ = [
    "GCAConfig",
    "GCATrainer",
    "SIPOConfig",
    "SIPOTrainer",
    "SearchAgentConfig",
    "SearchAgentTrainer",
    "__version__",
]

_HOMES = {
    "GCAConfig": "grounded_rl.trainers",
    "GCATrainer": "grounded_rl.trainers",
    "SIPOConfig": "grounded_rl.trainers",
    "SIPOTrainer": "grounded_rl.trainers",
    "SearchAgentConfig": "grounded_rl.trainers",
    "SearchAgentTrainer": "grounded_rl.trainers",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
