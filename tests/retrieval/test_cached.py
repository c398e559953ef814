"""A cache answers what was asked before, exactly, and remembers nothing else."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendUnavailableError,
    BadResponseError,
    ConfigurationError,
    IndexMismatchError,
)
from grounded_rl.retrieval.cached import CachedRetriever
from grounded_rl.retrieval.result_file import ResultFile
from grounded_rl.retrieval.stats import SearchStats
from tests.retrieval.flaky import FlakyBackend, answer_of, away, in_threads

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["memory", "file"])
def path(request, tmp_path):
    return None if request.param == "memory" else tmp_path / "deep" / "cache.sqlite"


def test_only_what_is_missing_is_asked_for(path):
    backend = FlakyBackend()
    cached = CachedRetriever(backend, path)
    expected = {query: answer_of(query, 3) for query in ("Peru", "Chile", "Kenya")}
    assert cached.search(["Peru", "Chile"], 3) == [expected["Peru"], expected["Chile"]]
    assert cached.search(["Chile", "Kenya", "Peru", "Kenya"], 3) == [
        expected["Chile"],
        expected["Kenya"],
        expected["Peru"],
        expected["Kenya"],
    ]
    assert backend.requests == [["Peru", "Chile"], ["Kenya"]]


def test_one_k_never_answers_another(path):
    backend = FlakyBackend()
    cached = CachedRetriever(backend, path)
    for k in (3, 10, 2, 3, 10, 2):
        assert cached.search(["a long query"], k) == [answer_of("a long query", k)]
    assert len(backend.requests) == 3


def test_a_result_belongs_to_its_caller(path):
    cached = CachedRetriever(FlakyBackend(), path)
    (first,) = cached.search(["Peru"], 3)
    first.clear()
    assert cached.search(["Peru"], 3) == [answer_of("Peru", 3)]


def test_an_empty_result_is_remembered_as_a_result(path):
    backend = FlakyBackend()
    cached = CachedRetriever(backend, path)
    assert cached.search(["  "], 3) == cached.search(["  "], 3) == [[]]
    assert len(backend.requests) == 1


@pytest.mark.parametrize("failure", [away(), BadResponseError("half an answer"), BackendOverloadedError("busy", 2.0)])
def test_a_failure_is_raised_and_forgotten(path, failure):
    backend = FlakyBackend([None, failure])
    cached = CachedRetriever(backend, path)
    cached.search(["Peru"], 3)
    with pytest.raises(type(failure)):
        cached.search(["Peru", "Chile"], 3)
    assert cached.search(["Peru", "Chile"], 3) == [answer_of("Peru", 3), answer_of("Chile", 3)]
    assert backend.requests == [["Peru"], ["Chile"], ["Chile"]]


def test_an_answer_with_a_missing_list_is_refused_and_forgotten(path):
    backend = FlakyBackend()
    whole, backend.search = backend.search, lambda queries, k: whole(queries, k)[1:]
    cached = CachedRetriever(backend, path)
    with pytest.raises(BadResponseError, match="answered 1 of 2 queries"):
        cached.search(["Peru", "Chile"], 3)
    backend.search = whole
    assert cached.search(["Peru", "Chile"], 3) == [answer_of("Peru", 3), answer_of("Chile", 3)]


def test_spellings_that_are_the_same_text_are_one_query(path):
    backend = FlakyBackend()
    cached = CachedRetriever(backend, path)
    composed = "São Tomé"
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed
    assert cached.search([decomposed, composed], 3) == [answer_of(composed, 3)] * 2
    # What is sent does not depend on which spelling came first.
    assert backend.requests == [[composed]]


@pytest.mark.parametrize("other", ["peru", "Peru ", " Peru", "Peru\u200b", "PERU", "Perú", "Peru\ud800"])
def test_nothing_else_is_taken_for_the_same_query(path, other):
    cached = CachedRetriever(FlakyBackend(), path)
    assert cached.search(["Peru", other], 9) == [answer_of("Peru", 9), answer_of(other, 9)]
    assert cached.search([other, "Peru"], 9) == [answer_of(other, 9), answer_of("Peru", 9)]


def test_the_least_recently_used_result_goes_first():
    backend = FlakyBackend()
    cached = CachedRetriever(backend, max_entries=2)
    for query in ("a", "b", "a", "c", "a", "b"):
        cached.search([query], 1)
    assert backend.requests == [["a"], ["b"], ["c"], ["b"]]


def test_a_query_another_thread_is_asking_is_waited_for():
    asked, go = threading.Event(), threading.Event()

    def hold(queries):
        asked.set()
        assert go.wait(30)

    backend = FlakyBackend(on_search=hold)
    stats = SearchStats()
    cached = CachedRetriever(backend, stats=stats)

    def run(number):
        if number:
            assert asked.wait(30)
        if number == 7:
            go.set()
        return cached.search(["Peru"], 3)

    assert in_threads(8, run) == [[answer_of("Peru", 3)]] * 8
    assert backend.requests == [["Peru"]]
    window = stats.window()
    assert (window.lookups, window.cache_hits) == (8, 7)


def test_the_failure_of_a_search_reaches_those_who_waited_for_it_and_nobody_later():
    asked, go = threading.Event(), threading.Event()

    def hold(queries):
        asked.set()
        assert go.wait(30)

    backend = FlakyBackend([BackendOverloadedError("busy", 3.0)], on_search=hold)
    cached = CachedRetriever(backend)
    entered = threading.Semaphore(0)

    def run(number):
        if number:
            assert asked.wait(30)
        entered.release()
        if number == 3:
            for _ in range(4):
                entered.acquire(timeout=30)
            threading.Timer(0.3, go.set).start()
        return cached.search(["Peru"], 3)

    errors = in_threads(4, run)
    assert {type(error) for error in errors} == {BackendOverloadedError}
    assert {error.retry_after for error in errors} == {3.0}
    assert len({id(error) for error in errors}) == 4
    assert cached.search(["Peru"], 3) == [answer_of("Peru", 3)]
    assert backend.requests == [["Peru"], ["Peru"]]


def test_threads_that_wait_for_each_other_all_finish():
    def run(number):
        order = ["a", "b", "c", "d"][number % 4 :] + ["a", "b", "c", "d"][: number % 4]
        return cached.search(order, 2) == [answer_of(query, 2) for query in order]

    for _ in range(20):
        backend = FlakyBackend()
        cached = CachedRetriever(backend)
        assert in_threads(8, run) == [True] * 8
        assert sorted(query for queries in backend.requests for query in queries) == ["a", "b", "c", "d"]


def test_an_interrupted_search_lets_those_who_wait_go():
    asked, go = threading.Event(), threading.Event()
    backend = FlakyBackend()

    def stopped(queries, k):
        asked.set()
        assert go.wait(30)
        raise KeyboardInterrupt

    backend.search = stopped
    cached = CachedRetriever(backend)

    def run(number):
        if number:
            assert asked.wait(30)
            threading.Timer(0.2, go.set).start()
            return cached.search(["Peru"], 3)
        with pytest.raises(KeyboardInterrupt):
            cached.search(["Peru"], 3)
        return None

    leader, follower = in_threads(2, run)
    assert leader is None
    assert isinstance(follower, BackendUnavailableError)


def test_a_file_outlives_the_process_and_belongs_to_its_index(tmp_path):
    path = tmp_path / "cache.sqlite"
    first = CachedRetriever(FlakyBackend(), path)
    expected = first.search(["São Tomé", "\ud800"], 3)
    first.close()
    backend = FlakyBackend()
    assert CachedRetriever(backend, path).search(["São Tomé", "\ud800"], 3) == expected
    assert backend.requests == []
    other = FlakyBackend(index_id="another")
    CachedRetriever(other, path).search(["São Tomé"], 3)
    assert other.requests == [["São Tomé"]]


def test_search_parameters_are_part_of_the_key(tmp_path):
    path = tmp_path / "cache.sqlite"
    for parameters, num_requests in (({"boost": 1.0}, 1), ({"boost": 2.0}, 1), ({"boost": 1.0}, 0)):
        backend = FlakyBackend()
        backend.search_parameters = parameters
        CachedRetriever(backend, path).search(["Peru"], 3)
        assert len(backend.requests) == num_requests


def test_a_file_keeps_nothing_of_an_index_that_took_the_place_of_another(tmp_path):
    path = tmp_path / "cache.sqlite"
    backend = FlakyBackend()
    backend.ready_failures = [IndexMismatchError("another index")]
    with pytest.raises(IndexMismatchError, match="another index"):
        CachedRetriever(backend, path).search(["Peru"], 3)
    backend.ready_failures = [away()]
    assert CachedRetriever(backend, path).search(["Peru"], 3) == [answer_of("Peru", 3)]
    # Neither of the two was kept: nobody knew for sure where they came from.
    CachedRetriever(backend, path).search(["Peru"], 3)
    assert backend.requests == [["Peru"]] * 3
    CachedRetriever(backend, path).search(["Peru"], 3)
    assert backend.requests == [["Peru"]] * 3


def test_a_file_needs_an_index_that_can_be_told_from_others(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`path` must be left out for a retriever .* no `index_id`"):
        CachedRetriever(FlakyBackend(index_id=None), tmp_path / "cache.sqlite")
    memory = CachedRetriever(FlakyBackend(index_id=None))
    assert memory.search(["Peru"], 3) == [answer_of("Peru", 3)]


def test_a_file_of_something_else_is_never_written_to(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("shopping list " * 100, encoding="utf-8")
    database = tmp_path / "other.sqlite"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE results (key, hits)")
    connection.close()
    for path in (text, database, tmp_path):
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(ConfigurationError, match="`retrieval_cache` must be a file that can be opened"):
            CachedRetriever(FlakyBackend(), path)
        assert before is None or path.read_bytes() == before


def test_a_file_that_breaks_under_a_run_costs_searches_not_the_run(tmp_path, caplog):
    path = tmp_path / "cache.sqlite"
    backend = FlakyBackend()
    cached = CachedRetriever(backend, path, max_entries=1)
    cached.search(["Peru"], 3)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TABLE results")
    connection.close()
    for query in ("Chile", "Peru", "Kenya"):
        assert cached.search([query], 3) == [answer_of(query, 3)]
    assert [record.message for record in caplog.records if "cannot be used" in record.message] == [
        f"The search cache `{path}` cannot be used (no such table: results); searches go on without it."
    ]


def test_a_damaged_entry_is_asked_for_again(tmp_path):
    path = tmp_path / "cache.sqlite"
    CachedRetriever(FlakyBackend(), path).search(["Peru"], 3)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE results SET hits = substr(hits, 1, 20)")
    connection.close()
    assert CachedRetriever(FlakyBackend(), path).search(["Peru"], 3) == [answer_of("Peru", 3)]


def test_a_file_keeps_the_latest_results(tmp_path):
    path = tmp_path / "cache.sqlite"
    cached = CachedRetriever(FlakyBackend(), path, max_entries=2)
    for number in range(250):
        cached.search([f"query {number}"], 1)
    cached.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT COUNT(*) FROM results").fetchone() == (100,)
    connection.close()
    backend = FlakyBackend()
    CachedRetriever(backend, path).search([f"query {number}" for number in range(150, 250)], 1)
    assert backend.requests == []


WRITER = """
import sys
from grounded_rl.retrieval.cached import CachedRetriever
from tests.retrieval.flaky import FlakyBackend, answer_of
cached = CachedRetriever(FlakyBackend(), sys.argv[1])
print("ready", flush=True)
for number in range(int(sys.argv[2]), 10**9):
    queries = [f"query {number} {part}" for part in range(20)]
    assert cached.search(queries, 5) == [answer_of(query, 5) for query in queries]
