"""Repeats searches that failed for a passing reason."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.retrieval.base import Hit, Retriever
from grounded_rl.retrieval.stats import SearchStats
from grounded_rl.retrieval.wrapper import Clock, RetrieverWrapper


class RetryingRetriever(RetrieverWrapper):
    r"""
    Tries a failed search again after a random pause ("full jitter").

    The pause before try \\( n + 1 \\) is uniform in \\( [0, \min(\text{cap}, \text{base} \cdot 2^{n-1})] \\), so that
    many clients of one backend do not come back together; a backend that says when to come back is given that time
    first. Only errors that are retryable are repeated.

    Args:
        inner ([`Retriever`]):
            Retriever whose searches may fail.
        attempts (`int`, *optional*, defaults to `4`):
            Tries in all, the first included.
        base (`float`, *optional*, defaults to `0.5`):
            Longest first pause, in seconds.
        cap (`float`, *optional*, defaults to `30.0`):
            Longest pause.
        deadline (`float`, *optional*, defaults to `120.0`):
            Seconds after which no further try begins. A try that is under way is not cut off; the backend's own time
            limit does that.
        stats ([`SearchStats`], *optional*):
            Counters to add to.
        rng (`random.Random`, *optional*):
            Source of the pauses; one seeded by the system by default, which leaves the run's own generators alone.
        clock ([`Clock`], *optional*):
            What waits and tells the time; the module `time` by default.

    Raises:
        `ConfigurationError`: If a number is out of range.
    """

    def __init__(
        self,
        inner: Retriever,
        *,
        attempts: int = 4,
        base: float = 0.5,
        cap: float = 30.0,
        deadline: float = 120.0,
        stats: SearchStats | None = None,
        rng: random.Random | None = None,
        clock: Clock = time,
    ):
        super().__init__(inner)
        if attempts < 1:
            raise ConfigurationError(f"`attempts` must be at least 1: got {attempts}. Use 1 for a single try.")
        for name, value in (("base", base), ("cap", cap), ("deadline", deadline)):
            if not value >= 0:
                raise ConfigurationError(f"`{name}` must be at least 0 seconds: got {value}. Raise it.")
        self._attempts = attempts
        self._base = base
        self._cap = cap
        self._deadline = deadline
        self._stats = SearchStats() if stats is None else stats
        self._rng = random.Random() if rng is None else rng
        self._clock = clock

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The best passages for every query; the last error once tries or time are used up."""
        end = self._clock.monotonic() + self._deadline
        for failed in range(1, self._attempts):
            try:
                return self.inner.search(queries, k)
            except RetrievalError as error:
                pause = self._pause(error, failed)
                if not error.is_retryable or self._clock.monotonic() + pause > end:
                    raise
            self._clock.sleep(pause)
            self._stats.add(retries=1)
        return self.inner.search(queries, k)

    def _pause(self, error: RetrievalError, failed: int) -> float:
        """Seconds until the next try, after `failed` of them."""
        jitter = self._rng.uniform(0.0, min(self._cap, self._base * 2.0 ** min(failed - 1, 60)))
        return jitter + max(0.0, getattr(error, "retry_after", None) or 0.0)
