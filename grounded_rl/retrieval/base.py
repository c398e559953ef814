"""What a retriever is: passages, hits and one batched method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from grounded_rl.errors import ConfigurationError


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


@runtime_checkable
class RemoteRetriever(Retriever, Protocol):
    """
    A retriever whose index lives in another process.

    Embedded indexes need neither method; `check_ready` and `close_retriever` accept both.
    """

    def ready(self, timeout: float = 5.0) -> None:
        """
        Return if a search would be answered now, by the index of `manifest`.

        Args:
            timeout (`float`, *optional*, defaults to `5.0`):
                Seconds to wait for an answer; one try.

        Raises:
            `RetrievalError`: If not; `is_retryable` tells whether waiting may help.
        """
        ...

    def close(self) -> None:
        """Release connections and threads; later calls have no effect."""
        ...


def check_ready(retriever: Retriever, timeout: float = 5.0) -> None:
    """
    Ask a retriever whether it would answer now; an embedded index always would.

    Args:
        retriever ([`Retriever`]):
            Any retriever.
        timeout (`float`, *optional*, defaults to `5.0`):
            Seconds to wait for an answer.

    Raises:
        `RetrievalError`: If it would not.
    """
    ready = getattr(retriever, "ready", None)
    if ready is not None:
        ready(timeout)


def close_retriever(retriever: Retriever) -> None:
    """
    Release what a retriever holds; an embedded index holds nothing that must be released.

    Args:
        retriever ([`Retriever`]):
            Any retriever.
    """
    close = getattr(retriever, "close", None)
    if close is not None:
        close()


def check_request(queries: Sequence[str], k: int) -> None:
    """
    Refuse what no retriever accepts.

    Args:
        queries (`Sequence[str]`):
            Queries of a search.
        k (`int`):
            Hits wanted per query.

    Raises:
        `ConfigurationError`: If `queries` is one string or holds something else, or `k` is not a positive integer.
    """
    if isinstance(queries, str):
        raise ConfigurationError("`queries` must be a list of strings: got one string. Write `[query]`.")
    for position, query in enumerate(queries):
        if not isinstance(query, str):
            raise ConfigurationError(
                f"`queries` must hold strings: got {type(query).__name__} at position {position}. Convert it first."
            )
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigurationError(f"`k` must be an integer of at least 1: got {k!r}. Ask for one hit or more.")
