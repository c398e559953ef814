"""
Percentile bootstrap over questions.

A resample draws questions with replacement; the two runs of a comparison are resampled together, so the difficulty
that a question has for both cancels. Quotients of means (HitAcc, grounded share) are resampled as quotients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grounded_rl.errors import ConfigurationError

Quantity = tuple[Sequence[float] | np.ndarray, Sequence[float] | np.ndarray | None]
"""Numerator and denominator per question; a denominator of `None` makes the quantity a mean."""

_NAN = float("nan")
_CHUNK_ENTRIES = 4_000_000
"""Largest number of drawn indices in memory at a time (32 MB)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its bootstrap interval; all NaN where it is undefined."""

    value: float
    low: float
    high: float
    n: int
    """Questions it rests on."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A paired difference, after minus before, with its bootstrap interval; all NaN where it is undefined."""

    difference: float
    low: float
    high: float
    n: int
    """Questions it rests on."""

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside the interval; `False` where the difference is undefined."""
        return bool(self.low > 0 or self.high < 0)


def _check_settings(num_resamples: int, confidence: float) -> None:
    if num_resamples < 1:
        raise ConfigurationError(f"`num_resamples` must be at least 1: got {num_resamples}. Use 10,000 for a report.")
    if not 0.0 < confidence < 1.0:
        raise ConfigurationError(f"`confidence` must lie in (0, 1): got {confidence}. Use 0.95 for a 95 % interval.")


def resampled_sums(columns: np.ndarray, *, num_resamples: int, seed: int) -> np.ndarray:
    """
    Sums of every column over bootstrap resamples of the rows.

    Args:
        columns (`np.ndarray` of shape `(N, M)`):
            One row per question, one column per quantity.
        num_resamples (`int`):
            Number of resamples `R`.
        seed (`int`):
            Seed of the draws. The same seed and `N` give the same resamples, whatever the columns are.

    Returns:
        `np.ndarray` of shape `(R, M)`: Sums, in double precision.
    """

    def chunks() -> Iterator[np.ndarray]:
        generator = np.random.default_rng(seed)
        num_rows = len(columns)
        rows_per_chunk = max(1, _CHUNK_ENTRIES // num_rows)
        for start in range(0, num_resamples, rows_per_chunk):
            size = min(rows_per_chunk, num_resamples - start)
            drawn = generator.integers(0, num_rows, size=(size, num_rows))
            # Times each question was drawn: turns M gathers of (size, N) into one product of matrices.
            drawn += np.arange(size)[:, None] * num_rows
            counts = np.bincount(drawn.ravel(), minlength=size * num_rows).reshape(size, num_rows)
            yield counts.astype(np.float64) @ columns

    return np.concatenate(list(chunks()))


def _quotient(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom == 0, np.nan, top / bottom)


def _values_and_draws(quantities: Sequence[Quantity], **resampling: int) -> tuple[np.ndarray, np.ndarray]:
    """Value of every quantity, `(M,)`, and its values over the resamples, `(R, M)`; NaN where undefined."""
    tops = [np.asarray(top, dtype=np.float64) for top, _ in quantities]
    bottoms = [
        np.ones_like(top) if bottom is None else np.asarray(bottom, dtype=np.float64)
        for top, (_, bottom) in zip(tops, quantities, strict=True)
    ]
    columns = np.stack([*tops, *bottoms], axis=1)
    m = len(tops)
    totals, draws = columns.sum(axis=0), resampled_sums(columns, **resampling)
    return _quotient(totals[:m], totals[m:]), _quotient(draws[:, :m], draws[:, m:])


def _limits(value: float, draws: np.ndarray, confidence: float) -> tuple[float, float]:
    """Percentile limits. Resamples in which the quantity is undefined are left out."""
    draws = draws[~np.isnan(draws)]
    if np.isnan(value) or not draws.size:
        return float("nan"), float("nan")
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def bootstrap_intervals(
    quantities: Mapping[str, Quantity], *, num_resamples: int = 10_000, confidence: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """
    `bootstrap_interval` of several quantities over the same questions, from one set of resamples.

    Args:
        quantities (`Mapping[str, Quantity]`):
            Name to per-question numerator and denominator; a denominator of `None` makes the quantity a mean.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            Number of resamples.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage of the interval.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `dict[str, Estimate]`: One estimate per name.
    """
    _check_settings(num_resamples, confidence)
    n = len(next(iter(quantities.values()))[0]) if quantities else 0
    if n == 0:
        return {name: Estimate(_NAN, _NAN, _NAN, n=0) for name in quantities}
    values, draws = _values_and_draws(list(quantities.values()), num_resamples=num_resamples, seed=seed)
    return {
        name: Estimate(float(value), *_limits(value, draws[:, number], confidence), n=n)
        for number, (name, value) in enumerate(zip(quantities, values, strict=True))
    }


def paired_intervals(
    before: Mapping[str, Quantity],
    after: Mapping[str, Quantity],
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """
    `paired_bootstrap` of several quantities, from one set of resamples.

    Args:
        before (`Mapping[str, Quantity]`):
            Name to per-question numerator and denominator; a denominator of `None` makes the quantity a mean.
        after (`Mapping[str, Quantity]`):
            The same names; entry `i` of an array belongs to the question of entry `i` in `before`.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            Number of resamples.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage of the interval.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `dict[str, Interval]`: One interval of "after minus before" per name.
    """
    _check_settings(num_resamples, confidence)
    n = len(next(iter(before.values()))[0]) if before else 0
    if n == 0:
        return {name: Interval(_NAN, _NAN, _NAN, n=0) for name in before}
    quantities = [*before.values(), *(after[name] for name in before)]
    values, draws = _values_and_draws(quantities, num_resamples=num_resamples, seed=seed)
    m = len(before)
    differences, spread = values[m:] - values[:m], draws[:, m:] - draws[:, :m]
    return {
        name: Interval(float(value), *_limits(value, spread[:, number], confidence), n=n)
        for number, (name, value) in enumerate(zip(before, differences, strict=True))
    }


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    denominator: Sequence[float] | np.ndarray | None = None,
    *,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """
    Mean of per-question values with its bootstrap interval.

    Args:
        values (`Sequence[float]` or `np.ndarray`):
            One value per question.
        denominator (`Sequence[float]` or `np.ndarray`, *optional*):
            One value per question. With it the quantity is `sum(values) / sum(denominator)`.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            Number of resamples.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage of the interval.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `Estimate`: All NaN where the quantity is undefined.
    """
    if denominator is not None and len(denominator) != len(values):
        raise ConfigurationError(
            f"`denominator` must have one entry per value ({len(values)}): got {len(denominator)}. "
            "Pass arrays of equal length."
        )
    settings = {"num_resamples": num_resamples, "confidence": confidence, "seed": seed}
    return bootstrap_intervals({"value": (values, denominator)}, **settings)["value"]


def check_same_questions(before: Sequence[str], after: Sequence[str]) -> None:
    """Raise [`ConfigurationError`] unless both hold the same question ids."""
    only_before, only_after = sorted(set(before) - set(after)), sorted(set(after) - set(before))
    if only_before or only_after:
        raise ConfigurationError(
            "`before` and `after` must answer the same questions: got "
            f"{len(only_before)} only before {only_before[:3]}, {len(only_after)} only after {only_after[:3]}. "
            "Evaluate both policies on the same rows."
        )


def paired_bootstrap(
    before: Mapping[str, float],
    after: Mapping[str, float],
    *,
    before_denominator: Mapping[str, float] | None = None,
    after_denominator: Mapping[str, float] | None = None,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """
    Difference of two means over the same questions, after minus before, with its bootstrap interval.

    Args:
        before (`Mapping[str, float]`):
            Question id to value (the mean over its samples).
        after (`Mapping[str, float]`):
            Question id to value; the same ids, in any order.
        before_denominator (`Mapping[str, float]`, *optional*):
            Question id to denominator. With it the quantity is `sum(values) / sum(denominators)`, for instance HitAcc.
        after_denominator (`Mapping[str, float]`, *optional*):
            The same for `after`; give both or neither.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            Number of resamples.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage of the interval.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the draws.

    Returns:
        `Interval`: All NaN where the difference is undefined.

    Raises:
        `ConfigurationError`: If the ids differ.

    Example:
    ```python
    >>> interval = paired_bootstrap({"q1": 0.0, "q2": 0.0}, {"q2": 1.0, "q1": 1.0})
    >>> interval.difference, interval.low, interval.high, interval.n
    (1.0, 1.0, 1.0, 2)

    ```
    """
    if (before_denominator is None) != (after_denominator is None):
        raise ConfigurationError(
            "`before_denominator` and `after_denominator` must be given together: got one. Pass both or neither."
        )
    for other in (after, before_denominator, after_denominator):
        if other is not None:
            check_same_questions(list(before), list(other))

    def quantity(values: Mapping[str, float], denominator: Mapping[str, float] | None) -> Quantity:
        bottom = None if denominator is None else [denominator[name] for name in before]
        return [values[name] for name in before], bottom

    return paired_intervals(
        {"value": quantity(before, before_denominator)},
        {"value": quantity(after, after_denominator)},
        num_resamples=num_resamples,
        confidence=confidence,
        seed=seed,
    )["value"]
