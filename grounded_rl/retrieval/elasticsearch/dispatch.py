"""
Many threads, few requests: searches that wait at the same time go out together, and no more than the server takes.

There is no thread of its own and no clock. A caller that finds a free slot sends what is queued, its own searches and
those of others. Beyond two requests on their way, a slot is used only for a batch worth it: meanwhile searches queue
up and the next request carries them. The number of slots follows the server: halved when it refuses work, one more
after a run of successes.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    RetrievalError,
)

Body = dict[str, Any]
Outcome = dict[str, Any] | RetrievalError
Transmit = Callable[[Sequence[Body]], Sequence[Outcome]]
"""Sends bodies in one request: one outcome each, or an error for all."""

_SUCCESSES_PER_SLOT = 16
_FREE_REQUESTS = 2
_FILL_SHARE = 4


class InFlightLimit:
    """
    How many requests may be on their way: additive increase, multiplicative decrease. Not thread-safe by itself.

    Args:
        start (`int`):
            Slots at first.
        maximum (`int`):
            Slots at most.
    """

    def __init__(self, start: int, maximum: int) -> None:
        self.slots = min(start, maximum)
        """Slots now; at least 1."""
        self._maximum = maximum
        self._successes = 0
        self._era = 0

    @property
    def era(self) -> int:
        """Number of decreases so far; a request remembers it, to be blamed once."""
        return self._era

    def succeeded(self) -> None:
        """Note a request the server carried out."""
        self._successes += 1
        if self._successes >= _SUCCESSES_PER_SLOT:
            self._successes = 0
            self.slots = min(self.slots + 1, self._maximum)

    def refused(self, era: int) -> None:
        """
        Note a request the server refused.

        Args:
            era (`int`):
                `era` when it was sent: requests that were under way together count as one refusal.
        """
        self._successes = 0
        if era == self._era:
            self._era += 1
            self.slots = max(1, self.slots // 2)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a failed search is tried again."""

    patience: float = 120.0
    """Seconds from the first try to the last; waiting in the queue counts."""
    backoff_base: float = 0.2
    """Seconds the first pause may last."""
    backoff_cap: float = 10.0
    """Seconds any pause may last at most."""

    def pause(self, tries: int, error: RetrievalError) -> float:
        """
        Seconds to wait after a failure: anywhere between 0 and a bound that doubles, so that clients spread out.

        Args:
            tries (`int`):
                Tries so far, at least 1.
            error (`RetrievalError`):
                What the last one failed with. A wait the server asked for is kept in full.

        Returns:
            `float`: Seconds.
        """
        bound = min(self.backoff_cap, self.backoff_base * 2.0 ** min(tries - 1, 30))
        asked = getattr(error, "retry_after", None) or 0.0
        return float(asked) + random.uniform(0.0, bound)


@dataclass(eq=False, slots=True)
class _Caller:
    """A thread that waits for its searches."""

    wake: threading.Event = field(default_factory=threading.Event)
    is_sending: bool = False


@dataclass(eq=False, slots=True)
class _Job:
    """Bodies that belong to one query, and what became of them."""

    bodies: Sequence[Body]
    caller: _Caller
    is_done: bool = False
    responses: list[dict[str, Any]] = field(default_factory=list)
    error: RetrievalError | None = None


