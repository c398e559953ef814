"""
One ranking from several: reciprocal ranks, or weighted scores.

Pure functions over lists of hits of one query. Ties are settled by the best single rank, then by passage id, so that a
fused ranking depends on its inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Hit
from grounded_rl.retrieval.corpus import id_sort_key

RANK_CONSTANT: Final = 60
"""The constant of reciprocal rank fusion; larger values weigh the first ranks less."""


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[Hit]],
    k: int,
    *,
    weights: Sequence[float] | None = None,
    rank_constant: int = RANK_CONSTANT,
) -> list[Hit]:
    r"""
    Hits ordered by the sum of their reciprocal ranks.

    A passage at rank \\( r_i \\) (from 1) of ranking \\( i \\) scores \\( \sum_i w_i / (c + r_i) \\), over the
    rankings that contain it. Scores of the rankings are not looked at.

    Args:
        rankings (`Sequence[Sequence[Hit]]`):
            Hits of one query, best first, from different searches.
        k (`int`):
            Largest number of hits.
        weights (`Sequence[float]`, *optional*):
            One weight above 0 per ranking. All are 1 if left out.
        rank_constant (`int`, *optional*, defaults to 60):
            The constant \\( c \\), at least 1.

    Returns:
        `list[Hit]`: At most `k` hits with the fused score, best first.

    Raises:
        `ConfigurationError`: If a weight or the constant is out of range, or a ranking names a passage twice.

    Example:
    ```python
    >>> from grounded_rl.retrieval.base import Passage
    >>> a, b = (Hit(Passage(name, "", name), 1.0) for name in "ab")
    >>> [(hit.passage.id, round(hit.score, 4)) for hit in reciprocal_rank_fusion([[a, b], [b]], k=2)]
    [('b', 0.0325), ('a', 0.0164)]

    ```
    """
    if isinstance(rank_constant, bool) or not isinstance(rank_constant, int) or rank_constant < 1:
        raise ConfigurationError(
            f"`rank_constant` must be an integer of at least 1: got {rank_constant!r}. Leave it out."
        )
    weights = _checked_weights(weights, len(rankings))
    scored = [
        [(hit, weight / (rank_constant + rank)) for rank, hit in enumerate(ranking, start=1)]
        for ranking, weight in zip(rankings, weights, strict=True)
    ]
    return _fused(scored, k)


def weighted_score_fusion(
    rankings: Sequence[Sequence[Hit]], k: int, *, weights: Sequence[float] | None = None
) -> list[Hit]:
    r"""
    Hits ordered by the weighted sum of their scores, each ranking scaled to [0, 1].

    In a ranking with lowest score \\( l \\) and highest \\( h \\), a score \\( s \\) becomes
    \\( (s - l) / (h - l) \\), or 1 if all are equal. A ranking that does not contain a passage adds nothing for it.

    Args:
        rankings (`Sequence[Sequence[Hit]]`):
            Hits of one query, best first, from different searches.
        k (`int`):
            Largest number of hits.
        weights (`Sequence[float]`, *optional*):
            One weight above 0 per ranking. All are 1 if left out.

    Returns:
        `list[Hit]`: At most `k` hits with the fused score, best first.

    Raises:
        `ConfigurationError`: If a weight is out of range, or a ranking names a passage twice.

    Example:
    ```python
    >>> from grounded_rl.retrieval.base import Passage
    >>> a, b, c = (Passage(name, "", name) for name in "abc")
    >>> rankings = [[Hit(a, 9.0), Hit(b, 7.0), Hit(c, 5.0)], [Hit(b, 0.8), Hit(c, 0.2)]]
    >>> [(hit.passage.id, hit.score) for hit in weighted_score_fusion(rankings, k=3, weights=[0.5, 0.5])]
    [('b', 0.75), ('a', 0.5), ('c', 0.0)]

    ```
    """
    weights = _checked_weights(weights, len(rankings))
    scored = []
    for ranking, weight in zip(rankings, weights, strict=True):
        scores = [hit.score for hit in ranking]
        low, high = min(scores, default=0.0), max(scores, default=0.0)
        span = high - low
        scored.append([(hit, weight * ((hit.score - low) / span if span else 1.0)) for hit in ranking])
    return _fused(scored, k)


def _fused(scored: Sequence[Sequence[tuple[Hit, float]]], k: int) -> list[Hit]:
    """The best `k` by summed score, then best single rank, then id."""
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ConfigurationError(f"`k` must be an integer of at least 1: got {k!r}. Ask for one hit or more.")
    terms: dict[str, list[float]] = {}
    best_rank: dict[str, int] = {}
    first: dict[str, Hit] = {}
    for ranking in scored:
        ids = [hit.passage.id for hit, _ in ranking]
        if len(set(ids)) != len(ids):
            repeated = next(name for position, name in enumerate(ids) if name in ids[:position])
            raise ConfigurationError(
                f"`rankings` must name every passage once: got {repeated!r} twice in one ranking. "
                "Check the ids of the corpus."
            )
        for rank, (hit, score) in enumerate(ranking):
            name = hit.passage.id
            terms.setdefault(name, []).append(score)
            best_rank[name] = min(rank, best_rank.get(name, rank))
            first.setdefault(name, hit)
    # A sum that does not depend on the order of its terms: passages with swapped ranks tie exactly.
    totals = {name: math.fsum(parts) for name, parts in terms.items()}
    order = sorted(totals, key=lambda name: (-totals[name], best_rank[name], id_sort_key(name)))
    return [Hit(passage=first[name].passage, score=totals[name]) for name in order[:k]]


def _checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """One weight per ranking."""
    if weights is None:
        return [1.0] * count
    if len(weights) != count:
        raise ConfigurationError(
            f"`weights` must have one entry for each of {count} rankings: got {len(weights)}. Add or remove some."
        )
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigurationError(
                f"`weights` must be finite and above 0: got {list(weights)}. Leave out a ranking that is not wanted."
            )
    return [float(weight) for weight in weights]
