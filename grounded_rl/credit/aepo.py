r"""
Entropy-balanced credit, and the branching decisions of entropy-driven rollouts (ARPO, AEPO).

The clipped objective of AEPO is `clipped_surrogate(..., keep_clipped_gradient=True)`.

Shapes: `B` rollouts, `T` completion tokens.
"""

from __future__ import annotations

import math

import torch

from grounded_rl.credit._checks import check_dimensions, check_same_shape

BRANCH_ENTROPY_TOKENS = 20
"""Number of tokens after a tool result whose entropy decides about branching."""
BRANCH_THRESHOLD = 0.5
"""Threshold of the branching score."""


def entropy_weighted_advantages(
    advantages: torch.Tensor, entropy: torch.Tensor, mask: torch.Tensor, *, weight: float = 0.2
) -> torch.Tensor:
    r"""
    Advantages scaled up where the policy was uncertain.

    $$
    A'_t = A_t \Big( 1 + w\, \frac{H_t - \mu_H}{\sigma_H} \Big)
    $$

    with mean and sample standard deviation of the entropy over the mask. With `weight=0`, without spread, or with a
    single masked token the advantages come back unchanged. AEPO (arXiv 2510.14545).

    Args:
        advantages (`torch.Tensor` of shape `(B, T)`):
            Advantages.
        entropy (`torch.Tensor` of shape `(B, T)`):
            Entropy of the policy at every token, in nats. Treated as a constant.
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at sampled tokens. Elsewhere both inputs are ignored, even when NaN.
        weight (`float`, *optional*, defaults to `0.2`):
            \\( w \\).

    Returns:
        `torch.Tensor` of shape `(B, T)`: Advantages, 0 outside the mask.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> advantages, entropy = torch.ones(1, 3), torch.tensor([[0.0, 1.0, 2.0]])
    >>> entropy_weighted_advantages(advantages, entropy, torch.ones(1, 3))
    tensor([[0.8000, 1.0000, 1.2000]])

    ```
    """
    check_dimensions("advantages", advantages, "B", "T")
    check_same_shape(advantages=advantages, entropy=entropy, mask=mask)
    sampled = mask.bool()
    scores = torch.zeros_like(entropy)
    chosen = entropy.detach()[sampled]
    # Equal entropies have a standard deviation of rounding size, which must not be divided by.
    if chosen.numel() and chosen.max() > chosen.min():
        scores[sampled] = (chosen - chosen.mean()) / chosen.std()
    return torch.where(sampled, advantages * (1 + weight * scores), 0.0)


def branching_entropy(
    top_logps: torch.Tensor, vocabulary_size: int, *, num_tokens: int = BRANCH_ENTROPY_TOKENS
) -> torch.Tensor:
    r"""
    Entropy after a tool result, as a share of the largest possible: \\( -\sum_t \sum_v p \log p / \log |\mathcal{V}|
    \\).

    A sum over tokens, not a mean, over the candidates that the engine reported.

    Args:
        top_logps (`torch.Tensor` of shape `(T, K)`):
            Log-probabilities of the most likely tokens at every position after the result, in nats.
        vocabulary_size (`int`):
            Number of tokens of the vocabulary.
        num_tokens (`int`, *optional*, defaults to `20`):
            Number of leading positions that count.

    Returns:
        `torch.Tensor` of shape `()`: The entropy, 0 without positions.

    Raises:
        `ValueError`: If `top_logps` is no matrix or the vocabulary has fewer than two tokens.

    Example:

    ```python
    >>> branching_entropy(torch.log(torch.full((1, 4), 0.25)), 16)
    tensor(0.5000)

    ```
    """
    check_dimensions("top_logps", top_logps, "T", "K")
    if vocabulary_size < 2:
        raise ValueError(
            f"`vocabulary_size` must be at least 2: got {vocabulary_size}. Pass the size of the vocabulary."
        )
    leading = top_logps[:num_tokens]
    # A candidate of probability 0 adds 0, although its logarithm is infinite.
    terms = torch.where(leading > -torch.inf, leading.exp() * leading, 0.0)
    return -terms.sum() / math.log(vocabulary_size)


def arpo_branches(entropy: float, initial_entropy: float, draw: float, *, entropy_weight: float = 0.2) -> bool:
    """
    Whether ARPO branches after a tool result: `clamp(draw - weight * (H - H_0), 0, 1) <= 0.5`.

    Args:
        entropy (`float`):
            Entropy after this tool result; see `branching_entropy`.
        initial_entropy (`float`):
            Entropy at the start of the same rollout.
        draw (`float`):
            Uniform draw in [0, 1).
        entropy_weight (`float`, *optional*, defaults to `0.2`):
            Weight of the entropy rise.

    Returns:
        `bool`: The decision.
    """
    score = draw - entropy_weight * (entropy - initial_entropy)
    return min(max(score, 0.0), 1.0) <= BRANCH_THRESHOLD


def aepo_branches(
    entropy: float,
    initial_entropy: float,
    draw: float,
    *,
    num_consecutive: int = 0,
    entropy_weight: float = 0.2,
    penalty: float = 0.05,
) -> bool:
    """
    Whether AEPO branches after a tool result: `clamp((draw + weight * (H - H_0)) * max(0, 1 - penalty * n), 0, 1) >=
    0.5`.

    Args:
        entropy (`float`):
            Entropy after this tool result; see `branching_entropy`.
        initial_entropy (`float`):
            Entropy at the start of the same rollout.
        draw (`float`):
            Uniform draw in [0, 1).
        num_consecutive (`int`, *optional*, defaults to 0):
            Number of consecutive branchings before this one.
        entropy_weight (`float`, *optional*, defaults to `0.2`):
            Weight of the entropy rise.
        penalty (`float`, *optional*, defaults to `0.05`):
            Cost of a consecutive branching.

    Returns:
        `bool`: The decision.
    """
    score = (draw + entropy_weight * (entropy - initial_entropy)) * max(0.0, 1 - penalty * num_consecutive)
    return min(max(score, 0.0), 1.0) >= BRANCH_THRESHOLD


def aepo_initial_rollouts(num_rollouts: int, root_entropy: float, tool_entropy: float) -> int:
    r"""
    Number of rollouts that AEPO starts from the prompt, \\( \lfloor n\, \sigma(\tfrac12 (H_{root} - H_{tool})) \rfloor
    + 1 \\).

    Args:
        num_rollouts (`int`):
            Rollouts per prompt.
        root_entropy (`float`):
            Entropy of the first tokens after the prompt.
        tool_entropy (`float`):
            Mean entropy after tool results.

    Returns:
        `int`: Number of initial rollouts, at most `num_rollouts`.

    Example:

    ```python
    >>> aepo_initial_rollouts(16, 1.0, 1.0)
    9

    ```
    """
    share = 1 / (1 + math.exp(-0.5 * (root_entropy - tool_entropy)))
    return min(num_rollouts, int(num_rollouts * share) + 1)
