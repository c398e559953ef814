r"""
How much leaves that share a prefix resemble each other, by depth.

A leaf's cluster at a depth is its ancestor there. The correlation is that of a one-way analysis of variance with the
tree as block, so that the difficulty of questions does not count as resemblance; the second figure leaves it in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grounded_rl.credit import (
    Interval,
    effective_sample_size,
    intraclass_correlation,
    node_depths,
    tree_multiplicities,
)
from grounded_rl.credit.tree import tree_ids


@dataclass(frozen=True)
class PrefixRow:
    """Leaves that reach one depth, clustered by their ancestors there."""

    depth: int
    clusters_per_tree: float
    leaves_per_tree: float
    cluster_size: float
    """Size m0 of the analysis of variance, pooled over trees."""
    correlation: Interval
    """Within trees."""
    correlation_with_questions: float
    """With the differences between questions left in."""
    effective_leaves: float
    """Effective number of leaves of a tree under the within-tree correlation, averaged over trees."""


def prefix_rows(
    parents: torch.Tensor,
    rewards: torch.Tensor,
    counted: torch.Tensor,
    tree_steps: torch.Tensor,
    *,
    num_resamples: int,
    generator: torch.Generator,
) -> list[PrefixRow]:
    """
    Shared-prefix correlations and effective numbers of leaves at every depth that some leaf reaches.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node of a forest, `-1` for a root.
        rewards (`torch.Tensor` of shape `(N,)`):
            Reward of every counted leaf.
        counted (`torch.Tensor` of shape `(N,)`, `torch.bool`):
            Leaves that count.
        tree_steps (`torch.Tensor` of shape `(U,)`, `torch.long`):
            Step of every tree, within which trees are resampled.
        num_resamples (`int`):
            Number of resamples.
        generator (`torch.Generator`):
            Source of randomness.

    Returns:
        `list[PrefixRow]`: One row per depth, from 1. A correlation is NaN where no cluster holds two leaves.
    """
    counts = torch.cat(
        [
            torch.ones(1, len(tree_steps), dtype=torch.float64),
            tree_multiplicities(tree_steps, num_resamples, generator=generator),
        ]
    )
    depths, trees = node_depths(parents), tree_ids(parents)
    leaves = counted.nonzero().squeeze(1)
    rows = []
    for depth in range(1, int(depths[leaves].max()) + 1 if len(leaves) else 1):
        reached = leaves[depths[leaves] >= depth]
        ancestors = reached
        while (deeper := depths[ancestors] > depth).any():
            ancestors = torch.where(deeper, parents[ancestors], ancestors)
        rows.append(_row(depth, rewards[reached].double(), ancestors, trees[reached], counts))
    return rows


def _row(
    depth: int, returns: torch.Tensor, ancestors: torch.Tensor, trees: torch.Tensor, counts: torch.Tensor
) -> PrefixRow:
    num_trees = counts.shape[1]
    _, clusters, sizes = ancestors.unique(return_inverse=True, return_counts=True)
    cluster_trees = torch.zeros(len(sizes), dtype=torch.long).index_copy(0, clusters, trees)
    sizes = sizes.double()

    def per_tree(entries: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        return torch.zeros(num_trees, dtype=torch.float64).index_add(0, owners, entries)

    num_leaves = per_tree(torch.ones_like(returns), trees)
    num_clusters = per_tree(torch.ones_like(sizes), cluster_trees)
    means = torch.zeros_like(sizes).index_add(0, clusters, returns) / sizes
    tree_means = per_tree(returns, trees) / num_leaves.clamp(min=1)
    squares = per_tree(sizes**2, cluster_trees) / num_leaves.clamp(min=1)
    present = (num_leaves > 0).double()
    between = counts @ per_tree(sizes * (means - tree_means[cluster_trees]) ** 2, cluster_trees)
    within = counts @ per_tree((returns - means[clusters]) ** 2, trees)
    between = between / (counts @ (num_clusters - present))
    within = within / (counts @ (num_leaves - num_clusters))
    cluster_size = (counts @ (num_leaves - squares)) / (counts @ (num_clusters - present))
    correlations = (between - within) / (between + (cluster_size - 1) * within)
    defined = correlations[1:][torch.isfinite(correlations[1:])]
    low, high = defined.quantile(torch.tensor([0.025, 0.975]).double()).tolist() if len(defined) else (torch.nan,) * 2
    rho = float(correlations[0])
    sizes_by_tree = [sizes[cluster_trees == tree] for tree in range(num_trees) if present[tree]]
    effective = sum(effective_sample_size(each, rho) for each in sizes_by_tree) / len(sizes_by_tree)
    return PrefixRow(
        depth=depth,
        clusters_per_tree=float(num_clusters.sum() / present.sum()),
        leaves_per_tree=float(num_leaves.sum() / present.sum()),
        cluster_size=float(cluster_size[0]),
        correlation=Interval(rho, low, high, len(returns), int(present.sum())),
        correlation_with_questions=intraclass_correlation(returns, ancestors),
        effective_leaves=effective,
    )
