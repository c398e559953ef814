"""The rollout file of a run: what it was trained on, with the credit it was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grounded_rl.rollouts.io import drop_records_from, save_rollouts, save_trees
from grounded_rl.rollouts.tree import RolloutTree
from grounded_rl.rollouts.types import Rollout, sampled_parts


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
            drop_records_from(self.path, step)
        self._is_open = True


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
    turns = tuple(
        replace(turn, advantages=tuple(0.0 if is_masked else round(value, 6) for value in values))
        for turn, values in zip(rollout.turns, sampled_parts(rollout.turns, advantages), strict=True)
    )
    return replace(rollout, turns=turns, extras=extras)
