r"""
Values of a tree of turns: leaf standardisation, child-weighted backup, and credit of the generated tokens.

A tree is stored as a parent-index tensor. Nodes are numbered so that a parent comes before its children (breadth-first
order does), a root has parent `-1`, and several trees are concatenated into one *forest* by shifting the indices, so
that a whole batch is one call. Per-node tensors have shape `(N,)`; what they hold at nodes where a quantity is
meaningless (the reward of an inner node, the surprisal of a root) is never read, even when it is NaN.

Shapes: `N` tree nodes, `L` leaves, `B` rollouts, `T` completion tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice
from grounded_rl.credit.group import group_advantages, has_reward_variance

NO_PARENT = -1
"""Parent index of a root."""
NO_NODE = -1
"""Node index of a token that belongs to no node: tool output, padding, text inserted by the environment."""

ChildWeights = Literal["softmax", "proportional", "uniform", "leaf_count"]
AdvantageMode = Literal["node_value", "minus_parent", "minus_root", "minus_both"]


def check_parents(parents: torch.Tensor) -> None:
    """Raise unless `parents` is a forest whose parents come before their children."""
    if parents.ndim != 1 or parents.dtype != torch.long or len(parents) == 0:
        raise ValueError(
            "`parents` must be a non-empty `torch.long` vector: got "
            f"{tuple(parents.shape)} of {parents.dtype}. Pass one parent index per node."
        )
    misplaced = (parents < NO_PARENT) | (parents >= torch.arange(len(parents), device=parents.device))
    if misplaced.any():
        node = int(misplaced.nonzero()[0])
        raise ValueError(
            f"`parents` must hold -1 for a root and otherwise an earlier node: got parents[{node}] = "
            f"{int(parents[node])}. Number the nodes breadth-first."
        )


def check_per_node(parents: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise unless `parents` is a forest and every given tensor holds one entry per node."""
    check_parents(parents)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != parents.shape:
            raise ValueError(
                f"`{name}` must hold one entry per node, {tuple(parents.shape)}: got {tuple(tensor.shape)}. "
                "Entries that have no meaning at a node may be anything, but must be there."
            )


def leaf_mask(parents: torch.Tensor) -> torch.Tensor:
    """
    Nodes without children.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.

    Returns:
        `torch.Tensor` of shape `(N,)`, `torch.bool`: `True` at leaves. A tree of one node is a leaf.

    Example:

    ```python
    >>> leaf_mask(torch.tensor([-1, 0, 0, 1])).tolist()
    [False, False, True, True]

    ```
    """
    check_parents(parents)
    mask = torch.ones_like(parents, dtype=torch.bool)
    mask[parents[parents >= 0]] = False
    return mask


def node_depths(parents: torch.Tensor) -> torch.Tensor:
    """
    Number of edges between every node and its root.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.

    Returns:
        `torch.Tensor` of shape `(N,)`, `torch.long`: Depths; roots have 0.
    """
    check_parents(parents)
    depths = torch.zeros_like(parents)
    ancestor = parents
    while (ancestor >= 0).any():
        depths += ancestor >= 0
        ancestor = torch.where(ancestor >= 0, parents[ancestor.clamp(min=0)], NO_PARENT)
    return depths


def node_levels(parents: torch.Tensor) -> list[torch.Tensor]:
    """Indices of the nodes at depth 0, 1, …; every backup walks this list once."""
    depths = node_depths(parents)
    order = torch.argsort(depths, stable=True)
    return list(order.split(torch.bincount(depths).tolist()))


def tree_ids(parents: torch.Tensor) -> torch.Tensor:
    """
    Tree of every node of a forest, numbered from 0 in the order of the roots.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.

    Returns:
        `torch.Tensor` of shape `(N,)`, `torch.long`: Tree ids.
    """
    is_root = parents < 0
    ids = is_root.long().cumsum(0) - 1
    for level in node_levels(parents)[1:]:
        ids[level] = ids[parents[level]]
    return ids


