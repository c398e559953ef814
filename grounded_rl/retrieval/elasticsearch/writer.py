"""
Fills an index on a server: streamed, resumable, and visible under its alias only when it is complete.

Every passage is written under its own id, so that writing it again changes nothing. Batches are acknowledged in the
order of the corpus: after a crash, a builder goes on at the last position it was told.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import (
    BackendOverloadedError,
    BadResponseError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.elasticsearch.client import ElasticsearchClient
from grounded_rl.retrieval.elasticsearch.dispatch import RetryPolicy, retried
from grounded_rl.retrieval.elasticsearch.documents import document
from grounded_rl.retrieval.elasticsearch.failures import status_error
from grounded_rl.retrieval.elasticsearch.identity import check_name, find_index
from grounded_rl.retrieval.elasticsearch.mapping import (
    META_KEY,
    IndexSpec,
    index_body,
    mapping_differences,
    similarity_differences,
)

Item = tuple[int, Passage, NDArray[np.float32] | None]
"""Position in the corpus, from 0; passage; vector, or `None` for an index without vectors."""

_LOGGER = logging.getLogger(__name__)
_PACKED_VECTORS_SINCE: Final = (9, 3)
_MERGE_POLL_S: Final = 2.0
_MERGE_TIMEOUT_S: Final = 24 * 3600.0
_SHOWN_FAILURES: Final = 5


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """How passages are cut into requests."""

    max_passages: int = 500
    """Most passages of one request."""
    max_bytes: int = 8 * 1024 * 1024
    """About the most bytes of one request."""
    num_threads: int = 1
    """Requests on their way at once."""
    patience: float = 900.0
    """Seconds one request may take with all its tries."""


class ElasticsearchWriter:
    """
    Writes one index.

    Args:
        client ([`ElasticsearchClient`]):
            Connection; stays open.
        index (`str`):
            Own name of the index, not an alias. See `new_index_name`.
        spec ([`IndexSpec`]):
            What was decided.
        limits ([`WriteLimits`], *optional*):
            How passages are cut into requests.

    Example:
    ```python
    >>> writer = ElasticsearchWriter(client, new_index_name("wiki-18"), IndexSpec())  # doctest: +SKIP
    >>> writer.create()  # doctest: +SKIP
    >>> writer.write(((i, passage, None) for i, passage in enumerate(passages)), print)  # doctest: +SKIP
    >>> writer.finish(manifest)  # doctest: +SKIP
    >>> writer.publish("wiki-18")  # doctest: +SKIP

    ```
    """

    def __init__(
        self, client: ElasticsearchClient, index: str, spec: IndexSpec, *, limits: WriteLimits | None = None
    ) -> None:
        check_name(index)
        self._client = client
        self._spec = spec
        self._limits = limits or WriteLimits()
        self._retry = RetryPolicy(patience=self._limits.patience, backoff_base=0.5, backoff_cap=30.0)
        self._stopped = threading.Event()
        self._path = f"/{quote(index, safe='')}"
        self._version: tuple[int, ...] | None = None
        self.index = index
        """Own name of the index."""

    def server_version(self) -> str:
        """Version of the server, for the manifest."""
        version = self._client.server_version()
        self._version = tuple(int(part) for part in version.split("-")[0].split(".") if part.isdigit())
        return version

    def exists(self) -> bool:
        """Whether the index is there, finished or not."""
        try:
            self._client.request("GET", f"{self._path}/_settings")
        except IndexMismatchError:
            return False
        return True

    def create(self) -> None:
        """
        Create the index, empty and unseen.

        Raises:
            `ConfigurationError`: If the server is another product, or too old for vectors.
            `RetrievalError`: If it exists, or could not be created.
        """
        self.server_version()
        self._client.request("PUT", self._path, body=index_body(self._spec))

    def check_resumable(self) -> None:
        """
        Raise unless the index can be written on: it is there, as specified, and unfinished.

        Raises:
            `IndexMismatchError`: If it is missing, finished, or of another specification.
            `RetrievalError`: If the server does not answer.
        """
        self.server_version()
        description = self._client.request("GET", self._path).get(self.index)
        if not isinstance(description, Mapping):
            raise IndexMismatchError(f"`{self.index}` must be the own name of an index: got an alias. Start anew.")
        differences = mapping_differences(description["mappings"], self._spec)
        differences += similarity_differences(description["settings"]["index"], self._spec)
        if description["mappings"].get("_meta"):
            differences.append("it is finished")
        if differences:
            raise IndexMismatchError(
                f"The index `{self.index}` must be the unfinished one of this build: got {'; '.join(differences)}. "
                "Start anew under another name."
            )

    def write(self, items: Iterable[Item], on_acknowledged: Callable[[int], None] | None = None) -> int:
        """
        Write passages.

        Args:
            items (`Iterable[Item]`):
                Position, passage and vector, in the order of the corpus, from where an earlier build stopped.
            on_acknowledged (`Callable[[int], None]`, *optional*):
                Called, in this thread, with the position after the last passage that is safe together with all before
                it. The server keeps what it acknowledged through a crash.

        Returns:
            `int`: Passages written.

        Raises:
            `ConfigurationError`: If a passage or a vector cannot be stored; names the id.
            `RetrievalError`: If the server refused passages, with ids and reasons, or did not answer for too long.
        """
        if self._version is None:
            self.server_version()
        self._stopped.clear()
        written = 0
        pending: deque[tuple[int, int, Future[None]]] = deque()
        with ThreadPoolExecutor(self._limits.num_threads, thread_name_prefix="grounded-rl-bulk") as pool:
            try:
                for batch in self._batches(items):
                    pending.append((batch[-1].ordinal + 1, len(batch), pool.submit(self._write_batch, batch)))
                    while len(pending) > self._limits.num_threads:
                        written += _acknowledge(pending, on_acknowledged)
                while pending:
                    written += _acknowledge(pending, on_acknowledged)
            except BaseException:
                self._stopped.set()
                raise
        return written

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """
        Make the index complete: one segment, counted, no longer writable, with the facts of its manifest.

        May be called again after a crash. It can be opened afterwards, under its own name.

        Args:
            manifest (`Mapping[str, Any]`):
                Result of `index_facts`.

        Raises:
            `RetrievalError`: If passages are missing, or the server did not answer.
        """
        if self._version is None:
            self.server_version()
        self._patiently("POST", f"{self._path}/_refresh")
        self._check_count(int(manifest["num_passages"]))
        self._merge()
        self._patiently("POST", f"{self._path}/_refresh")
        self._patiently("PUT", f"{self._path}/_mapping", body={"_meta": {META_KEY: dict(manifest)}})
        self._patiently("PUT", f"{self._path}/_settings", body={"index": {"blocks": {"write": True}}})
        find_index(self._client, self.index, expected=manifest)

    def publish(self, alias: str) -> list[str]:
        """
        Let an alias stand for this index, in one step.

        Args:
            alias (`str`):
                Alias; it may stand for other indices before.

        Returns:
            `list[str]`: Names of the indices it stood for before. They are kept: runs may be searching them.

        Raises:
            `ConfigurationError`: If there is an index of that name.
            `RetrievalError`: If the server did not answer.
        """
        check_name(alias)
        try:
            earlier = sorted(self._client.request("GET", f"/{quote(alias, safe='')}"))
        except IndexMismatchError:
            earlier = []
        if alias in earlier:
            raise ConfigurationError(
                f"`alias` must not be the name of an index: got {alias!r}. Choose another name or remove that index."
            )
        actions = [{"remove": {"index": name, "alias": alias}} for name in earlier if name != self.index]
        actions.append({"add": {"index": self.index, "alias": alias}})
        self._patiently("POST", "/_aliases", body={"actions": actions})
        return [name for name in earlier if name != self.index]

    def delete(self) -> None:
        """Remove the index from the server, if it is there."""
        try:
            self._client.request("DELETE", self._path)
        except IndexMismatchError:
            _LOGGER.debug("the index `%s` was not there", self.index)

    def _batches(self, items: Iterable[Item]) -> Iterator[list[_Entry]]:
        """Consecutive passages, serialised, within the limits of a request."""
        packed = self._version is not None and self._version >= _PACKED_VECTORS_SINCE
        batch: list[_Entry] = []
        size = 0
        for ordinal, passage, vector in items:
            shape = None if vector is None else vector.shape
            if shape != ((self._spec.dims,) if self._spec.has_vectors else None):
                raise ConfigurationError(
                    f"Passage {passage.id!r} must come with a vector of {self._spec.dims} dimensions: got one of "
                    f"shape {shape}. Encode it with the encoder of the index."
                )
            source = document(passage, ordinal, vector, packed=packed)
            num_bytes = len(json.dumps(source, ensure_ascii=False).encode("utf-8", "replace"))
            if batch and (len(batch) == self._limits.max_passages or size + num_bytes > self._limits.max_bytes):
                yield batch
                batch, size = [], 0
            batch.append(_Entry(ordinal, passage.id, source))
            size += num_bytes
        if batch:
            yield batch

    def _write_batch(self, batch: Sequence[_Entry]) -> None:
        """One request, and again with what was refused for the moment, until every passage is stored."""
        remaining = list(batch)

        def send() -> None:
            nonlocal remaining
            if self._stopped.is_set():
                raise RetrievalError("The build was stopped.")
            remaining = self._send(remaining)
            if remaining:
                raise BackendOverloadedError(
                    f"{self._client.settings.url} refused {len(remaining)} passages for now, the first with id "
                    f"{remaining[0].id!r}."
                )

        retried(send, self._retry, self._stopped)

    def _send(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """The passages of one request that must be sent again; raises for those that never can be stored."""
        lines: list[Mapping[str, Any]] = []
        for entry in entries:
            lines += [{"index": {"_id": entry.id}}, entry.source]
        answer = self._client.request("POST", f"{self._path}/_bulk", lines=lines)
        items = answer.get("items")
        if not isinstance(items, list) or len(items) != len(entries):
            raise BadResponseError(
                f"A bulk request must be answered for each of {len(entries)} passages: got {str(items)[:80]}."
            )
        again, refused = [], []
        for entry, item in zip(entries, items, strict=True):
            result = item.get("index") if isinstance(item, Mapping) else None
            if not isinstance(result, Mapping) or result.get("_id") != entry.id:
                raise BadResponseError(f"The answer for passage {entry.id!r} must name it: got {str(item)[:120]}.")
            status = result.get("status")
            if status in (200, 201) and "error" not in result:
                continue
            error = status_error(status if isinstance(status, int) else 500, result, {}, self._client.settings.url)
            if error.is_retryable:
                again.append(entry)
            else:
                refused.append((entry.id, error))
        if refused:
            shown = "; ".join(f"`{name}`: {error}" for name, error in refused[:_SHOWN_FAILURES])
            raise RetrievalError(f"{len(refused)} passages were refused, by id: {shown}. Nothing was published.")
        return again

    def _check_count(self, expected: int) -> None:
        """Raise unless the index holds that many passages."""
        answer = self._patiently("GET", f"{self._path}/_count")
        if answer.get("count") != expected:
            raise RetrievalError(
                f"The index `{self.index}` must hold {expected} passages: got {answer.get('count')}. "
                "Was something else writing to it? Start anew."
            )

    def _merge(self) -> None:
        """Merge to one segment: one graph to search, the same results at every search."""
        path, params = f"{self._path}/_forcemerge", {"max_num_segments": "1"}
        if (self._version or ()) < (8,):
            self._client.request("POST", path, params=params, timeout=_MERGE_TIMEOUT_S)
            return
        task = self._patiently("POST", path, params={**params, "wait_for_completion": "false"}).get("task")
        while True:
            report = self._patiently("GET", f"/_tasks/{quote(str(task), safe=':')}")
            if report.get("completed"):
                break
            time.sleep(_MERGE_POLL_S)
        if "error" in report:
            raise RetrievalError(f"The index `{self.index}` could not be merged: {str(report['error'])[:200]}")

    def _patiently(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """A request that changes nothing when it is repeated, tried until it is answered."""
        answers: list[dict[str, Any]] = []
        retried(lambda: answers.append(self._client.request(method, path, **options)), self._retry, self._stopped)
        return answers[-1]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A passage as it is sent."""

    ordinal: int
    id: str
    source: dict[str, Any]


def new_index_name(alias: str) -> str:
    """
    A name that no index has yet.

    Args:
        alias (`str`):
            Alias the index is made for.

    Returns:
        `str`: The alias, the time and a few random digits.
    """
    name = f"{alias}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
    check_name(name)
    return name


def _acknowledge(pending: deque[tuple[int, int, Future[None]]], on_acknowledged: Callable[[int], None] | None) -> int:
    """Wait for the oldest request; passages it wrote."""
    position, count, future = pending.popleft()
    future.result()
    if on_acknowledged is not None:
        on_acknowledged(position)
    return count
