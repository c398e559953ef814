"""
Several retrievers of one index behind one: load is spread, failures are routed around.

A member that fails is taken out of service and probed in the background until it answers again from the same index.
The search it failed goes to another member at once.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.base import Hit, Retriever, check_ready, check_request, close_retriever

_MIN_QUERIES_PER_MEMBER = 8
_FIRST_PROBE_S = 0.2
_BUSY_S = 0.5
_THREADS_PER_MEMBER = 16


class _Member:
    """A retriever and what is known of its health; fields change under the lock of the balancer."""

    def __init__(self, retriever: Retriever, position: int):
        self.retriever = retriever
        self.name = str(getattr(retriever, "url", None) or f"member {position}")
        self.in_flight = 0
        self.num_searches = 0
        self.last_use = 0
        self.error: Exception | None = None
        """Why it is out of service; `None` while it is in."""
        self.busy_until = 0.0
        self.next_probe = 0.0
        self.probe_wait = _FIRST_PROBE_S


class BalancedRetriever:
    """
    Spreads searches over retrievers of the same index. Thread-safe.

    Every search goes to the member with the fewest searches in flight; a batch is split over the members. A member
    that fails is out of service until a probe of it succeeds, and its share goes to another one at once. A member that
    is overloaded stays in service and is passed over for as long as it asked. Members may be away at the start.

    Args:
        members (`Sequence[Retriever]`):
            Retrievers whose manifests have the same `index_id`, at least one.
        probe_timeout (`float`, *optional*, defaults to `5.0`):
            Seconds a member has to answer a probe.
        max_probe_interval (`float`, *optional*, defaults to `5.0`):
            Longest pause between two probes of a member; pauses start at 0.2 seconds and double.

    Raises:
        `IndexMismatchError`: If two members serve different indexes.
        `ConfigurationError`: If there is no member, or one of several cannot tell its index.
        `BackendUnavailableError`: If no member can be reached.
    """

    def __init__(self, members: Sequence[Retriever], *, probe_timeout: float = 5.0, max_probe_interval: float = 5.0):
        if not members:
            raise ConfigurationError("`members` must hold at least one retriever: got none. Name a server.")
        self._members = [_Member(retriever, position) for position, retriever in enumerate(members)]
        self._probe_timeout = probe_timeout
        self._max_probe_interval = max_probe_interval
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._is_closed = False
        self._num_acquired = 0
        self._prober: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(
            _THREADS_PER_MEMBER * len(self._members), thread_name_prefix="grounded-rl-balanced"
        )
        # Apart from the searches: a probe must not wait behind the searches whose fate it decides.
        self._probe_pool = ThreadPoolExecutor(2 * len(self._members), thread_name_prefix="grounded-rl-probe")
        self._manifest: Mapping[str, object] | None = None
        try:
            self._manifest = self._agree_on_manifest()
        except BaseException:
            self.close()
            raise

    @property
    def manifest(self) -> Mapping[str, object]:
        """Manifest of the index all members serve."""
        assert self._manifest is not None
        return self._manifest

    @property
    def search_parameters(self) -> Mapping[str, object]:
        """How the members search, as the first one in service tells it; empty if it does not."""
        with self._lock:
            members = sorted(self._members, key=lambda member: member.error is not None)
        parameters: Mapping[str, object] = getattr(members[0].retriever, "search_parameters", {})
        return parameters

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """
        The best passages for every query, from as many members as it has use for.

        Args:
            queries (`Sequence[str]`):
                Queries, in any number.
            k (`int`):
                Largest number of hits per query, at least 1.

        Returns:
            `list[list[Hit]]`: One list per query, best first.

        Raises:
            `BackendUnavailableError`: If no member is left that could answer.
            `BackendOverloadedError`: If every member in service asked to wait.
            `RetrievalError`: If all members refused the search itself.
        """
        check_request(queries, k)
        if self._is_closed:
            raise self._all_failed(())
        if not queries:
            return []
        shares = self._shares(list(queries))
        # The caller's own thread takes the first share, so that searches go on when the pool is busy.
        members = [self._acquire(()) for _ in shares]
        futures = [
            self._pool.submit(self._search_share, share, k, member)
            for share, member in zip(shares[1:], members[1:], strict=True)
        ]
        try:
            first = self._search_share(shares[0], k, members[0])
            return [*first, *(hits for future in futures for hits in future.result())]
        finally:
            for future, member in zip(futures, members[1:], strict=True):
                if future.cancel() and member is not None:
                    self._release(member)

    def ready(self, timeout: float = 5.0) -> None:
        """
        Return as soon as one member says that it would answer; all are asked at once, also those out of service.

        Args:
            timeout (`float`, *optional*, defaults to `5.0`):
                Seconds to wait.

        Raises:
            `RetrievalError`: If none does.
        """
        if self._is_closed:
            raise self._all_failed(())
        deadline = time.monotonic() + timeout
        pending: set[Future[bool]] = {
            self._probe_pool.submit(self._probe, member, timeout) for member in self._members
        }
        while pending and (left := deadline - time.monotonic()) > 0:
            done, pending = wait(pending, left, FIRST_COMPLETED)
            if any(future.result() for future in done):
                return
        if pending:
            raise BackendTimeoutError(f"None of {len(self._members)} members said in {timeout:g} s that it is ready.")
        raise self._all_failed([(member, member.error) for member in self._members if member.error is not None])

    def close(self) -> None:
        """Stop probing and close every member."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._wake.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._probe_pool.shutdown(wait=False, cancel_futures=True)
        for member in self._members:
            close_retriever(member.retriever)

    @property
    def health(self) -> list[dict[str, object]]:
        """One row per member: `name`, `in_service`, `in_flight`, `num_searches`, and the `error` that took it out."""
        with self._lock:
            return [
                {
                    "name": member.name,
                    "in_service": member.error is None,
                    "in_flight": member.in_flight,
                    "num_searches": member.num_searches,
                    "error": None if member.error is None else str(member.error),
                }
                for member in self._members
            ]

    def _agree_on_manifest(self) -> Mapping[str, object]:
        """The manifest of the members that can be reached; the others are out of service until they can."""
        futures = [self._probe_pool.submit(_manifest_of, member) for member in self._members]
        agreed: Mapping[str, object] | None = None
        errors: list[tuple[_Member, Exception]] = []
        for member, future in zip(self._members, futures, strict=True):
            try:
                manifest = future.result()
            except RetrievalError as error:
                if not error.is_retryable:
                    raise
                errors.append((member, error))
                continue
            if len(self._members) > 1 and not manifest.get("index_id"):
                raise ConfigurationError(
                    f"`members` must tell their index when there are several: got none from {member.name}. "
                    "Pass `index_id`, the same for servers of the same index."
                )
            agreed = manifest if agreed is None else agreed
            _check_same_index(member, manifest, agreed)
        if agreed is None:
            raise self._all_failed(errors)
        for absent, reason in errors:
            self._take_out(absent, reason)
        return agreed

    def _shares(self, queries: list[str]) -> list[list[str]]:
        """Consecutive parts of about equal size, at most one per member in service."""
        with self._lock:
            num_in = sum(member.error is None for member in self._members)
        count = max(1, min(num_in, len(queries) // _MIN_QUERIES_PER_MEMBER))
        cuts = [len(queries) * number // count for number in range(count + 1)]
        return [queries[start:end] for start, end in itertools.pairwise(cuts)]

    def _search_share(self, queries: list[str], k: int, member: _Member | None) -> list[list[Hit]]:
        """Hits from the first member that answers, beginning with one that was acquired for it."""
        failed: list[tuple[_Member, Exception]] = []
        while member is not None:
            try:
                return member.retriever.search(queries, k)
            except RetrievalError as error:
                failed.append((member, error))
                self._note_failure(member, error)
            finally:
                self._release(member)
            member = self._acquire([tried for tried, _ in failed])
        raise self._all_failed(failed)

    def _acquire(self, excluded: Sequence[_Member]) -> _Member | None:
        """The member in service with the fewest searches in flight, counted up; those that asked to wait come last."""
        with self._lock:
            now = time.monotonic()
            candidates = [m for m in self._members if m.error is None and m not in excluded]
            if not candidates or self._is_closed:
                return None
            # Among equals, the one used longest ago: counts would send everything to one that was away for a while.
            member = min(candidates, key=lambda m: (m.busy_until > now, m.in_flight, m.last_use))
            member.in_flight += 1
            member.num_searches += 1
            member.last_use = self._num_acquired = self._num_acquired + 1
            return member

    def _release(self, member: _Member) -> None:
        """Count a search of a member as over."""
        with self._lock:
            member.in_flight -= 1

    def _note_failure(self, member: _Member, error: RetrievalError) -> None:
        """Pass over a busy member for a while and take a broken one out."""
        if isinstance(error, BackendOverloadedError):
            with self._lock:
                member.busy_until = time.monotonic() + (error.retry_after or _BUSY_S)
        elif type(error) is not RetrievalError:
            # A plain `RetrievalError` is a refusal of this search, which says nothing about the next one.
            self._take_out(member, error)

    def _take_out(self, member: _Member, error: Exception) -> None:
        """Take a member out of service and see to it that it is probed."""
        with self._lock:
            if member.error is None:
                member.probe_wait = _FIRST_PROBE_S
                member.next_probe = time.monotonic() + member.probe_wait
            member.error = error
            if self._prober is None and not self._is_closed:
                self._prober = threading.Thread(target=self._probe_absent, name="grounded-rl-probe", daemon=True)
                self._prober.start()
            self._wake.notify_all()

    def _probe_absent(self) -> None:
        """Probe members that are out of service until all are in; the body of the background thread."""
        while True:
            with self._lock:
                out = [member for member in self._members if member.error is not None]
                if not out or self._is_closed:
                    self._prober = None
                    return
                now = time.monotonic()
                due = [member for member in out if member.next_probe <= now]
                if not due:
                    self._wake.wait(min(member.next_probe for member in out) - now)
                    continue
            with contextlib.suppress(RuntimeError):  # the pool was shut down: the next round ends the thread
                wait([self._probe_pool.submit(self._probe, member, self._probe_timeout) for member in due])

    def _probe(self, member: _Member, timeout: float) -> bool:
        """Whether a member would answer from the agreed index; puts it into service or out of it."""
        try:
            check_ready(member.retriever, timeout)
            if self._manifest is not None:
                _check_same_index(member, member.retriever.manifest, self._manifest)
        except Exception as error:  # whatever a probe dies of, the thread that probes must live
            self._take_out(member, error)
            with self._lock:
                member.probe_wait = min(2 * member.probe_wait, self._max_probe_interval)
                member.next_probe = time.monotonic() + member.probe_wait
            return False
        with self._lock:
            member.error = None
            member.busy_until = 0.0
        return True

    def _all_failed(self, failed: Sequence[tuple[_Member, Exception]]) -> RetrievalError:
        """The error of a search that no member answered."""
        if self._is_closed:
            return RetrievalError("The retriever was closed. Build it again.")
        with self._lock:
            seen = dict(failed)
            reasons = [(m.name, seen.get(m, m.error)) for m in self._members]
        errors = [error for _, error in reasons if error is not None]
        waits = [error.retry_after or _BUSY_S for error in errors if isinstance(error, BackendOverloadedError)]
        summary = "; ".join(f"{name}: {error}" for name, error in reasons if error is not None)
        if waits:
            return BackendOverloadedError(f"No member can take the search now. {summary}", min(waits))
        lasting = [error for error in errors if isinstance(error, RetrievalError) and not error.is_retryable]
        if errors and len(lasting) == len(errors):
            return type(lasting[0])(f"No member could answer the search. {summary}")
        return BackendUnavailableError(f"None of {len(self._members)} members is in service. {summary}")


def _manifest_of(member: _Member) -> Mapping[str, object]:
    """Manifest of a member; asks it, if it lives elsewhere."""
    return member.retriever.manifest


def _check_same_index(member: _Member, manifest: Mapping[str, object], agreed: Mapping[str, object]) -> None:
    """Raise unless a member serves the agreed index."""
    if manifest.get("index_id") != agreed.get("index_id"):
        raise IndexMismatchError(
            f"`members` must serve the same index, {agreed.get('index_id')!r}: got {manifest.get('index_id')!r} from "
            f"{member.name}. Serve the same index everywhere."
        )
