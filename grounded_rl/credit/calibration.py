r"""
Bootstrap over trees, and calibration of the rank model behind SIPO's correction.

Leaves of a tree share prefixes, so the tree is the unit that is resampled, within its optimiser step. A resample is a
vector of multiplicities, one per tree; every statistic here is a ratio of sums over trees, so that all resamples are
one matrix product.

Shapes: `E` entries (events or pairs), `C` candidates, `R` resamples, `U` trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from grounded_rl.credit._checks import check_dimensions, check_same_shape
from grounded_rl.credit.selection import standardized_scores
from grounded_rl.credit.sipo import blom

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """Estimate with a percentile interval; NaN where no entry contributes."""

    estimate: float
    low: float
    high: float
    num_entries: int
    num_trees: int


def tree_multiplicities(
    tree_steps: torch.Tensor, num_resamples: int, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """
    How often every tree is drawn in every resample: with replacement, as many trees per step as the step has.

    Args:
        tree_steps (`torch.Tensor` of shape `(U,)`, integer):
            Optimiser step of every tree.
        num_resamples (`int`):
            Number of resamples.
        generator (`torch.Generator`, *optional*):
            Source of randomness.

    Returns:
        `torch.Tensor` of shape `(R, U)`, `torch.float64`: Multiplicities; over the trees of a step they sum to their
        number.
    """
    counts = torch.zeros(num_resamples, len(tree_steps), dtype=torch.float64)
    for step in tree_steps.unique().tolist():
        trees = (tree_steps == step).nonzero().squeeze(1)
        drawn = trees[torch.randint(len(trees), (num_resamples, len(trees)), generator=generator)]
        counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return counts


def _interval(
    point: torch.Tensor, resampled: torch.Tensor, level: float, num_entries: int, num_trees: int
) -> Interval:
    """Interval of one statistic; resamples in which it is undefined are left out."""
    defined = resampled[torch.isfinite(resampled)]
    if len(defined) == 0:
        return Interval(float(point), float("nan"), float("nan"), num_entries, num_trees)
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(defined, tails).tolist()
    return Interval(float(point), low, high, num_entries, num_trees)


def _tree_sums(entries: torch.Tensor, trees: torch.Tensor, num_trees: int) -> torch.Tensor:
    return torch.zeros(num_trees, dtype=torch.float64).index_add(0, trees, entries.double())


def bootstrap_mean(
    entries: torch.Tensor,
    tree_ids: torch.Tensor,
    steps: torch.Tensor,
    *,
    num_resamples: int = NUM_RESAMPLES,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    """
    Mean of entries with an interval from resampling trees within steps.

    Args:
        entries (`torch.Tensor` of shape `(E,)`):
            One number per event, such as a contrast of `branch_contrasts`. NaN entries are left out.
        tree_ids (`torch.Tensor` of shape `(E,)`, integer):
            Tree of every entry; ids need to be unique only within a step.
        steps (`torch.Tensor` of shape `(E,)`, integer):
            Optimiser step of every entry.
        num_resamples (`int`, *optional*, defaults to 2000):
            Number of resamples.
        level (`float`, *optional*, defaults to 0.95):
            Coverage of the interval.
        generator (`torch.Generator`, *optional*):
            Source of randomness.

    Returns:
        `Interval`: Mean and interval.

    Raises:
        `ValueError`: If the shapes differ.
    """
    check_dimensions("entries", entries, "E")
    check_same_shape(entries=entries, tree_ids=tree_ids, steps=steps)
    defined = torch.isfinite(entries)
    pairs, trees = torch.stack([steps, tree_ids], 1)[defined].unique(dim=0, return_inverse=True)
    sums = _tree_sums(entries[defined], trees, len(pairs))
    sizes = _tree_sums(torch.ones_like(entries[defined]), trees, len(pairs))
    counts = tree_multiplicities(pairs[:, 0], num_resamples, generator=generator)
    resampled = (counts @ sums) / (counts @ sizes)
    return _interval(sums.sum() / sizes.sum(), resampled, level, int(defined.sum()), len(pairs))


@dataclass(frozen=True)
class CandidateSample:
    """Candidates of the last expansion round of every tree, unselected ones included."""

    scores: torch.Tensor  # (C,) the score that ranked
    outcomes: torch.Tensor  # (C,) mean raw reward over selection-time leaves
    set_ids: torch.Tensor  # (C,) candidate set
    tree_ids: torch.Tensor  # (C,) tree, unique within a step
    steps: torch.Tensor  # (C,) optimiser step


@dataclass(frozen=True)
class PairSample:
    """Incumbent–fresh pairs of the last expansion round."""

    displacements: torch.Tensor  # (E,) incumbent outcome minus fresh outcome
    ranks: torch.Tensor  # (E,) rank of the incumbent
    set_sizes: torch.Tensor  # (E,) number of candidates
    tree_ids: torch.Tensor  # (E,) tree, unique within a step
    steps: torch.Tensor  # (E,) optimiser step


@dataclass(frozen=True)
class CalibrationRow:
    """Observed and predicted displacement of one group of pairs."""

    group: str
    observed: Interval
    predicted: Interval
    residual: Interval  # observed minus predicted


def calibration_groups(pairs: PairSample) -> dict[str, torch.Tensor]:
    """Masks of the bins that the paper fixed in advance: all pairs, by rank, and by number of candidates."""
    ranks, sizes = pairs.ranks, pairs.set_sizes
    return {
        "all": torch.ones_like(ranks, dtype=torch.bool),
        "rank 1": ranks == 1,
        "rank 2-3": (ranks >= 2) & (ranks <= 3),
        "rank 4-6": (ranks >= 4) & (ranks <= 6),
        "candidates <= 20": sizes <= 20,
        "candidates 21-30": (sizes >= 21) & (sizes <= 30),
        "candidates > 30": sizes > 30,
    }


def rank_calibration(
    candidates: CandidateSample,
    pairs: PairSample,
    *,
    groups: Mapping[str, torch.Tensor] | None = None,
    num_resamples: int = NUM_RESAMPLES,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> list[CalibrationRow]:
    r"""
    Predicted against observed displacement of selected branches.

    The prediction is \\( \hat D_i = \hat a_{2,t-1} h(r_i, n_i) \\) with the slope of all candidates of the step
    before. Trees are resampled within steps and the slope is refitted in every resample; a tree that serves both as
    fitting data and as evaluation data is drawn as often for both. Pairs of a step whose predecessor has no
    candidates are left out. SIPO ([Sec. B.2](https://huggingface.co/papers/2609.34805)).

    Args:
        candidates (`CandidateSample`):
            Full candidate sets of all steps.
        pairs (`PairSample`):
            Evaluated pairs.
        groups (`Mapping[str, torch.Tensor]`, *optional*):
            Named `(E,)` masks of pairs; those of `calibration_groups` if omitted.
        num_resamples (`int`, *optional*, defaults to 2000):
            Number of resamples.
        level (`float`, *optional*, defaults to 0.95):
            Coverage of the intervals.
        generator (`torch.Generator`, *optional*):
            Source of randomness.

    Returns:
        `list[CalibrationRow]`: One row per group.

    Raises:
        `ValueError`: If shapes differ within a sample or a mask does not fit.
    """
    check_same_shape(**vars(candidates))
    check_same_shape(**vars(pairs))
    groups = calibration_groups(pairs) if groups is None else groups
    owners = torch.cat(
        [torch.stack([candidates.steps, candidates.tree_ids], 1), torch.stack([pairs.steps, pairs.tree_ids], 1)]
    )
    trees, slots = owners.unique(dim=0, return_inverse=True)
    fit_trees, pair_trees = slots.split([len(candidates.steps), len(pairs.steps)])
    counts = torch.cat(
        [
            torch.ones(1, len(trees), dtype=torch.float64),
            tree_multiplicities(trees[:, 0], num_resamples, generator=generator),
        ]
    )
    slopes = _slopes_by_step(candidates, fit_trees, trees[:, 0], counts)
    evaluated = torch.tensor([step - 1 in slopes for step in pairs.steps.tolist()], dtype=torch.bool)
    rows = []
    for name, mask in groups.items():
        check_same_shape(ranks=pairs.ranks, **{name: mask})
        rows.append(_calibration_row(name, pairs, mask & evaluated, pair_trees, counts, slopes, level))
    return rows


def _slopes_by_step(
    candidates: CandidateSample, trees: torch.Tensor, tree_steps: torch.Tensor, counts: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Slope of every step in the original sample (first entry) and every resample."""
    z = standardized_scores(candidates.scores.double(), candidates.set_ids)
    products = _tree_sums(z * candidates.outcomes, trees, len(tree_steps))
    squares = _tree_sums(z * z, trees, len(tree_steps))
    slopes = {}
    for step in candidates.steps.unique().tolist():
        of_step = (tree_steps == step).double()
        slopes[step] = (counts @ (products * of_step)) / (counts @ (squares * of_step))
    return slopes


def _calibration_row(
    name: str,
    pairs: PairSample,
    mask: torch.Tensor,
    trees: torch.Tensor,
    counts: torch.Tensor,
    slopes: dict[int, torch.Tensor],
    level: float,
) -> CalibrationRow:
    num_trees = counts.shape[1]
    chosen = mask.double()
    observed = counts @ _tree_sums(pairs.displacements.double().where(mask, 0.0), trees, num_trees)
    sizes = counts @ _tree_sums(chosen, trees, num_trees)
    strengths = blom(pairs.ranks, pairs.set_sizes)
    predicted = torch.zeros_like(observed)
    for step in pairs.steps[mask].unique().tolist():
        of_step = _tree_sums(strengths * chosen * (pairs.steps == step), trees, num_trees)
        predicted = predicted + slopes[step - 1] * (counts @ of_step)
    entries, used_trees = int(mask.sum()), len(trees[mask].unique())

    def interval(sums: torch.Tensor) -> Interval:
        means = sums / sizes
        return _interval(means[0], means[1:], level, entries, used_trees)

    return CalibrationRow(name, interval(observed), interval(predicted), interval(observed - predicted))
