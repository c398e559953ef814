from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grounded_rl.errors import BackendOverloadedError, BackendTimeoutError, BackendUnavailableError
from grounded_rl.retrieval.server import ServedIndex, ServerSettings, create_app
from tests.retrieval.serving import EchoRetriever, httpx, running


class Client:
    """Asks for one passage per query."""

    def __init__(self, url):
        limits = httpx.Limits(max_connections=100)
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False, limits=limits)

    def post(self, *queries, k=1):
        return self.http.post("/retrieve", json={"queries": list(queries), "topk": k, "return_scores": True})

    def metric(self, name):
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"grounded_rl_{name}"))


@pytest.fixture
def start():
    """Serve an index whose searches can be held up; ends with the test."""
    with contextlib.ExitStack() as stack:

        def serve(retriever, **settings):
            served = ServedIndex(lambda: retriever, manifest=retriever.manifest)
            url = stack.enter_context(running(create_app(served, ServerSettings(**settings))))
            client = Client(url)
            stack.callback(client.http.close)
            stack.callback(retriever.gate.set)
            until(lambda: client.http.get("/ready").status_code == 200)
            retriever.calls.clear()
            return client

        yield serve


@pytest.fixture
def pool():
    with ThreadPoolExecutor(40) as pool:
        yield pool


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def texts(answer):
    return [[row["document"]["text"] for row in hits] for hits in answer.raise_for_status().json()["result"]]


def hold(retriever, client, pool):
    """Occupy the retriever with a search that waits; returns its future."""
    retriever.gate.clear()
    first = pool.submit(client.post, "first")
    until(lambda: retriever.calls)
    return first


def test_requests_that_wait_are_searched_together_and_get_their_own_hits(start, pool):
    index = EchoRetriever()
    client = start(index)
    first = hold(index, client, pool)
    others = [pool.submit(client.post, f"query {n}", f"other {n}") for n in range(20)]
    until(lambda: client.metric("queue_depth") == 40)
    index.gate.set()
    assert texts(first.result()) == [["first"]]
    assert [texts(other.result()) for other in others] == [[[f"query {n}"], [f"other {n}"]] for n in range(20)]
    assert [len(queries) for queries, _ in index.calls] == [1, 40]


def test_the_first_request_of_a_batch_waits_for_others_but_no_longer_than_told(start, pool):
    index = EchoRetriever()
    client = start(index, max_wait_ms=300, max_batch=8)
    started = time.monotonic()
    assert texts(client.post("alone")) == [["alone"]]
    assert time.monotonic() - started >= 0.3
    index.calls.clear()
    answers = list(pool.map(client.post, [f"query {n}" for n in range(8)]))
    assert [texts(answer) for answer in answers] == [[[f"query {n}"]] for n in range(8)]
    assert len(index.calls) < 8


def test_a_batch_holds_no_more_queries_than_told_and_equal_ones_once(start, pool):
    index = EchoRetriever()
    client = start(index, max_batch=6)
    first = hold(index, client, pool)
    others = [pool.submit(client.post, *(f"{n} {part}" for part in range(4))) for n in range(3)]
    until(lambda: client.metric("queue_depth") == 12)
    same = [pool.submit(client.post, "same", "same") for _ in range(3)]
    until(lambda: client.metric("queue_depth") == 18)
    index.gate.set()
    assert [texts(other.result()) for other in others] == [[[f"{n} {part}"] for part in range(4)] for n in range(3)]
    assert [texts(answer.result()) for answer in same] == [[["same"], ["same"]]] * 3
    first.result()
    # The last four and the first `same, same` make six.
    assert [len(queries) for queries, _ in index.calls] == [1, 4, 4, 5, 1]
    index.calls.clear()
    many = [f"query {number}" for number in range(20)]
    assert texts(client.post(*many)) == [[query] for query in many]
    assert [len(queries) for queries, _ in index.calls] == [6, 6, 6, 2]


def test_requests_for_different_numbers_of_passages_are_searched_apart(start, pool):
    index = EchoRetriever()
    client = start(index)
    first = hold(index, client, pool)
    others = [pool.submit(client.post, f"query {n}", k=1 + n % 3) for n in range(12)]
    until(lambda: client.metric("queue_depth") == 12)
    index.gate.set()
    first.result()
    assert [len(texts(other.result())[0]) for other in others] == [1 + n % 3 for n in range(12)]
    assert sorted((len(queries), k) for queries, k in index.calls[1:]) == [(4, 1), (4, 2), (4, 3)]


def test_a_query_that_breaks_the_search_fails_alone(start, pool):
    index = EchoRetriever(trouble={"poison": ValueError("secret of the operator")})
    client = start(index)
    first = hold(index, client, pool)
    queries = [f"query {n}" if n not in (5, 17) else f"poison {n}" for n in range(24)]
    others = [pool.submit(client.post, query) for query in queries]
    until(lambda: client.metric("queue_depth") == 24)
    index.gate.set()
    first.result()
    for query, other in zip(queries, others, strict=True):
        if query.startswith("poison"):
            assert other.result().status_code == 500
            assert other.result().json() == {"detail": "the search failed (ValueError)", "error": "RetrievalError"}
        else:
            assert texts(other.result()) == [[query]]
    assert client.metric('errors_total{kind="ValueError"}') == 2


