"""A limit on the queries in flight."""

from __future__ import annotations

import threading
import time

import pytest

from grounded_rl.errors import BackendUnavailableError, ConfigurationError
from grounded_rl.retrieval.limited import LimitedRetriever
from grounded_rl.retrieval.stats import SearchStats
from tests.retrieval.flaky import FlakyBackend, answer_of, away, in_threads


def test_never_more_queries_are_in_flight_than_allowed():
    backend = FlakyBackend(on_search=lambda queries: threading.Event().wait(0.002))
    limited = LimitedRetriever(backend, 5)

    def run(number):
        queries = [f"query {number} {part}" for part in range(1 + number % 7)]
        return limited.search(queries, 3) == [answer_of(query, 3) for query in queries]

    assert in_threads(24, run) == [True] * 24
    # Reached as well: a limit that lets less through than it says would pass otherwise.
    assert backend.most_in_flight == 5
    assert max(map(len, backend.requests)) == 5


def test_a_large_search_is_sent_in_parts_in_order():
    backend = FlakyBackend()
    queries = [f"query {number}" for number in range(10)]
    assert LimitedRetriever(backend, 4).search(queries, 2) == [answer_of(query, 2) for query in queries]
    assert backend.requests == [queries[:4], queries[4:8], queries[8:]]


def test_first_come_is_first_served():
    inside, go = threading.Event(), threading.Event()

    def hold(queries):
        inside.set()
        assert go.wait(30)

    backend = FlakyBackend(on_search=hold)
    limited = LimitedRetriever(backend, 4)
    names = ["first", *"bcdefgh"]

    def run(number):
        if number:
            assert inside.wait(30)
            while len(limited._waiting) != number - 1:
                pass
            if number == 7:
                threading.Timer(0.2, go.set).start()
        # The second needs all room, the others would find some free.
        count = 4 if number == 1 else 1
        limited.search([names[number]] * count, 1)

    in_threads(8, run)
    assert [queries[0] for queries in backend.requests][:2] == ["first", "b"]


def test_a_failed_search_gives_its_room_back():
    limited = LimitedRetriever(FlakyBackend([away()] * 20), 2)
    for _ in range(20):
        with pytest.raises(BackendUnavailableError):
            limited.search(["a", "b"], 1)
    assert limited.search(["a", "b"], 1) == [answer_of("a", 1), answer_of("b", 1)]


def test_the_time_in_the_queue_is_measured():
    stats = SearchStats()

    def search_for_50_ms(queries):
        while len(backend.requests) == 1 and len(limited._waiting) < 3:
            pass  # the first search begins when the others wait
        time.sleep(0.05)

    backend = FlakyBackend(on_search=search_for_50_ms)
    limited = LimitedRetriever(backend, 1, stats=stats)
    in_threads(4, lambda number: limited.search([f"query {number}"], 1))
    window = stats.window()
    assert window.queued == 4
    # Nobody, one, two and three searches of 50 ms in front.
    assert 0.28 < window.queue_s < 3.0
    assert window.metrics()["search/queue_ms"] == pytest.approx(250 * window.queue_s, rel=1e-9)


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="`max_in_flight` must be at least 1: got 0"):
        LimitedRetriever(FlakyBackend(), 0)
