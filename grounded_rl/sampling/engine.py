"""What an engine is: token contexts in, sampled tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from grounded_rl.rollouts.types import FinishReason


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled turn."""

    ids: list[int]
    """Sampled token ids, at least one, the end-of-turn token included when it was reached."""
    finish: FinishReason
    logps: list[float] | None = None
    """Log-probability of every sampled token in nats, or `None` if the engine gives none."""


@runtime_checkable
class Engine(Protocol):
    """
    Samples one turn for every context.

    Contract: one completion per context, in the order of the contexts; an empty list of contexts is allowed; ids are
    returned exactly as sampled, never decoded and re-encoded.
    """

    def generate(self, contexts: Sequence[Sequence[int]], rollouts: Sequence[int]) -> list[Completion]:
        """
        Sample one turn for every context.

        Args:
            contexts (`Sequence[Sequence[int]]`):
                Token ids of prompt and completion so far, of any lengths.
            rollouts (`Sequence[int]`):
                Number of the rollout each context belongs to; it stays the same over the turns of a rollout.

        Returns:
            `list[Completion]`: One per context.
        """
        ...
