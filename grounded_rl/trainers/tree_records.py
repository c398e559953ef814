"""Finished trees with their credit written in, and what a step says about its trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from grounded_rl.credit import SIPOCredit, leaf_mask, subtree_sums, zero_variance_trees
from grounded_rl.rollouts.tree import Node, RolloutTree
from grounded_rl.rollouts.types import sampled_parts
from grounded_rl.sampling.forest import Forest
from grounded_rl.trainers._trl import GenerationBatch

_DIGITS = 6


def token_counts(trees: Sequence[RolloutTree]) -> dict[str, float]:
    """Sampled tokens of the trees, and of as many linear rollouts of the same lengths."""
    sampled = sum(tree.num_sampled_tokens for tree in trees)
    linear = sum(tree.num_path_tokens for tree in trees)
    return {
        "rollout/tree_tokens": float(sampled),
        "rollout/linear_tokens": float(linear),
        "rollout/tree_token_share": sampled / linear,
    }


def tree_metrics(
    trees: Sequence[RolloutTree], forest: Forest, credit: SIPOCredit, rewards: torch.Tensor
) -> dict[str, float]:
    """What a step says about its trees: shares, and how far the correction moved values."""
    parents, valid = forest.trees.parents, forest.trees.valid
    counted = leaf_mask(parents) & valid
    shifts = (credit.corrected - credit.leaf_values).abs()
    flat = zero_variance_trees(parents, forest.at_leaves(rewards), valid=valid)
    num_children = torch.bincount(parents[parents >= 0], minlength=len(parents))
    inner = num_children > 0

    def mean(where: torch.Tensor, values: torch.Tensor) -> float:
        return values[where].double().mean().item() if where.any() else float("nan")

    return {
        **{name: value for name, value in credit.metrics.items() if name != "credit/num_trees"},
        "credit/correction": mean(counted, shifts),
        "credit/correction_on_zero_variance": mean(counted & flat, shifts),
        "credit/slope_candidates": float(credit.slope_sums.count),
        "rollout/one_child_share": mean(inner, num_children == 1),
        "rollout/root_fallbacks": sum(not choice.is_event for tree in trees for choice in tree.selections)
        / len(trees),
    }


def with_credit(
    trees: Sequence[RolloutTree],
    forest: Forest,
    credit: SIPOCredit,
    batch: GenerationBatch,
    *,
    advantages: torch.Tensor,
    extras: Mapping[str, object],
) -> list[RolloutTree]:
    """
    The trees with rewards, values and advantages; nodes without a counted leaf stay unscored.

    Args:
        trees (`Sequence[RolloutTree]`):
            The trees as they were sampled.
        forest ([`Forest`]):
            The same as tensors.
        credit ([`SIPOCredit`]):
            Their credit.
        batch ([`GenerationBatch`]):
            Rollouts with rewards, and token advantages.
        advantages (`torch.Tensor` of shape `(N,)`):
            Advantage of every node.
        extras (`Mapping[str, object]`):
            Provenance of the credit.
    """
    parents, valid = forest.trees.parents, forest.trees.valid
    is_scored = subtree_sums(parents, (leaf_mask(parents) & valid).double()) > 0
    masked = [False] * len(batch.rollouts) if batch.masked is None else batch.masked.tolist()
    trained = [is_valid and not off for is_valid, off in zip(batch.valid.tolist(), masked, strict=True)]
    finished, first = [], 0
    for tree, start in zip(trees, forest.starts, strict=True):
        rows = range(first, first + len(tree.leaves))
        first += len(tree.leaves)
        tokens = _token_advantages(tree, [batch.advantages[row].tolist() if trained[row] else None for row in rows])
        nodes = [
            _scored(node, advantages[start + number].item(), tokens.get(number))
            if is_scored[start + number] and number > 0
            else node
            for number, node in enumerate(tree.nodes)
        ]
        leaves = [
            replace(
                leaf,
                rewards=batch.rollouts[row].rewards,
                value=round(credit.leaf_values[start + leaf.node].item(), _DIGITS) if batch.valid[row] else None,
                corrected=round(credit.corrected[start + leaf.node].item(), _DIGITS) if batch.valid[row] else None,
                masked=masked[row],
            )
            for leaf, row in zip(tree.leaves, rows, strict=True)
        ]
        finished.append(replace(tree, nodes=tuple(nodes), leaves=tuple(leaves), extras={**tree.extras, **extras}))
    return finished


def _token_advantages(tree: RolloutTree, rows: Sequence[Sequence[float] | None]) -> dict[int, tuple[float, ...]]:
    """Advantages of every node's sampled tokens, from any rollout through it that is trained on."""
    found: dict[int, tuple[float, ...]] = {}
    for number, row in enumerate(rows):
        if row is None:
            continue
        path = tree.leaf_path(number)
        for node, values in zip(path, sampled_parts([tree.nodes[node].turn for node in path], row), strict=True):
            found.setdefault(node, tuple(round(value, _DIGITS) for value in values))
    return found


def _scored(node: Node, advantage: float, tokens: tuple[float, ...] | None) -> Node:
    """The node with its advantage; tokens are written out only where they differ from it."""
    advantage = round(advantage, _DIGITS)
    own = tokens is not None and any(abs(value - advantage) > 10**-_DIGITS for value in tokens)
    turn = replace(node.turn, advantages=tokens) if own else node.turn
    return replace(node, turn=turn, advantage=advantage)
