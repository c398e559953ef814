"""The wrappers of a run around one retriever, in the one order in which they work."""

from __future__ import annotations

from dataclasses import dataclass

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Retriever
from grounded_rl.retrieval.cached import CachedRetriever
from grounded_rl.retrieval.limited import LimitedRetriever
from grounded_rl.retrieval.outage import PatientRetriever
from grounded_rl.retrieval.retrying import RetryingRetriever
from grounded_rl.retrieval.stats import MeasuredRetriever, SearchStats


@dataclass(frozen=True)
class RetrievalSettings:
    """
    How a run treats its retriever.

    Args:
        attempts (`int`, *optional*, defaults to `4`):
            Tries of a search, the first included.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds after which a failed search is not tried again.
        max_in_flight (`int`, *optional*, defaults to `256`):
            Queries sent at once.
        cache (`str`, *optional*, defaults to `"memory"`):
            `"off"`, `"memory"`, or the path of a file.
        patience (`float`, *optional*, defaults to `0.0`):
            Seconds to wait for a backend that is away; `0` does not wait.

    Raises:
        `ConfigurationError`: If a value is out of range.
    """

    attempts: int = 4
    timeout: float = 120.0
    max_in_flight: int = 256
    cache: str = "memory"
    patience: float = 0.0

    def __post_init__(self):
        for name, least in (("attempts", 1), ("timeout", 0), ("max_in_flight", 1), ("patience", 0)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"`{name}` must be at least {least}: got {getattr(self, name)}. Raise it.")
        if not self.cache:
            raise ConfigurationError("`cache` must be `off`, `memory` or a path: got an empty text. Choose one.")


def compose_retriever(
    inner: Retriever, settings: RetrievalSettings | None = None, *, stats: SearchStats | None = None
) -> Retriever:
    """
    A retriever with what a run needs around it.

    From the outside in: waiting for a backend that is away, cache, limit on the queries in flight, repetition of
    failed requests, measurement.

    Args:
        inner ([`Retriever`]):
            The backend.
        settings ([`RetrievalSettings`], *optional*):
            How to treat it.
        stats ([`SearchStats`], *optional*):
            Counters all of them add to.

    Returns:
        [`Retriever`]: The outermost wrapper.

    Raises:
        `ConfigurationError`: If the cache file cannot be used.
    """
    settings = settings or RetrievalSettings()
    stats = stats or SearchStats()
    outer: Retriever = MeasuredRetriever(inner, stats)
    outer = RetryingRetriever(outer, attempts=settings.attempts, deadline=settings.timeout, stats=stats)
    outer = LimitedRetriever(outer, settings.max_in_flight, stats=stats)
    if settings.cache != "off":
        outer = CachedRetriever(outer, None if settings.cache == "memory" else settings.cache, stats=stats)
    if settings.patience > 0:
        outer = PatientRetriever(outer, patience=settings.patience, stats=stats)
    return outer
