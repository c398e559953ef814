"""
Client of a retrieval server: ours (`grounded-rl serve`) or one that speaks Search-R1's `POST /retrieve`.

Nothing that goes wrong on the way becomes a result. Every request has a deadline, every answer is checked against the
wire format, and an answer from another index than the first one is refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from grounded_rl.errors import BackendUnavailableError, BadResponseError, ConfigurationError, IndexMismatchError
from grounded_rl.retrieval.base import Hit, check_request
from grounded_rl.retrieval.connection import Answer, Connection
from grounded_rl.retrieval.wire import INDEX_ID_HEADER, INFO_PATH, READY_PATH, RETRIEVE_PATH, decode_results

BACKEND: Final = "http"

_MAX_REQUEST_BYTES = 4 * 1024 * 1024
_REQUESTS_IN_PARALLEL = 4
_PROBE_QUERY = "capital city"


class HTTPRetriever:
    """
    Searches the index behind a retrieval server. Thread-safe; connections are pooled.

    The constructor talks to no one: the first search asks the server what it serves. [`HTTPRetriever.connect`] asks at
    once. A server without `/info` (Search-R1's own) is taken as it is; name what it serves by `index_id`.

    Args:
        url (`str`):
            Address of the server, for instance `"http://localhost:8000"`; a trailing `/retrieve` is ignored.
        timeout (`float`, *optional*, defaults to `30.0`):
            Seconds for one request, from waiting for a connection to the last byte of the answer.
        token (`str`, *optional*):
            Bearer token. Taken from the environment variable `GROUNDED_RL_SERVER_TOKEN` if left out.
        index_id (`str`, *optional*):
            Identity the index must have, or, for a server that states none, the name to know it by.
        max_batch_size (`int`, *optional*, defaults to 256):
            Most queries per request; larger searches are split and sent four at a time.
        ca_certs (`str`, *optional*):
            File of certificate authorities to trust for `https` instead of the system's.

    Example:
    ```python
    >>> retriever = HTTPRetriever.connect("http://localhost:8000")  # doctest: +SKIP
    >>> retriever.search(["capital of Peru"], k=3)  # doctest: +SKIP

    ```
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        token: str | None = None,
        index_id: str | None = None,
        max_batch_size: int = 256,
        ca_certs: str | None = None,
    ):
        if not timeout > 0:
            raise ConfigurationError(f"`timeout` must be above 0 seconds: got {timeout}. Leave it out for 30.")
        if max_batch_size < 1:
            raise ConfigurationError(f"`max_batch_size` must be at least 1: got {max_batch_size}. Leave it out.")
        self._connection = Connection(url, token=token, ca_certs=ca_certs)
        self._url = self._connection.url
        self._timeout = timeout
        self._max_batch_size = max_batch_size
        self._index_id = index_id
        self._manifest: dict[str, Any] | None = None
        self._search_parameters: dict[str, Any] | None = None
        self._max_k: int | None = None
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        timeout: float = 30.0,
        token: str | None = None,
        **options: Any,
    ) -> HTTPRetriever:
        """
        Reach a server and learn what it serves.

        Args:
            url (`str`):
                Address of the server.
            timeout (`float`, *optional*, defaults to `30.0`):
                Seconds for one request.
            token (`str`, *optional*):
                Bearer token. Taken from `GROUNDED_RL_SERVER_TOKEN` if left out.
            **options:
                Further arguments of the constructor.

        Returns:
            `HTTPRetriever`: The connected client.

        Raises:
            `RetrievalError`: If the server cannot be reached, refuses the token, or serves another index.
            `ConfigurationError`: If an argument cannot be used.
        """
        retriever = cls(url, timeout=timeout, token=token, **options)
        try:
            retriever._learn(timeout)
        except BaseException:
            retriever.close()
            raise
        return retriever

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._url

    @property
    def manifest(self) -> Mapping[str, object]:
        """What the server's index was built from; asked for once. Of a server without `/info`, what is known."""
        return self._known_manifest()

    @property
    def search_parameters(self) -> Mapping[str, object]:
        """How the server searches its index, where that was chosen when it was opened; empty if it does not say."""
        if self._search_parameters is None:
            self._learn(self._timeout)
        return self._search_parameters or {}

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """
        The best passages for every query. Blank queries are not sent, equal ones are sent once.

        Args:
            queries (`Sequence[str]`):
                Queries, in any number.
            k (`int`):
                Largest number of hits per query, at least 1 and at most what the server allows.

        Returns:
            `list[list[Hit]]`: One list per query, best first.

        Raises:
            `RetrievalError`: If any part of the answer is missing or cannot be trusted; there are no partial results.
            `ConfigurationError`: If `k` or `queries` cannot be used.
        """
        check_request(queries, k)
        # Unpaired surrogates (a model's broken byte sequences) cannot be sent.
        sent = [query.encode("utf-8", "replace").decode("utf-8") for query in queries]
        distinct = list(dict.fromkeys(query for query in sent if query.strip()))
        found: dict[str, list[Hit]] = {}
        if distinct:
            limit = self._limited_k(k)
            found = dict(zip(distinct, self._search_batches(distinct, limit), strict=True))
        return [list(found.get(query, ())) for query in sent]

    def ready(self, timeout: float = 5.0) -> None:
        """
        Return if the server would answer now, from the index it served first.

        Args:
            timeout (`float`, *optional*, defaults to `5.0`):
                Seconds to wait for each of at most two answers.

        Raises:
            `RetrievalError`: If it would not; `IndexMismatchError` if it serves another index.
        """
        answer = self._connection.exchange("GET", READY_PATH, timeout=timeout)
        if answer.status == 503:
            raise BackendUnavailableError(f"The retrieval server at {self._url} is not ready: {answer.detail}")
        if answer.is_unknown_path:
            # Search-R1's server has no such path: it is ready if it answers a search.
            self._retrieve([_PROBE_QUERY], 1, timeout=timeout)
        else:
            self._check_status(answer)
        self._learn(timeout)

    def close(self) -> None:
        """Close all connections."""
        self._connection.close()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _known_manifest(self) -> dict[str, Any]:
        """The manifest, from the first contact."""
        if self._manifest is None:
            self._learn(self._timeout)
        assert self._manifest is not None
        return self._manifest

    def _learn(self, timeout: float) -> None:
        """Ask what the server serves and keep it, or check that it is what was kept."""
        answer = self._connection.exchange("GET", INFO_PATH, timeout=timeout)
        if answer.is_unknown_path:
            manifest: dict[str, Any] = {"backend": BACKEND, "library": "search-r1", "url": self._url}
            if self._index_id is not None:
                manifest["index_id"] = self._index_id
            limits: Mapping[str, Any] = {}
            parameters: dict[str, Any] | None = {}
        else:
            self._check_status(answer)
            info = answer.json()
            manifest, limits = _parse_info(info, self._url)
            parameters = info.get("search_parameters", {}) if isinstance(info, Mapping) else {}
            self._check_index(manifest["index_id"])
        with self._lock:
            if self._search_parameters is None:
                self._search_parameters = parameters
            elif parameters is not None and parameters != self._search_parameters:
                raise IndexMismatchError(
                    f"The retrieval server at {self._url} must search as before, by {self._search_parameters}: "
                    f"got {parameters}. Serve the index as at the start of this run, or start another run."
                )
            if self._manifest is None:
                self._index_id = manifest.get("index_id")
                self._max_k = limits.get("max_k")
                self._max_batch_size = min(self._max_batch_size, limits.get("max_queries", self._max_batch_size))
                self._manifest = manifest

    def _check_index(self, index_id: str) -> None:
        """Raise unless the index is the one this client works with."""
        if self._index_id is not None and index_id != self._index_id:
            raise IndexMismatchError(
                f"The retrieval server at {self._url} must serve the index {self._index_id!r}: got {index_id!r}. "
                "Serve the index of this run again, or start another run."
            )

    def _limited_k(self, k: int) -> int:
        """The count to ask for: more than the corpus has is never needed, more than the server gives is refused."""
        num_passages = self._known_manifest().get("num_passages")
        if isinstance(num_passages, int):
            k = min(k, max(num_passages, 1))
        if self._max_k is not None and k > self._max_k:
            raise ConfigurationError(
                f"`k` must be at most {self._max_k}, the limit of the server at {self._url}: got {k}. "
                "Ask for fewer passages or start the server with a larger `--max-k`."
            )
        return k

    def _search_batches(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Hits of every query, in requests no larger than the server takes."""
        batches = _split(queries, self._max_batch_size)
        if len(batches) == 1:
            return self._retrieve(queries, k, timeout=self._timeout)
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_REQUESTS_IN_PARALLEL, thread_name_prefix="grounded-rl-http")
            pool = self._pool
        futures = [pool.submit(self._retrieve, batch, k, timeout=self._timeout) for batch in batches]
        try:
            return [hits for future in futures for hits in future.result()]
        finally:
            for future in futures:
                future.cancel()

    def _retrieve(self, queries: list[str], k: int, *, timeout: float) -> list[list[Hit]]:
        """Hits of one request."""
        payload = {"queries": queries, "topk": k, "return_scores": True}
        answer = self._connection.exchange("POST", RETRIEVE_PATH, timeout=timeout, payload=payload)
        self._check_status(answer)
        return decode_results(answer.json(), num_queries=len(queries), k=k)

    def _check_status(self, answer: Answer) -> None:
        """Raise for anything but success from the expected index."""
        if answer.status != 200:
            answer.fail()
        index_id = answer.headers.get(INDEX_ID_HEADER.lower())
        if index_id is not None:
            self._check_index(index_id)


def _parse_info(payload: object, url: str) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """Manifest and limits of `/info`."""
    manifest = payload.get("manifest") if isinstance(payload, Mapping) else None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("index_id"), str):
        raise BadResponseError(
            f"{url}{INFO_PATH} must describe an index with an `index_id`: got {str(payload)[:120]}."
        )
    limits = payload.get("limits") if isinstance(payload, Mapping) else None
    limits = limits if isinstance(limits, Mapping) else {}
    valid = {name: value for name, value in limits.items() if type(value) is int and value >= 1}
    return manifest, valid


def _split(queries: list[str], max_queries: int) -> list[list[str]]:
    """Consecutive batches of at most `max_queries` queries and about `_MAX_REQUEST_BYTES`."""
    batches: list[list[str]] = [[]]
    size = 0
    for query in queries:
        num_bytes = len(json.dumps(query))
        if batches[-1] and (len(batches[-1]) == max_queries or size + num_bytes > _MAX_REQUEST_BYTES):
            batches.append([])
            size = 0
        batches[-1].append(query)
        size += num_bytes
    return batches
