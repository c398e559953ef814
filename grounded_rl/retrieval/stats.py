"""Counts and latencies of searches, for the log of a training run."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grounded_rl.errors import RetrievalError
from grounded_rl.retrieval.base import Hit, Retriever
from grounded_rl.retrieval.wrapper import RetrieverWrapper

RESERVOIR_SIZE = 4096
"""Latencies kept per window; percentiles are exact as long as a window has no more requests."""


def nearest_rank(values: Sequence[float], percent: float) -> float:
    r"""
    Percentile of values by the nearest rank: the smallest value that at least `percent` of them do not exceed.

    Args:
        values (`Sequence[float]`):
            Values in any order.
        percent (`float`):
            In \\( (0, 100] \\).

    Returns:
        `float`: One of the values; NaN without any.

    Example:

    ```python
    >>> nearest_rank([15, 20, 35, 40, 50], 30), nearest_rank([15, 20, 35, 40, 50], 100)
    (20, 50)

    ```
    """
    if not values:
        return math.nan
    # Through the product first: 0.95 * 20 is a little more than 19 in binary, 95 * 20 / 100 is 19.
    return sorted(values)[max(1, math.ceil(percent * len(values) / 100)) - 1]


@dataclass(frozen=True)
class SearchWindow:
    """What happened between two readings of [`SearchStats`]; windows of several processes can be merged."""

    requests: int = 0
    """Calls of the backend, repeated ones included."""
    queries: int = 0
    """Queries in them."""
    retries: int = 0
    """Requests that repeated a failed one."""
    failures: int = 0
    """Requests that failed."""
    answered: int = 0
    """Queries a backend answered."""
    empty: int = 0
    """Answered queries that found nothing."""
    lookups: int = 0
    """Queries asked of a cache."""
    cache_hits: int = 0
    """Queries the cache answered, those that waited for the same query of another thread included."""
    queued: int = 0
    """Calls that passed a limit on the queries in flight."""
    queue_s: float = 0.0
    """Time they waited in total."""
    outages: int = 0
    """Times a search waited for a backend that was away."""
    outage_s: float = 0.0
    """Time waited for it."""
    latencies_s: tuple[float, ...] = ()
    """Duration of requests that were answered, a uniform sample of at most `RESERVOIR_SIZE`."""

    def metrics(self) -> dict[str, float]:
        """The values under the names of the training log; NaN where there is nothing to measure."""
        return {
            "search/requests": float(self.requests),
            "search/queries": float(self.queries),
            "search/retries": float(self.retries),
            "search/failures": float(self.failures),
            "search/empty_share": _quotient(self.empty, self.answered),
            "search/cache_hit_share": _quotient(self.cache_hits, self.lookups),
            "search/latency_p50_ms": 1000 * nearest_rank(self.latencies_s, 50),
            "search/latency_p95_ms": 1000 * nearest_rank(self.latencies_s, 95),
            "search/queue_ms": 1000 * _quotient(self.queue_s, self.queued),
            "search/outages": float(self.outages),
            "search/outage_s": self.outage_s,
        }


def merge_windows(windows: Iterable[SearchWindow]) -> SearchWindow:
    """
    One window of several: counts are added, latencies pooled.

    Args:
        windows (`Iterable[SearchWindow]`):
            Windows, for instance one per process.

    Returns:
        [`SearchWindow`]: Their sum.
    """
    totals: dict[str, Any] = dict(vars(SearchWindow()))
    for window in windows:
        totals = {name: value + getattr(window, name) for name, value in totals.items()}
    return SearchWindow(**totals)


class SearchStats:
    """
    Counters that the wrappers of one retriever share; safe to use from any thread.

    Args:
        reservoir_size (`int`, *optional*, defaults to `RESERVOIR_SIZE`):
            Latencies kept between two readings.
    """

    def __init__(self, reservoir_size: int = RESERVOIR_SIZE):
        self._size = reservoir_size
        self._lock = threading.Lock()
        # A generator of its own: measuring must not move the random state of a run.
        self._random = random.Random(0)
        self._clear()

    def _clear(self) -> None:
        self._counts: dict[str, int | float] = {}
        self._latencies: list[float] = []
        self._num_latencies = 0

    def add(self, **counts: int | float) -> None:
        """
        Add to counters.

        Args:
            **counts (`int` or `float`):
                Amounts by the names of the fields of [`SearchWindow`].
        """
        with self._lock:
            for name, amount in counts.items():
                self._counts[name] = self._counts.get(name, 0) + amount

    def add_latency(self, seconds: float) -> None:
        """
        Record how long a request took.

        Args:
            seconds (`float`):
                Its duration.
        """
        with self._lock:
            self._num_latencies += 1
            if len(self._latencies) < self._size:
                self._latencies.append(seconds)
                return
            place = self._random.randrange(self._num_latencies)
            if place < self._size:
                self._latencies[place] = seconds

    def window(self, *, reset: bool = False) -> SearchWindow:
        """
        What was counted since the last reset.

        Args:
            reset (`bool`, *optional*, defaults to `False`):
                Start a new window.

        Returns:
            [`SearchWindow`]
        """
        with self._lock:
            window = SearchWindow(**self._counts, latencies_s=tuple(self._latencies))  # type: ignore[arg-type]
            if reset:
                self._clear()
        return window


class MeasuredRetriever(RetrieverWrapper):
    """
    Counts the requests a backend gets and how long they take.

    A backend that repeats requests by itself tells how many with an attribute `num_retries`; they are added.

    Args:
        inner ([`Retriever`]):
            The backend.
        stats ([`SearchStats`], *optional*):
            Counters to add to; new ones by default.
    """

    def __init__(self, inner: Retriever, stats: SearchStats | None = None):
        super().__init__(inner)
        self.stats = SearchStats() if stats is None else stats
        self._lock = threading.Lock()
        self._num_retries = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for every query; counted, and timed if it succeeds."""
        if not queries:
            return self.inner.search(queries, k)
        self.stats.add(requests=1, queries=len(queries))
        start = time.perf_counter()
        try:
            found = self.inner.search(queries, k)
        except RetrievalError:
            self.stats.add(failures=1)
            raise
        finally:
            self._add_own_retries()
        self.stats.add_latency(time.perf_counter() - start)
        self.stats.add(answered=len(found), empty=sum(not hits for hits in found))
        return found

    def _add_own_retries(self) -> None:
        """Count what a backend that repeats requests by itself has repeated since the last look."""
        total = getattr(self.inner, "num_retries", 0)
        with self._lock:
            new, self._num_retries = total - self._num_retries, total
        self.stats.add(retries=new)


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
