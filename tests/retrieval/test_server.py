from __future__ import annotations

import contextlib
import threading
import time

import pytest

from grounded_rl.errors import BackendUnavailableError, ConfigurationError, RetrievalError
from grounded_rl.retrieval import Hit, Passage
from grounded_rl.retrieval.server import ServedIndex, ServerSettings, create_app
from grounded_rl.retrieval.server import index as index_module
from tests.retrieval.serving import EchoRetriever, httpx, running

TOKEN = "a-token-of-enough-letters"


class Client:
    """Search-R1's own call, and the other paths."""

    def __init__(self, url, **headers):
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False, headers=headers)

    def post(self, queries, topk=1, return_scores=True):
        payload = {"queries": queries, "topk": topk, "return_scores": return_scores}
        return self.http.post("/retrieve", json=payload)

    def search(self, query):
        """Text of the first passage, read as Search-R1's trainer does."""
        content = self.post([query]).raise_for_status().json()["result"][0][0]["document"]["contents"]
        return "\n".join(content.split("\n")[1:])

    def metric(self, name):
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"grounded_rl_{name}"))


@pytest.fixture
def serve():
    """Start servers that end with the test; returns a function of a retriever and settings."""
    with contextlib.ExitStack() as stack:

        def start(retriever, *, token=None, **settings):
            chosen = ServerSettings(**{"max_wait_ms": 0, "token": token, **settings})
            served = ServedIndex(lambda: retriever, manifest=retriever.manifest)
            url = stack.enter_context(running(create_app(served, chosen)))
            client = Client(url, **({"Authorization": f"Bearer {token}"} if token else {}))
            stack.callback(client.http.close)
            stack.callback(getattr(retriever, "gate", threading.Event()).set)
            _until(lambda: client.http.get("/ready").status_code == 200)
            return client

        yield start


def _until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


# The wire format ---------------------------------------------------------------------------------------------------


def test_an_answer_with_scores_is_exactly_that_of_search_r1_with_title_and_text_beside(serve):
    class Retriever(EchoRetriever):
        def search(self, queries, k):
            return [[Hit(Passage("7", 'The "Peru" article', "Two\nlines."), 2.5)][:k] for _ in queries]

    answer = serve(Retriever()).post(["capital of Peru"], topk=2)
    assert answer.status_code == 200
    assert answer.json() == {
        "result": [
            [
                {
                    "document": {
                        "id": "7",
                        "contents": '"The "Peru" article"\nTwo\nlines.',
                        "title": 'The "Peru" article',
                        "text": "Two\nlines.",
                    },
                    "score": 2.5,
                }
            ]
        ]
    }


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_answer_without_scores_has_the_documents_of_every_query(serve, count):
    queries = [f"query {number}" for number in range(count)]
    result = serve(EchoRetriever()).post(queries, topk=2, return_scores=False).json()["result"]
    assert [[document["id"] for document in row] for row in result] == [[f"{q}#0", f"{q}#1"] for q in queries]
    assert {tuple(document) for row in result for document in row} == {("id", "contents", "title", "text")}


def test_the_code_of_search_r1_reads_titles_and_texts(serve):
    assert serve(EchoRetriever()).search("capital of Peru") == "capital of Peru"


