r"""
Choosing which turns of a tree to expand, and remembering how they were chosen.

At every expansion round the candidates of a tree (turns that were continued) are scored, ranked and the best are
chosen; each chosen *incumbent* gets fresh siblings. A candidate set is the candidates of one tree at one round.
`SelectionRecords` keeps all sets of a batch, losers included, because the correction of selected values needs ranks
and set sizes, and its slope needs every candidate.

Shapes: `N` tree nodes, `C` candidates of all sets together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_dimensions, check_same_shape
from grounded_rl.credit.tree import check_per_node, leaf_mask, tree_ids

RELEASE_SPREAD_THRESHOLD = 1e-9
"""Standard deviation at or below which the released SIPO code ranks by unstandardised surprisal."""

ScoreSpread = Literal["floor", "absolute"]
RootCandidate = Literal["fallback_only", "always"]


def sibling_counts(parents: torch.Tensor) -> torch.Tensor:
    r"""
    Number of siblings of every node, \\( b(v) = |\operatorname{ch}(p(v))| - 1 \\).

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root, as the tree is at the moment of selection.

    Returns:
        `torch.Tensor` of shape `(N,)`, `torch.long`: Counts. A root, whose own children would be its fresh siblings,
        has `max(0, children - 1)`.

    Example:

    ```python
    >>> sibling_counts(torch.tensor([-1, 0, 0, 0, 1])).tolist()
    [2, 2, 2, 2, 0]

    ```
    """
    check_per_node(parents)
    num_children = torch.bincount(parents[parents >= 0], minlength=len(parents))
    own = (num_children - 1).clamp(min=0)
    return torch.where(parents >= 0, num_children[parents.clamp(min=0)] - 1, own)


def candidate_mask(
    parents: torch.Tensor, has_tokens: torch.Tensor, *, root_candidate: RootCandidate = "fallback_only"
) -> torch.Tensor:
    """
    Nodes that may be chosen for expansion: turns that were continued.

    Args:
        parents (`torch.Tensor` of shape `(N,)`, `torch.long`):
            Parent of every node, `-1` for a root, as the tree is at the moment of selection.
        has_tokens (`torch.Tensor` of shape `(N,)`, `torch.bool`):
            Whether the node has generated tokens. One without is never a candidate, unless it is a root. Ignored at
            roots.
        root_candidate (`str`, *optional*, defaults to `"fallback_only"`):
            `"fallback_only"`: the root is the only candidate of a tree without another one (its fresh siblings are new
            rollouts from the prompt). `"always"`: the root is a candidate whenever it has children, as in the released
            code.

    Returns:
        `torch.Tensor` of shape `(N,)`, `torch.bool`: Candidates. Leaves are never candidates, except a lone root under
        `"fallback_only"`.

    Raises:
        `ValueError`: If the shapes differ or `root_candidate` is unknown.
    """
    check_choice("root_candidate", root_candidate, ("fallback_only", "always"))
    check_per_node(parents, has_tokens=has_tokens)
    is_root, is_inner = parents < 0, ~leaf_mask(parents)
    candidates = is_inner & has_tokens.bool() & ~is_root
    if root_candidate == "always":
        return candidates | (is_root & is_inner)
    trees = tree_ids(parents)
    has_candidate = torch.zeros(int(trees.max()) + 1, dtype=torch.bool, device=parents.device)
    has_candidate[trees[candidates]] = True
    return candidates | (is_root & ~has_candidate[trees])


def set_moments(
    entries: torch.Tensor, set_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-entry size, mean, population standard deviation and flatness (no spread at all) of the entry's set."""
    if set_ids is None:
        set_ids = torch.zeros(len(entries), dtype=torch.long, device=entries.device)
    check_same_shape(scores=entries, set_ids=set_ids)
    _, slots, sizes = set_ids.unique(return_inverse=True, return_counts=True)
    zeros = entries.new_zeros(len(sizes))
    means = zeros.index_add(0, slots, entries) / sizes
    deviations = entries - means[slots]
    spreads = (zeros.index_add(0, slots, deviations**2) / sizes).sqrt()
    highest = (zeros - torch.inf).scatter_reduce(0, slots, entries, "amax")
    lowest = (zeros + torch.inf).scatter_reduce(0, slots, entries, "amin")
    return sizes[slots], means[slots], spreads[slots], (highest == lowest)[slots]


