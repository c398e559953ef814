"""Comparison of evaluations: metrics side by side, paired differences with intervals, moves between types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grounded_rl.evaluation.bootstrap import (
    Estimate,
    Interval,
    Quantity,
    bootstrap_intervals,
    check_same_questions,
    paired_intervals,
)
from grounded_rl.evaluation.metrics import METRIC_LABELS, Diagnose, QuestionTable, question_table, table_metrics
from grounded_rl.grounding import diagnose as default_diagnose
from grounded_rl.rollouts import Rollout

TYPES = ("a", "b", "c", "d")
"""Diagnosis types as they occur in metric names."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two evaluations of the same questions."""

    before: Mapping[str, float]
    """Metrics over the paired questions, as `compute_metrics` names them."""
    after: Mapping[str, float]
    intervals: Mapping[str, Interval]
    """Paired difference of every metric, after minus before."""
    kinds: Mapping[str, Comparison]
    """The same for every kind of question; empty within a kind."""
    transitions: tuple[tuple[float, ...], ...]
    """Questions by type before (rows A to D) and after (columns A to D); sums to the number of paired questions."""
    num_questions: int
    """Questions scored in both evaluations."""
    num_dropped: int
    """Questions left out because every rollout of one side failed."""
    confidence: float


def _quantities(table: QuestionTable) -> dict[str, Quantity]:
    return {name: table.values(name) for name in METRIC_LABELS}


def _align(first: QuestionTable, second: QuestionTable) -> tuple[QuestionTable, QuestionTable]:
    """Both tables narrowed to the questions they share, in the order of the first."""
    rows = {name: number for number, name in enumerate(second.ids)}
    shared = [number for number, name in enumerate(first.ids) if name in rows]
    return first.take(shared), second.take([rows[first.ids[number]] for number in shared])


def _transitions(before: QuestionTable, after: QuestionTable) -> tuple[tuple[float, ...], ...]:
    """Sum over questions of the outer product of their type shares; with one sample each this counts questions."""
    rows = np.stack([before.columns[f"type_{letter}"] for letter in TYPES])
    columns = np.stack([after.columns[f"type_{letter}"] for letter in TYPES])
    return tuple(tuple(map(float, row)) for row in rows @ columns.T)


def _compare_tables(
    before: QuestionTable, after: QuestionTable, *, num_dropped: int, by_kind: bool, **bootstrap: float
) -> Comparison:
    kinds = {}
    if by_kind:
        names = np.array(before.kinds)
        for kind in sorted(set(before.kinds)):
            rows = np.flatnonzero(names == kind)
            kinds[kind] = _compare_tables(
                before.take(rows), after.take(rows), num_dropped=0, by_kind=False, **bootstrap
            )
    return Comparison(
        before=table_metrics(before),
        after=table_metrics(after),
        intervals=paired_intervals(_quantities(before), _quantities(after), **bootstrap),
        kinds=kinds,
        transitions=_transitions(before, after),
        num_questions=len(before.ids),
        num_dropped=num_dropped,
        confidence=bootstrap["confidence"],
    )


def compare(
    before: Sequence[Rollout],
    after: Sequence[Rollout],
    *,
    diagnose: Diagnose = default_diagnose,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Comparison:
    """
    Metrics of two evaluations of the same questions, with paired bootstrap intervals.

    Args:
        before (`Sequence[Rollout]`):
            Rollouts of the first policy.
        after (`Sequence[Rollout]`):
            Rollouts of the second policy on the same questions.
        diagnose (`Callable[[Rollout], Diagnosis]`, *optional*, defaults to [`~grounded_rl.grounding.diagnose`]):
            Diagnosis of one rollout.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            Bootstrap resamples.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage of the intervals.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        `Comparison`: Over the questions that both evaluations scored. A question all of whose rollouts failed in one
        of them is left out of both and counted in `num_dropped`.

    Raises:
        `ConfigurationError`: If the two were asked different questions.
    """
    check_same_questions([rollout.question_id for rollout in before], [rollout.question_id for rollout in after])
    first, second = _align(*(question_table(rollouts, diagnose=diagnose) for rollouts in (before, after)))
    return _compare_tables(
        first,
        second,
        num_dropped=len({rollout.question_id for rollout in before}) - len(first.ids),
        by_kind=True,
        num_resamples=num_resamples,
        confidence=confidence,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run of a comparison of several."""

    name: str
    metrics: Mapping[str, float]
    estimates: Mapping[str, Estimate]
    """Every metric with its own interval."""
    differences: Mapping[str, Interval] | None
    """Paired difference to the first run; `None` for the first run and where the questions differ."""


def compare_runs(
    runs: Mapping[str, Sequence[Rollout]],
    *,
    diagnose: Diagnose = default_diagnose,
    num_resamples: int = 10_000,
    confidence: float = 0.95,
    seed: int = 0,
) -> list[RunResult]:
    """
    Metrics of any number of runs, each against the first.

    Args:
        runs (`Mapping[str, Sequence[Rollout]]`):
            Name to rollouts; the first is the baseline.
        diagnose (`Callable[[Rollout], Diagnosis]`, *optional*, defaults to [`~grounded_rl.grounding.diagnose`]):
            Diagnosis of one rollout.
        num_resamples (`int`, *optional*, defaults to `10_000`):
            Bootstrap resamples.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage of the intervals.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        `list[RunResult]`: In the order of `runs`. Differences are over the questions that both runs scored, and only
        given where both were asked the same questions.
    """
    bootstrap = {"num_resamples": num_resamples, "confidence": confidence, "seed": seed}
    results: list[RunResult] = []
    baseline: QuestionTable | None = None
    asked_first: set[str] = set()
    for name, rollouts in runs.items():
        table = question_table(rollouts, diagnose=diagnose)
        asked = {rollout.question_id for rollout in rollouts}
        differences = None
        if baseline is None:
            baseline, asked_first = table, asked
        elif asked == asked_first:
            first, second = _align(baseline, table)
            differences = paired_intervals(_quantities(first), _quantities(second), **bootstrap)
        estimates = bootstrap_intervals(_quantities(table), **bootstrap)
        results.append(RunResult(name, table_metrics(table), estimates, differences))
    return results
