"""How a recomputed value is compared with a recorded one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

TOLERANCE = 1e-5
"""Recorded floats have nine digits and were mostly computed in single precision."""


def flatten(value: Any) -> list[Any]:
    """Leaves of nested lists and tensors, in order."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return [leaf for entry in value for leaf in flatten(entry)] if isinstance(value, (list, tuple)) else [value]


def difference(ours: Any, recorded: Any) -> float:
    """Absolute difference; unequal texts, flags, missing values or NaN on one side only differ infinitely."""
    if isinstance(ours, (int, float)) and isinstance(recorded, (int, float)):
        ours, recorded = float(ours), float(recorded)
        if math.isnan(ours) or math.isnan(recorded):
            return 0.0 if math.isnan(ours) and math.isnan(recorded) else math.inf
        return 0.0 if ours == recorded else abs(ours - recorded)
    return 0.0 if ours == recorded else math.inf


@dataclass
class Differences:
    """Largest difference seen, and where."""

    num_values: int = 0
    largest: float = 0.0
    where: str = ""
    failures: list[str] = field(default_factory=list)

    def compare(self, name: str, ours: Any, recorded: Any) -> None:
        """Compare two values of any nesting, entry by entry."""
        left, right = flatten(ours), flatten(recorded)
        if len(left) != len(right):
            self._note(name, math.inf, f"{len(left)} values, recorded {len(right)}")
            return
        self.num_values += len(left)
        worst, entry = 0.0, 0
        for index, (mine, theirs) in enumerate(zip(left, right, strict=True)):
            distance = difference(mine, theirs)
            if distance > worst:
                worst, entry = distance, index
        if worst > 0:
            self._note(name, worst, f"entry {entry}: {left[entry]!r}, recorded {right[entry]!r}")

    def _note(self, name: str, distance: float, detail: str) -> None:
        if distance > self.largest:
            self.largest, self.where = distance, name
        if distance > TOLERANCE:
            self.failures.append(f"{name}, {detail}")
