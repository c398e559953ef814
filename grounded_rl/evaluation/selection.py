r"""
What a tree run's own records say about selection: contrasts, calibration of the rank model, shared prefixes.

All intervals come from resampling whole trees within their step. Rewards are raw; contrasts are in advantage units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grounded_rl.credit import (
    CalibrationRow,
    CandidateSample,
    Interval,
    PairSample,
    bootstrap_mean,
    branch_contrasts,
    calibration_groups,
    candidate_outcomes,
    leaf_mask,
    rank_calibration,
    selection_slope,
    sipo_options,
    subtree_sums,
    zero_variance_trees,
)
from grounded_rl.credit.tree import tree_ids
from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.prefixes import PrefixRow, prefix_rows
from grounded_rl.evaluation.signals import BranchSignals, branch_signals
from grounded_rl.rollouts.tree import RolloutTree
from grounded_rl.sampling.forest import Forest, build_forest

NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class SelectionAnalysis:
    """Everything `selection_markdown` shows of one run."""

    name: str
    facts: dict[str, float]
    """Counts, shares and means over the run, by name."""
    contrasts: dict[str, Interval]
    calibration: list[CalibrationRow]
    prefixes: list[PrefixRow]
    signals: BranchSignals
    slopes: list[tuple[int, float, float]]
    """Step, slope it was corrected with (NaN for none), slope of the step's own recorded trees."""


@dataclass(frozen=True)
class RunForest:
    """The trees of a run as tensors, with steps counted 0, 1, … in the order they were generated."""

    trees: Sequence[RolloutTree]
    forest: Forest
    rewards: torch.Tensor  # (N,) raw reward of every counted leaf, NaN elsewhere
    steps: torch.Tensor  # (U,) step of every tree

    @property
    def parents(self) -> torch.Tensor:
        """Parent of every node."""
        return self.forest.trees.parents

    @property
    def counted(self) -> torch.Tensor:
        """Leaves that count."""
        return leaf_mask(self.parents) & self.forest.trees.valid

    def subtree_means(self) -> torch.Tensor:
        """Mean raw reward of the counted leaves below every node; NaN without one."""
        sums = subtree_sums(self.parents, torch.where(self.counted, self.rewards, 0.0))
        return sums / subtree_sums(self.parents, self.counted.double())


def run_forest(trees: Sequence[RolloutTree]) -> RunForest:
    """
    The trees of a run as tensors.

    Raises:
        `ConfigurationError`: If there is no tree, or none of their leaves has a reward.
    """
    if not trees:
        raise ConfigurationError(
            "`trees` must hold at least one tree: got none. Train with a tree method and `rollout_log_groups: -1`."
        )
    totals = []
    for leaf in (leaf for tree in trees for leaf in tree.leaves):
        known = [value for value in leaf.rewards.values() if value is not None]
        totals.append(sum(known) if known and leaf.error is None else torch.nan)
    rewards = torch.tensor(totals, dtype=torch.float64)
    if rewards.isnan().all():
        raise ConfigurationError(
            "`trees` must have leaves with rewards: got none. Use the `rollouts.jsonl` that training wrote."
        )
    forest = build_forest(trees, ~rewards.isnan())
    order = {step: number for number, step in enumerate(sorted({tree.step for tree in trees}))}
    return RunForest(trees, forest, forest.at_leaves(rewards), torch.tensor([order[tree.step] for tree in trees]))


