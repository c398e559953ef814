"""Counters, percentiles, and what wrappers pass on."""

from __future__ import annotations

import contextlib
import math
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.errors import BackendUnavailableError, ConfigurationError, RetrievalError
from grounded_rl.retrieval import Retriever
from grounded_rl.retrieval.base import check_ready, close_retriever
from grounded_rl.retrieval.bm25 import build_bm25_index
from grounded_rl.retrieval.build import build_retriever
from grounded_rl.retrieval.cached import CachedRetriever
from grounded_rl.retrieval.compose import RetrievalSettings, compose_retriever
from grounded_rl.retrieval.limited import LimitedRetriever
from grounded_rl.retrieval.outage import PatientRetriever
from grounded_rl.retrieval.retrying import RetryingRetriever
from grounded_rl.retrieval.stats import MeasuredRetriever, SearchStats, SearchWindow, merge_windows, nearest_rank
from tests.retrieval import contract
from tests.retrieval.flaky import Clock, FlakyBackend, answer_of, away, in_threads

WRAPPERS = {
    "cached": CachedRetriever,
    "limited": lambda inner: LimitedRetriever(inner, 3),
    "retrying": lambda inner: RetryingRetriever(inner, attempts=3, clock=Clock()),
    "measured": MeasuredRetriever,
    "patient": lambda inner: PatientRetriever(inner, clock=Clock()),
}


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_that_enough_of_them_do_not_exceed(values, percent):
    expected = min(value for value in values if 100 * sum(other <= value for other in values) >= percent * len(values))
    assert nearest_rank(values, percent) == expected


def test_percentiles_are_exact_where_a_product_would_round_up():
    assert nearest_rank(range(1, 21), 95) == 19
    assert nearest_rank(range(1, 101), 7) == 7
    assert math.isnan(nearest_rank([], 50))


def test_requests_are_counted_and_timed():
    stats = SearchStats()
    backend = FlakyBackend([None, away()], on_search=lambda queries: threading.Event().wait(0.01))
    measured = MeasuredRetriever(backend, stats)
    measured.search(["Peru", "  ", "Chile", " "], 3)
    with pytest.raises(BackendUnavailableError):
        measured.search(["Kenya"], 3)
    assert measured.search([], 3) == []
    metrics = stats.window().metrics()
    assert metrics["search/requests"] == 2
    assert metrics["search/queries"] == 5
    assert metrics["search/failures"] == 1
    assert metrics["search/empty_share"] == 0.5
    assert 10 <= metrics["search/latency_p50_ms"] == metrics["search/latency_p95_ms"] < 1000
    assert math.isnan(metrics["search/cache_hit_share"])


def test_what_a_backend_repeats_by_itself_is_counted():
    stats = SearchStats()
    backend = FlakyBackend([None, away()])
    backend.num_retries = 0
    measured = MeasuredRetriever(backend, stats)
    for total in (3, 3, 7):
        backend.num_retries = total
        with contextlib.suppress(BackendUnavailableError):
            measured.search(["Peru"], 3)
    assert stats.window().retries == 7


def test_a_window_begins_where_the_last_one_ended():
    stats = SearchStats()
    stats.add(requests=2)
    stats.add_latency(1.0)
    assert stats.window() == stats.window(reset=True) == SearchWindow(requests=2, latencies_s=(1.0,))
    assert stats.window() == SearchWindow()


def test_windows_of_processes_are_one_window():
    one = SearchWindow(requests=3, answered=10, empty=1, lookups=20, cache_hits=10, latencies_s=(0.1, 0.3))
    two = SearchWindow(requests=1, answered=30, empty=7, latencies_s=(0.2,))
    metrics = merge_windows([one, two, SearchWindow()]).metrics()
    assert metrics["search/requests"] == 4
    assert metrics["search/empty_share"] == 8 / 40
    assert metrics["search/cache_hit_share"] == 0.5
    assert metrics["search/latency_p50_ms"] == 200.0
    assert metrics["search/latency_p95_ms"] == 300.0


def test_nothing_is_lost_between_threads():
    stats = SearchStats()

    def run(number):
        for _ in range(2000):
            stats.add(requests=1, queue_s=0.5)
            stats.add_latency(float(number))

    in_threads(8, run)
    window = stats.window()
    assert (window.requests, window.queue_s, len(window.latencies_s)) == (16000, 8000.0, 4096)


