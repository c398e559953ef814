"""
Training methods by the name recipes use.

A method is a trainer and the configuration whose defaults make it that method. To add one: write its trainer and
config in `grounded_rl.trainers`, add an entry here and a recipe under `recipes/`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["METHODS", "Method"]


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train a search agent."""

    name: str
    summary: str
    trainer: str
    """Class in `grounded_rl.trainers`."""
    config: str
    """Dataclass in `grounded_rl.trainers`."""

    def load_trainer(self) -> type:
        """The trainer class; imports TRL."""
        return getattr(importlib.import_module("grounded_rl.trainers"), self.trainer)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        method.name: method
        for method in (
            Method("grpo", "GRPO on whole rollouts (Search-R1)", "SearchAgentTrainer", "SearchAgentConfig"),
            Method("gspo_token", "GSPO with one gradient per token", "SearchAgentTrainer", "GSPOTokenConfig"),
            Method("gca", "Grounded credit assignment", "GCATrainer", "GCAConfig"),
            Method("at2po", "Trees of rollouts with turn-level policy optimisation", "SIPOTrainer", "AT2POConfig"),
            Method("sipo", "AT²PO with values corrected for the selection of branches", "SIPOTrainer", "SIPOConfig"),
            Method("gca_sipo", "Grounded credit assignment on SIPO's trees", "GCASIPOTrainer", "GCASIPOConfig"),
        )
    }
)
"""Every method, by name."""
