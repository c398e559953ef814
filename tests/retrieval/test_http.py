from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from grounded_rl.errors import (
    BackendTimeoutError,
    BackendUnavailableError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.http import HTTPRetriever
from grounded_rl.retrieval.server import ServedIndex, ServerSettings, create_app
from tests.retrieval import contract
from tests.retrieval.serving import EchoRetriever, echo, free_port, raw_server, running, search_r1_app, send


@pytest.fixture(scope="module")
def bm25(tmp_path_factory):
    folder = tmp_path_factory.mktemp("http")
    build_bm25_index(contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES), folder / "index")
    return BM25Retriever.open(folder / "index")


@pytest.fixture(scope="module")
def our_server(bm25):
    with running(create_app(ServedIndex(lambda: bm25, manifest=bm25.manifest), ServerSettings())) as url:
        yield url


@pytest.fixture(scope="module")
def search_r1_server(bm25):
    with running(search_r1_app(bm25)) as url:
        yield url


@pytest.fixture(scope="module", params=["ours", "search-r1"])
def retriever(request, our_server, search_r1_server):
    url = our_server if request.param == "ours" else search_r1_server
    retriever = HTTPRetriever.connect(url, index_id=None if request.param == "ours" else "wiki-18")
    yield retriever
    retriever.close()


def _ours(retriever, **settings):
    return create_app(
        ServedIndex(lambda: retriever, manifest=retriever.manifest), ServerSettings(max_wait_ms=0, **settings)
    )


# Search-R1's server does not say how many passages it has.
_CHECKS = [check for check in contract.CHECKS if check is not contract.the_manifest_counts_the_passages]


