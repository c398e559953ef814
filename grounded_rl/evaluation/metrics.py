"""
Metrics of a set of rollouts.

Every number is a mean over unique questions: the samples of a question are averaged first, so neither the batch
layout nor an uneven number of samples weighs. Rollouts that failed for infrastructural reasons are counted and left
out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from grounded_rl.grounding import Diagnosis, diagnose
from grounded_rl.rollouts import CallStatus, Rollout, StopReason, TurnKind
from grounded_rl.text import token_f1

Diagnose = Callable[[Rollout], Diagnosis]

RATIOS: dict[str, tuple[str, str]] = {"hit_acc": ("sup_cor", "tool_hit"), "grounded_share": ("sup_cor", "em")}
"""Metrics that are a quotient of two means: name to (numerator, denominator)."""

METRIC_LABELS: dict[str, str] = {
    "em": "EM",
    "f1": "F1",
    "tool_hit": "ToolHit",
    "sup_cor": "SupCor",
    "hit_acc": "HitAcc",
    "grounded_share": "Grounded share",
    "hit_but_wrong": "Hit but wrong",
    "type_a": "Type A (hit, right)",
    "type_b": "Type B (hit, wrong)",
    "type_c": "Type C (no hit, wrong)",
    "type_d": "Type D (no hit, right)",
    "answered_share": "Answered",
    "malformed_share": "With a malformed call",
    "truncated_share": "Cut by the token budget",
    "num_searches": "Searches per rollout",
    "num_turns": "Turns per rollout",
    "num_sampled_tokens": "Sampled tokens per rollout",
}
"""Every averaged metric in the order of reports, with its label."""

UNKNOWN_KIND = "unknown"
"""Kind under which questions without one are reported."""


@dataclass(frozen=True, slots=True)
class QuestionTable:
    """
    Per-question means of every averaged metric, quotients left out.

    `kinds[i]`, `counts[i]`, `failed[i]` and `columns[name][i]` belong to the question `ids[i]`.
    """

    ids: tuple[str, ...]
    kinds: tuple[str, ...]
    columns: Mapping[str, np.ndarray]
    counts: np.ndarray
    """Scored rollouts of every question, at least 1."""
    failed: np.ndarray
    """Failed rollouts of every question, left out of `columns`."""
    num_failed_elsewhere: int = 0
    """Failed rollouts of questions that are not in the table because none of their rollouts could be scored."""

    def take(self, rows: Sequence[int] | np.ndarray) -> QuestionTable:
        """Table of the questions in `rows`, in that order."""
        rows = np.asarray(rows, dtype=np.intp)
        return QuestionTable(
            ids=tuple(self.ids[row] for row in rows),
            kinds=tuple(self.kinds[row] for row in rows),
            columns={name: values[rows] for name, values in self.columns.items()},
            counts=self.counts[rows],
            failed=self.failed[rows],
        )

    def values(self, metric: str) -> tuple[np.ndarray, np.ndarray | None]:
        """Numerator and denominator of a metric per question; the denominator is `None` where the metric is a mean."""
        if metric in RATIOS:
            numerator, denominator = RATIOS[metric]
            return self.columns[numerator], self.columns[denominator]
        return self.columns[metric], None

    def mean(self, metric: str) -> float:
        """Value of a metric over all questions; NaN where it is undefined."""
        numerator, denominator = self.values(metric)
        bottom = float(len(self.ids)) if denominator is None else float(denominator.sum())
        return float(numerator.sum()) / bottom if bottom else float("nan")


def _rollout_row(rollout: Rollout, diagnosis: Diagnosis) -> dict[str, float]:
    hit, correct = bool(diagnosis.hit), bool(diagnosis.correct)
    calls = [call for turn in rollout.turns for call in turn.calls]
    return {
        "em": float(correct),
        "f1": token_f1(rollout.answer, rollout.answers),
        "tool_hit": float(hit),
        "sup_cor": float(hit and correct),
        "hit_but_wrong": float(hit and not correct),
        "type_a": float(hit and correct),
        "type_b": float(hit and not correct),
        "type_c": float(not hit and not correct),
        "type_d": float(not hit and correct),
        "answered_share": float(rollout.answer is not None),
        "malformed_share": float(any(turn.kind is TurnKind.MALFORMED for turn in rollout.turns)),
        "truncated_share": float(rollout.stop is StopReason.LENGTH),
        "num_searches": float(sum(call.status in (CallStatus.OK, CallStatus.EMPTY) for call in calls)),
        "num_turns": float(len(rollout.turns)),
        "num_sampled_tokens": float(rollout.num_sampled_tokens),
    }


def question_table(rollouts: Sequence[Rollout], *, diagnose: Diagnose = diagnose) -> QuestionTable:
    """
    Per-question means of every averaged metric.

    Args:
        rollouts (`Sequence[Rollout]`):
            Rollouts in any order, any number per question.
        diagnose (`Callable[[Rollout], Diagnosis]`, *optional*, defaults to [`~grounded_rl.grounding.diagnose`]):
            Diagnosis of one rollout. Pass a partial to choose another matcher.

    Returns:
        `QuestionTable`: One row per question with a rollout that did not fail, in order of first appearance.
    """
    rows: defaultdict[str, list[dict[str, float]]] = defaultdict(list)
    failed: Counter[str] = Counter()
    kinds: dict[str, str] = {}
    for rollout in rollouts:
        if rollout.stop is StopReason.FAILED:
            failed[rollout.question_id] += 1
            continue
        rows[rollout.question_id].append(_rollout_row(rollout, diagnose(rollout)))
        kinds.setdefault(rollout.question_id, rollout.question_kind or UNKNOWN_KIND)
    return QuestionTable(
        ids=tuple(rows),
        kinds=tuple(kinds.values()),
        columns={
            name: np.array([np.mean([row[name] for row in samples]) for samples in rows.values()], dtype=np.float64)
            for name in METRIC_LABELS
            if name not in RATIOS
        },
        counts=np.array([len(samples) for samples in rows.values()], dtype=np.int64),
        failed=np.array([failed[name] for name in rows], dtype=np.int64),
        num_failed_elsewhere=sum(number for name, number in failed.items() if name not in rows),
    )


def table_metrics(table: QuestionTable) -> dict[str, float]:
    """Every metric of a table, in the order of `METRIC_LABELS`, then the counts."""
    return {
        **{name: table.mean(name) for name in METRIC_LABELS},
        "num_questions": float(len(table.ids)),
        "num_rollouts": float(table.counts.sum()),
        "num_failed": float(table.failed.sum() + table.num_failed_elsewhere),
    }


def compute_metrics(rollouts: Sequence[Rollout], *, diagnose: Diagnose = diagnose) -> dict[str, float]:
    r"""
    Metrics of a set of rollouts.

    With \\( H \\) "some search showed the answer" and \\( C \\) "the answer is an exact match", both averaged over the
    samples of a question and then over questions: `em` \\( = \overline{C} \\), `tool_hit` \\( = \overline{H} \\),
    `sup_cor` \\( = \overline{HC} \\), `hit_acc` = `sup_cor` / `tool_hit`, `grounded_share` = `sup_cor` / `em`,
    `hit_but_wrong` \\( = \overline{H(1-C)} \\).

    Args:
        rollouts (`Sequence[Rollout]`):
            Rollouts in any order, any number per question.
        diagnose (`Callable[[Rollout], Diagnosis]`, *optional*, defaults to [`~grounded_rl.grounding.diagnose`]):
            Diagnosis of one rollout. Pass a partial to choose another matcher.

    Returns:
        `dict[str, float]`: The metrics of `METRIC_LABELS` and the counts `num_questions`, `num_rollouts` (both without
        failed rollouts) and `num_failed`. An undefined quotient, and every mean over no question, is NaN and never 0.
    """
    return table_metrics(question_table(rollouts, diagnose=diagnose))


def metrics_by_kind(rollouts: Sequence[Rollout], *, diagnose: Diagnose = diagnose) -> dict[str, dict[str, float]]:
    """
    `compute_metrics` for every kind of question.

    Args:
        rollouts (`Sequence[Rollout]`):
            Rollouts in any order, any number per question.
        diagnose (`Callable[[Rollout], Diagnosis]`, *optional*, defaults to [`~grounded_rl.grounding.diagnose`]):
            Diagnosis of one rollout.

    Returns:
        `dict[str, dict[str, float]]`: Kinds in alphabetical order; questions without one are under `"unknown"`.
    """
    by_kind: defaultdict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_kind[rollout.question_kind or UNKNOWN_KIND].append(rollout)
    return {kind: compute_metrics(by_kind[kind], diagnose=diagnose) for kind in sorted(by_kind)}
