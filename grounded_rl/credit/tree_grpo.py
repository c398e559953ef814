"""
Group advantages at two levels: the leaves of a prompt, and the leaves of a tree.

Shapes: `B` rollouts (leaves), `T` completion tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_dimensions, check_same_shape
from grounded_rl.credit.group import group_advantages

TreeGRPOLevel = Literal["sum", "inter", "intra", "nested"]


def tree_grpo_advantages(
    rewards: torch.Tensor,
    prompt_ids: torch.Tensor,
    tree_ids: torch.Tensor,
    *,
    level: TreeGRPOLevel = "sum",
    singleton: Literal["zero", "raw"] = "zero",
    epsilon: float = 1e-6,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Rollout advantages of Tree-GRPO.

    The sum of the group advantage over all leaves of the prompt (`"inter"`) and over the leaves of the rollout's own
    tree (`"intra"`), each divided by its sample standard deviation. `"nested"` normalises by prompt and the result by
    tree. With one tree per prompt the sum is twice the advantage of GRPO. Tree-GRPO (arXiv 2509.21240).

    Args:
        rewards (`torch.Tensor` of shape `(B,)`):
            Reward of every rollout.
        prompt_ids (`torch.Tensor` of shape `(B,)`, integer):
            Prompt of every rollout.
        tree_ids (`torch.Tensor` of shape `(B,)`, integer):
            Tree of every rollout; a tree belongs to one prompt.
        level (`str`, *optional*, defaults to `"sum"`):
            `"sum"`, `"inter"`, `"intra"` or `"nested"`.
        singleton (`str`, *optional*, defaults to `"zero"`):
            Advantage of a group of one: 0, or its `"raw"` reward as in the released code (a tree of one leaf then adds
            its reward without a baseline).
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviations.
        valid (`torch.Tensor` of shape `(B,)`, `torch.bool`, *optional*):
            Rollouts that count.

    Returns:
        `torch.Tensor` of shape `(B,)`: Advantages, 0 at rollouts outside `valid`.

    Raises:
        `ValueError`: If the shapes differ, a tree spans several prompts, or an option is unknown.

    Example:

    ```python
    >>> rewards, prompts = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long()
    >>> tree_grpo_advantages(rewards, prompts, torch.tensor([0, 0, 1, 1]))
    tensor([ 2.2071, -1.2071, -0.5000, -0.5000])

    ```
    """
    check_choice("level", level, ("sum", "inter", "intra", "nested"))
    check_same_shape(rewards=rewards, prompt_ids=prompt_ids, tree_ids=tree_ids)
    _check_nested(prompt_ids, tree_ids)

    def advantages(entries: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return group_advantages(entries, ids, singleton=singleton, epsilon=epsilon, valid=valid)

    if level == "intra":
        return advantages(rewards, tree_ids)
    inter = advantages(rewards, prompt_ids)
    if level == "inter":
        return inter
    return advantages(inter, tree_ids) if level == "nested" else inter + advantages(rewards, tree_ids)


def _check_nested(prompt_ids: torch.Tensor, tree_ids: torch.Tensor) -> None:
    pairs = torch.stack([tree_ids, prompt_ids], 1).unique(dim=0)
    trees, counts = pairs[:, 0].unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"`tree_ids` must name trees within one prompt: got tree {int(trees[counts > 1][0])} in several prompts. "
            "Number the trees of the batch consecutively."
        )


def tree_grpo_token_advantages(
    token_rewards: torch.Tensor, sampled_mask: torch.Tensor, prompt_ids: torch.Tensor, tree_ids: torch.Tensor
) -> torch.Tensor:
    """
    The per-token variant of the released code, for comparison: every *token's* reward is normalised over all sampled
    tokens of the prompt, and again over those of the tree.

    Because nearly all token rewards are 0, long rollouts dilute the signal; prefer `tree_grpo_advantages`.

    Args:
        token_rewards (`torch.Tensor` of shape `(B, T)`):
            Reward of every token, usually all of it on the last one. Ignored at unsampled positions, even when NaN.
        sampled_mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at sampled tokens.
        prompt_ids (`torch.Tensor` of shape `(B,)`, integer):
            Prompt of every rollout.
        tree_ids (`torch.Tensor` of shape `(B,)`, integer):
            Tree of every rollout.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Advantages, 0 at unsampled positions.

    Raises:
        `ValueError`: If the shapes differ.
    """
    check_dimensions("token_rewards", token_rewards, "B", "T")
    check_same_shape(token_rewards=token_rewards, sampled_mask=sampled_mask)
    total = torch.zeros_like(token_rewards)
    for ids in (prompt_ids, tree_ids):
        columns = ids[:, None].expand(token_rewards.shape).reshape(-1)
        flat = group_advantages(token_rewards.reshape(-1), columns, singleton="raw", valid=sampled_mask.reshape(-1))
        total = total + flat.reshape(token_rewards.shape)
    return total