class Dispatcher:
    """
    Sends searches of many threads in few requests and tries again what failed.

    Args:
        transmit (`Callable`):
            Sends bodies in one request and returns one outcome each, or raises one error for all.
        limit ([`InFlightLimit`]):
            Slots.
        retry ([`RetryPolicy`]):
            When to try again.
        max_batch_size (`int`):
            Most bodies of one request; those of one query stay together.
    """

    def __init__(self, transmit: Transmit, limit: InFlightLimit, retry: RetryPolicy, *, max_batch_size: int) -> None:
        self._transmit = transmit
        self._limit = limit
        self._retry = retry
        self._max_batch_size = max_batch_size
        self._lock = threading.Lock()
        self._queue: deque[_Job] = deque()
        self._in_flight = 0
        self._closed = threading.Event()
        self.num_requests = 0
        """Requests sent so far."""
        self.num_retries = 0
        """Queries sent again so far."""

    @property
    def slots(self) -> int:
        """Requests that may be on their way at once, now."""
        return self._limit.slots

    def run(self, groups: Sequence[Sequence[Body]]) -> list[list[dict[str, Any]]]:
        """
        Answers to the bodies of every query.

        Args:
            groups (`Sequence[Sequence[dict]]`):
                Bodies of each query.

        Returns:
            `list[list[dict]]`: Whole answers, in the same order.

        Raises:
            `RetrievalError`: If one could not be had in time, or failed in a way that another try cannot mend.
        """
        started = time.monotonic()
        deadline = started + self._retry.patience
        caller = _Caller()
        jobs = [_Job(bodies, caller) for bodies in groups]
        waiting, tries = jobs, 0
        while waiting:
            self._attempt(waiting, caller, deadline)
            tries += 1
            waiting = [job for job in waiting if job.error is not None]
            if not waiting:
                break
            error = next((job.error for job in waiting if job.error and not job.error.is_retryable), waiting[0].error)
            assert error is not None
            pause = self._retry.pause(tries, error)
            if not error.is_retryable or time.monotonic() + pause > deadline:
                raise _with_history(error, tries, time.monotonic() - started) from error
            if self._closed.wait(pause):
                break
            for job in waiting:
                job.error, job.is_done = None, False
            with self._lock:
                self.num_retries += len(waiting)
        if self._closed.is_set():
            raise RetrievalError("The retriever was closed while a search was under way. Open it again.")
        return [job.responses for job in jobs]

    def close(self) -> None:
        """Refuse what is queued and what comes later."""
        self._closed.set()
        with self._lock:
            abandoned, self._queue = list(self._queue), deque()
        for job in abandoned:
            job.error = RetrievalError("The retriever was closed. Open it again.")
            job.is_done = True
            job.caller.wake.set()

    def _attempt(self, jobs: Sequence[_Job], caller: _Caller, deadline: float) -> None:
        """Return when every job has an outcome; send requests, also for others, while there are slots."""
        with self._lock:
            self._queue.extend(jobs)
        while not all(job.is_done for job in jobs):
            batch = self._take(caller)
            if batch:
                self._send(batch, caller)
                continue
            remaining = deadline - time.monotonic()
            if remaining > 0:
                caller.wake.wait(remaining)
            elif not self._withdraw(jobs):
                # What another thread has sent already will be answered: its request has a time limit.
                caller.wake.wait()
            caller.wake.clear()
        self._wake_next()

    def _take(self, caller: _Caller) -> list[_Job]:
        """Jobs for one request, if there is a slot."""
        with self._lock:
            if self._closed.is_set():
                for job in self._queue:
                    job.error, job.is_done = RetrievalError("The retriever was closed. Open it again."), True
                    job.caller.wake.set()
                self._queue.clear()
            if not self._may_send():
                return []
            batch: list[_Job] = []
            size = 0
            while self._queue and (not batch or size + len(self._queue[0].bodies) <= self._max_batch_size):
                job = self._queue.popleft()
                size += len(job.bodies)
                batch.append(job)
            self._in_flight += 1
            self.num_requests += 1
            caller.is_sending = True
            return batch

    def _may_send(self) -> bool:
        """Whether what is queued should go out now; called with the lock held."""
        if not self._queue or self._in_flight >= self._limit.slots:
            return False
        # While some requests are on their way, a few searches wait for company: every request costs the server as much
        # as several searches. One of those requests will return, so that nothing waits for more than an answer.
        return self._in_flight < _FREE_REQUESTS or len(self._queue) * _FILL_SHARE >= self._max_batch_size

    def _send(self, batch: Sequence[_Job], caller: _Caller) -> None:
        """One request: settle its jobs, free the slot, wake who waits."""
        era = self._limit.era
        outcomes: list[Outcome] = []
        try:
            bodies = [body for job in batch for body in job.bodies]
            outcomes = list(self._transmit(bodies))
            if len(outcomes) != len(bodies):
                raise AssertionError(f"{len(outcomes)} outcomes for {len(bodies)} bodies")
        except RetrievalError as error:
            outcomes = [error for job in batch for _ in job.bodies]
        except BaseException as error:
            # The thread of another caller must not wait for one that was interrupted.
            stopped = BackendUnavailableError(f"The thread that sent the search was stopped: {error!r}.")
            outcomes = [stopped for job in batch for _ in job.bodies]
            raise
        finally:
            self._settle(batch, outcomes, caller, era)

    def _settle(self, batch: Sequence[_Job], outcomes: Sequence[Outcome], caller: _Caller, era: int) -> None:
        """Give every job its outcome and the limit its lesson."""
        remaining = iter(outcomes)
        with self._lock:
            self._in_flight -= 1
            caller.is_sending = False
            for job in batch:
                parts = [next(remaining) for _ in job.bodies]
                job.responses = [part for part in parts if not isinstance(part, RetrievalError)]
                job.error = next((part for part in parts if isinstance(part, RetrievalError)), None)
                job.is_done = True
            errors = [job.error for job in batch if job.error is not None]
            if any(isinstance(error, BackendOverloadedError) for error in errors):
                self._limit.refused(era)
            elif not errors:
                self._limit.succeeded()
        for other in {job.caller for job in batch}:
            other.wake.set()
        self._wake_next()

    def _wake_next(self) -> None:
        """Wake threads that can use the free slots."""
        with self._lock:
            free = self._limit.slots - self._in_flight if self._may_send() else 0
            for job in self._queue:
                if free <= 0:
                    break
                if not job.caller.is_sending and not job.caller.wake.is_set():
                    job.caller.wake.set()
                    free -= 1

    def _withdraw(self, jobs: Sequence[_Job]) -> bool:
        """Take jobs that nobody has sent off the queue; whether there were any."""
        with self._lock:
            mine = set(jobs)
            queued = [job for job in self._queue if job in mine]
            self._queue = deque(job for job in self._queue if job not in mine)
            for job in queued:
                job.error = BackendTimeoutError("No request could be sent in time: all slots were taken.")
                job.is_done = True
        return bool(queued)