def test_a_request_without_topk_gets_the_default_number_and_no_query_no_list(serve):
    client = serve(EchoRetriever(), default_k=4)
    for fields in ({"topk": None}, {}):
        answer = client.http.post("/retrieve", json={"queries": ["Peru"], "return_scores": True, **fields})
        assert len(answer.json()["result"][0]) == 4
    assert client.post([]).json() == {"result": []}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "must be JSON"),
        (b"{", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"\xff\xfe", "must be JSON"),
        (b'["Peru"]', "must be a JSON object"),
        (b"{}", "`queries` must be a list of strings"),
        (b'{"queries": "Peru"}', "`queries` must be a list of strings"),
        (b'{"queries": ["Peru", null]}', "`queries` must be a list of strings"),
        (b'{"queries": ["a", "b", "c", "d", "e"]}', "`queries` must have at most 4 entries: got 5"),
        (b'{"queries": ["Peru"], "topk": 0}', "`topk` must be an integer from 1 to 5: got '0'"),
        (b'{"queries": ["Peru"], "topk": -1}', "`topk` must be an integer"),
        (b'{"queries": ["Peru"], "topk": 6}', "`topk` must be an integer"),
        (b'{"queries": ["Peru"], "topk": "3"}', "`topk` must be an integer"),
        (b'{"queries": ["Peru"], "topk": true}', "`topk` must be an integer"),
        (b'{"queries": ["Peru"], "topk": 2.0}', "`topk` must be an integer"),
        (b'{"queries": ["Peru"], "return_scores": 1}', "`return_scores` must be true or false"),
    ],
)
def test_a_malformed_request_is_refused_with_its_reason_and_nothing_is_searched(serve, body, message):
    index = EchoRetriever()
    client = serve(index, max_queries=4, max_k=5)
    index.calls.clear()
    answer = client.http.post("/retrieve", content=body)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]
    assert index.calls == []
    assert client.search("Peru") == "Peru"


def test_a_body_beyond_the_limit_is_refused_also_when_its_size_is_not_declared(serve):
    client = serve(EchoRetriever(), max_body_bytes=1000)
    body = b'{"queries": ["' + b"x" * 2000 + b'"]}'
    assert client.http.post("/retrieve", content=body).status_code == 413
    assert client.http.post("/retrieve", content=iter([body[:500], body[500:]])).status_code == 413
    assert client.search("Peru") == "Peru"


def test_a_query_with_an_unpaired_surrogate_is_searched(serve):
    client = serve(EchoRetriever())
    answer = client.http.post("/retrieve", content=rb'{"queries": ["Peru \ud800"], "return_scores": true}')
    assert answer.json()["result"][0][0]["document"]["text"] == "Peru ?"


# Access ------------------------------------------------------------------------------------------------------------


def test_only_health_and_readiness_are_open_without_the_token(serve):
    client = serve(EchoRetriever(), token=TOKEN)
    for given in (None, "Bearer wrong", f"Bearer {TOKEN}x", TOKEN, f"Basic {TOKEN}", "Bearer zażółć".encode()):
        stranger = {"Authorization": given} if given else {}
        with httpx.Client(base_url=client.url, trust_env=False, headers=stranger) as http:
            for method, path in (("POST", "/retrieve"), ("GET", "/info"), ("GET", "/metrics")):
                answer = http.request(method, path)
                assert (answer.status_code, answer.headers.get("www-authenticate")) == (401, "Bearer")
                assert "echo" not in answer.text + str(answer.headers)
            assert http.get("/health").json() == {"status": "alive"}
            assert http.get("/ready").status_code == 200
            assert http.get("/openapi.json").status_code == http.get("/docs").status_code == 404
    assert client.search("Peru") == "Peru"
    assert client.metric('errors_total{kind="Unauthorized"}') == 18


def test_other_addresses_than_loopback_need_a_token_or_a_clear_word():
    for host in ("127.0.0.1", "127.1.2.3", "localhost", "::1"):
        assert ServerSettings(host=host).host == host
    for host in ("0.0.0.0", "::", "10.0.0.5", "example.org", ""):
        with pytest.raises(ConfigurationError, match="`host` must be a loopback address while there is no token"):
            ServerSettings(host=host)
        assert ServerSettings(host=host, token=TOKEN).host == host
        assert ServerSettings(host=host, allow_unauthenticated=True).host == host


