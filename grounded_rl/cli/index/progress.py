"""Progress of work on a corpus: a bar where someone watches, a line now and then in a log."""

from __future__ import annotations

import sys
import time

LOG_INTERVAL_S = 30.0
"""Seconds between two lines in a log."""


class CorpusProgress:
    """
    Shows on the error stream how far a corpus is read, at what rate, and how long it will take.

    Args:
        label (`str`):
            What is being done.
    """

    def __init__(self, label: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc=label, unit="B", unit_scale=True, disable=None, leave=False)
        self._label = label
        self._started = self._last_line = time.monotonic()
        self._stage: str | None = None

    def __enter__(self) -> CorpusProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, done: int, total: int) -> None:
        """Move the bar to `done` of `total` bytes."""
        self._bar.total = total
        self._bar.update(done - self._bar.n if not self._bar.disable else 0)
        if self._bar.disable and self._stage is None and done:
            seconds = time.monotonic() - self._started
            left = seconds * (total - done) / done
            share = 100 * done / max(total, 1)
            self._log(f"{self._label}: {share:.0f} %, {done / seconds / 1e6:.1f} MB/s, {left:.0f} s left")

    def stage(self, line: str) -> None:
        """Say what is being done."""
        self._stage = line
        if self._bar.disable:
            self._log(line)
        else:
            self._bar.set_description_str(line)

    def _log(self, line: str) -> None:
        """Print a line, unless one was printed a moment ago."""
        now = time.monotonic()
        if now - self._last_line >= LOG_INTERVAL_S:
            self._last_line = now
            print(line, file=sys.stderr, flush=True)
