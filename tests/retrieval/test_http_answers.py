from __future__ import annotations

import json

import pytest

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    BadResponseError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.http import HTTPRetriever
from tests.retrieval.serving import raw_server, send


def _status(status, body=b'{"detail": "because"}', **headers):
    return lambda handler, _: send(handler, status, body, {name.replace("_", "-"): v for name, v in headers.items()})


def _truncated(handler, _):
    send(handler, 200, b'{"result": [[{"document"', {"Content-Length": "5000"})
    handler.close_connection = True


def _cut_connection(handler, _):
    handler.connection.close()
    handler.close_connection = True


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (_status(401), RetrievalError, "refused the token .*GROUNDED_RL_SERVER_TOKEN"),
        (_status(403), RetrievalError, "refused the token"),
        (_status(404), BadResponseError, "no retrieval server at this address"),
        (_status(302, Location="http://localhost:1/"), BadResponseError, "no retrieval server at this address"),
        (_status(204, b""), BadResponseError, "no retrieval server"),
        (_status(422), RetrievalError, "refused the request .*because"),
        (_status(500, b"Internal Server Error"), BackendUnavailableError, "failed .*Internal Server Error"),
        (_status(502), BackendUnavailableError, "failed"),
        (_status(504), BackendTimeoutError, "in time"),
        (_status(500, b'{"detail": "x", "error": "IndexMismatchError"}'), IndexMismatchError, "could not search"),
        (_status(200, b"<html>proxy</html>"), BadResponseError, "must answer JSON: got '<html>proxy"),
        (_status(200, b"[" * 100_000), BadResponseError, "must answer JSON"),
        (_status(200, b"nonsense", Content_Encoding="gzip"), BadResponseError, "cannot be unpacked"),
        (_truncated, BackendUnavailableError, "broke the connection"),
        (_cut_connection, BackendUnavailableError, "broke the connection"),
    ],
)
def test_whatever_goes_wrong_is_a_typed_error_and_never_a_result(reply, kind, message):
    def answer(handler, body):
        return reply(handler, body) if handler.path == "/retrieve" else send(handler, 404, b"{}")

    with raw_server(answer) as url:
        retriever = HTTPRetriever.connect(url, timeout=10, token="a-secret-token-of-the-run")
        with pytest.raises(RetrievalError, match=message) as raised:
            retriever.search(["Peru"], 3)
    assert type(raised.value) is kind
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("retry_after", "seconds"), [("7", 7.0), (None, None), ("soon", None)])
@pytest.mark.parametrize("status", [429, 503])
def test_an_overloaded_server_says_how_long_to_wait(status, retry_after, seconds):
    headers = {"Retry-After": retry_after} if retry_after else {}

    def reply(handler, _):
        send(handler, status if handler.path == "/retrieve" else 404, b"busy", headers)

    with raw_server(reply) as url, pytest.raises(BackendOverloadedError, match="busy") as raised:
        HTTPRetriever(url).search(["Peru"], 3)
    assert raised.value.retry_after == seconds


def _document(**fields):
    return {"document": {"id": "1", "contents": '"Peru"\nA country.', **fields}, "score": 1.0}


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ([], 'must answer `{"result"'),
        ({"error": "index not loaded"}, 'must answer `{"result"'),
        ({"result": []}, "one list for each of 1 queries: got 0"),
        ({"result": [[], []]}, "one list for each of 1 queries: got 2"),
        ({"result": [{"document": 1}]}, "must be a list"),
        ({"result": [[{"id": "1", "contents": "Peru"}]]}, "must have `document` and `score`"),
        ({"result": [[{**_document(), "score": None}]]}, "score` must be a finite number"),
        ({"result": [[{**_document(), "score": True}]]}, "score` must be a finite number"),
        ({"result": [[{**_document(), "score": float("nan")}]]}, "score` must be a finite number"),
        ({"result": [[{**_document(), "score": -3.4028234663852886e38}]]}, "filler of an approximate index"),
        ({"result": [[_document(id=None)]]}, "id` must be a string or an integer"),
        ({"result": [[_document(contents=None)]]}, "must have a passage"),
        ({"result": [[_document(contents=" \n ")]]}, "must have a passage"),
        ({"result": [[_document(contents="", text="", title="")]]}, "must have a passage"),
        ({"result": [[_document(), _document()]]}, "must not repeat a passage"),
        ({"result": [[_document(id=str(number)) for number in range(4)]]}, "at most 3 documents"),
        ({"result": [[_document(), {**_document(id="2"), "score": 2.0}]]}, "scores that do not increase"),
    ],
)
def test_an_answer_of_another_shape_is_refused_as_a_whole(payload, message):
    def reply(handler, _):
        send(handler, 200 if handler.path == "/retrieve" else 404, json.dumps(payload).encode())

    with raw_server(reply) as url, pytest.raises(BadResponseError, match=message):
        HTTPRetriever(url).search(["Peru"], 3)


def test_ties_of_a_server_that_does_not_order_them_come_in_order_of_id():
    def reply(handler, _):
        rows = [{**_document(id=name), "score": score} for name, score in (("9", 2), ("b", 1), ("10", 1), ("2", 1))]
        send(handler, 200 if handler.path == "/retrieve" else 404, json.dumps({"result": [rows]}).encode())

    with raw_server(reply) as url:
        (hits,) = HTTPRetriever(url).search(["Peru"], 4)
    assert [hit.passage.id for hit in hits] == ["9", "2", "10", "b"]
