"""The file of a cache: results by key, safe against other processes and against being killed."""

from __future__ import annotations

import json
import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Hit, Passage

logger = logging.getLogger(__name__)

_APPLICATION_ID = 0x67726C63
"""Marks the file as ours in its header."""
_BUSY_TIMEOUT_S = 30.0
_KEYS_PER_QUERY = 500
_SCHEMA = "CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, hits BLOB NOT NULL)"


class ResultFile:
    """
    Results by key in an SQLite database with a write-ahead log.

    A write is one transaction: a process killed in the middle leaves the file as it was before. Failing to read or
    write after the file was opened is said once and never fails a search: what cannot be read counts as unknown.

    Args:
        path (`str` or `Path`):
            The file; created with its folder if it does not exist. Must be on a local disk.
        max_entries (`int`):
            Results kept; the oldest go first.

    Raises:
        `ConfigurationError`: If the file cannot be opened or is something else.
    """

    def __init__(self, path: str | Path, *, max_entries: int):
        self._path = Path(path)
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._owner = os.getpid()
        self._has_warned = False
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = self._open()
        except (OSError, sqlite3.Error) as error:
            raise ConfigurationError(
                f"`retrieval_cache` must be a file that can be opened as a cache: got `{self._path}` ({error}). "
                "Delete it or choose another one."
            ) from error

    def get(self, keys: Sequence[bytes]) -> dict[bytes, tuple[Hit, ...]]:
        """
        The results that are there.

        Args:
            keys (`Sequence[bytes]`):
                Keys to look up.

        Returns:
            `dict[bytes, tuple[Hit, ...]]`: Results by key, without those that are not there.
        """
        rows: list[tuple[bytes, bytes]] = []
        try:
            with self._lock:
                connection = self._connected()
                for start in range(0, len(keys), _KEYS_PER_QUERY):
                    part = keys[start : start + _KEYS_PER_QUERY]
                    marks = ",".join("?" * len(part))
                    rows += connection.execute(f"SELECT key, hits FROM results WHERE key IN ({marks})", part)
            return {key: _decoded(hits) for key, hits in rows}
        except (sqlite3.Error, ValueError, TypeError) as error:
            self._warn(error)
            return {}

    def put(self, results: Mapping[bytes, Sequence[Hit]]) -> None:
        """
        Keep results.

        Args:
            results (`Mapping[bytes, Sequence[Hit]]`):
                Results by key.
        """
        rows = [(key, _encoded(hits)) for key, hits in results.items()]
        try:
            with self._lock:
                connection = self._connected()
                with connection:
                    connection.executemany("INSERT OR REPLACE INTO results VALUES (?, ?)", rows)
                    # `rowid` counts up with the inserts, so the span bounds the number of entries.
                    connection.execute(
                        "DELETE FROM results WHERE rowid <= (SELECT MAX(rowid) FROM results) - ?", (self._max_entries,)
                    )
        except sqlite3.Error as error:
            self._warn(error)

    def close(self) -> None:
        """Close the file; later calls open it again."""
        with self._lock:
            if self._connection is not None and self._owner == os.getpid():
                self._connection.close()
            self._connection = None

    def _connected(self) -> sqlite3.Connection:
        if self._connection is None or self._owner != os.getpid():
            # A connection must not be used on both sides of a fork; the child leaves the parent's alone.
            self._owner = os.getpid()
            self._connection = self._open()
        return self._connection

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
        try:
            # In this order: another process that makes the file right now marks it before it adds the table.
            (num_tables,) = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            if num_tables and application != _APPLICATION_ID:
                raise sqlite3.DatabaseError("a database of something else")
            _use_write_ahead_log(connection)
            connection.execute("PRAGMA synchronous = NORMAL")
            with connection:
                connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
                connection.execute(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("The search cache `%s` cannot be used (%s); searches go on without it.", self._path, error)


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging; unlike other statements, this one does not wait for another process by itself."""
    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not is_busy or time.monotonic() >= deadline:
                raise
        time.sleep(random.uniform(0.001, 0.02))


def _encoded(hits: Sequence[Hit]) -> bytes:
    rows = [[hit.passage.id, hit.passage.title, hit.passage.text, hit.score] for hit in hits]
    return json.dumps(rows).encode()


def _decoded(hits: bytes) -> tuple[Hit, ...]:
    return tuple(Hit(Passage(*fields), score) for *fields, score in json.loads(hits))
