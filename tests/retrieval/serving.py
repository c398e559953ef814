"""Real servers on free ports of the loopback interface, for tests of the client."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grounded_rl.errors import RetrievalError
from grounded_rl.retrieval import Hit, Passage, Retriever

_EXTRA = "needs the extra `serve`"
uvicorn = pytest.importorskip("uvicorn", reason=_EXTRA)
fastapi = pytest.importorskip("fastapi", reason=_EXTRA)
pydantic = pytest.importorskip("pydantic", reason=_EXTRA)
httpx = pytest.importorskip("httpx", reason=_EXTRA)


class EchoRetriever:
    """
    Answers every query with `k` passages that repeat it, so that a wrong pairing shows.

    `gate` holds searches up while it is cleared; `trouble` maps words of a query to the error it raises.
    """

    def __init__(self, index_id: str = "echo", trouble: dict[str, Exception] | None = None):
        self.manifest = {"backend": "echo", "index_id": index_id, "num_passages": 1000, "files": {"secret": 1}}
        self.search_parameters = {"mode": "echo"}
        self.trouble = trouble or {}
        self.calls: list[tuple[list[str], int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.seconds = 0.0

    def search(self, queries, k):
        self.calls.append((list(queries), k))
        time.sleep(self.seconds)
        assert self.gate.wait(30)
        for query in queries:
            for word, error in self.trouble.items():
                if word in query.split():
                    raise error
        return [[Hit(echo(query, rank), 1.0 / (1 + rank)) for rank in range(k)] for query in queries]


def echo(query: str, rank: int = 0) -> Passage:
    return Passage(f"{query}#{rank}", "Echo", query)


class FlakyRetriever(EchoRetriever):
    """An `EchoRetriever` elsewhere: it can be away, and then neither searches nor is ready."""

    def __init__(self, name: str, index_id: str = "echo"):
        super().__init__(index_id)
        self.url = name
        self.error: RetrievalError | None = None
        self.num_probes = 0
        self.is_closed = False

    def search(self, queries, k):
        hits = super().search(queries, k)
        if self.error is not None:
            raise self.error
        return hits

    def ready(self, timeout=5.0):
        self.num_probes += 1
        if self.error is not None:
            raise self.error

    def close(self):
        self.is_closed = True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(app: Any, *, port: int = 0) -> Iterator[str]:
    """Serve an ASGI application from a thread; yields its address."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert server.started
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


Reply = Callable[[http.server.BaseHTTPRequestHandler, bytes], None]


@contextlib.contextmanager
def raw_server(reply: Reply) -> Iterator[str]:
    """A server whose every answer is written by hand, down to the bytes; yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            reply(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))

        def do_GET(self):
            self.do_POST()

        def log_message(self, *_: object) -> None:
            """Nothing: the output of tests is for failures."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def send(
    handler: http.server.BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    """An answer with a body."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


class _Request(pydantic.BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def search_r1_app(retriever: Retriever, *, default_topk: int = 3) -> Any:
    """
    A server that answers as Search-R1's does, mistakes included.

    One path, no health check; documents with `id` and `contents` only; `topk` of 0 falls back to the default; without
    scores it fails, except for two queries, where it answers the documents of the first.
    """
    app = fastapi.FastAPI()

    @app.post("/retrieve")
    def retrieve(request: _Request) -> dict[str, Any]:
        found = retriever.search(request.queries, request.topk or default_topk)
        documents = [
            [{"id": hit.passage.id, "contents": f'"{hit.passage.title}"\n{hit.passage.text}'} for hit in hits]
            for hits in found
        ]
        scores = [[hit.score for hit in hits] for hits in found]
        results, scores = (documents, scores) if request.return_scores else documents
        if not request.return_scores:
            return {"result": results}
        pairs = [zip(d, s, strict=True) for d, s in zip(results, scores, strict=True)]
        return {"result": [[{"document": d, "score": s} for d, s in row] for row in pairs]}

    return app
