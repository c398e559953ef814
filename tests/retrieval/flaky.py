"""A backend that answers by formula and fails by plan, for tests of what is put around a retriever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from grounded_rl.errors import BackendUnavailableError
from grounded_rl.retrieval import Hit, Passage


def answer_of(query: str, k: int) -> list[Hit]:
    """What the backend finds: as many hits as the query has letters, each of which names the query and its place."""
    count = min(k, len(query.strip()))
    return [Hit(Passage(f"{query}/{place}", query, f"text {place}"), float(count - place)) for place in range(count)]


class FlakyBackend:
    """
    Answers with [`answer_of`]; the n-th call raises the n-th entry of `failures` unless it is `None`.

    `requests` holds the queries of every call. `on_search` is called with them first.
    """

    def __init__(
        self,
        failures: Iterable[Exception | None] = (),
        *,
        index_id: str | None = "0123456789abcdef",
        on_search: Callable[[list[str]], None] | None = None,
    ):
        self._failures = iter(failures)
        self._index_id = index_id
        self._on_search = on_search
        self._lock = threading.Lock()
        self.requests: list[list[str]] = []
        self.ready_failures: list[Exception] = []
        self.num_ready = 0
        self.is_closed = False
        self.in_flight = 0
        self.most_in_flight = 0

    @property
    def manifest(self) -> Mapping[str, object]:
        return {"backend": "flaky", "num_passages": 1} | (
            {} if self._index_id is None else {"index_id": self._index_id}
        )

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        with self._lock:
            self.requests.append(list(queries))
            failure = next(self._failures, None)
            self.in_flight += len(queries)
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self._on_search is not None:
                self._on_search(list(queries))
            if failure is not None:
                raise failure
            return [answer_of(query, k) for query in queries]
        finally:
            with self._lock:
                self.in_flight -= len(queries)

    def ready(self, timeout: float = 5.0) -> None:
        self.num_ready += 1
        if self.ready_failures:
            raise self.ready_failures.pop(0)

    def sample(self, count: int) -> list[Passage]:
        return [Passage(str(number), "title", "text") for number in range(count)]

    def close(self) -> None:
        self.is_closed = True


class Clock:
    """Time that passes only when someone sleeps."""

    def __init__(self):
        self.now = 0.0
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def away(number: int = 0) -> BackendUnavailableError:
    """A retryable failure."""
    return BackendUnavailableError(f"connection {number} refused")


def in_threads(count: int, run: Callable[[int], object]) -> list[object]:
    """Results of `run(0) … run(count - 1)`, or the errors they raised, each in a thread of its own."""
    results: list[object] = [None] * count

    def work(number: int) -> None:
        try:
            results[number] = run(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "a search never came back"
    return results
