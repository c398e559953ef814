"""Training metrics of a batch of rollouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grounded_rl.evaluation.metrics import RATIOS, compute_metrics
from grounded_rl.grounding import Diagnosis
from grounded_rl.rollouts.types import Rollout

_LOGGED = {
    "em": "rollout/em",
    "tool_hit": "rollout/tool_hit",
    "sup_cor": "rollout/sup_cor",
    "hit_but_wrong": "rollout/hit_but_wrong",
    "malformed_share": "rollout/malformed_share",
    "truncated_share": "rollout/truncated_share",
    "type_a": "rollout/type_a",
    "type_b": "rollout/type_b",
    "type_c": "rollout/type_c",
    "type_d": "rollout/type_d",
    "num_searches": "rollout/num_searches",
    "num_failed": "rollout/failed",
}


def rollout_metrics(rollouts: Sequence[Rollout], diagnoses: Sequence[Diagnosis]) -> dict[str, float]:
    """What the rollouts did, under the names of the training log; plain means, NaN where there is none."""
    by_rollout = {id(rollout): diagnosis for rollout, diagnosis in zip(rollouts, diagnoses, strict=True)}
    metrics = compute_metrics(rollouts, diagnose=lambda rollout: by_rollout[id(rollout)])
    return {name: metrics[key] for key, name in _LOGGED.items()}


def quotients(means: Mapping[str, float]) -> dict[str, float]:
    """`rollout/hit_acc` and `rollout/grounded_share` of averaged metrics; NaN where the denominator is zero."""
    values = {}
    for key, (numerator, denominator) in RATIOS.items():
        top, bottom = means[_LOGGED[numerator]], means[_LOGGED[denominator]]
        values[f"rollout/{key}"] = top / bottom if bottom else float("nan")
    return values
