"""Evaluation: metrics of rollouts, bootstrap intervals, reports, plots and the rollout viewer."""

from grounded_rl.evaluation.bootstrap import Estimate, Interval, bootstrap_interval, paired_bootstrap
from grounded_rl.evaluation.comparison import Comparison, RunResult, compare, compare_runs
from grounded_rl.evaluation.html import write_html
from grounded_rl.evaluation.metrics import METRIC_LABELS, compute_metrics, metrics_by_kind, question_table
from grounded_rl.evaluation.report import write_report

__all__ = [
    "METRIC_LABELS",
    "Comparison",
    "Estimate",
    "Interval",
    "RunResult",
    "bootstrap_interval",
    "compare",
    "compare_runs",
    "compute_metrics",
    "metrics_by_kind",
    "paired_bootstrap",
    "question_table",
    "write_html",
    "write_report",
]
