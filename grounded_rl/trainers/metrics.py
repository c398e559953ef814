"""Training metrics of a batch of rollouts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grounded_rl.evaluation.metrics import RATIOS, compute_metrics
from grounded_rl.grounding import Diagnosis
from grounded_rl.rollouts.types import CallStatus, Rollout, StopReason

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class SearchCounts:
    """What the calls of a batch of rollouts came to; counts of several processes can be added."""

    num_rollouts: int = 0
    masked: int = 0
    """Rollouts that failed and left statistics and loss."""
    executed: int = 0
    """Calls that were answered with passages, or with none."""
    rejected: int = 0
    """Calls that could not be executed as they were written."""
    truncated_tokens: int = 0
    """Policy tokens of passages that the budget of an observation cut off."""

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> SearchCounts:
        """Counts of rollouts."""
        calls = [call for rollout in rollouts for turn in rollout.turns for call in turn.calls]
        passages = [passage for call in calls for passage in call.passages]
        return cls(
            num_rollouts=len(rollouts),
            masked=sum(rollout.stop is StopReason.FAILED for rollout in rollouts),
            executed=sum(call.status in (CallStatus.OK, CallStatus.EMPTY) for call in calls),
            rejected=sum(call.status is CallStatus.REJECTED for call in calls),
            truncated_tokens=sum((each.num_tokens_full or 0) - (each.num_tokens or 0) for each in passages),
        )

    def __add__(self, other: SearchCounts) -> SearchCounts:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return SearchCounts(*(mine + theirs for mine, theirs in pairs))

    def metrics(self) -> dict[str, float]:
        """The values under the names of the training log."""
        return {
            "search/masked_rollouts": float(self.masked),
            "search/truncated_tokens": float(self.truncated_tokens),
        }


class SearchAlarm:
    """Warns when a whole generation batch searched for nothing: at the first, second, fourth, … such batch."""

    def __init__(self) -> None:
        self._num_silent = 0

    def check(self, counts: SearchCounts) -> None:
        """
        Look at one batch.

        Args:
            counts ([`SearchCounts`]):
                Counts over all processes.
        """
        if counts.executed or counts.masked == counts.num_rollouts:
            return
        self._num_silent += 1
        if self._num_silent & (self._num_silent - 1) == 0:
            logger.warning(
                "No search was executed in a whole generation batch (%d rollouts, %d calls that could not be read; "
                "%d such batches so far). If the policy should search, check `tool_format` and `prompt_style`.",
                counts.num_rollouts,
                counts.rejected,
                self._num_silent,
            )
