"""Keeps the number of queries in flight below a limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Hit, Retriever, check_request
from grounded_rl.retrieval.stats import SearchStats
from grounded_rl.retrieval.wrapper import RetrieverWrapper


class LimitedRetriever(RetrieverWrapper):
    """
    Lets at most `max_in_flight` queries through at once, first come, first served.

    A search with more queries is sent in parts of that size, one after another; as the result of a query does not
    depend on the others, nothing else changes. A small search behind a large one waits its turn rather than slipping
    past, so that no thread starves.

    Args:
        inner ([`Retriever`]):
            Retriever that is protected.
        max_in_flight (`int`):
            Queries it may have to answer at once, over all threads.
        stats ([`SearchStats`], *optional*):
            Counters to add the time in the queue to.

    Raises:
        `ConfigurationError`: If `max_in_flight` is not positive.
    """

    def __init__(self, inner: Retriever, max_in_flight: int, *, stats: SearchStats | None = None):
        super().__init__(inner)
        if max_in_flight < 1:
            raise ConfigurationError(f"`max_in_flight` must be at least 1: got {max_in_flight}. Raise it.")
        self._size = max_in_flight
        self._free = max_in_flight
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()
        self._stats = SearchStats() if stats is None else stats

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for every query, once there is room for them."""
        check_request(queries, k)
        found: list[list[Hit]] = []
        for start in range(0, len(queries), self._size):
            part = queries[start : start + self._size]
            self._enter(len(part))
            try:
                found += self.inner.search(part, k)
            finally:
                self._leave(len(part))
        return found

    def _enter(self, count: int) -> None:
        ticket = object()
        begin = time.monotonic()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(lambda: self._waiting[0] is ticket and self._free >= count)
                self._free -= count
            finally:
                # An interrupted thread must not block those behind it.
                self._waiting.remove(ticket)
                self._changed.notify_all()
        self._stats.add(queued=1, queue_s=time.monotonic() - begin)

    def _leave(self, count: int) -> None:
        with self._changed:
            self._free += count
            self._changed.notify_all()
