"""The index of a server: opened in the background, and asked for a passage it must find before it counts as ready."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from grounded_rl.errors import BackendUnavailableError, RetrievalError
from grounded_rl.retrieval.base import Passage, Retriever, check_ready, close_retriever
from grounded_rl.retrieval.build import known_item_recall

_NUM_KNOWN_ITEMS = 10
_MIN_KNOWN_ITEM_RECALL = 0.5
_PROBE_QUERY = "capital city"
_FIRST_WAIT_S = 0.5
_MAX_WAIT_S = 15.0
_CHECK_VALID_S = 1.0


class ServedIndex:
    """
    Opens an index while the server already listens.

    Opening is tried again for as long as it fails in a way that may pass (a database that is still starting). An index
    that samples its passages must find most of them by their own words, and one of them again at every check.

    Args:
        open_retriever (`Callable[[], Retriever]`):
            Opens the index; may take minutes.
        manifest (`Mapping[str, object]`, *optional*):
            Manifest, if it is known before the index is open.
    """

    def __init__(self, open_retriever: Callable[[], Retriever], *, manifest: Mapping[str, object] | None = None):
        self._open_retriever = open_retriever
        self._manifest = manifest
        self._retriever: Retriever | None = None
        self._known_item: Passage | None = None
        self._reason = "the index is being opened"
        self._is_stopped = threading.Event()
        self._check_lock = threading.Lock()
        self._checked_at = float("-inf")
        self.failure: Exception | None = None
        """Why the index can never be opened; `None` if it was, or still may be."""

    @property
    def manifest(self) -> Mapping[str, object] | None:
        """Manifest; `None` if the index must be open to know it."""
        return self._manifest if self._retriever is None else self._retriever.manifest

    @property
    def index_id(self) -> str | None:
        """Identity of the index, if it is known and has one."""
        return (
            None if self.manifest is None else str(self.manifest["index_id"]) if "index_id" in self.manifest else None
        )

    @property
    def retriever(self) -> Retriever:
        """The open index; raises `BackendUnavailableError` until there is one."""
        if self._retriever is None:
            raise BackendUnavailableError(f"the index is not open: {self._reason}")
        return self._retriever

    @property
    def is_open(self) -> bool:
        """Whether the index is open."""
        return self._retriever is not None

    def open(self) -> None:
        """Open the index, however long it takes; returns when it is open, `failure` is set, or `close` was called."""
        pause = _FIRST_WAIT_S
        while not self._is_stopped.is_set():
            try:
                retriever = self._open_retriever()
                self._known_item = _known_item(retriever)
            except Exception as error:  # whatever it is, it must end the server, not only this thread
                if not getattr(error, "is_retryable", False):
                    self.failure = error
                    return
                self._reason = f"{error} Next try in {pause:g} s."
                self._is_stopped.wait(pause)
                pause = min(2 * pause, _MAX_WAIT_S)
                continue
            self._retriever = retriever
            return

    def check(self, timeout: float = 5.0) -> None:
        """
        Return if a search is answered now and finds a passage that is known to be there; checked once a second.

        Args:
            timeout (`float`, *optional*, defaults to `5.0`):
                Seconds for an index that lives elsewhere.

        Raises:
            `RetrievalError`: If not.
        """
        retriever = self.retriever
        with self._check_lock:
            if time.monotonic() - self._checked_at < _CHECK_VALID_S:
                return
            check_ready(retriever, timeout)
            if self._known_item is None:
                retriever.search([_PROBE_QUERY], 1)
            elif known_item_recall(retriever, [self._known_item]) < 1:
                raise RetrievalError(f"the index no longer finds its passage {self._known_item.id!r} by its own words")
            self._checked_at = time.monotonic()

    def close(self) -> None:
        """Stop trying to open the index and release it."""
        self._is_stopped.set()
        if self._retriever is not None:
            close_retriever(self._retriever)


def _known_item(retriever: Retriever) -> Passage | None:
    """A passage the index finds; `None` if it cannot sample; raises if it finds too few of those it samples."""
    sample = getattr(retriever, "sample", None)
    if sample is None:
        return None
    passages = sample(_NUM_KNOWN_ITEMS)
    found = [passage for passage in passages if known_item_recall(retriever, [passage]) == 1]
    if len(found) < _MIN_KNOWN_ITEM_RECALL * len(passages) or not found:
        raise RetrievalError(
            f"The index must find sampled passages by their own words: got {len(found)} of {len(passages)}. "
            "Check it with `grounded-rl index verify`."
        )
    return found[0]
