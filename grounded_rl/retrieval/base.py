"""What a retriever is: passages, hits and one batched method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage of the corpus."""

    id: str
    title: str
    text: str
    """Body, without the title."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage found for a query."""

    passage: Passage
    score: float
    """Backend's own scale; larger is better."""


@runtime_checkable
class Retriever(Protocol):
    """
    A searchable index of passages.

    Contract: one list per query, in the order of the queries; at most `k` hits, best first, scores non-increasing,
    ties in order of passage id; a blank query gives an empty list; the result does not depend on the other queries of
    the call.
    """

    @property
    def manifest(self) -> Mapping[str, object]:
        """What the index was built from: backend, corpus hash, number of passages, parameters, library versions."""
        ...

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """
        The best passages for every query.

        Args:
            queries (`Sequence[str]`):
                Queries, in any number. Any text is allowed.
            k (`int`):
                Largest number of hits per query, at least 1.

        Returns:
            `list[list[Hit]]`: One list per query, best first.

        Raises:
            `RetrievalError`: If the search could not be carried out. Never for a query that finds nothing.
        """
        ...