def test_settings_never_show_the_token():
    assert TOKEN not in repr(ServerSettings(token=TOKEN))
    for token in ("short", "zażółć" * 8):
        with pytest.raises(ConfigurationError, match="GROUNDED_RL_SERVER_TOKEN") as raised:
            ServerSettings(token=token)
        assert token not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_k": 0}, "`max_k` must be at least 1"),
        ({"default_k": 200}, "`default_k` must be at most `max_k`, 100"),
        ({"queue": 100}, "`queue` must hold one request of `max_queries`, 512"),
        ({"port": 70000}, "`port` must be from 0 to 65535"),
        ({"max_wait_ms": -1}, "`max_wait_ms` must be at least 0"),
        ({"request_timeout": float("nan")}, "`request_timeout` must be at least"),
        ({"tls_key": "key.pem"}, "`tls_cert` must be given"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ServerSettings(**settings)


# Readiness ---------------------------------------------------------------------------------------------------------


def test_the_port_is_open_while_the_index_is_not(monkeypatch):
    opening = threading.Event()
    retriever = EchoRetriever()
    attempts = []

    def open_index():
        attempts.append(1)
        if len(attempts) < 3:
            raise BackendUnavailableError("the database is starting.")
        assert opening.wait(30)
        return retriever

    monkeypatch.setattr(index_module, "_FIRST_WAIT_S", 0.01)
    app = create_app(ServedIndex(open_index, manifest=retriever.manifest), ServerSettings(token=TOKEN))
    with running(app) as url, httpx.Client(base_url=url, trust_env=False) as http:
        allowed = {"Authorization": f"Bearer {TOKEN}"}
        _until(lambda: len(attempts) == 3)
        assert http.get("/health").status_code == 200
        assert (http.get("/ready").status_code, http.get("/ready").json()) == (503, {"detail": "not ready"})
        assert "the database is starting" in http.get("/ready", headers=allowed).json()["detail"]
        early = http.post("/retrieve", json={"queries": ["Peru"]}, headers=allowed)
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        manifest = http.get("/info", headers=allowed).json()["manifest"]
        assert (manifest["index_id"], "files" in manifest) == ("echo", False)
        opening.set()
        _until(lambda: http.get("/ready").status_code == 200)
        answer = http.post("/retrieve", json={"queries": ["Peru"]}, headers=allowed)
        assert answer.json()["result"][0][0]["text"] == "Peru"
        assert answer.headers["X-Grounded-RL-Index-Id"] == "echo"


def test_an_index_that_can_never_be_opened_is_reported_once():
    def open_index():
        raise ConfigurationError("`index` must be something else.")

    failed = threading.Event()
    index = ServedIndex(open_index)
    with running(create_app(index, ServerSettings(), on_failure=failed.set)):
        assert failed.wait(30)
    assert isinstance(index.failure, ConfigurationError)


class Sampled(EchoRetriever):
    """Finds passages by their title, unless it is `broken`."""

    broken = False

    def sample(self, count):
        return [Passage(str(number), f"title {number}", "text") for number in range(count)]

    def search(self, queries, k):
        found = [Hit(Passage("3" if self.broken else query.split()[1], "", query), 1.0) for query in queries]
        return [[hit] for hit in found]


def test_an_index_that_does_not_find_its_own_passages_is_not_served():
    index = ServedIndex(lambda: _broken())
    index.open()
    assert not index.is_open
    with pytest.raises(RetrievalError, match="must find sampled passages by their own words: got 1 of 10"):
        raise index.failure


def _broken():
    retriever = Sampled()
    retriever.broken = True
    return retriever


def test_an_index_that_stops_finding_a_known_passage_is_no_longer_ready(serve, monkeypatch):
    monkeypatch.setattr(index_module, "_CHECK_VALID_S", 0.0)
    retriever = Sampled()
    client = serve(retriever)
    assert client.http.get("/ready").json() == {"status": "ready", "index_id": "echo"}
    retriever.broken = True
    answer = client.http.get("/ready")
    assert (answer.status_code, "no longer finds its passage '0'" in answer.text) == (503, True)
    retriever.broken = False
    assert client.http.get("/ready").status_code == 200


def test_readiness_is_checked_at_most_once_a_second(serve):
    retriever = EchoRetriever()
    client = serve(retriever)
    before = len(retriever.calls)
    started = time.monotonic()
    for _ in range(20):
        client.http.get("/ready")
    assert len(retriever.calls) - before <= 1 + (time.monotonic() - started)
