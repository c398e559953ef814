"""Training metrics of a batch of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from grounded_rl.evaluation.metrics import compute_metrics
from grounded_rl.rollouts.types import Rollout

_LOGGED = {
    "em": "rollout/em",
    "tool_hit": "rollout/tool_hit",
    "sup_cor": "rollout/sup_cor",
    "hit_acc": "rollout/hit_acc",
    "grounded_share": "rollout/grounded_share",
    "hit_but_wrong": "rollout/hit_but_wrong",
    "malformed_share": "rollout/malformed_share",
    "truncated_share": "rollout/truncated_share",
    "type_a": "rollout/type_a",
    "type_b": "rollout/type_b",
    "type_c": "rollout/type_c",
    "type_d": "rollout/type_d",
    "num_failed": "rollout/failed",
}


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What the rollouts did, under the names of the training log; undefined ratios are NaN."""
    metrics = compute_metrics(rollouts)
    return {name: metrics[key] for key, name in _LOGGED.items()}
