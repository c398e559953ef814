r"""
Turn rewards without a critic: returns of turns, and their advantages against the same turn of the other rollouts.

Shapes: `B` rollouts, `S` turns (right-padded), `T` completion tokens.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_dimensions, check_same_shape
from grounded_rl.credit.group import group_advantages


def last_turns(turn_mask: torch.Tensor) -> torch.Tensor:
    """
    Last turn of every rollout.

    Args:
        turn_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at turns that exist.

    Returns:
        `torch.Tensor` of shape `(B, S)`, `torch.bool`: `True` at the last existing turn; nowhere in a rollout without
        turns.

    Example:

    ```python
    >>> last_turns(torch.tensor([[1, 1, 0], [0, 0, 0]])).tolist()
    [[False, True, False], [False, False, False]]

    ```
    """
    check_dimensions("turn_mask", turn_mask, "B", "S")
    exists = turn_mask.bool()
    later = exists.flip(1).long().cumsum(1).flip(1) - exists.long()
    return exists & (later == 0)


def turn_returns(turn_rewards: torch.Tensor, turn_mask: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    r"""
    Discounted return of every turn, \\( G_k = \sum_{j \ge k} \gamma^{j - k} r_j \\).

    Args:
        turn_rewards (`torch.Tensor` of shape `(B, S)`):
            Reward of every turn, the outcome added to the last one. Ignored where `turn_mask` is zero, even when NaN.
        turn_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at turns that exist. A gap costs no discount: the next existing turn follows directly.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per turn.

    Returns:
        `torch.Tensor` of shape `(B, S)`: Returns, 0 where there is no turn.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> turn_returns(torch.tensor([[0.5, 0.0, 1.0]]), torch.ones(1, 3), gamma=0.5)
    tensor([[0.7500, 0.5000, 1.0000]])

    ```
    """
    check_dimensions("turn_rewards", turn_rewards, "B", "S")
    check_same_shape(turn_rewards=turn_rewards, turn_mask=turn_mask)
    exists = turn_mask.bool()
    rewards = torch.where(exists, turn_rewards, 0.0)
    running = rewards.new_zeros(len(rewards))
    returns = torch.zeros_like(rewards)
    for turn in reversed(range(rewards.shape[1])):
        running = torch.where(exists[:, turn], rewards[:, turn] + gamma * running, running)
        returns[:, turn] = running
    return torch.where(exists, returns, 0.0)


def turn_return_advantages(
    turn_rewards: torch.Tensor,
    turn_mask: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    gamma: float = 1.0,
    scale: Literal["std", "none"] = "std",
    singleton: Literal["zero", "raw"] = "zero",
    epsilon: float = 1e-6,
) -> torch.Tensor:
    """
    Turn returns, normalised over the rollouts of a prompt that have this turn.

    The critic-free substitute for turn-level PPO: the baseline of the k-th turn is the mean return of the k-th turns
    of the group. With one turn per rollout it is the group advantage of GRPO. Spread the result with
    `spread_segments`.

    Args:
        turn_rewards (`torch.Tensor` of shape `(B, S)`):
            Reward of every turn, the outcome added to the last one.
        turn_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at turns that exist.
        group_ids (`torch.Tensor` of shape `(B,)`, integer):
            Prompt of every rollout.
        gamma (`float`, *optional*, defaults to `1.0`):
            Discount per turn.
        scale (`str`, *optional*, defaults to `"std"`):
            `"std"` divides by the sample standard deviation, `"none"` only subtracts the mean.
        singleton (`str`, *optional*, defaults to `"zero"`):
            Advantage of a turn that no other rollout of the group has: 0, or its `"raw"` return.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation.

    Returns:
        `torch.Tensor` of shape `(B, S)`: Advantages, 0 where there is no turn.

    Raises:
        `ValueError`: If the shapes differ.
    """
    returns = turn_returns(turn_rewards, turn_mask, gamma=gamma)
    num_turns = turn_mask.shape[1]
    check_same_shape(rollouts=turn_mask[:, 0], group_ids=group_ids)
    _, prompts = group_ids.unique(return_inverse=True)
    cells = prompts[:, None] * num_turns + torch.arange(num_turns, device=prompts.device)
    advantages = group_advantages(
        returns.reshape(-1),
        cells.reshape(-1),
        scale=scale,
        singleton=singleton,
        epsilon=epsilon,
        valid=turn_mask.bool().reshape(-1),
    )
    return advantages.reshape(returns.shape)


def search_turn_rewards(
    hits: torch.Tensor,
    well_formed: torch.Tensor,
    turn_mask: torch.Tensor,
    outcomes: torch.Tensor,
    *,
    hit_reward: float = 0.3,
    format_reward: float = 0.1,
    format_penalty: float = 0.2,
    search_cost: float = 0.1,
) -> torch.Tensor:
    """
    Verifiable turn rewards of MT-PPO.

    Every turn but the last earns `hit_reward` if its search returned an answer, `format_reward` or minus
    `format_penalty` for its form, and pays `search_cost` times the number of searches so far, its own included. The
    last turn earns the outcome. MT-PPO (arXiv 2505.11821, version 2).

    Args:
        hits (`torch.Tensor` of shape `(B, S)`):
            Non-zero where the result of the turn's search contains an answer.
        well_formed (`torch.Tensor` of shape `(B, S)`):
            Non-zero where the turn has the required form.
        turn_mask (`torch.Tensor` of shape `(B, S)`):
            Non-zero at turns that exist. Other entries of `hits` and `well_formed` are ignored.
        outcomes (`torch.Tensor` of shape `(B,)`):
            Outcome reward; in MT-PPO 1 for a correct answer in the right form, 0.2 for the form alone, else -1.
        hit_reward (`float`, *optional*, defaults to `0.3`):
            Reward of a hit.
        format_reward (`float`, *optional*, defaults to `0.1`):
            Reward of a well-formed turn.
        format_penalty (`float`, *optional*, defaults to `0.2`):
            Cost of any other turn.
        search_cost (`float`, *optional*, defaults to `0.1`):
            Cost per search made so far.

    Returns:
        `torch.Tensor` of shape `(B, S)`: Turn rewards, 0 where there is no turn.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> mask = torch.ones(1, 3)
    >>> search_turn_rewards(torch.tensor([[0, 1, 0]]), torch.ones(1, 3), mask, torch.tensor([1.0]))
    tensor([[0.0000, 0.2000, 1.0000]])

    ```
    """
    check_dimensions("hits", hits, "B", "S")
    check_same_shape(hits=hits, well_formed=well_formed, turn_mask=turn_mask)
    check_same_shape(rollouts=hits[:, 0], outcomes=outcomes)
    exists, last = turn_mask.bool(), last_turns(turn_mask)
    searches_so_far = (exists & ~last).to(outcomes.dtype).cumsum(1)
    form = torch.where(well_formed.bool(), outcomes.new_tensor(format_reward), outcomes.new_tensor(-format_penalty))
    rewards = hit_reward * hits.bool().to(outcomes.dtype) + form - search_cost * searches_so_far
    rewards = torch.where(last, outcomes[:, None], rewards)
    return torch.where(exists, rewards, 0.0)