def standardized_scores(
    scores: torch.Tensor, set_ids: torch.Tensor | None = None, *, epsilon: float = 1e-6
) -> torch.Tensor:
    r"""
    Scores standardised within their candidate set, \\( (q - \bar q) / \max(\operatorname{sd}(q), \epsilon) \\).

    Args:
        scores (`torch.Tensor` of shape `(C,)`):
            One score per candidate.
        set_ids (`torch.Tensor` of shape `(C,)`, `torch.long`, *optional*):
            Candidate set of every candidate; one set if omitted.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Floor of the population standard deviation.

    Returns:
        `torch.Tensor` of shape `(C,)`: Standardised scores, exactly 0 in a set whose scores are all equal.
    """
    _, means, spreads, flat = set_moments(scores, set_ids)
    return torch.where(flat, 0.0, (scores - means) / spreads.clamp(min=epsilon))


def sfc_scores(
    surprisals: torch.Tensor,
    num_siblings: torch.Tensor,
    set_ids: torch.Tensor | None = None,
    *,
    penalty: float = 0.05,
    standardize: bool = True,
    epsilon: float = 1e-6,
    spread: ScoreSpread = "floor",
) -> torch.Tensor:
    r"""
    Scale-free branch criterion of SIPO: standardised surprisal less a penalty per sibling.

    $$
    q(v) = \frac{s(v) - \mu_{\mathcal{C}}}{\max(\sigma_{\mathcal{C}}, \epsilon)} - \lambda\, b(v)
    $$

    with mean and population standard deviation over the candidate set. Positive affine maps of the surprisals leave
    the ranking as it is. With `standardize=False` it is the criterion of AT²PO, \\( s(v) - \lambda\, b(v) \\). SIPO
    ([Eq. 2](https://huggingface.co/papers/2609.34805)).

    Args:
        surprisals (`torch.Tensor` of shape `(C,)`):
            Realised surprisal of every candidate, in nats per token; see `node_surprisals`.
        num_siblings (`torch.Tensor` of shape `(C,)`):
            Number of existing siblings; see `sibling_counts`.
        set_ids (`torch.Tensor` of shape `(C,)`, `torch.long`, *optional*):
            Candidate set of every candidate; one set if omitted.
        penalty (`float`, *optional*, defaults to `0.05`):
            \\( \lambda \\), in standard deviations (in nats if not standardised). To charge an expansion instead of a
            branch, divide it by the number of fresh siblings.
        standardize (`bool`, *optional*, defaults to `True`):
            Whether surprisals are standardised.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Floor of the standard deviation.
        spread (`str`, *optional*, defaults to `"floor"`):
            What happens in a set without spread. `"floor"`: all standardised surprisals are 0. `"absolute"`: the set
            is not standardised, as in the released code (standard deviation at most 1e-9, or a single candidate).

    Returns:
        `torch.Tensor` of shape `(C,)`: Scores; the largest is chosen first.

    Raises:
        `ValueError`: If the shapes differ, a surprisal is not finite, or `spread` is unknown.

    Example:

    ```python
    >>> surprisals = torch.tensor([0.42, 0.35, 0.55, 0.30, 0.48])
    >>> sfc_scores(surprisals, torch.tensor([9, 9, 9, 0, 1]))
    tensor([-0.4500, -1.2346,  1.0071, -1.3450,  0.6225])

    ```
    """
    check_choice("spread", spread, ("floor", "absolute"))
    check_dimensions("surprisals", surprisals, "C")
    check_same_shape(surprisals=surprisals, num_siblings=num_siblings)
    if not torch.isfinite(surprisals).all():
        raise ValueError(
            f"`surprisals` must be finite: got {int((~torch.isfinite(surprisals)).sum())} entries that are not. "
            "Compute them with `node_surprisals`, which drops unscored tokens."
        )
    base = surprisals
    if standardize:
        base = standardized_scores(surprisals, set_ids, epsilon=epsilon)
        if spread == "absolute":
            sizes, means, spreads, _ = set_moments(surprisals, set_ids)
            standardized = (surprisals - means) / spreads
            base = torch.where((spreads > RELEASE_SPREAD_THRESHOLD) & (sizes >= 2), standardized, surprisals)
    return base - penalty * num_siblings.to(base.dtype)


