"""Counters and distributions of a retrieval server, in the text format of Prometheus."""

from __future__ import annotations

import bisect
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_RECENT = 4096
_QUANTILES = (0.5, 0.95, 0.99)


class Histogram:
    """
    Counts of observations at or below fixed bounds, and the quantiles of the last few thousand. Thread-safe.

    Args:
        bounds (`Sequence[float]`):
            Upper bounds of the buckets, ascending; the last bucket has none.
    """

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """
        Add an observation.

        Args:
            value (`float`):
                What was observed.
        """
        with self._lock:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sum += value
            self._recent.append(value)

    def quantiles(self) -> dict[float, float]:
        """Quantiles 0.5, 0.95 and 0.99 of the last 4,096 observations; empty before the first."""
        with self._lock:
            ordered = sorted(self._recent)
        return {q: ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in _QUANTILES} if ordered else {}

    def lines(self, name: str) -> list[str]:
        """
        Samples of the exposition format.

        Args:
            name (`str`):
                Name of the metric.

        Returns:
            `list[str]`: Cumulative buckets, sum and count.
        """
        with self._lock:
            counts, total = list(self._counts), self._sum
        lines, cumulative = [], 0
        for bound, count in zip((*(f"{bound:g}" for bound in self._bounds), "+Inf"), counts, strict=True):
            cumulative += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {cumulative}')
        return [*lines, f"{name}_sum {total:.6f}", f"{name}_count {cumulative}"]


class Metrics:
    """What a server counts. Gauges are read when the text is made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._errors: Counter[str] = Counter()
        self._queries = 0
        self._empty = 0
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self.request_seconds = Histogram(_SECONDS)
        self.queue_seconds = Histogram(_SECONDS)
        self.search_seconds = Histogram(_SECONDS)
        self.batch_size = Histogram(_SIZES)

    def count_request(self, path: str, status: int) -> None:
        """
        Count an answered request.

        Args:
            path (`str`):
                Path without parameters.
            status (`int`):
                HTTP status of the answer.
        """
        with self._lock:
            self._requests[path, status] += 1

    def count_error(self, kind: str) -> None:
        """
        Count a failure.

        Args:
            kind (`str`):
                Name of the exception, or of the rule that was broken.
        """
        with self._lock:
            self._errors[kind] += 1

    def count_results(self, sizes: Sequence[int]) -> None:
        """
        Count the queries of an answered search.

        Args:
            sizes (`Sequence[int]`):
                Number of hits of every query.
        """
        with self._lock:
            self._queries += len(sizes)
            self._empty += sum(size == 0 for size in sizes)

    def add_gauge(self, name: str, explanation: str, read: Callable[[], float]) -> None:
        """
        Show a value that is read when asked for.

        Args:
            name (`str`):
                Name without the prefix.
            explanation (`str`):
                One line.
            read (`Callable[[], float]`):
                Called for every page.
        """
        self._gauges[name] = (explanation, read)

    def text(self) -> str:
        """The page of `/metrics`."""
        with self._lock:
            requests, errors, queries, empty = dict(self._requests), dict(self._errors), self._queries, self._empty
        lines = _header("requests_total", "counter", "Requests answered, by path and status.")
        lines += [
            f'grounded_rl_requests_total{{path="{path}",status="{status}"}} {count}'
            for (path, status), count in sorted(requests.items())
        ]
        lines += _header("errors_total", "counter", "Requests that failed, by kind of failure.")
        lines += [f'grounded_rl_errors_total{{kind="{kind}"}} {count}' for kind, count in sorted(errors.items())]
        lines += _header("queries_total", "counter", "Queries answered.")
        lines += [f"grounded_rl_queries_total {queries}"]
        lines += _header("empty_results_total", "counter", "Queries that found nothing.")
        lines += [f"grounded_rl_empty_results_total {empty}"]
        for name, (explanation, read) in self._gauges.items():
            lines += [*_header(name, "gauge", explanation), f"grounded_rl_{name} {read():g}"]
        for name, explanation, histogram in (
            ("request_seconds", "Seconds from the head of a search request to its answer.", self.request_seconds),
            ("queue_seconds", "Seconds a search request waited for its batch.", self.queue_seconds),
            ("search_seconds", "Seconds the retriever took for a batch.", self.search_seconds),
            ("batch_size", "Queries searched in one call of the retriever.", self.batch_size),
        ):
            lines += [*_header(name, "histogram", explanation), *histogram.lines(f"grounded_rl_{name}")]
            lines += _header(f"{name}_quantile", "gauge", f"Recent quantiles. {explanation}")
            lines += [
                f'grounded_rl_{name}_quantile{{quantile="{q:g}"}} {value:.6f}'
                for q, value in histogram.quantiles().items()
            ]
        return "\n".join(lines) + "\n"


def _header(name: str, kind: str, explanation: str) -> list[str]:
    """Help and type of a metric."""
    return [f"# HELP grounded_rl_{name} {explanation}", f"# TYPE grounded_rl_{name} {kind}"]
