"""
How well a branch point can be told in advance: the selection criterion against what its siblings turned out to do.

The disagreement of an event is the standard deviation of the mean rewards below the incumbent and its fresh siblings.
A ridge fit on everything known at selection, fitted and read on the same events, says how much the recorded features
could tell; the choice in hindsight says how much there is to tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grounded_rl.rollouts.tree import RolloutTree, Selection

FEATURES = ("score", "surprisal", "siblings", "depth", "turn tokens", "candidates", "round")


@dataclass(frozen=True)
class BranchSignals:
    """Correlations with sibling disagreement, and what ways of choosing reach of it; NaN where undefined."""

    num_events: int
    score_correlation: float
    surprisal_correlation: float
    ridge_correlation: float
    """In-sample."""
    mean_disagreement: float
    chosen_by_score: float
    """Disagreement at the best-ranked event of every tree and round with several."""
    chosen_by_ridge: float
    chosen_in_hindsight: float
    """Disagreement at the event where it is largest: an upper bound that uses outcomes."""


def branch_signals(
    trees: Sequence[RolloutTree], starts: Sequence[int], subtree_means: torch.Tensor, *, ridge: float = 1.0
) -> BranchSignals:
    """
    Signals of a run.

    Args:
        trees (`Sequence[RolloutTree]`):
            The trees.
        starts (`Sequence[int]`):
            Forest node of every root.
        subtree_means (`torch.Tensor` of shape `(N,)`):
            Mean reward below every node of the forest.
        ridge (`float`, *optional*, defaults to `1.0`):
            Penalty of the fit on standardised features.

    Returns:
        [`BranchSignals`]
    """
    rows: list[list[float]] = []
    disagreements: list[torch.Tensor] = []
    rounds: dict[tuple[int, int], list[int]] = {}
    for number, (tree, start) in enumerate(zip(trees, starts, strict=True)):
        for choice in (choice for choice in tree.selections if choice.is_event):
            outcomes = subtree_means[[start + node for node in (choice.incumbent, *choice.fresh)]]
            if outcomes.isfinite().all():
                rounds.setdefault((number, choice.round), []).append(len(rows))
                rows.append(_features(tree, choice))
                disagreements.append(outcomes.std(correction=0))
    if len(rows) < 2:
        return BranchSignals(len(rows), *[float("nan")] * 7)
    features = torch.tensor(rows, dtype=torch.float64)
    target = torch.stack(disagreements)
    spread = features.std(dim=0, correction=0)
    scaled = (features - features.mean(dim=0)) / torch.where(spread > 0, spread, 1.0)
    gram = scaled.T @ scaled + ridge * torch.eye(len(FEATURES), dtype=torch.float64)
    fitted = scaled @ torch.linalg.solve(gram, scaled.T @ (target - target.mean()))
    contested = [torch.tensor(places) for places in rounds.values() if len(places) > 1]

    def reached(criterion: torch.Tensor) -> float:
        chosen = [target[places[criterion[places].argmax()]] for places in contested]
        return float(torch.stack(chosen).mean()) if chosen else float("nan")

    return BranchSignals(
        num_events=len(rows),
        score_correlation=_correlation(features[:, 0], target),
        surprisal_correlation=_correlation(features[:, 1], target),
        ridge_correlation=_correlation(fitted, target),
        mean_disagreement=float(torch.cat([target[places] for places in contested]).mean())
        if contested
        else float("nan"),
        chosen_by_score=reached(features[:, 0]),
        chosen_by_ridge=reached(fitted),
        chosen_in_hindsight=reached(target),
    )


def _features(tree: RolloutTree, choice: Selection) -> list[float]:
    chosen = choice.chosen
    turn = tree.nodes[choice.incumbent].turn
    assert turn is not None, "an incumbent is a turn"
    return [
        chosen.score,
        chosen.surprisal,
        float(chosen.num_siblings),
        float(len(tree.path(choice.incumbent))),
        float(len(turn.ids)),
        float(len(choice.candidates)),
        float(choice.round),
    ]


def _correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    first, second = first - first.mean(), second - second.mean()
    scale = float((first**2).sum().sqrt() * (second**2).sum().sqrt())
    return float(first @ second) / scale if scale > 0 else float("nan")