def candidate_ranks(scores: torch.Tensor, set_ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    Rank of every candidate within its set, 1 for the largest score.

    Args:
        scores (`torch.Tensor` of shape `(C,)`):
            One score per candidate, each set in source order (breadth-first, children in the order of creation).
        set_ids (`torch.Tensor` of shape `(C,)`, `torch.long`, *optional*):
            Candidate set of every candidate; one set if omitted.

    Returns:
        `torch.Tensor` of shape `(C,)`, `torch.long`: Ranks; ties go to the earlier candidate.

    Example:

    ```python
    >>> candidate_ranks(torch.tensor([0.1, 0.9, 0.1, 0.5])).tolist()
    [3, 1, 4, 2]

    ```
    """
    if set_ids is None:
        set_ids = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(set_ids[order], stable=True)]
    _, sizes = set_ids.unique(return_counts=True)
    starts = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    ranks = torch.empty_like(set_ids)
    ranks[order] = torch.arange(len(scores), device=scores.device) - starts + 1
    return ranks


def select_candidates(scores: torch.Tensor, num_selected: int) -> torch.Tensor:
    """
    The best candidates of one set, best first.

    Args:
        scores (`torch.Tensor` of shape `(C,)`):
            Scores of one candidate set in source order.
        num_selected (`int`):
            Number of expansion slots.

    Returns:
        `torch.Tensor` of shape `(num_selected,)`, `torch.long`: Positions in `scores`. With fewer candidates than
        slots the ranked list is repeated from its start.

    Raises:
        `ValueError`: If there is no candidate.

    Example:

    ```python
    >>> select_candidates(torch.tensor([0.1, 0.9]), 3).tolist()
    [1, 0, 1]

    ```
    """
    if len(scores) == 0:
        raise ValueError(
            "`scores` must hold at least one candidate: got none. Fall back to the root; see `candidate_mask`."
        )
    order = torch.argsort(scores, descending=True, stable=True)
    return order[torch.arange(num_selected, device=scores.device) % len(scores)]


@dataclass(frozen=True)
class SelectionRecords:
    """
    Candidate sets of a batch, one entry per candidate, losers included.

    Build it with `record_selections`, which derives ranks and sizes.
    """

    nodes: torch.Tensor  # (C,) node index in the forest
    set_ids: torch.Tensor  # (C,) candidate set: one tree at one round
    rounds: torch.Tensor  # (C,) expansion round of the set, from 0
    scores: torch.Tensor  # (C,) the score that ranked
    surprisals: torch.Tensor  # (C,) surprisal behind the score, nats per token
    chosen: torch.Tensor  # (C,) bool, got fresh siblings
    ranks: torch.Tensor  # (C,) 1 = largest score
    set_sizes: torch.Tensor  # (C,) number of candidates in the set

    def where(self, keep: torch.Tensor) -> SelectionRecords:
        """
        Records of the candidates in `keep` (`(C,)`, `torch.bool`); ranks and set sizes stay those of the full sets.
        """
        return SelectionRecords(**{field.name: getattr(self, field.name)[keep] for field in fields(self)})


def record_selections(
    nodes: torch.Tensor,
    set_ids: torch.Tensor,
    rounds: torch.Tensor,
    *,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    surprisals: torch.Tensor | None = None,
) -> SelectionRecords:
    """
    Selection records of a batch of trees.

    Args:
        nodes (`torch.Tensor` of shape `(C,)`, `torch.long`):
            Node of every candidate in the final forest, each set in source order.
        set_ids (`torch.Tensor` of shape `(C,)`, `torch.long`):
            Candidate set of every candidate; a set is one tree at one round.
        rounds (`torch.Tensor` of shape `(C,)`, `torch.long`):
            Expansion round of every candidate's set, from 0.
        scores (`torch.Tensor` of shape `(C,)`):
            The score that ranked the candidates; see `sfc_scores`.
        chosen (`torch.Tensor` of shape `(C,)`, `torch.bool`):
            Whether the candidate got fresh siblings.
        surprisals (`torch.Tensor` of shape `(C,)`, *optional*):
            Surprisals behind the scores; needed only by the estimator of the released code. Defaults to NaN.

    Returns:
        `SelectionRecords`: The records with ranks and set sizes.

    Raises:
        `ValueError`: If the shapes differ, or a set spans several rounds.
    """
    if surprisals is None:
        surprisals = torch.full_like(scores, torch.nan)
    columns = {"set_ids": set_ids, "rounds": rounds, "scores": scores, "chosen": chosen, "surprisals": surprisals}
    check_dimensions("nodes", nodes, "C")
    check_same_shape(nodes=nodes, **columns)
    sizes, _, _, one_round = set_moments(rounds.double(), set_ids)
    if not one_round.all():
        raise ValueError(
            f"`set_ids` must separate rounds: got set {int(set_ids[~one_round][0])} in several rounds. "
            "Number the sets by tree and round."
        )
    ranks = candidate_ranks(scores, set_ids)
    return SelectionRecords(
        nodes=nodes,
        chosen=chosen.bool(),
        ranks=ranks,
        set_sizes=sizes,
        **{name: columns[name] for name in ("set_ids", "rounds", "scores", "surprisals")},
    )
