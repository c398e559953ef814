"""An engine that plays back given turns, for tests, demonstrations and notebooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grounded_rl.errors import RolloutError
from grounded_rl.rollouts.types import FinishReason
from grounded_rl.sampling.engine import Completion


class ScriptedEngine:
    """
    Plays back one script per rollout.

    Args:
        scripts (`Sequence[Sequence[Sequence[int]]]`):
            Script of every rollout, by its number: the token ids of its turns, in order.
        end_ids (`Sequence[int]`):
            Ids that end a turn; a turn that ends otherwise counts as cut off by its length.
    """

    def __init__(self, scripts: Sequence[Sequence[Sequence[int]]], end_ids: Sequence[int]) -> None:
        self._scripts = scripts
        self._end_ids = frozenset(end_ids)
        self._played: Counter[int] = Counter()

    def generate(self, contexts: Sequence[Sequence[int]], rollouts: Sequence[int]) -> list[Completion]:
        """Next turn of every rollout's script; see `Engine.generate`."""
        return [self._next_turn(rollout) for rollout in rollouts]

    def _next_turn(self, rollout: int) -> Completion:
        number = self._played[rollout]
        if rollout >= len(self._scripts) or number >= len(self._scripts[rollout]):
            raise RolloutError(
                f"`scripts` must hold every turn that is asked for: got none for turn {number} of rollout {rollout}. "
                "Add the turn, or end the script with a turn that makes no call."
            )
        self._played[rollout] += 1
        ids = list(self._scripts[rollout][number])
        return Completion(ids, FinishReason.STOP if ids[-1] in self._end_ids else FinishReason.LENGTH)