@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (BackendOverloadedError("busy", 4.0), 503, {"retry-after": "4"}),
        (BackendUnavailableError("away"), 503, {"retry-after": "1"}),
        (BackendTimeoutError("slow"), 504, {}),
    ],
)
def test_a_failure_of_the_backend_is_told_to_all_and_not_multiplied(start, pool, error, status, headers):
    index = EchoRetriever(trouble={"query": error})
    client = start(index)
    first = hold(index, client, pool)
    others = [pool.submit(client.post, f"query {n}") for n in range(10)]
    until(lambda: client.metric("queue_depth") == 10)
    index.gate.set()
    first.result()
    for other in others:
        assert other.result().status_code == status
        assert headers.items() <= dict(other.result().headers).items()
        assert str(error) in other.result().json()["detail"]
    assert len(index.calls) == 2


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(start, pool):
    index = EchoRetriever()
    client = start(index, queue=4, max_queries=4)
    first = hold(index, client, pool)
    waiting = pool.submit(client.post, "one", "two", "three")
    until(lambda: client.metric("queue_depth") == 3)
    refused = client.post("four", "five")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert "the queue is full: 3 queries wait, at most 4 may" in refused.json()["detail"]
    fits = pool.submit(client.post, "four")
    until(lambda: client.metric("queue_depth") == 4)
    index.gate.set()
    assert [texts(answer.result()) for answer in (first, waiting, fits)] == [
        [["first"]],
        [["one"], ["two"], ["three"]],
        [["four"]],
    ]
    assert client.metric('errors_total{kind="BackendOverloadedError"}') == 1


def test_a_request_ends_when_its_time_is_up_and_is_not_searched_after(start, pool):
    index = EchoRetriever()
    client = start(index, request_timeout=0.3)
    first = hold(index, client, pool)
    late = client.post("late")
    assert (late.status_code, late.json()["error"]) == (504, "BackendTimeoutError")
    assert first.result().status_code == 504
    index.gate.set()
    until(lambda: client.metric("queue_depth") == 0)
    assert texts(client.post("next")) == [["next"]]
    assert [queries for queries, _ in index.calls] == [["first"], ["next"]]


def test_a_retriever_that_loses_a_query_is_an_error_and_no_result(start):
    class Lossy(EchoRetriever):
        def search(self, queries, k):
            return super().search(queries, k)[: 1 if len(queries) == 1 else -1]

    client = start(Lossy())
    assert texts(client.post("one")) == [["one"]]
    answer = client.post("one", "two")
    assert (answer.status_code, answer.json()["error"]) == (500, "BadResponseError")


def test_workers_search_at_once(start, pool):
    index = EchoRetriever()
    client = start(index, workers=2)
    first = hold(index, client, pool)
    second = pool.submit(client.post, "second")
    until(lambda: len(index.calls) == 2)
    index.gate.set()
    assert texts(first.result()) + texts(second.result()) == [["first"], ["second"]]


def test_stopping_finishes_the_requests_in_progress(pool):
    index = EchoRetriever()
    served = ServedIndex(lambda: index, manifest=index.manifest)
    with running(create_app(served, ServerSettings())) as url:
        client = Client(url)
        until(lambda: client.http.get("/ready").status_code == 200)
        index.calls.clear()
        first = hold(index, client, pool)
        others = [pool.submit(client.post, f"query {n}") for n in range(10)]
        until(lambda: client.metric("queue_depth") == 10)
        threading.Timer(0.3, index.gate.set).start()
    assert texts(first.result()) == [["first"]]
    assert [texts(other.result()) for other in others] == [[[f"query {n}"]] for n in range(10)]
    client.http.close()


def test_metrics_count_requests_queries_batches_and_times(start):
    client = start(EchoRetriever())
    for number in range(5):
        client.post(f"query {number}", "same")
    client.http.post("/retrieve", content=b"{")
    client.http.get("/nowhere")
    assert client.metric('requests_total{path="/retrieve",status="200"}') == 5
    assert client.metric('requests_total{path="/retrieve",status="422"}') == 1
    assert client.metric('errors_total{kind="InvalidRequestError"}') == 1
    assert client.metric("queries_total") == 10
    assert client.metric("batch_size_sum") == 10
    assert client.metric("batch_size_count") == client.metric("search_seconds_count") == 5
    assert client.metric('request_seconds_bucket{le="+Inf"}') == client.metric("request_seconds_count") == 6
    assert 0 < client.metric('request_seconds_quantile{quantile="0.5"}') < 30
    assert client.metric("index_open") == 1
    assert "nowhere" not in client.http.get("/metrics").text
