"""What the wrappers around a retriever share: everything but the search is passed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grounded_rl.retrieval.base import Hit, Retriever, check_ready, close_retriever

_OPTIONAL = frozenset({"sample", "search_parameters"})
"""What some retrievers have beyond the protocol; a wrapper has it exactly if what it wraps has."""


class Clock(Protocol):
    """What waits and tells the time: the module `time`, or a stand-in in tests."""

    def monotonic(self) -> float:
        """Seconds since some moment."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Wait."""
        ...


class RetrieverWrapper:
    """
    A retriever in front of another one.

    Subclasses override `search` and keep the contract of [`Retriever`]. Manifest, readiness, closing and the optional
    `sample` and `search_parameters` are those of the wrapped retriever.

    Args:
        inner ([`Retriever`]):
            Retriever that is wrapped.
    """

    def __init__(self, inner: Retriever):
        self.inner = inner

    @property
    def manifest(self) -> Mapping[str, object]:
        """Manifest of the wrapped index."""
        return self.inner.manifest

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for every query; see [`Retriever`]."""
        return self.inner.search(queries, k)

    def ready(self, timeout: float = 5.0) -> None:
        """Return if a search would be answered now; see [`RemoteRetriever`]."""
        check_ready(self.inner, timeout)

    def close(self) -> None:
        """Release what the wrapped retriever holds."""
        close_retriever(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONAL:
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
