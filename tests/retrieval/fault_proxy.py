"""
An HTTP proxy that harms what passes through it, to stand between a client and a real search server.

    with FaultProxy(node.url, faults=random_faults(["reset", "overload"], share=0.3)) as proxy:
        retriever = ElasticsearchRetriever.connect(proxy.url, alias)
"""

from __future__ import annotations

import http.client
import http.server
import json
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

Faults = Callable[[int, str], str | None]
"""Fault of a request by its number and path; `None` lets it pass."""

FAULTS = ("refuse", "reset", "overload", "unavailable", "gateway", "slow", "truncate", "truncate_json", "page")
SLOW_S = 0.15


def random_faults(kinds: Sequence[str], *, share: float, seed: int = 0) -> Faults:
    """Harms a share of all requests, each in one of these ways."""
    generator = random.Random(seed)
    lock = threading.Lock()

    def fault(number: int, path: str) -> str | None:
        with lock:
            return generator.choice(list(kinds)) if generator.random() < share else None

    return fault


def storms(kind: str, *, length: int, every: int) -> Faults:
    """Harms runs of consecutive requests: the last `length` of every `every`."""
    return lambda number, path: kind if number % every >= every - length else None


class FaultProxy:
    """
    Forwards requests to one server and harms some of them.

    - `refuse`: the connection is closed before anything is read by the server; `reset`: after the server has answered.
    - `overload`, `unavailable`, `gateway`: 429 with a wait, 503 and 502, from a server's or a balancer's hand.
    - `slow`: the answer is late. `truncate`: it ends in the middle of what was announced.
    - `truncate_json`: it ends in the middle, announced as complete. `page`: a page of HTML with status 200.

    Args:
        target (`str`):
            Address of the server.
        faults (`Callable[[int, str], str | None]`, *optional*):
            Which requests are harmed and how; may be replaced at any time.
    """

    def __init__(self, target: str, faults: Faults | None = None) -> None:
        self.target = target
        self.faults: Faults = faults or (lambda number, path: None)
        self.counts: Counter[str] = Counter()
        self.num_requests = 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """Address of the proxy."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def num_faults(self) -> int:
        """Requests that were harmed."""
        return sum(self.counts.values())

    def next_fault(self, path: str) -> str | None:
        """Fault of the next request, counted."""
        with self._lock:
            number, self.num_requests = self.num_requests, self.num_requests + 1
        fault = self.faults(number, path)
        if fault is not None:
            with self._lock:
                self.counts[fault] += 1
        return fault

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    proxy: FaultProxy

    def handle_error(self, request, client_address):
        """Broken connections are what this is for."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def _serve(self) -> None:
        proxy = self.server.proxy
        fault = proxy.next_fault(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "refuse":
            self._reset()
        elif fault == "overload":
            self._refuse(429, "es_rejected_execution_exception", {"Retry-After": "0"})
        elif fault == "unavailable":
            self._refuse(503, "cluster_block_exception", {})
        elif fault == "gateway":
            self._answer(502, {"Content-Type": "text/html"}, b"<html><h1>Bad Gateway</h1></html>")
        elif fault == "page":
            headers = {"Content-Type": "text/html", "X-Elastic-Product": "Elasticsearch"}
            self._answer(200, headers, b"<html>It works!</html>")
        else:
            self._forward(proxy.target, fault, body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _forward(self, target: str, fault: str | None, body: bytes) -> None:
        address = urlsplit(target)
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
        dropped = ("host", "connection", "content-length", "accept-encoding")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        try:
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException):
            # The server is down: so is whoever asks through us.
            self._reset()
            return
        finally:
            connection.close()
        kept = {
            name: value
            for name, value in response.getheaders()
            if name.lower() not in ("connection", "content-length", "transfer-encoding", "date", "server")
        }
        if fault == "slow":
            threading.Event().wait(SLOW_S)
        if fault == "reset":
            self._reset()
        elif fault == "truncate":
            self._answer(response.status, kept, answer[: len(answer) // 2], announced=len(answer))
            self._reset()
        elif fault == "truncate_json":
            self._answer(response.status, kept, answer[: max(1, len(answer) // 2)])
        else:
            self._answer(response.status, kept, answer)

    def _refuse(self, status: int, kind: str, headers: dict[str, str]) -> None:
        error = {"type": kind, "reason": "injected by the test"}
        body = json.dumps({"error": {**error, "root_cause": [error]}, "status": status}).encode()
        self._answer(
            status, {"Content-Type": "application/json", "X-Elastic-Product": "Elasticsearch", **headers}, body
        )

    def _answer(self, status: int, headers: dict[str, str], body: bytes, *, announced: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if announced is None else announced))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def _reset(self) -> None:
        """Close so that the other side sees the connection break."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RD)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""