def retried(call: Callable[[], None], policy: RetryPolicy, closed: threading.Event) -> None:
    """
    Carry out something that is not a search, with the same patience.

    Args:
        call (`Callable[[], None]`):
            What to do; tried again after an error that says so.
        policy ([`RetryPolicy`]):
            When to try again.
        closed (`threading.Event`):
            Ends the wait between tries when set.

    Raises:
        `RetrievalError`: If it could not be done in time, or failed in a way that another try cannot mend.
    """
    started = time.monotonic()
    tries = 0
    while True:
        try:
            return call()
        except RetrievalError as error:
            tries += 1
            pause = policy.pause(tries, error)
            elapsed = time.monotonic() - started
            if not error.is_retryable or elapsed + pause > policy.patience:
                raise _with_history(error, tries, elapsed) from error
        if closed.wait(pause):
            raise RetrievalError("The retriever was closed. Open it again.")


def _with_history(error: RetrievalError, tries: int, seconds: float) -> RetrievalError:
    """The same error for this caller alone, saying how often it was tried."""
    message = str(error)
    if tries > 1:
        message = f"{message} Gave up after {tries} tries in {seconds:.1f} s."
    if isinstance(error, BackendOverloadedError):
        return BackendOverloadedError(message, error.retry_after)
    return type(error)(message)