@pytest.mark.parametrize("check", _CHECKS + contract.LEXICAL_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract_behind_both_servers(check, retriever):
    check(retriever)


def test_hits_are_those_of_the_index_itself(retriever, bm25):
    queries = ["capital of Peru", "Lima", "lighthouse", "São Tomé", '"Heroes" [we]', "glaciers"]
    assert retriever.search(queries, 5) == bm25.search(queries, 5)


def test_the_manifest_is_that_of_the_server_without_its_files(our_server, bm25):
    retriever = HTTPRetriever.connect(our_server + "/retrieve/")
    assert retriever.manifest == {name: value for name, value in bm25.manifest.items() if name != "files"}
    retriever.ready()


def test_a_server_that_names_no_index_is_known_by_the_given_name(search_r1_server):
    assert HTTPRetriever.connect(search_r1_server, index_id="wiki-18").manifest["index_id"] == "wiki-18"
    unnamed = HTTPRetriever.connect(search_r1_server)
    assert "index_id" not in unnamed.manifest
    unnamed.ready()


def test_connecting_to_an_index_other_than_the_named_one_is_refused(our_server, bm25):
    HTTPRetriever.connect(our_server, index_id=bm25.manifest["index_id"])
    with pytest.raises(IndexMismatchError, match="must serve the index 'other'"):
        HTTPRetriever.connect(our_server, index_id="other")


def test_an_index_that_changes_behind_the_address_is_noticed_by_search_and_by_ready():
    port = free_port()
    with running(_ours(EchoRetriever("first")), port=port) as url:
        retriever = HTTPRetriever.connect(url)
        assert retriever.search(["Peru"], 1)[0][0].passage == echo("Peru")
    with pytest.raises(BackendUnavailableError):
        retriever.search(["Peru"], 1)
    with running(_ours(EchoRetriever("second")), port=port):
        _wait_until_open(url)
        for call in (lambda: retriever.search(["Peru"], 1), retriever.ready):
            with pytest.raises(IndexMismatchError, match="'first': got 'second'"):
                call()
    with running(_ours(EchoRetriever("first")), port=port):
        _wait_until_open(url)
        retriever.ready()
        assert retriever.search(["Lima"], 1)[0][0].passage == echo("Lima")


def test_a_server_that_searches_in_another_way_after_a_restart_is_not_ready():
    port = free_port()
    with running(_ours(EchoRetriever()), port=port) as url:
        _wait_until_open(url)
        retriever = HTTPRetriever.connect(url)
        assert retriever.search_parameters == {"mode": "echo"}
    other = EchoRetriever()
    other.search_parameters = {"mode": "reverse"}
    with running(_ours(other), port=port):
        _wait_until_open(url)
        with pytest.raises(IndexMismatchError, match="must search as before.*'echo'.*got .*'reverse'"):
            retriever.ready()


def test_search_parameters_are_asked_for_again_if_the_index_was_not_open():
    gate = threading.Event()
    index = EchoRetriever()

    def open_slowly():
        assert gate.wait(30)
        return index

    with running(create_app(ServedIndex(open_slowly, manifest=index.manifest), ServerSettings())) as url:
        retriever = HTTPRetriever.connect(url)
        assert retriever.search_parameters == {}
        gate.set()
        _wait_until_open(url)
        assert retriever.search_parameters == {"mode": "echo"}


def _wait_until_open(url):
    other = HTTPRetriever(url)
    for _ in range(500):
        try:
            return other.ready()
        except BackendUnavailableError:
            time.sleep(0.01)
    raise AssertionError("the server never became ready")


def test_a_large_search_is_split_and_keeps_every_pairing():
    index = EchoRetriever()
    with running(_ours(index, max_batch=3)) as url:
        _wait_until_open(url)
        index.calls.clear()
        retriever = HTTPRetriever.connect(url, max_batch_size=3)
        queries = [f"query {number}" for number in range(50)]
        assert [hits[0].passage.text for hits in retriever.search(queries, 1)] == queries
    assert {len(sent) for sent, _ in index.calls} == {3, 2}
    assert sorted(query for sent, _ in index.calls for query in sent) == sorted(queries)


def test_the_limits_of_the_server_hold_for_the_client():
    with running(_ours(EchoRetriever(), max_queries=4, max_k=7)) as url:
        _wait_until_open(url)
        retriever = HTTPRetriever.connect(url)
        queries = [f"query {number}" for number in range(10)]
        assert [len(hits) for hits in retriever.search(queries, 7)] == [7] * 10
        with pytest.raises(ConfigurationError, match="`k` must be at most 7, the limit of the server"):
            retriever.search(queries, 8)


def test_blank_queries_are_not_sent_and_equal_ones_once():
    sent = []

    def reply(handler, body):
        if handler.path != "/retrieve":
            return send(handler, 404, b"{}")
        sent.append(json.loads(body))
        result = [[{"document": {"id": 7, "contents": f'"T"\n{q}'}, "score": 1}] for q in sent[-1]["queries"]]
        return send(handler, 200, json.dumps({"result": result}).encode())

    with raw_server(reply) as url:
        hits = HTTPRetriever(url).search(["Lima", " ", "Peru", "Lima", ""], 2)
        HTTPRetriever(url).search(["", "\n"], 2)
    assert sent == [{"queries": ["Lima", "Peru"], "topk": 2, "return_scores": True}]
    assert [[hit.passage.text for hit in row] for row in hits] == [["Lima"], [], ["Peru"], ["Lima"], []]
    assert (hits[0][0].passage.id, hits[0][0].passage.title) == ("7", "T")


def test_threads_share_a_client_and_never_mix_answers():
    with running(_ours(EchoRetriever())) as url:
        _wait_until_open(url)
        retriever = HTTPRetriever.connect(url)

        def one(number):
            queries = [f"{number} {part}" for part in range(1 + number % 5)]
            return [[hit.passage for hit in hits] for hits in retriever.search(queries, 2)] == [
                [echo(query, 0), echo(query, 1)] for query in queries
            ]

        with ThreadPoolExecutor(16) as pool:
            assert all(pool.map(one, range(200)))


def _silent(handler, _, stop):
    stop.wait(20)
    handler.close_connection = True


def _dripping(handler, _, stop):
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    while not stop.wait(0.05):
        handler.wfile.write(b" ")


@pytest.mark.parametrize("behaviour", [_silent, _dripping])
def test_a_request_ends_when_its_time_is_up_however_the_server_delays(behaviour):
    stop = threading.Event()

    def reply(handler, body):
        return behaviour(handler, body, stop) if handler.path == "/retrieve" else send(handler, 404, b"{}")

    with raw_server(reply) as url:
        retriever = HTTPRetriever.connect(url, timeout=0.6)
        started = time.monotonic()
        with pytest.raises(BackendTimeoutError):
            retriever.search(["Peru"], 3)
        assert time.monotonic() - started < 5
        stop.set()


def test_an_absent_server_is_unavailable_at_once():
    retriever = HTTPRetriever(f"http://127.0.0.1:{free_port()}")
    for call in (lambda: retriever.search(["Peru"], 1), retriever.ready, lambda: retriever.manifest):
        with pytest.raises(BackendUnavailableError, match="cannot be reached"):
            call()


def test_a_server_that_is_not_ready_is_unavailable_and_says_why():
    gate = threading.Event()
    index = EchoRetriever()

    def open_slowly():
        assert gate.wait(30)
        return index

    with running(create_app(ServedIndex(open_slowly, manifest=index.manifest), ServerSettings())) as url:
        retriever = HTTPRetriever.connect(url)
        for call in (retriever.ready, lambda: retriever.search(["Peru"], 1)):
            with pytest.raises(BackendUnavailableError, match="the index is being opened"):
                call()
        gate.set()
        _wait_until_open(url)
        assert retriever.search(["Peru"], 1)[0][0].passage == echo("Peru")


def test_the_loopback_is_never_reached_through_a_proxy(our_server, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert HTTPRetriever.connect(our_server).search(["Lima"], 1)[0]


def test_a_token_comes_from_the_argument_or_the_environment(monkeypatch):
    token = "a-token-of-enough-letters"
    with running(_ours(EchoRetriever(), token=token)) as url:
        with pytest.raises(RetrievalError, match="refused the token"):
            HTTPRetriever.connect(url)
        with pytest.raises(RetrievalError, match="refused the token"):
            HTTPRetriever.connect(url, token="wrong")
        assert HTTPRetriever.connect(url, token=token).manifest["index_id"] == "echo"
        monkeypatch.setenv("GROUNDED_RL_SERVER_TOKEN", token)
        assert HTTPRetriever.connect(url).manifest["index_id"] == "echo"


def test_a_closed_client_says_so(our_server):
    retriever = HTTPRetriever.connect(our_server)
    retriever.close()
    retriever.close()
    with pytest.raises(RetrievalError, match="was closed"):
        retriever.search(["Peru"], 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "localhost:8000"}, "`url` must be the http or https address"),
        ({"url": "ftp://localhost"}, "`url` must be the http or https address"),
        ({"url": "http://"}, "`url` must be the http or https address"),
        ({"url": "http://me:password@localhost:8000"}, "`url` must have no user"),
        ({"url": "http://localhost:8000/?token=password"}, "`url` must have no user, query"),
        ({"url": "http://localhost", "timeout": 0}, "`timeout` must be above 0"),
        ({"url": "http://localhost", "max_batch_size": 0}, "`max_batch_size` must be at least 1"),
        ({"url": "http://localhost", "token": "zażółć"}, "`token` must be printable ASCII"),
        ({"url": "https://localhost", "ca_certs": "absent.pem"}, "`ca_certs` must be a readable file"),
    ],
)
def test_an_argument_that_cannot_work_is_refused_without_repeating_secrets(arguments, message):
    with pytest.raises(ConfigurationError, match=message) as raised:
        HTTPRetriever(**arguments)
    assert "password" not in str(raised.value)
    assert "zażółć" not in str(raised.value)