def subtree_sums(parents: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """
    Sum of `entries` over every node's subtree, the node included.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.
        entries (`torch.Tensor` of shape `(N,)`):
            What is summed. Gradient flows.

    Returns:
        `torch.Tensor` of shape `(N,)`: Subtree sums.
    """
    check_per_node(parents, entries=entries)
    sums = entries
    for level in reversed(node_levels(parents)[1:]):
        sums = sums.index_add(0, parents[level], sums[level])
    return sums


def standardized_leaf_values(
    parents: torch.Tensor, rewards: torch.Tensor, *, valid: torch.Tensor | None = None, epsilon: float = 1e-6
) -> torch.Tensor:
    r"""
    Terminal rewards in units of the standard deviation of their tree.

    $$
    V_u = \frac{R(u) - \mu_{\mathcal{T}}}{\sigma_{\mathcal{T}} + \epsilon},
    $$

    with mean and population standard deviation over the leaves of the tree. Values are not clipped: the only correct
    leaf of 22 has value 4.58. This is the leaf value of AT²PO and SIPO ([Sec.
    4.4](https://huggingface.co/papers/2609.34805), "Selected-value adjustment").

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.
        rewards (`torch.Tensor` of shape `(N,)`):
            Terminal reward of every leaf. Other entries are ignored, even when NaN.
        valid (`torch.Tensor` of shape `(N,)`, `torch.bool`, *optional*):
            Leaves that count. A leaf outside (a failed rollout, a filler copy) enters neither statistic.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation.

    Returns:
        `torch.Tensor` of shape `(N,)`: Leaf values; 0 at inner nodes, at leaves outside `valid`, and at every leaf of
        a tree whose rewards are all equal.

    Raises:
        `ValueError`: If the shapes differ or `parents` is not a forest.

    Example:

    ```python
    >>> parents = torch.tensor([-1, 0, 0, 0, 0])
    >>> standardized_leaf_values(parents, torch.tensor([float("nan"), 1.0, 0.0, 0.0, -1.0]))
    tensor([ 0.0000,  1.4142,  0.0000,  0.0000, -1.4142])

    ```
    """
    check_per_node(parents, rewards=rewards, valid=valid)
    counted = leaf_mask(parents) if valid is None else leaf_mask(parents) & valid
    return group_advantages(rewards, tree_ids(parents), ddof=0, epsilon=epsilon, valid=counted)


def zero_variance_trees(
    parents: torch.Tensor, rewards: torch.Tensor, *, valid: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Nodes of trees whose leaves all earned the same reward.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.
        rewards (`torch.Tensor` of shape `(N,)`):
            Terminal reward of every leaf. Other entries are ignored, even when NaN.
        valid (`torch.Tensor` of shape `(N,)`, `torch.bool`, *optional*):
            Leaves that count.

    Returns:
        `torch.Tensor` of shape `(N,)`, `torch.bool`: `True` at every node of such a tree, and where no leaf counts.

    Raises:
        `ValueError`: If the shapes differ, `parents` is not a forest, or a counted reward is not finite.

    Example:

    ```python
    >>> zero_variance_trees(torch.tensor([-1, 0, 0, -1, 3]), torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])).tolist()
    [False, False, False, True, True]

    ```
    """
    check_per_node(parents, rewards=rewards, valid=valid)
    counted = leaf_mask(parents) if valid is None else leaf_mask(parents) & valid
    trees = tree_ids(parents)
    varies = torch.zeros(int(trees.max()) + 1, dtype=torch.bool, device=parents.device)
    varies[trees[has_reward_variance(rewards, trees, counted)]] = True
    return ~varies[trees]


def child_weights(
    parents: torch.Tensor,
    surprisals: torch.Tensor,
    *,
    weights: ChildWeights = "softmax",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Share of every node in the value of its parent; the shares of siblings sum to one.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.
        surprisals (`torch.Tensor` of shape `(N,)`):
            Mean negative log-probability of the node's generated tokens, in nats. Ignored at roots. Gradient flows.
        weights (`str`, *optional*, defaults to `"softmax"`):
            `"softmax"`: \\( e^{s(c)} / \sum_{c'} e^{s(c')} \\). `"proportional"`: \\( s(c) / \sum_{c'} s(c') \\),
            uniform where the sum is 0. `"uniform"`: one over the number of siblings. `"leaf_count"`: in proportion to
            the number of counted leaves below, so that a node's value is the mean of its leaves.
        valid (`torch.Tensor` of shape `(N,)`, `torch.bool`, *optional*):
            Leaves that count. A node without a counted leaf has weight 0, and its siblings share the whole.

    Returns:
        `torch.Tensor` of shape `(N,)`: Weights; 0 at roots.

    Raises:
        `ValueError`: If a surprisal of a non-root node is not finite, or negative under `"proportional"`.
    """
    check_per_node(parents, surprisals=surprisals, valid=valid)
    is_child = parents >= 0
    counted = leaf_mask(parents) if valid is None else leaf_mask(parents) & valid
    num_leaves = subtree_sums(parents, counted.to(surprisals.dtype))
    contributes = is_child & (num_leaves > 0)
    _check_surprisals(surprisals, is_child, weights)
    slots = parents.clamp(min=0)
    scores = torch.where(is_child, surprisals, 0.0)
    if weights == "softmax":
        lowest = torch.full_like(scores, -torch.inf)
        highest = lowest.scatter_reduce(0, slots[contributes], scores.detach()[contributes], "amax")[slots]
        mass = torch.where(contributes, (scores - torch.where(contributes, highest, 0.0)).exp(), 0.0)
    elif weights == "leaf_count":
        mass = torch.where(is_child, num_leaves, 0.0)
    else:
        mass = (torch.ones_like(scores) if weights == "uniform" else scores) * contributes
    totals = torch.zeros_like(mass).index_add(0, slots, mass)[slots]
    siblings = torch.zeros_like(num_leaves).index_add(0, slots, contributes.to(num_leaves.dtype))[slots]
    shares = torch.where(totals > 0, mass / torch.where(totals > 0, totals, 1.0), 1.0 / siblings.clamp(min=1.0))
    return torch.where(contributes, shares, 0.0)


def _check_surprisals(surprisals: torch.Tensor, is_child: torch.Tensor, weights: str) -> None:
    check_choice("weights", weights, ("softmax", "proportional", "uniform", "leaf_count"))
    scores = surprisals.detach()[is_child]
    if not torch.isfinite(scores).all():
        raise ValueError(
            f"`surprisals` must be finite at every node but the roots: got {int((~torch.isfinite(scores)).sum())} "
            "entries that are not. Compute them with `node_surprisals`, which drops unscored tokens."
        )
    if weights == "proportional" and (scores < 0).any():
        raise ValueError(
            f'`surprisals` must not be negative when `weights="proportional"`: got {float(scores.min())}. '
            "Pass negative log-probabilities, or use softmax weights."
        )


def tree_values(
    parents: torch.Tensor,
    surprisals: torch.Tensor,
    leaf_values: torch.Tensor,
    *,
    weights: ChildWeights = "softmax",
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    r"""
    Values of all nodes: leaf values propagated to the roots through child weights.

    $$
    V_n = \sum_{c \in \operatorname{ch}(n)} w_c V_c, \qquad w_c = \frac{e^{s(c)}}{\sum_{c'} e^{s(c')}}.
    $$

    A chain of single children copies the value of its leaf. With one turn per rollout the tree is a star and the
    values of the root's children are the leaf values. AT²PO and SIPO ([Eq.
    6](https://huggingface.co/papers/2609.34805)).

    Shapes: `N` tree nodes, `L` leaves.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root; parents come before their children.
        surprisals (`torch.Tensor` of shape `(N,)`):
            Mean negative log-probability of each node's generated tokens, in nats; see `node_surprisals`. Ignored at
            roots. Carries gradient if it has any.
        leaf_values (`torch.Tensor` of shape `(N,)` or `(L,)`):
            Value of every leaf, either indexed by node (other entries are ignored, even when NaN) or one per leaf in
            node order. Carries gradient.
        weights (`str`, *optional*, defaults to `"softmax"`):
            How siblings share their parent: `"softmax"`, `"proportional"`, `"uniform"` or `"leaf_count"`; see
            `child_weights`.
        valid (`torch.Tensor` of shape `(N,)`, `torch.bool`, *optional*):
            Leaves that count. Nodes without a counted leaf take no part and have value 0.

    Returns:
        `torch.Tensor` of shape `(N,)`: Node values, roots included.

    Raises:
        `ValueError`: If a shape does not fit, `parents` is not a forest, or a surprisal is not finite.

    Example:

    ```python
    >>> parents = torch.tensor([-1, 0, 0, 0])
    >>> surprisals = torch.tensor([float("nan"), 0.5, 0.4, 0.3])
    >>> tree_values(parents, surprisals, torch.tensor([-0.3, 1.2, 0.4]))
    tensor([ 0.4088, -0.3000,  1.2000,  0.4000])

    ```
    """
    check_per_node(parents, surprisals=surprisals, valid=valid)
    is_leaf = leaf_mask(parents)
    num_leaves = int(is_leaf.sum())
    if leaf_values.shape == (num_leaves,):
        leaf_values = leaf_values.new_zeros(len(parents)).masked_scatter(is_leaf, leaf_values)
    elif leaf_values.shape != parents.shape:
        raise ValueError(
            f"`leaf_values` must have one entry per node ({len(parents)}) or per leaf ({num_leaves}): got "
            f"{tuple(leaf_values.shape)}. Index it by node if in doubt."
        )
    counted = is_leaf if valid is None else is_leaf & valid
    shares = child_weights(parents, surprisals, weights=weights, valid=valid).to(leaf_values.dtype)
    values = torch.where(counted, leaf_values, 0.0)
    for level in reversed(node_levels(parents)[1:]):
        values = values.index_add(0, parents[level], shares[level] * values[level])
    return values