def contrasts(run: RunForest, *, num_resamples: int, generator: torch.Generator) -> dict[str, Interval]:
    """Selected–fresh and fresh–fresh differences of node advantages, as trained and without the correction."""
    incumbents, fresh, owners = [], [], []
    width = max([len(choice.fresh) for tree in run.trees for choice in tree.selections], default=1)
    for number, (tree, start) in enumerate(zip(run.trees, run.forest.starts, strict=True)):
        for choice in (choice for choice in tree.selections if choice.is_event):
            incumbents.append(start + choice.incumbent)
            fresh.append([start + node for node in choice.fresh] + [-1] * (width - len(choice.fresh)))
            owners.append(number)
    trees = torch.tensor(owners, dtype=torch.long)
    weights = str(run.trees[0].extras.get("child_weights", "softmax"))
    plain = run.forest.credit(
        run.rewards[run.forest.leaf_nodes], None, weight=0.0, options=sipo_options(child_weights=weights)
    ).values
    has_leaf = subtree_sums(run.parents, run.counted.double()) > 0
    trained = [torch.nan if node.advantage is None else node.advantage for tree in run.trees for node in tree.nodes]
    found = {}
    for label, values in (
        ("as trained", torch.tensor(trained, dtype=torch.float64)),
        ("without correction", torch.where(has_leaf, plain, torch.nan)),
    ):
        pair = branch_contrasts(
            values, torch.tensor(incumbents, dtype=torch.long), torch.tensor(fresh, dtype=torch.long).view(-1, width)
        )
        for name, entries in (("selected - fresh", pair.selected), ("fresh - fresh", pair.fresh)):
            found[f"{name}, {label}"] = bootstrap_mean(
                entries, trees, run.steps[trees], num_resamples=num_resamples, generator=generator
            )
    return found


def calibration_samples(run: RunForest) -> tuple[CandidateSample, PairSample]:
    """Candidates and incumbent–fresh pairs of the last expansion round of every tree, in raw reward."""
    forest = run.forest
    records = forest.records
    owners = tree_ids(run.parents)
    last = torch.tensor([max((choice.round for choice in tree.selections), default=-1) for tree in run.trees])
    records = records.where(records.rounds == last[owners[records.nodes]])
    outcomes = candidate_outcomes(
        run.parents, forest.trees.fresh_rounds, run.rewards, records, valid=forest.trees.valid
    )
    complete = ~torch.isin(records.set_ids, records.set_ids[outcomes.isnan()])
    candidates = records.where(complete)
    candidate_trees = owners[candidates.nodes]
    means = run.subtree_means()
    by_node = dict(zip(records.nodes.tolist(), outcomes.tolist(), strict=True))
    rows = []
    for number, (tree, start) in enumerate(zip(run.trees, forest.starts, strict=True)):
        for choice in tree.selections:
            if choice.is_event and choice.round == last[number]:
                fresh = means[[start + node for node in choice.fresh]].mean().item()
                rows.append(
                    (by_node[start + choice.incumbent] - fresh, choice.chosen.rank, len(choice.candidates), number)
                )
    rows = [row for row in rows if row[0] == row[0]]
    displacements, ranks, sizes, trees = zip(*rows, strict=True) if rows else ((),) * 4
    pair_trees = torch.tensor(trees, dtype=torch.long)
    return (
        CandidateSample(
            scores=candidates.scores,
            outcomes=outcomes[complete],
            set_ids=candidates.set_ids,
            tree_ids=candidate_trees,
            steps=run.steps[candidate_trees],
        ),
        PairSample(
            displacements=torch.tensor(displacements, dtype=torch.float64),
            ranks=torch.tensor(ranks, dtype=torch.long),
            set_sizes=torch.tensor(sizes, dtype=torch.long),
            tree_ids=pair_trees,
            steps=run.steps[pair_trees],
        ),
    )


def groups_of(pairs: PairSample) -> dict[str, torch.Tensor]:
    """
    The paper's bins without the empty ones; candidate counts in thirds of their own where all fall into one bin.
    """
    groups = {name: mask for name, mask in calibration_groups(pairs).items() if mask.any()}
    counts = [name for name in groups if name.startswith("candidates")]
    sizes = pairs.set_sizes
    if len(counts) == 1 and len(sizes.unique()) > 1:
        del groups[counts[0]]
        edges = sorted({float("-inf"), *(float(sizes.double().quantile(share)) for share in (1 / 3, 2 / 3))})
        for low, high in zip(edges, [*edges[1:], float("inf")], strict=True):
            mask = (sizes > low) & (sizes <= high)
            if mask.any():
                groups[f"candidates {int(sizes[mask].min())}-{int(sizes[mask].max())}"] = mask
    return groups