"""


def test_a_new_file_is_opened_by_many_at_once(tmp_path):
    together = threading.Barrier(12)

    def opened(path):
        together.wait()
        ResultFile(path, max_entries=10).close()

    with ThreadPoolExecutor(12) as pool:
        for number in range(10):
            list(pool.map(opened, [tmp_path / f"cache-{number}.sqlite"] * 12))


def test_killed_writers_leave_a_file_that_works(tmp_path):
    path = tmp_path / "cache.sqlite"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), start],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
        )
        for start in ("0", "5", "1000")
    ]
    try:
        for writer in writers:
            assert writer.stdout.readline() == b"ready\n"
        threading.Event().wait(0.5)
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            writer.stdout.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (count,) = connection.execute("SELECT COUNT(*) FROM results").fetchone()
    connection.close()
    assert count > 0
    assert count % 20 == 0, "a batch was written in part"
    queries = [f"query {number} {part}" for number in range(20) for part in range(20)]
    backend = FlakyBackend()
    cached = CachedRetriever(backend, path)
    assert cached.search(queries, 5) == [answer_of(query, 5) for query in queries]
    assert sum(map(len, backend.requests)) < len(queries)


def test_a_cache_without_room_is_refused():
    with pytest.raises(ConfigurationError, match="`max_entries` must be at least 1: got 0"):
        CachedRetriever(FlakyBackend(), max_entries=0)
