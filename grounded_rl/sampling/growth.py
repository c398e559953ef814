"""A tree while it grows: which branch added which node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from grounded_rl.rollouts.tree import NOT_FRESH, ROOT, Leaf, Node, RolloutTree, Selection
from grounded_rl.sampling.scheduler import Episode, RolloutRequest, RolloutSampler


@dataclass
class Branch:
    """One path of a growing tree."""

    episode: Episode
    path: list[int] = field(default_factory=list)
    """Nodes of the episode's turns, as far as they are in the tree."""
    num_shared: int = 0
    """Turns that were in the tree before the branch was begun."""


@dataclass
class Growth:
    """A tree in the making; node 0 is the root."""

    request: RolloutRequest
    nodes: list[Node] = field(default_factory=lambda: [Node(-1, None)])
    children: list[list[int]] = field(default_factory=lambda: [[]])
    branches: list[Branch] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)

    def breadth_first(self) -> list[int]:
        """All nodes level by level, siblings in the order of creation: the order that decides ties."""
        order = [ROOT]
        for node in order:
            order += self.children[node]
        return order

    def leaves_below(self) -> list[list[int]]:
        """Leaf nodes below every node, a leaf itself included, in the order of the branches."""
        below: list[list[int]] = [[] for _ in self.nodes]
        for branch in self.branches:
            for node in (ROOT, *branch.path):
                below[node].append(branch.path[-1])
        return below

    def fork(self, node: int, *, sample: int) -> Branch:
        """A branch that draws a new sibling of `node`, or a new child of the root for the root itself."""
        source = next(branch for branch in self.branches if node == ROOT or node in branch.path)
        num_shared = 0 if node == ROOT else source.path.index(node)
        return Branch(source.episode.fork(num_shared, sample=sample), source.path[:num_shared], num_shared)

    def graft(
        self, branches: Sequence[Branch], surprisals: Sequence[Sequence[float | None]], created_round: int
    ) -> None:
        """
        Add the new turns of finished branches, turn by turn, so that siblings are in the order of creation.

        Args:
            branches (`Sequence[Branch]`):
                Branches in the order they were begun.
            surprisals (`Sequence[Sequence[float]]`):
                Surprisal of every turn of every branch.
            created_round (`int`):
                Round that drew them, -1 for the initial rollouts.
        """
        for depth in range(max(len(branch.episode.turns) for branch in branches)):
            for branch, row in zip(branches, surprisals, strict=True):
                if len(branch.path) == depth < len(branch.episode.turns):
                    is_head = depth == branch.num_shared
                    parent = branch.path[-1] if branch.path else ROOT
                    node = Node(
                        parent,
                        branch.episode.turns[depth],
                        surprisal=row[depth],
                        created_round=created_round if is_head else NOT_FRESH,
                    )
                    self.nodes.append(node)
                    self.children.append([])
                    self.children[parent].append(len(self.nodes) - 1)
                    branch.path.append(len(self.nodes) - 1)
        self.branches += branches

    def finished(self, sampler: RolloutSampler, *, step: int, number: int) -> RolloutTree:
        """The tree as a record."""
        rollouts = [sampler.finished(branch.episode) for branch in self.branches]
        question = self.request.question
        return RolloutTree(
            question_id=question.id,
            question=question.question,
            answers=question.answers,
            prompt_ids=self.request.prompt_ids,
            nodes=tuple(self.nodes),
            leaves=tuple(
                Leaf(branch.path[-1], rollout.stop, answer=rollout.answer, error=rollout.error)
                for branch, rollout in zip(self.branches, rollouts, strict=True)
            ),
            selections=tuple(self.selections),
            step=step,
            number=number,
            question_kind=question.kind,
        )
