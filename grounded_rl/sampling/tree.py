r"""
Trees of rollouts on the one rollout loop: initial rollouts, then rounds of fresh branches at chosen turns.

Every round ranks the turns that were continued by their surprisal, less a penalty per sibling, and gives the best of
them fresh siblings: the turn is taken back and a new one is drawn from the same token ids, with whatever turns are
left. A tree ends with exactly \\( M + L K B \\) leaves. All branches of all trees advance together.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from grounded_rl.credit.selection import (
    RootCandidate,
    ScoreSpread,
    candidate_mask,
    candidate_ranks,
    select_candidates,
    sfc_scores,
    sibling_counts,
)
from grounded_rl.errors import ConfigurationError
from grounded_rl.rollouts.tree import NOT_FRESH, ROOT, Candidate, RolloutTree, Selection
from grounded_rl.rollouts.types import sampled_parts
from grounded_rl.sampling.engine import Engine
from grounded_rl.sampling.growth import Branch, Growth
from grounded_rl.sampling.scheduler import Episode, RolloutRequest, RolloutSampler

logger = logging.getLogger(__name__)

Scorer = Callable[[Sequence[Sequence[int]], Sequence[Sequence[int]]], list[list[float]]]
"""Log-probability of every completion token, given prompts and completions; for engines that return none."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    r"""
    How large a tree grows.

    Args:
        num_initial (`int`, *optional*, defaults to `10`):
            Rollouts from the prompt, \\( M \\).
        num_rounds (`int`, *optional*, defaults to `2`):
            Expansion rounds, \\( L \\).
        num_incumbents (`int`, *optional*, defaults to `3`):
            Turns chosen in every round, \\( K \\).
        num_fresh (`int`, *optional*, defaults to `2`):
            Fresh siblings of every chosen turn, \\( B \\).

    Raises:
        `ConfigurationError`: If a number is too small.
    """

    num_initial: int = 10
    num_rounds: int = 2
    num_incumbents: int = 3
    num_fresh: int = 2

    def __post_init__(self):
        for name, least in (("num_initial", 1), ("num_rounds", 0), ("num_incumbents", 1), ("num_fresh", 1)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"`{name}` must be at least {least}: got {getattr(self, name)}. Raise it.")

    @property
    def num_leaves(self) -> int:
        r"""Leaves of a finished tree, \\( M + L K B \\)."""
        return self.num_initial + self.num_rounds * self.num_incumbents * self.num_fresh


@dataclass(frozen=True, slots=True)
class BranchRule:
    """
    How candidates are scored.

    Args:
        standardize (`bool`, *optional*, defaults to `True`):
            Standardise surprisals within the candidate set (SIPO); without it they are used as they are (AT²PO).
        penalty (`float`, *optional*, defaults to `0.05`):
            Penalty per sibling, in standard deviations (in nats if not standardised).
        penalty_per_branch (`bool`, *optional*, defaults to `False`):
            Divide the penalty by the number of fresh siblings, so that an expansion is charged rather than a branch.
        root_candidate (`str`, *optional*, defaults to `"fallback_only"`):
            `"fallback_only"`: the root is chosen only where there is no other candidate. `"always"`: it competes.
        spread (`str`, *optional*, defaults to `"floor"`):
            What happens without spread; see `sfc_scores`.
    """

    standardize: bool = True
    penalty: float = 0.05
    penalty_per_branch: bool = False
    root_candidate: RootCandidate = "fallback_only"
    spread: ScoreSpread = "floor"


@dataclass(frozen=True)
class TreeSampler:
    """
    Samples trees of rollouts.

    AT²PO's tree ([paper](https://huggingface.co/papers/2601.04767)) with SIPO's criterion and its several fresh
    siblings per incumbent ([Sec. 4.2 and 4.3](https://huggingface.co/papers/2609.34805)). The scores of a round are
    frozen before any of its branches is drawn; ties keep breadth-first order. With fewer candidates than slots the
    ranked list is repeated from its start, and a turn chosen twice gets twice the fresh siblings and one record. A
    tree without a candidate gets new rollouts from the prompt.

    Args:
        sampler ([`RolloutSampler`]):
            The rollout loop, with its environment, retriever and budgets.
        shape ([`TreeShape`], *optional*):
            How large a tree grows.
        rule ([`BranchRule`], *optional*):
            How candidates are scored.
        score (`Callable`, *optional*):
            Log-probability of every completion token, given prompts and completions. Called once per round with all
            finished branches, and needed only for engines that return no log-probabilities.
    """

    sampler: RolloutSampler
    shape: TreeShape = TreeShape()
    rule: BranchRule = BranchRule()
    score: Scorer | None = None

    def sample(
        self,
        engine: Engine,
        requests: Sequence[RolloutRequest],
        *,
        step: int = 0,
        first_number: int = 0,
        on_turn: Callable[[int, int], None] | None = None,
    ) -> list[RolloutTree]:
        """
        Grow one tree per request.

        Args:
            engine ([`Engine`]):
                Samples the turns. Leaf `j` of tree `i` is rollout `i * num_leaves + j` to it.
            requests (`Sequence[RolloutRequest]`):
                One per tree; `sample` is ignored.
            step (`int`, *optional*, defaults to `0`):
                Optimiser step, for the records.
            first_number (`int`, *optional*, defaults to `0`):
                Number of the first tree within the step; processes that share a step count on from each other.
            on_turn (`Callable[[int, int], None]`, *optional*):
                Called after every round of turns with the numbers of finished and of all branches of the round.

        Returns:
            `list[RolloutTree]`: One per request, each with exactly `shape.num_leaves` leaves. A leaf whose search
            failed is marked as failed; it counts as a leaf.

        Raises:
            `RetrievalError`: If a search fails and the sampler's `on_search_failure` is `"raise"`.
            `ConfigurationError`: If the engine returns no log-probabilities, `score` is not given, and the shape has
                an expansion round.
        """
        growths = [Growth(request) for request in requests]
        initial = range(self.shape.num_initial)
        begun = [
            [Branch(Episode.start(replace(growth.request, sample=sample))) for sample in initial] for growth in growths
        ]
        self._play(engine, growths, begun, NOT_FRESH, on_turn)
        for number in range(self.shape.num_rounds):
            choices = [self._choose(growth) for growth in growths]
            begun = [self._fork(growth, picks) for growth, (_, picks) in zip(growths, choices, strict=True)]
            self._play(engine, growths, begun, number, on_turn)
            for tree, (growth, (candidates, picks)) in enumerate(zip(growths, choices, strict=True), first_number):
                growth.selections += _selections(
                    growth, candidates, picks, begun[tree - first_number], step=step, tree=tree, number=number
                )
        return [
            growth.finished(self.sampler, step=step, number=number)
            for number, growth in enumerate(growths, first_number)
        ]

    def _play(
        self,
        engine: Engine,
        growths: list[Growth],
        begun: list[list[Branch]],
        created_round: int,
        on_turn: Callable[[int, int], None] | None,
    ) -> None:
        """Play new branches of all trees to their ends and add what they sampled."""
        branches = [branch for of_tree in begun for branch in of_tree]
        numbers = [
            tree * self.shape.num_leaves + branch.episode.request.sample
            for tree, of_tree in enumerate(begun)
            for branch in of_tree
        ]
        self.sampler.run(engine, [branch.episode for branch in branches], numbers=numbers, on_turn=on_turn)
        surprisals = iter(self._surprisals(branches))
        for growth, of_tree in zip(growths, begun, strict=True):
            growth.graft(of_tree, [next(surprisals) for _ in of_tree], created_round)

    def _surprisals(self, branches: list[Branch]) -> list[list[float | None]]:
        """Surprisal of every turn of every branch, shared turns included."""
        episodes = [branch.episode for branch in branches]
        if all(turn.logps is not None for episode in episodes for turn in episode.turns):
            return [[_surprisal(turn.logps) for turn in episode.turns] for episode in episodes]
        if self.score is None:
            if self.shape.num_rounds > 0:
                raise ConfigurationError(
                    "`score` must be given for an engine that returns no log-probabilities: got `None`. Pass a "
                    "function that scores completions, or an engine that returns log-probabilities."
                )
            return [[None] * len(episode.turns) for episode in episodes]
        prompts = [episode.request.prompt_ids for episode in episodes]
        scored = self.score(prompts, [episode.context[len(episode.request.prompt_ids) :] for episode in episodes])
        surprisals: list[list[float | None]] = []
        for episode, logps in zip(episodes, scored, strict=True):
            surprisals.append([_surprisal(part) for part in sampled_parts(episode.turns, logps)])
        return surprisals

    def _choose(self, growth: Growth) -> tuple[list[Candidate], list[int]]:
        """The ranked candidates of a tree as it stands, and the node chosen for every slot."""
        parents = torch.tensor([node.parent for node in growth.nodes])
        has_tokens = torch.tensor([node.surprisal is not None for node in growth.nodes])
        is_candidate = candidate_mask(parents, has_tokens, root_candidate=self.rule.root_candidate).tolist()
        nodes = [node for node in growth.breadth_first() if is_candidate[node]]
        # A root has no turn; where it competes, its surprisal is 0.
        surprisals = torch.tensor([growth.nodes[node].surprisal or 0.0 for node in nodes], dtype=torch.float64)
        counts = sibling_counts(parents)[nodes]
        penalty = self.rule.penalty / (self.shape.num_fresh if self.rule.penalty_per_branch else 1)
        scores = sfc_scores(
            surprisals, counts, penalty=penalty, standardize=self.rule.standardize, spread=self.rule.spread
        )
        picks = [nodes[entry] for entry in select_candidates(scores, self.shape.num_incumbents).tolist()]
        if picks[0] == ROOT and len(nodes) == 1:
            _warn_once()
        leaves = growth.leaves_below()
        columns = zip(
            nodes,
            surprisals.tolist(),
            counts.tolist(),
            scores.tolist(),
            candidate_ranks(scores).tolist(),
            (tuple(leaves[node]) for node in nodes),
            strict=True,
        )
        return sorted((Candidate(*row) for row in columns), key=lambda candidate: candidate.rank), picks

    def _fork(self, growth: Growth, picks: list[int]) -> list[Branch]:
        sources = [node for node in picks for _ in range(self.shape.num_fresh)]
        first = len(growth.branches)
        return [growth.fork(node, sample=first + number) for number, node in enumerate(sources)]


def _surprisal(logps: Sequence[float | None] | None) -> float | None:
    """Mean surprisal of the scored tokens of a turn; `None` without one."""
    scored = [-value for value in logps or () if value is not None and math.isfinite(value)]
    return sum(scored) / len(scored) if scored else None


def _selections(
    growth: Growth,
    candidates: list[Candidate],
    picks: list[int],
    branches: list[Branch],
    *,
    step: int,
    tree: int,
    number: int,
) -> list[Selection]:
    """One record per node that was chosen in a round, however often."""
    num_fresh = len(branches) // len(picks)
    records = []
    for node in dict.fromkeys(picks):
        own = [branch for place, branch in enumerate(branches) if picks[place // num_fresh] == node]
        shared = own[0].episode.turns[: own[0].num_shared]
        records.append(
            Selection(
                step=step,
                tree=tree,
                round=number,
                parent=max(ROOT, growth.nodes[node].parent),
                incumbent=node,
                candidates=tuple(candidates),
                fresh=tuple(branch.path[branch.num_shared] for branch in own),
                boundary=len(growth.request.prompt_ids)
                + sum(len(turn.ids) + len(turn.observation_ids) for turn in shared),
            )
        )
    return records


@functools.lru_cache(maxsize=1)
def _warn_once() -> None:
    logger.warning(
        "A tree has no turn to expand (no rollout made a call): it gets new rollouts from the prompt. "
        "Said once; see `rollout/root_fallbacks` for how often."
    )
