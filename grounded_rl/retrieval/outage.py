"""Waits for a backend that is away, so that a run survives its restart."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.retrieval.base import Hit, Retriever, check_ready
from grounded_rl.retrieval.stats import SearchStats
from grounded_rl.retrieval.wrapper import Clock, RetrieverWrapper

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_Result = TypeVar("_Result")

FIRST_REMINDER_S = 60.0
"""Time after the first message of an outage at which the next one comes; each further pause is twice as long."""


class PatientRetriever(RetrieverWrapper):
    """
    Holds a search back while the backend is away, and repeats it when it is there again.

    Meant as the outermost wrapper of a training run: whoever searches sees either the true result, late, or an error
    after which nothing but stopping is left. Nothing that was generated is lost to an outage shorter than `patience`.

    Args:
        inner ([`Retriever`]):
            Retriever whose backend may go away.
        patience (`float`, *optional*, defaults to `600.0`):
            Seconds one search may wait in all, from its first failure.
        cap (`float`, *optional*, defaults to `15.0`):
            Longest pause between two questions whether the backend is there.
        stats ([`SearchStats`], *optional*):
            Counters to add to.
        rng (`random.Random`, *optional*):
            Source of the pauses; one seeded by the system by default.
        clock ([`Clock`], *optional*):
            What waits and tells the time; the module `time` by default.

    Raises:
        `ConfigurationError`: If `patience` is negative.
    """

    def __init__(
        self,
        inner: Retriever,
        *,
        patience: float = 600.0,
        cap: float = 15.0,
        stats: SearchStats | None = None,
        rng: random.Random | None = None,
        clock: Clock = time,
    ):
        super().__init__(inner)
        if not patience >= 0:
            raise ConfigurationError(f"`patience` must be at least 0 seconds: got {patience}. Raise it.")
        self._patience = patience
        self._cap = cap
        self._stats = SearchStats() if stats is None else stats
        self._rng = random.Random() if rng is None else rng
        self._clock = clock

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for every query, if need be after the backend came back."""

        def ask_and_search() -> list[list[Hit]]:
            check_ready(self.inner)
            return self.inner.search(queries, k)

        return self._patiently(lambda: self.inner.search(queries, k), ask_and_search)

    def confirm(self) -> None:
        """
        Return once the backend says that it still is the index of `manifest`.

        Raises:
            `RetrievalError`: If it is not, or did not come back in time.
        """

        def ask() -> None:
            check_ready(self.inner)

        self._patiently(ask, ask)

    def _patiently(self, act: Callable[[], _Result], act_again: Callable[[], _Result]) -> _Result:
        """Result of an action, if need be of its repetition after the backend came back."""
        try:
            return act()
        except RetrievalError as error:
            if not error.is_retryable or self._patience == 0:
                raise
            failure = error
        begin = self._clock.monotonic()
        self._stats.add(outages=1)
        try:
            return self._wait_and_act(act_again, failure, begin)
        finally:
            self._stats.add(outage_s=self._clock.monotonic() - begin)

    def _wait_and_act(self, act: Callable[[], _Result], failure: RetrievalError, begin: float) -> _Result:
        reminder = FIRST_REMINDER_S
        logger.warning(
            "The search backend does not answer (%s). Waiting up to %.0f s; nothing that was generated is lost.",
            failure,
            self._patience,
        )
        for tries in range(1, 10**9):
            waited = self._clock.monotonic() - begin
            if waited >= self._patience:
                break
            self._clock.sleep(min(self._pause(failure, tries), self._patience - waited))
            try:
                result = act()
            except RetrievalError as error:
                if not error.is_retryable:
                    raise
                failure = error
            else:
                logger.warning("The search backend answered again after %.0f s.", self._clock.monotonic() - begin)
                return result
            waited = self._clock.monotonic() - begin
            if waited >= reminder:
                logger.warning("Still waiting for the search backend after %.0f s (%s).", waited, failure)
                reminder = 2 * waited
        raise type(failure)(
            f"The search backend did not come back within `retrieval_patience`, {self._patience:g} s; last: {failure}"
        ) from failure

    def _pause(self, failure: RetrievalError, tries: int) -> float:
        """Seconds until the backend is asked again."""
        longest = min(self._cap, _FIRST_PAUSE_S * 2.0 ** min(tries - 1, 60))
        return self._rng.uniform(longest / 2, longest) + max(0.0, getattr(failure, "retry_after", None) or 0.0)


def index_failure(retriever: Retriever, *, may_be_away: bool = False) -> RetrievalError | None:
    """
    What keeps the answers of earlier searches from being those of the index the run was started with.

    An index that was replaced under its own name answers like any other until someone asks which it is. One that is
    the right one now was the right one before: an index that is made anew never becomes the old one again.

    Args:
        retriever ([`Retriever`]):
            Any retriever; a patient one waits for its backend, an embedded index is always the right one.
        may_be_away (`bool`, *optional*, defaults to `False`):
            Whether a backend that does not answer now is no reason to distrust what it answered.

    Returns:
        `RetrievalError`, *optional*: The failure; `None` if there is none.
    """
    try:
        if isinstance(retriever, PatientRetriever):
            retriever.confirm()
        else:
            check_ready(retriever)
    except RetrievalError as error:
        return None if may_be_away and error.is_retryable else error
    return None
