"""Evaluation: metrics of rollouts, bootstrap intervals, reports, plots and the rollout viewer."""

from grounded_rl.evaluation.bootstrap import Estimate, Interval, bootstrap_interval, paired_bootstrap
from grounded_rl.evaluation.metrics import METRIC_LABELS, compute_metrics, metrics_by_kind, question_table

__all__ = [
    "METRIC_LABELS",
    "Estimate",
    "Interval",
    "bootstrap_interval",
    "compute_metrics",
    "metrics_by_kind",
    "paired_bootstrap",
    "question_table",
]
