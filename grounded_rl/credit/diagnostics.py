r"""
Diagnostics of tree credit: contrasts between selected and fresh branches, shared-prefix dependence, and where GRPO's
pressure goes.

None of these enters training. Shapes: `N` tree nodes, `E` selection events, `K` fresh siblings.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from grounded_rl.credit._checks import check_dimensions, check_same_shape
from grounded_rl.credit.group import group_advantages
from grounded_rl.credit.tree import NO_NODE


@dataclass(frozen=True)
class BranchContrasts:
    """One entry per selection event; NaN where a contrast is undefined."""

    selected: torch.Tensor  # (E,) incumbent minus first fresh sibling
    fresh: torch.Tensor  # (E,) first minus second fresh sibling


def branch_contrasts(
    advantages: torch.Tensor, incumbents: torch.Tensor, fresh_siblings: torch.Tensor
) -> BranchContrasts:
    r"""
    Differences of node advantages within selection events.

    $$
    \Delta_{\text{sel}} = \mathbb{E}[A(v) - A(v'_1)], \qquad \Delta_{\text{fresh}} = \mathbb{E}[A(v'_1) - A(v'_2)]
    $$

    Fresh siblings are exchangeable, so the second mean is 0 up to noise; the first shows what selection did to the
    incumbent. SIPO ([Eq. 9](https://huggingface.co/papers/2609.34805)).

    Args:
        advantages (`torch.Tensor` of shape `(N,)`):
            Advantage of every node.
        incumbents (`torch.Tensor` of shape `(E,)`, `torch.long`):
            Selected node of every event.
        fresh_siblings (`torch.Tensor` of shape `(E, K)`, `torch.long`):
            Fresh siblings in the order of creation, padded with `-1`.

    Returns:
        `BranchContrasts`: Differences per event. NaN without a fresh sibling (or, for the second, without two).

    Raises:
        `ValueError`: If the shapes do not fit or a node is out of range.

    Example:

    ```python
    >>> contrasts = branch_contrasts(torch.tensor([0.0, -1.0, 0.5, 0.25]), torch.tensor([1]), torch.tensor([[2, 3]]))
    >>> contrasts.selected, contrasts.fresh
    (tensor([-1.5000]), tensor([0.2500]))

    ```
    """
    check_dimensions("advantages", advantages, "N")
    check_dimensions("fresh_siblings", fresh_siblings, "E", "K")
    check_same_shape(fresh_siblings=fresh_siblings[:, 0], incumbents=incumbents)
    nodes = torch.cat([incumbents[:, None], fresh_siblings], 1)
    if nodes.numel() and (int(nodes.min()) < NO_NODE or int(nodes.max()) >= len(advantages)):
        raise ValueError(
            f"`incumbents` and `fresh_siblings` must lie in [-1, {len(advantages)}): got a range of "
            f"[{int(nodes.min())}, {int(nodes.max())}]. Pass indices of the same forest as `advantages`."
        )
    # Index -1 selects the appended NaN, which every difference with it inherits.
    padded = torch.cat([advantages, advantages.new_full((1,), torch.nan)])[nodes]
    undefined = torch.full_like(padded[:, 0], torch.nan)
    second = padded[:, 2] if padded.shape[1] > 2 else undefined
    return BranchContrasts(selected=padded[:, 0] - padded[:, 1], fresh=padded[:, 1] - second)


def design_effect(cluster_sizes: torch.Tensor, correlation: float) -> float:
    r"""
    Inflation of the variance of a mean over leaves that share prefixes, \\( 1 + \rho (\sum_c m_c^2 / N - 1) \\).

    SIPO ([Eq. 12](https://huggingface.co/papers/2609.34805)).

    Args:
        cluster_sizes (`torch.Tensor` of shape `(C,)`):
            Number of leaves below every ancestor of one depth.
        correlation (`float`):
            Intraclass correlation; see `intraclass_correlation`.

    Returns:
        `float`: The design effect; 1 for clusters of one.

    Example:

    ```python
    >>> round(design_effect(torch.tensor([4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1]), 0.385), 6)
    1.525

    ```
    """
    sizes = cluster_sizes.double()
    return float(1 + correlation * ((sizes**2).sum() / sizes.sum() - 1))


def effective_sample_size(cluster_sizes: torch.Tensor, correlation: float) -> float:
    """
    Number of independent leaves with the same variance of the mean: leaves over `design_effect`.

    Args:
        cluster_sizes (`torch.Tensor` of shape `(C,)`):
            Number of leaves below every ancestor of one depth.
        correlation (`float`):
            Intraclass correlation.

    Returns:
        `float`: Effective sample size.
    """
    return float(cluster_sizes.sum()) / design_effect(cluster_sizes, correlation)


def anova_cluster_size(cluster_sizes: torch.Tensor) -> float:
    r"""
    Cluster size of the one-way analysis of variance, \\( m_0 = (N - \sum_c m_c^2 / N) / (C - 1) \\).

    Args:
        cluster_sizes (`torch.Tensor` of shape `(C,)`):
            Number of leaves below every ancestor of one depth.

    Returns:
        `float`: The common size for equal clusters; NaN for a single cluster.
    """
    sizes = cluster_sizes.double()
    if len(sizes) < 2:
        return float("nan")
    return float((sizes.sum() - (sizes**2).sum() / sizes.sum()) / (len(sizes) - 1))


def intraclass_correlation(returns: torch.Tensor, cluster_ids: torch.Tensor) -> float:
    r"""
    Share of the variance of leaf returns that lies between clusters, by analysis of variance.

    $$
    \hat\rho = \frac{MS_B - MS_W}{MS_B + (m_0 - 1) MS_W}
    $$

    Args:
        returns (`torch.Tensor` of shape `(L,)`):
            Return of every leaf.
        cluster_ids (`torch.Tensor` of shape `(L,)`, integer):
            Ancestor of every leaf at one depth.

    Returns:
        `float`: Correlation; negative when clusters differ less than chance. NaN with one cluster, with clusters of
        one leaf only, or without any variance.

    Raises:
        `ValueError`: If the shapes differ.
    """
    check_same_shape(returns=returns, cluster_ids=cluster_ids)
    _, clusters, sizes = cluster_ids.unique(return_inverse=True, return_counts=True)
    num_leaves, num_clusters = len(returns), len(sizes)
    if num_clusters < 2 or num_leaves == num_clusters:
        return float("nan")
    returns = returns.double()
    means = returns.new_zeros(num_clusters).index_add(0, clusters, returns) / sizes
    between = (sizes * (means - returns.mean()) ** 2).sum() / (num_clusters - 1)
    within = ((returns - means[clusters]) ** 2).sum() / (num_leaves - num_clusters)
    total = between + (anova_cluster_size(sizes) - 1) * within
    return float((between - within) / total) if total > 0 else float("nan")


def allocation_risk(width: float, correlation: float, num_leaves: int) -> float:
    r"""
    Surrogate risk of clusters of one width, \\( \rho \big(1 - \tfrac{m}{a + m} (1 - \tfrac{m}{N})\big) \\), \\( a =
    (1 - \rho)/\rho \\).

    SIPO ([Sec. C.2](https://huggingface.co/papers/2609.34805)), in units of the total variance.

    Args:
        width (`float`):
            Leaves per cluster m.
        correlation (`float`):
            Intraclass correlation in (0, 1].
        num_leaves (`int`):
            Leaf budget N.

    Returns:
        `float`: The risk.
    """
    a = (1 - correlation) / correlation
    return correlation * (1 - width / (a + width) * (1 - width / num_leaves))


def allocation_width(correlation: float, num_leaves: int, *, constrained: bool = False) -> float:
    r"""
    Width that minimises `allocation_risk`, \\( m_0^\star = \sqrt{a^2 + aN} - a \\).

    Args:
        correlation (`float`):
            Intraclass correlation in (0, 1].
        num_leaves (`int`):
            Leaf budget N.
        constrained (`bool`, *optional*, defaults to `False`):
            Whether the width must be at least one leaf.

    Returns:
        `float`: The width, not rounded.

    Raises:
        `ValueError`: If the correlation is outside (0, 1].

    Example:

    ```python
    >>> round(allocation_width(0.99, 22), 6), allocation_width(0.99, 22, constrained=True)
    (0.461412, 1.0)

    ```
    """
    if not 0 < correlation <= 1:
        raise ValueError(
            f"`correlation` must lie in (0, 1]: got {correlation}. Leaves without correlation need no clusters."
        )
    a = (1 - correlation) / correlation
    width = (a * a + a * num_leaves) ** 0.5 - a
    return max(1.0, width) if constrained else width


@dataclass(frozen=True)
class HitDecomposition:
    """One entry per group, in ascending order of group id."""

    hit_rate: torch.Tensor  # share of rollouts whose searches returned an answer
    contrast: torch.Tensor  # mean reward with a hit minus mean reward without; NaN if one of the two is empty
    covariance: torch.Tensor  # population covariance of hit and reward
    predicted: torch.Tensor  # n * covariance / (standard deviation + epsilon)
    observed: torch.Tensor  # sum of group advantages over the rollouts with a hit


def hit_decomposition(
    rewards: torch.Tensor, hits: torch.Tensor, group_ids: torch.Tensor, *, ddof: int = 1, epsilon: float = 1e-6
) -> HitDecomposition:
    r"""
    How much advantage outcome-only training gives to finding the evidence.

    $$
    \sum_{i: H_i = 1} \hat A_i = \frac{n \operatorname{Cov}(H, R)}{\sigma}
    = \frac{n\, p_H (1 - p_H)\, \Delta}{\sigma}, \qquad \Delta = \mathbb{E}[R \mid H = 1] - \mathbb{E}[R \mid H = 0]
    $$

    A negative contrast penalises the rollouts that found the evidence, in aggregate. GCA (Proposition 1).

    Args:
        rewards (`torch.Tensor` of shape `(B,)`):
            Reward of every rollout.
        hits (`torch.Tensor` of shape `(B,)`):
            Non-zero where a search returned an answer.
        group_ids (`torch.Tensor` of shape `(B,)`, integer):
            Prompt of every rollout.
        ddof (`int`, *optional*, defaults to 1):
            1 for the sample, 0 for the population standard deviation.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation.

    Returns:
        `HitDecomposition`: The decomposition of every group. `predicted` equals `observed`; both are 0 without reward
        variance.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> rewards, hits = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0]), torch.tensor([1, 0, 1, 1, 0])
    >>> parts = hit_decomposition(rewards, hits, torch.zeros(5).long(), ddof=0)
    >>> parts.contrast, parts.predicted
    (tensor([-0.1667]), tensor([-0.4082]))

    ```
    """
    check_dimensions("rewards", rewards, "B")
    check_same_shape(rewards=rewards, hits=hits, group_ids=group_ids)
    advantages = group_advantages(rewards, group_ids, ddof=ddof, epsilon=epsilon)
    _, slots, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    hit = hits.bool().to(rewards.dtype)

    def total(entries: torch.Tensor) -> torch.Tensor:
        return rewards.new_zeros(len(sizes)).index_add(0, slots, entries)

    num_hits = total(hit)
    hit_rate, mean = num_hits / sizes, total(rewards) / sizes
    covariance = total((hit - hit_rate[slots]) * (rewards - mean[slots])) / sizes
    contrast = total(hit * rewards) / num_hits - total((1 - hit) * rewards) / (sizes - num_hits)
    deviation = (total((rewards - mean[slots]) ** 2) / (sizes - ddof).clamp(min=1)).sqrt()
    # Group advantages treat a group without reward variance as exactly zero, whatever rounding left.
    varies = total(advantages.abs()) > 0
    predicted = torch.where(varies, sizes * covariance / (deviation + epsilon), 0.0)
    return HitDecomposition(hit_rate, contrast, covariance, predicted, total(hit * advantages))