def slope_series(run: RunForest) -> list[tuple[int, float, float]]:
    """Step, slope the step was corrected with, and slope of its own recorded trees in value units."""
    plain = run.forest.credit(run.rewards[run.forest.leaf_nodes], None, weight=0.0, options=sipo_options()).leaf_values
    records = run.forest.records
    outcomes = candidate_outcomes(
        run.parents, run.forest.trees.fresh_rounds, plain, records, valid=run.forest.trees.valid
    )
    set_steps = run.steps[tree_ids(run.parents)[records.nodes]]
    series = []
    for number in run.steps.unique().tolist():
        tree = run.trees[run.steps.tolist().index(number)]
        used = tree.extras.get("slope")
        sums = selection_slope(records.scores, outcomes, records.set_ids, keep=set_steps == number)
        own = sums.estimate(min_count=2)
        series.append((tree.step, float("nan") if used is None else float(used), float("nan") if own is None else own))
    return series


def run_facts(run: RunForest) -> dict[str, float]:
    """Counts, shares and means over a run."""
    parents, counted = run.parents, run.counted
    leaves = [leaf for tree in run.trees for leaf in tree.leaves]
    flat = zero_variance_trees(parents, run.rewards, valid=run.forest.trees.valid)[run.forest.leaf_nodes]
    is_counted = counted[run.forest.leaf_nodes]
    shifts = torch.tensor(
        [
            torch.nan if leaf.value is None or leaf.corrected is None else abs(leaf.corrected - leaf.value)
            for leaf in leaves
        ],
        dtype=torch.float64,
    )
    num_children = torch.bincount(parents[parents >= 0], minlength=len(parents))
    choices = [choice for tree in run.trees for choice in tree.selections]
    tokens = sum(tree.num_sampled_tokens for tree in run.trees)
    linear = sum(tree.num_path_tokens for tree in run.trees)
    return {
        "trees": len(run.trees),
        "steps": len(run.steps.unique()),
        "leaves": len(leaves),
        "leaves that failed or have no reward": int((~is_counted).sum()),
        "mean reward": float(run.rewards[counted].mean()),
        "selection events": sum(choice.is_event for choice in choices),
        "choices of the root, without an event": sum(not choice.is_event for choice in choices),
        "share of trees with equal rewards": float(
            zero_variance_trees(parents, run.rewards, valid=run.forest.trees.valid)[parents < 0].double().mean()
        ),
        "mean correction of a leaf (absolute)": float(shifts[is_counted].nanmean()),
        "mean correction of a leaf in trees with equal rewards (absolute)": float(shifts[is_counted & flat].nanmean()),
        "share of internal nodes with one child": float((num_children[num_children > 0] == 1).double().mean()),
        "sampled tokens": tokens,
        "tokens of as many linear rollouts": linear,
        "sampled / linear": tokens / linear,
    }


def analyse_selections(
    trees: Sequence[RolloutTree], *, name: str = "run", num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> SelectionAnalysis:
    """
    Diagnostics of a tree run from its own records.

    Contrasts ([Eq. 9](https://huggingface.co/papers/2609.34805)), calibration of the rank model (App. B.2), shared
    prefixes (App. C.2) and branching signals (App. B.3).

    Args:
        trees (`Sequence[RolloutTree]`):
            Trees that training wrote; see [`~rollouts.load_trees`].
        name (`str`, *optional*, defaults to `"run"`):
            What the report calls the run.
        num_resamples (`int`, *optional*, defaults to `2000`):
            Bootstrap resamples of trees within steps.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        [`SelectionAnalysis`]

    Raises:
        `ConfigurationError`: If there is no tree, or none of their leaves has a reward.
    """
    run = run_forest(trees)
    generator = torch.Generator().manual_seed(seed)
    candidates, pairs = calibration_samples(run)
    return SelectionAnalysis(
        name=name,
        facts=run_facts(run),
        contrasts=contrasts(run, num_resamples=num_resamples, generator=generator),
        calibration=rank_calibration(
            candidates, pairs, groups=groups_of(pairs), num_resamples=num_resamples, generator=generator
        ),
        prefixes=prefix_rows(
            run.parents, run.rewards, run.counted, run.steps, num_resamples=num_resamples, generator=generator
        ),
        signals=branch_signals(run.trees, run.forest.starts, run.subtree_means()),
        slopes=slope_series(run),
    )
