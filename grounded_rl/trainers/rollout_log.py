"""The rollout file of a run: what it was trained on, with the credit it was given."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grounded_rl.rollouts.io import save_rollouts, save_trees
from grounded_rl.rollouts.tree import RolloutTree
from grounded_rl.rollouts.types import Rollout


class RolloutLog:
    """
    File that rollouts or trees are appended to, step by step.

    The first write drops what the run is about to write again: everything when it starts at step 0, the records of
    later steps when it is resumed from a checkpoint.

    Args:
        path (`Path`):
            The file; made with the first write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_open = False

    def append_rollouts(self, rollouts: Sequence[Rollout], step: int) -> None:
        """Write the rollouts of a step."""
        self._open(step)
        save_rollouts(self.path, rollouts, append=True)

    def append_trees(self, trees: Sequence[RolloutTree], step: int) -> None:
        """Write the trees of a step."""
        self._open(step)
        save_trees(self.path, trees, append=True)

    def _open(self, step: int) -> None:
        if not self._is_open and self.path.is_file():
            _drop_from(self.path, step)
        self._is_open = True


def _drop_from(path: Path, step: int) -> None:
    """Keep the records of earlier steps: none when a run starts, those before the checkpoint when it is resumed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with path.open(encoding="utf-8") as stream, temporary.open("w", encoding="utf-8") as kept:
        for line in stream:
            try:
                record = json.loads(line)
                is_earlier = record.get("step", record.get("extras", {}).get("step", step)) < step
            except ValueError:
                continue  # the last line of a killed run may be incomplete
            if is_earlier:
                kept.write(line)
    temporary.replace(path)


def with_credit(
    rollout: Rollout, credit: tuple[float | None, list[float]] | None, is_masked: bool, step: int
) -> Rollout:
    """
    Rollout with its own advantage and those of its tokens.

    Both are absent where it was never scored; those of the tokens are zero where it was taken out of the loss.
    """
    extras = {**rollout.extras, "step": step, **({"masked": True} if is_masked else {})}
    if credit is None:
        return replace(rollout, extras=extras)
    shared, advantages = credit
    if shared is not None:
        extras["advantage"] = 0.0 if is_masked else round(shared, 6)
    turns, position = [], 0
    for turn in rollout.turns:
        values = advantages[position : position + len(turn.ids)]
        turns.append(replace(turn, advantages=tuple(0.0 if is_masked else round(value, 6) for value in values)))
        position += len(turn.ids) + len(turn.observation_ids)
    return replace(rollout, turns=tuple(turns), extras=extras)
