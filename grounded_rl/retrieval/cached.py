"""Remembers results, in memory and optionally in a file that runs may share."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import unicodedata
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from grounded_rl.errors import BackendUnavailableError, BadResponseError, ConfigurationError, RetrievalError
from grounded_rl.retrieval.base import Hit, Retriever, check_ready, check_request
from grounded_rl.retrieval.result_file import ResultFile
from grounded_rl.retrieval.stats import SearchStats
from grounded_rl.retrieval.wrapper import RetrieverWrapper

_Hits = tuple[Hit, ...]


class CachedRetriever(RetrieverWrapper):
    """
    Answers a query it has seen before without asking again.

    The key is the hash of the index's identity, the backend's search parameters, the query in Unicode normal form C,
    and `k`; a result for one `k` never answers another. Queries are passed on in that form too, so that a result does
    not depend on which spelling came first. Failures are never remembered. A query that another thread is already
    asking is waited for; if that fails, both get the error.

    Args:
        inner ([`Retriever`]):
            Retriever that is asked for what is missing.
        path (`str` or `Path`, *optional*):
            SQLite file that keeps results beyond the process. Several processes may share one on a local disk.
        max_entries (`int`, *optional*, defaults to `20_000`):
            Results kept in memory, least recently used first to go; the file keeps fifty times as many.
        stats ([`SearchStats`], *optional*):
            Counters to add to.

    Raises:
        `ConfigurationError`: If `max_entries` is not positive, if the file is no cache, or if `path` is given for a
            retriever whose manifest has no `index_id`.
    """

    def __init__(
        self,
        inner: Retriever,
        path: str | Path | None = None,
        max_entries: int = 20_000,
        *,
        stats: SearchStats | None = None,
    ):
        super().__init__(inner)
        if max_entries < 1:
            raise ConfigurationError(f"`max_entries` must be at least 1: got {max_entries}. Raise it.")
        if path is not None and not inner.manifest.get("index_id"):
            raise ConfigurationError(
                "`path` must be left out for a retriever whose manifest has no `index_id`: got "
                f"`{path}`, which would outlive the index. Cache in memory."
            )
        self._max_entries = max_entries
        self._file = None if path is None else ResultFile(path, max_entries=50 * max_entries)
        self._lock = threading.Lock()
        self._memory: OrderedDict[bytes, _Hits] = OrderedDict()
        self._in_flight: dict[bytes, Future[_Hits]] = {}
        self._unnamed_id = uuid.uuid4().hex
        self._stats = SearchStats() if stats is None else stats

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for every query; only those that are not known are searched for."""
        check_request(queries, k)
        normal = [unicodedata.normalize("NFC", query) for query in queries]
        prefix = self._prefix(k)
        keys = [_key(prefix, query) for query in normal]
        found, own, awaited = self._claim(dict(zip(keys, normal, strict=True)))
        if own:
            found |= self._resolve(own, k)
        for key, future in awaited.items():
            error = future.exception()
            if error is not None:
                # A copy: threads that raise one object would write into each other's traceback.
                raise copy.copy(error) from error
            found[key] = future.result()
        self._stats.add(lookups=len(keys), cache_hits=len(keys) - len(own))
        return [list(found[key]) for key in keys]

    def close(self) -> None:
        """Close the file, then what is wrapped."""
        if self._file is not None:
            self._file.close()
        super().close()

    def _prefix(self, k: int) -> bytes:
        identity = self.inner.manifest.get("index_id") or self._unnamed_id
        parameters = getattr(self.inner, "search_parameters", {})
        return json.dumps([identity, parameters, k], sort_keys=True, default=str).encode()

    def _claim(
        self, queries: dict[bytes, str]
    ) -> tuple[dict[bytes, _Hits], dict[bytes, str], dict[bytes, Future[_Hits]]]:
        """What is in memory, what this thread has to find, and what other threads are finding."""
        known: dict[bytes, _Hits] = {}
        own: dict[bytes, str] = {}
        awaited: dict[bytes, Future[_Hits]] = {}
        with self._lock:
            for key, query in queries.items():
                if key in self._memory:
                    self._memory.move_to_end(key)
                    known[key] = self._memory[key]
                elif key in self._in_flight:
                    awaited[key] = self._in_flight[key]
                else:
                    self._in_flight[key] = Future()
                    own[key] = query
        return known, own, awaited

    def _resolve(self, own: dict[bytes, str], k: int) -> dict[bytes, _Hits]:
        """Results of what this thread claimed, which other threads may be waiting for by now."""
        try:
            known = {} if self._file is None else self._file.get(list(own))
            new = self._ask({key: query for key, query in own.items() if key not in known}, k)
            is_kept = self._file is not None and bool(new) and self._is_confirmed()
        except BaseException as error:
            shown = error
            if not isinstance(error, Exception):
                shown = BackendUnavailableError(f"The thread that searched was stopped by {type(error).__name__}.")
            with self._lock:
                futures = [self._in_flight.pop(key) for key in own]
            for future in futures:
                future.set_exception(shown)
            raise
        for key, hits in (known | new).items():
            self._settle(key, hits)
        for key in known:
            del own[key]
        if self._file is not None and is_kept:
            self._file.put(new)
        return known | new

    def _is_confirmed(self) -> bool:
        """Whether results may go into a file that outlives the run; raises if they are of another index."""
        try:
            check_ready(self.inner)
        except RetrievalError as error:
            if not error.is_retryable:
                raise
            return False
        return True

    def _ask(self, missing: dict[bytes, str], k: int) -> dict[bytes, _Hits]:
        """Results of the wrapped retriever."""
        if not missing:
            return {}
        results = self.inner.search(list(missing.values()), k)
        if len(results) != len(missing):
            raise BadResponseError(
                f"The search backend answered {len(results)} of {len(missing)} queries, without saying which."
            )
        return {key: tuple(hits) for key, hits in zip(missing, results, strict=True)}

    def _settle(self, key: bytes, hits: _Hits) -> None:
        with self._lock:
            self._memory[key] = hits
            self._memory.move_to_end(key)
            if len(self._memory) > self._max_entries:
                self._memory.popitem(last=False)
            future = self._in_flight.pop(key)
        future.set_result(hits)


def _key(prefix: bytes, query: str) -> bytes:
    return hashlib.sha256(prefix + b"\n" + query.encode("utf-8", "surrogatepass")).digest()