def test_a_full_reservoir_is_a_fair_sample():
    stats = SearchStats(reservoir_size=1000)
    for number in range(20_000):
        stats.add_latency(number / 20_000)
    sample = stats.window().latencies_s
    assert len(sample) == 1000
    # The standard error of the mean of 1000 uniform values is 0.0091.
    assert abs(sum(sample) / 1000 - 0.5) < 0.04


def test_measuring_leaves_the_random_state_of_the_run_alone():
    state = random.getstate()
    stats = SearchStats(reservoir_size=1)
    stats.add_latency(1.0)
    stats.add_latency(2.0)
    assert random.getstate() == state


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_passes_on_everything_but_the_search(name):
    backend = FlakyBackend()
    wrapped = WRAPPERS[name](backend)
    assert isinstance(wrapped, Retriever)
    assert wrapped.manifest == backend.manifest
    assert len(wrapped.sample(4)) == 4
    backend.ready_failures = [away()]
    with pytest.raises(BackendUnavailableError):
        check_ready(wrapped)
    check_ready(wrapped)
    close_retriever(wrapped)
    assert backend.is_closed


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_has_no_method_the_backend_lacks(name):
    class Bare:
        manifest: dict = {}  # noqa: RUF012

        def search(self, queries, k):
            return [answer_of(query, k) for query in queries]

    wrapped = WRAPPERS[name](Bare())
    assert not hasattr(wrapped, "sample")
    assert not hasattr(wrapped, "search_parameters")
    with pytest.raises(AttributeError, match="has no attribute 'serach'"):
        wrapped.serach()
    check_ready(wrapped)
    close_retriever(wrapped)


@given(
    names=st.lists(st.sampled_from(sorted(WRAPPERS)), max_size=5),
    batches=st.lists(
        st.tuples(st.lists(st.text(alphabet="ab é ", max_size=4), max_size=8), st.integers(1, 4)), max_size=5
    ),
    failing=st.sets(st.integers(0, 12)),
)
@settings(max_examples=150, deadline=None)
def test_every_composition_keeps_the_contract(names, batches, failing):
    backend = FlakyBackend(away(number) if number in failing else None for number in range(13))
    retriever = backend
    for name in names:
        retriever = WRAPPERS[name](retriever)
    for queries, k in batches:
        try:
            found = retriever.search(queries, k)
        except RetrievalError:
            # Without a wrapper that repeats, a failure comes out as one; never as an answer.
            continue
        assert found == [answer_of(query, k) for query in queries]


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("composed")
    corpus = contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES)
    build_bm25_index(corpus, folder / "index")
    settings = RetrievalSettings(max_in_flight=3, cache=str(folder / "cache.sqlite"), patience=10.0)
    return compose_retriever(build_retriever(folder / "index"), settings)


@pytest.mark.parametrize("round_", ["cold", "warm"])
@pytest.mark.parametrize("check", contract.CHECKS + contract.LEXICAL_CHECKS, ids=lambda check: check.__name__)
def test_a_composed_index_keeps_the_contract(check, round_, composed):
    check(composed)


def test_a_composition_survives_what_its_parts_are_for():
    stats = SearchStats()
    backend = FlakyBackend([away(), None])
    retriever = compose_retriever(backend, RetrievalSettings(attempts=2, timeout=5.0, max_in_flight=2), stats=stats)
    queries = ["a", "bb", "ccc", "a"]
    assert retriever.search(queries, 3) == [answer_of(query, 3) for query in queries]
    assert retriever.search(queries, 3) == [answer_of(query, 3) for query in queries]
    assert backend.requests == [["a", "bb"], ["a", "bb"], ["ccc"]]
    window = stats.window()
    assert (window.requests, window.failures, window.retries) == (3, 1, 1)
    assert (window.lookups, window.cache_hits) == (8, 5)


def test_a_run_without_a_cache_asks_every_time():
    backend = FlakyBackend()
    retriever = compose_retriever(backend, RetrievalSettings(cache="off"))
    retriever.search(["a"], 1)
    retriever.search(["a"], 1)
    assert len(backend.requests) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 0}, "`attempts` must be at least 1: got 0"),
        ({"timeout": -1.0}, "`timeout` must be at least 0: got -1.0"),
        ({"max_in_flight": 0}, "`max_in_flight` must be at least 1: got 0"),
        ({"patience": -1.0}, "`patience` must be at least 0: got -1.0"),
        ({"cache": ""}, "`cache` must be `off`, `memory` or a path: got an empty text"),
    ],
)
def test_settings_out_of_range_are_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        RetrievalSettings(**options)
