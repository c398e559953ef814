"""
Concurrent requests, merged into calls of the retriever.

An encoder answers sixty-four queries nearly as fast as one. Requests therefore wait, for a few milliseconds or while
the retriever is busy, and are searched together; each gets its own hits or its own failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from grounded_rl.errors import BackendOverloadedError, BackendTimeoutError, BackendUnavailableError, BadResponseError
from grounded_rl.retrieval.base import Hit, Retriever
from grounded_rl.retrieval.server.metrics import Metrics
from grounded_rl.retrieval.server.settings import ServerSettings

_MAX_RETRY_AFTER_S = 30


@dataclass(eq=False)
class _Job:
    """The queries of one request and the promise of their hits."""

    queries: list[str]
    k: int
    hits: asyncio.Future[list[list[Hit]]]
    queued_at: float = field(default_factory=time.monotonic)


class Batcher:
    """
    Merges concurrent requests into calls of a retriever. Lives in one event loop; searches run in threads.

    Args:
        settings ([`ServerSettings`]):
            Sizes and times.
        metrics ([`Metrics`]):
            Where batches are counted.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics):
        self._settings = settings
        self._metrics = metrics
        self._pending: deque[_Job] = deque()
        self._num_pending = 0
        self._arrived = asyncio.Event()
        self._enough = asyncio.Event()
        self._collecting = asyncio.Lock()
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="grounded-rl-search")
        self._tasks: list[asyncio.Task[None]] = []
        self._seconds_per_query = 0.0

    @property
    def num_pending(self) -> int:
        """Queries that wait for a batch."""
        return self._num_pending

    def start(self, retriever: Retriever) -> None:
        """
        Begin to search what is submitted.

        Args:
            retriever ([`Retriever`]):
                Searches every batch.
        """
        self._tasks = [asyncio.create_task(self._work(retriever)) for _ in range(self._settings.workers)]

    async def stop(self) -> None:
        """Refuse what still waits; threads that search are left to finish."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._pending:
            job = self._pending.popleft()
            if not job.hits.done():
                job.hits.set_exception(BackendUnavailableError("The server was stopped."))
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def submit(self, queries: list[str], k: int) -> list[list[Hit]]:
        """
        The hits of one request.

        Args:
            queries (`list[str]`):
                Queries.
            k (`int`):
                Hits per query.

        Returns:
            `list[list[Hit]]`: One list per query.

        Raises:
            `BackendOverloadedError`: If the queue is full.
            `BackendTimeoutError`: If the time is up.
            `Exception`: What the retriever raised for these queries.
        """
        if not queries:
            return []
        if self._num_pending + len(queries) > self._settings.queue:
            raise BackendOverloadedError(
                f"the queue is full: {self._num_pending} queries wait, at most {self._settings.queue} may",
                self._retry_after(),
            )
        job = _Job(queries, k, asyncio.get_running_loop().create_future())
        self._pending.append(job)
        self._num_pending += len(queries)
        self._arrived.set()
        if self._num_pending >= self._settings.max_batch:
            self._enough.set()
        try:
            return await asyncio.wait_for(job.hits, self._settings.request_timeout)
        except TimeoutError as error:
            raise BackendTimeoutError(f"no answer in {self._settings.request_timeout:g} seconds") from error

    def _retry_after(self) -> float:
        """Whole seconds until the queue has probably been searched."""
        estimate = math.ceil(self._num_pending * self._seconds_per_query)
        return float(min(max(estimate, 1), _MAX_RETRY_AFTER_S))

    async def _work(self, retriever: Retriever) -> None:
        """Collect and search batches; the body of a worker."""
        while True:
            async with self._collecting:
                jobs = await self._next_batch()
            # One call has one `k`: an approximate index may rank differently for another.
            jobs.sort(key=lambda job: job.k)
            for k, group in groupby(jobs, key=lambda job: job.k):
                await self._answer(list(group), k, retriever)

    async def _next_batch(self) -> list[_Job]:
        """The oldest requests, once there are enough of them or the first has waited long enough."""
        jobs: list[_Job] = []
        while not jobs:
            if not self._pending:
                self._arrived.clear()
                await self._arrived.wait()
            left = self._pending[0].queued_at + self._settings.max_wait_ms / 1000 - time.monotonic()
            if self._num_pending < self._settings.max_batch and left > 0:
                self._enough.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._enough.wait(), left)
            jobs = self._take()
        return jobs

    def _take(self) -> list[_Job]:
        """Take requests off the queue, at least one, up to the size of a batch; those given up are dropped."""
        jobs: list[_Job] = []
        size, now = 0, time.monotonic()
        while self._pending and (not jobs or size + len(self._pending[0].queries) <= self._settings.max_batch):
            job = self._pending.popleft()
            self._num_pending -= len(job.queries)
            if not job.hits.done():
                jobs.append(job)
                size += len(job.queries)
                self._metrics.queue_seconds.observe(now - job.queued_at)
        return jobs

    async def _answer(self, jobs: list[_Job], k: int, retriever: Retriever) -> None:
        """Search requests together; if that fails for what they ask, in halves, until the cause stands alone."""
        queries = [query for job in jobs for query in job.queries]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, self._search, retriever, queries, k)
        except Exception as error:
            if len(jobs) == 1 or getattr(error, "is_retryable", False):
                for job in jobs:
                    if not job.hits.done():
                        job.hits.set_exception(error)
                return
            half = len(jobs) // 2
            await self._answer(jobs[:half], k, retriever)
            await self._answer(jobs[half:], k, retriever)
            return
        start = 0
        for job in jobs:
            if not job.hits.done():
                job.hits.set_result(found[start : start + len(job.queries)])
            start += len(job.queries)

    def _search(self, retriever: Retriever, queries: list[str], k: int) -> list[list[Hit]]:
        """Hits of every query; equal queries are searched once. Runs in a thread."""
        started = time.monotonic()
        distinct = list(dict.fromkeys(queries))
        found: dict[str, list[Hit]] = {}
        for start in range(0, len(distinct), self._settings.max_batch):
            batch = distinct[start : start + self._settings.max_batch]
            results: Sequence[list[Hit]] = retriever.search(batch, k)
            if len(results) != len(batch):
                raise BadResponseError(
                    f"a retriever must answer each of {len(batch)} queries: got {len(results)} lists of hits"
                )
            found.update(zip(batch, results, strict=True))
            self._metrics.batch_size.observe(len(batch))
        seconds = time.monotonic() - started
        self._metrics.search_seconds.observe(seconds)
        self._seconds_per_query = 0.8 * self._seconds_per_query + 0.2 * seconds / len(queries)
        return [found[query] for query in queries]
