"""
Between nodes and tokens: surprisal of a node from its tokens, advantage of a token from its node.

Shapes: `N` tree nodes, `B` rollouts, `T` completion tokens.
"""

from __future__ import annotations

import torch

from grounded_rl.credit._checks import check_choice, check_same_shape
from grounded_rl.credit.tree import NO_NODE, AdvantageMode, check_per_node, node_levels


def _check_token_nodes(token_nodes: torch.Tensor, num_nodes: int) -> None:
    if token_nodes.numel() == 0:
        return
    low, high = (int(end) for end in token_nodes.aminmax())
    if low < NO_NODE or high >= num_nodes:
        raise ValueError(
            f"`token_nodes` must lie in [-1, {num_nodes}): got a range of [{low}, {high}]. "
            "Use -1 for tokens that belong to no node."
        )


def node_surprisals(
    logps: torch.Tensor, token_nodes: torch.Tensor, parents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Realised surprisal of every node, in nats per generated token.

    $$
    s(v) = \frac{1}{|y_v|} \sum_{t \in y_v} -\log \pi_{\text{old}}(y_t \mid y_{<t}).
    $$

    Tokens of a shared node may occur once or once per rollout through it; both give the same mean. Realised surprisal
    of sampled tokens, which AT²PO calls a Monte-Carlo entropy.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities of the sampled tokens under the policy that sampled them, in nats. Non-finite entries (a
            token the engine did not score) are dropped. No gradient flows.
        token_nodes (`torch.Tensor` of shape `(B, T)`, `torch.long`):
            Node that generated every token, `-1` for tool output and padding, whose `logps` are ignored.
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.

    Returns:
        `tuple` of two `torch.Tensor` of shape `(N,)`: Surprisals, and whether the node has a scored token. A node
        without one inherits the surprisal of its parent; a root without one has 0.

    Raises:
        `ValueError`: If the shapes differ or a node index is out of range.

    Example:

    ```python
    >>> parents = torch.tensor([-1, 0, 1])
    >>> logps = torch.tensor([[-0.2, -0.4, 0.0, -0.5]])
    >>> surprisals, has_tokens = node_surprisals(logps, torch.tensor([[1, 1, -1, 2]]), parents)
    >>> surprisals, has_tokens.tolist()
    (tensor([0.0000, 0.3000, 0.5000]), [False, True, True])

    ```
    """
    check_per_node(parents)
    check_same_shape(logps=logps, token_nodes=token_nodes)
    _check_token_nodes(token_nodes, len(parents))
    logps = logps.detach()
    scored = (token_nodes >= 0) & torch.isfinite(logps)
    nodes = token_nodes[scored]
    sums = logps.new_zeros(len(parents)).index_add(0, nodes, -logps[scored])
    counts = torch.bincount(nodes, minlength=len(parents))
    has_tokens = counts > 0
    surprisals = sums / counts.clamp(min=1)
    for level in node_levels(parents)[1:]:
        surprisals[level] = torch.where(has_tokens[level], surprisals[level], surprisals[parents[level]])
    return surprisals, has_tokens


def node_advantages(
    parents: torch.Tensor, values: torch.Tensor, *, mode: AdvantageMode = "node_value"
) -> torch.Tensor:
    """
    Advantage of every node from the values of the tree.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root.
        values (`torch.Tensor` of shape `(N,)`):
            Node values; see `tree_values`. Gradient flows.
        mode (`str`, *optional*, defaults to `"node_value"`):
            `"node_value"`: the value itself. `"minus_parent"`: less the value of the parent. `"minus_root"`: less the
            value of the root. `"minus_both"`: the sum of the last two.

    Returns:
        `torch.Tensor` of shape `(N,)`: Advantages; a root keeps its value in every mode.

    Raises:
        `ValueError`: If the shapes differ or the mode is unknown.

    Example:

    ```python
    >>> node_advantages(torch.tensor([-1, 0, 1]), torch.tensor([0.5, 0.75, 1.0]), mode="minus_parent")
    tensor([0.5000, 0.2500, 0.2500])

    ```
    """
    check_per_node(parents, values=values)
    check_choice("mode", mode, ("node_value", "minus_parent", "minus_root", "minus_both"))
    if mode == "node_value":
        return values
    is_child = parents >= 0
    roots = torch.arange(len(parents), device=parents.device)
    for level in node_levels(parents)[1:]:
        roots[level] = roots[parents[level]]
    minus_parent = values - values[parents.clamp(min=0)]
    minus_root = values - values[roots]
    chosen = {"minus_parent": minus_parent, "minus_root": minus_root, "minus_both": minus_parent + minus_root}[mode]
    return torch.where(is_child, chosen, values)


def spread_to_tokens(advantages: torch.Tensor, token_nodes: torch.Tensor) -> torch.Tensor:
    """
    Advantage of every token: the one of the node that generated it.

    Only the result is allocated, no second tensor of its size.

    Args:
        advantages (`torch.Tensor` of shape `(N,)`):
            One advantage per node. Gradient flows.
        token_nodes (`torch.Tensor` of shape `(B, T)`, `torch.long`):
            Node that generated every token, `-1` for tool output and padding.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Advantages; exactly 0 where `token_nodes` is `-1`.

    Raises:
        `ValueError`: If a node index is outside `[-1, N)`.

    Example:

    ```python
    >>> spread_to_tokens(torch.tensor([0.5, -1.0]), torch.tensor([[0, 0, -1, 1, -1]]))
    tensor([[ 0.5000,  0.5000,  0.0000, -1.0000,  0.0000]])

    ```
    """
    _check_token_nodes(token_nodes, len(advantages))
    # Index -1 selects the last entry, so one zero at the end serves every token without a node.
    return torch.cat([advantages, advantages.new_zeros(1)])[token_nodes]
