"""The HTTP side of a retrieval server."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    RetrievalError,
)
from grounded_rl.import_utils import require
from grounded_rl.retrieval.server.batching import Batcher
from grounded_rl.retrieval.server.index import ServedIndex
from grounded_rl.retrieval.server.metrics import Metrics
from grounded_rl.retrieval.server.requests import (
    TIMED_OUT,
    TOO_LARGE,
    InvalidRequestError,
    SearchRequest,
    parse_request,
)
from grounded_rl.retrieval.server.settings import ServerSettings
from grounded_rl.retrieval.wire import INDEX_ID_HEADER, INFO_PATH, READY_PATH, RETRIEVE_PATH, encode_results

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response

Endpoint: TypeAlias = "Callable[[Request], Awaitable[Response]]"

HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"

_LIMITS = ("default_k", "max_k", "max_queries", "max_body_bytes")
_OPEN_PATHS = frozenset({HEALTH_PATH, READY_PATH})


def create_app(
    index: ServedIndex, settings: ServerSettings, *, on_failure: Callable[[], None] | None = None
) -> FastAPI:
    """
    The application of a retrieval server.

    Args:
        index ([`ServedIndex`]):
            What is served; opened when the application starts and closed when it ends.
        settings ([`ServerSettings`]):
            Limits, batching and token.
        on_failure (`Callable[[], None]`, *optional*):
            Called from a thread if the index can never be opened.

    Returns:
        `FastAPI`: An ASGI application.
    """
    fastapi = require("fastapi", "serve", needed_by="grounded-rl serve")
    service = _Service(index, settings, on_failure)
    # No generated pages: they would be served without the token.
    app = fastapi.FastAPI(lifespan=service.lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    for path, endpoint, method in (
        (RETRIEVE_PATH, service.retrieve, "POST"),
        (READY_PATH, service.ready, "GET"),
        (INFO_PATH, service.info, "GET"),
        (HEALTH_PATH, service.health, "GET"),
        (METRICS_PATH, service.page_of_metrics, "GET"),
    ):
        app.add_route(path, service.guarded(path, endpoint), methods=[method])
    return app


class _Service:
    """The endpoints and what they share."""

    def __init__(self, index: ServedIndex, settings: ServerSettings, on_failure: Callable[[], None] | None):
        self._index = index
        self._settings = settings
        self._on_failure = on_failure
        self._metrics = Metrics()
        self._batcher = Batcher(settings, self._metrics)
        self._num_in_flight = 0
        self._metrics.add_gauge("queue_depth", "Queries that wait.", lambda: self._batcher.num_pending)
        self._metrics.add_gauge("in_flight_requests", "Requests being answered.", lambda: self._num_in_flight)
        self._metrics.add_gauge("index_open", "1 if the index is open.", lambda: index.is_open)

    @contextlib.asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """Open the index in the background; on the way out, stop searching and close it."""
        loop = asyncio.get_running_loop()

        def open_index() -> None:
            self._index.open()
            if self._index.failure is not None and self._on_failure is not None:
                self._on_failure()
            elif self._index.is_open:
                with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                    loop.call_soon_threadsafe(self._batcher.start, self._index.retriever)

        threading.Thread(target=open_index, name="grounded-rl-open", daemon=True).start()
        try:
            yield
        finally:
            await self._batcher.stop()
            self._index.close()

    def guarded(self, path: str, endpoint: Endpoint) -> Endpoint:
        """The endpoint, behind the token; its answers name the index and are counted."""

        async def answer(request: Request) -> Response:
            self._num_in_flight += 1
            started = time.monotonic()
            try:
                if path not in _OPEN_PATHS and not self._is_authorized(request):
                    self._metrics.count_error("Unauthorized")
                    response = _failure(
                        401, "a valid bearer token is required", headers={"WWW-Authenticate": "Bearer"}
                    )
                else:
                    response = await endpoint(request)
                    if self._index.index_id is not None:
                        response.headers[INDEX_ID_HEADER] = self._index.index_id
            finally:
                self._num_in_flight -= 1
            if path == RETRIEVE_PATH:
                self._metrics.request_seconds.observe(time.monotonic() - started)
            self._metrics.count_request(path, response.status_code)
            return response

        return answer

    async def retrieve(self, request: Request) -> Response:
        """`POST /retrieve`."""
        from fastapi.responses import JSONResponse

        try:
            search = await self._read(request)
            self._index.retriever  # noqa: B018 - raises until the index is open
            results = await self._batcher.submit(search.queries, search.k)
        except Exception as error:
            self._metrics.count_error(type(error).__name__)
            return _explain(error)
        self._metrics.count_results([len(hits) for hits in results])
        return JSONResponse(encode_results(results, return_scores=search.return_scores))

    async def ready(self, request: Request) -> Response:
        """`GET /ready`: 200 if a search would be answered; the reason, if not, is for those with the token."""
        from fastapi.responses import JSONResponse

        try:
            await asyncio.wait_for(asyncio.to_thread(self._index.check), self._settings.request_timeout)
        except Exception as error:
            reason = str(error) or f"no answer in {self._settings.request_timeout:g} seconds"
            return _failure(503, reason if self._is_authorized(request) else "not ready")
        return JSONResponse({"status": "ready", "index_id": self._index.index_id})

    async def info(self, _: Request) -> Response:
        """`GET /info`: manifest, parameters of the search, limits, version."""
        from fastapi.responses import JSONResponse

        if self._index.manifest is None:
            return _explain(BackendUnavailableError("the index is not open yet"))
        is_open = self._index.is_open
        body = {
            "manifest": {name: value for name, value in self._index.manifest.items() if name != "files"},
            # How an index is searched may be chosen when it is opened, so before that nobody knows.
            "search_parameters": dict(getattr(self._index.retriever, "search_parameters", {})) if is_open else None,
            "limits": {name: getattr(self._settings, name) for name in _LIMITS},
            "version": self._settings.version,
            "is_open": is_open,
        }
        return JSONResponse(body)

    async def health(self, _: Request) -> Response:
        """`GET /health`: the process is alive."""
        from fastapi.responses import JSONResponse

        return JSONResponse({"status": "alive"})

    async def page_of_metrics(self, _: Request) -> Response:
        """`GET /metrics`."""
        from fastapi.responses import PlainTextResponse

        return PlainTextResponse(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _read(self, request: Request) -> SearchRequest:
        """The request, unless it is too large, too slow or malformed."""
        limit = self._settings.max_body_bytes
        too_large = InvalidRequestError(f"The body must have at most {limit} bytes. Send several requests.", TOO_LARGE)
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise InvalidRequestError("The body did not arrive in time.", TIMED_OUT) from error
        return parse_request(bytes(body), self._settings)

    def _is_authorized(self, request: Request) -> bool:
        """Whether the request carries the token, if there is one; takes the same time for every wrong token."""
        if self._settings.token is None:
            return True
        given = request.headers.get("authorization", "").encode("utf-8", "replace")
        return hmac.compare_digest(given, f"Bearer {self._settings.token}".encode())


def _explain(error: Exception) -> Response:
    """The answer to a search that failed."""
    kind = type(error).__name__
    if isinstance(error, InvalidRequestError):
        return _failure(error.status, error.detail)
    if isinstance(error, BackendOverloadedError):
        wait = max(1, round(error.retry_after or 1))
        return _failure(503, str(error), headers={"Retry-After": str(wait)})
    if isinstance(error, BackendUnavailableError):
        return _failure(503, str(error), kind=kind, headers={"Retry-After": "1"})
    if isinstance(error, BackendTimeoutError):
        return _failure(504, str(error), kind=kind)
    if isinstance(error, RetrievalError):
        return _failure(500, str(error), kind=kind)
    # Not the message: it may show what only the operator should see.
    return _failure(500, f"the search failed ({kind})", kind=RetrievalError.__name__)


def _failure(status: int, detail: str, *, kind: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """An answer that explains itself."""
    from fastapi.responses import JSONResponse

    body = {"detail": detail} if kind is None else {"detail": detail, "error": kind}
    return JSONResponse(body, status_code=status, headers=headers)
