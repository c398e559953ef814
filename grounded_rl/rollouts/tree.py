"""
Trees of rollouts: prefixes are stored once, and every choice that shaped the tree is on record.

    RolloutTree ─ Node ─ Turn
        │
        ├─ Leaf
        └─ Selection ─ Candidate

Node 0 is the prompt; every other node adds one turn to its parent. A turn ends with the observation that is carried
into all of its children, so the ids along a path from the root to a leaf are exactly what the model saw. Nodes are
numbered in the order they were generated: a parent comes before its children, siblings are in the order of creation,
and numbers never change while a tree grows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from grounded_rl.errors import RolloutError
from grounded_rl.rollouts.types import Rollout, StopReason, Turn

ROOT = 0
"""Number of the node that holds the prompt."""
NOT_FRESH = -1
"""`Node.created_round` of a node that does not start a fresh branch."""


@dataclass(frozen=True, slots=True)
class Node:
    """What one turn adds to its parent."""

    parent: int
    """Number of the parent, -1 for the root."""
    turn: Turn | None
    """The turn, with the observation carried into the children; `None` for the root."""
    surprisal: float | None = None
    """Mean negative log-probability of the turn's sampled tokens, in nats; `None` if it was never computed."""
    created_round: int = NOT_FRESH
    """Expansion round that drew the node as the head of a fresh branch; -1 for every other node."""
    advantage: float | None = None
    """Advantage of the node; `None` means never scored."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """How one path ended."""

    node: int
    stop: StopReason
    answer: str | None = None
    """The extracted answer; `None` when the policy gave none."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Value of every reward by name; `None` marks a reward that could not be computed."""
    error: str | None = None
    """What failed, for `StopReason.FAILED`."""
    value: float | None = None
    """Reward standardised within the tree, before any correction."""
    corrected: float | None = None
    """The value after the correction for selection."""
    masked: bool = False
    """Whether the rollout left the loss while it stayed in the statistics."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that could have been chosen for expansion, as it stood at that moment."""

    node: int
    surprisal: float
    num_siblings: int
    score: float
    rank: int
    """1 for the largest score; ties go to the earlier node, breadth-first."""
    leaves: tuple[int, ...] = ()
    """Nodes of the leaves below it at that moment."""


@dataclass(frozen=True, slots=True)
class Selection:
    """One choice: the incumbent, what it competed with, and the fresh siblings it was given."""

    step: int
    tree: int
    """Number of the tree within its step."""
    round: int
    """Expansion round, from 0."""
    parent: int
    incumbent: int
    """Chosen node; the root itself when it was chosen, whose fresh siblings are new rollouts of the prompt."""
    candidates: tuple[Candidate, ...]
    """The whole candidate set by rank, losers included."""
    fresh: tuple[int, ...]
    """Heads of the fresh branches, in the order of creation: fixed before any of their outcomes was known."""
    boundary: int
    """Tokens shared by incumbent and fresh siblings: the prompt, and the path to the parent with its observation."""

    @property
    def is_event(self) -> bool:
        """Whether there is an incumbent; choosing the root for new rollouts is no selection event."""
        return self.incumbent != ROOT

    @property
    def chosen(self) -> Candidate:
        """The incumbent's own entry."""
        return next(candidate for candidate in self.candidates if candidate.node == self.incumbent)


@dataclass(frozen=True, slots=True)
class RolloutTree:
    """All rollouts of one question, grown together."""

    question_id: str
    question: str
    answers: tuple[str, ...]
    """Gold answers; any of them is right."""
    prompt_ids: tuple[int, ...]
    nodes: tuple[Node, ...]
    leaves: tuple[Leaf, ...]
    """Ends of the initial rollouts, then of the fresh branches, each in the order they were begun."""
    selections: tuple[Selection, ...] = ()
    step: int = 0
    number: int = 0
    """Number of the tree within its step."""
    question_kind: str | None = None
    extras: Mapping[str, object] = field(default_factory=dict)
    """Free-form provenance: slope and weight of the correction, policy, index."""

    def __post_init__(self):
        _check_nodes(self.nodes)
        parents = {node.parent for node in self.nodes}
        childless = [number for number in range(1, len(self.nodes)) if number not in parents]
        if sorted(leaf.node for leaf in self.leaves) != childless:
            raise RolloutError(
                f"`leaves` must name every node without children once, {childless}: got "
                f"{[leaf.node for leaf in self.leaves]}. Add one leaf per path."
            )
        named = [
            number
            for selection in self.selections
            for number in (selection.parent, selection.incumbent, *selection.fresh)
        ]
        if named and not 0 <= min(named) <= max(named) < len(self.nodes):
            raise RolloutError(
                f"`selections` must name nodes of the tree, 0 to {len(self.nodes) - 1}: got a range of "
                f"[{min(named)}, {max(named)}]. Use the numbers of `nodes`."
            )

    @property
    def parents(self) -> list[int]:
        """Parent of every node."""
        return [node.parent for node in self.nodes]

    @property
    def boundaries(self) -> list[int]:
        """Heads of all fresh branches."""
        return [number for number, node in enumerate(self.nodes) if node.created_round != NOT_FRESH]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled for the tree, shared ones counted once."""
        return sum(len(node.turn.ids) for node in self.nodes if node.turn is not None)

    @property
    def num_path_tokens(self) -> int:
        """Sampled tokens along all paths: what as many linear rollouts of the same lengths would have cost."""
        lengths = [0 if node.turn is None else len(node.turn.ids) for node in self.nodes]
        return sum(lengths[node] for number in range(len(self.leaves)) for node in self.leaf_path(number))

    def path(self, node: int) -> list[int]:
        """Numbers of the nodes from below the root to `node`."""
        path = []
        while node != ROOT:
            path.append(node)
            node = self.nodes[node].parent
        return path[::-1]

    def leaf_path(self, number: int) -> list[int]:
        """Numbers of the nodes along the path of leaf `number`; one per turn of its rollout."""
        return self.path(self.leaves[number].node)

    def rollout(self, number: int) -> Rollout:
        """
        The rollout of a leaf; its ids are exactly what the model saw.

        Args:
            number (`int`):
                Position in `leaves`, which is also the rollout's index within its group.

        Returns:
            [`Rollout`]: Turns along the path. A turn without token advantages has its node's at every token.
        """
        leaf = self.leaves[number]
        path = self.leaf_path(number)
        return Rollout(
            question_id=self.question_id,
            question=self.question,
            answers=self.answers,
            prompt_ids=self.prompt_ids,
            turns=tuple(_turn(self.nodes[node]) for node in path),
            stop=leaf.stop,
            answer=leaf.answer,
            rewards=leaf.rewards,
            question_kind=self.question_kind,
            sample=number,
            error=leaf.error,
            extras={
                **self.extras,
                "step": self.step,
                "tree": self.number,
                "path": path,
                **({"masked": True} if leaf.masked else {}),
            },
        )

    def rollouts(self) -> list[Rollout]:
        """The rollouts of all leaves, in order."""
        return [self.rollout(number) for number in range(len(self.leaves))]


def _turn(node: Node) -> Turn:
    """The turn of a node, with the node's advantage where the turn has none of its own."""
    turn = node.turn
    assert turn is not None, "only the root has no turn"
    if node.advantage is None or turn.advantages is not None:
        return turn
    return replace(turn, advantages=(node.advantage,) * len(turn.ids))


def _check_nodes(nodes: tuple[Node, ...]) -> None:
    if not nodes or nodes[ROOT].parent != -1 or nodes[ROOT].turn is not None:
        raise RolloutError(
            f"`nodes` must begin with the root, without parent and turn: got {nodes[:1]}. Put the prompt first."
        )
    for number, node in enumerate(nodes[1:], start=1):
        if not 0 <= node.parent < number or node.turn is None:
            raise RolloutError(
                f"`nodes` must have a turn and an earlier parent each: got parent {node.parent} and "
                f"{'no turn' if node.turn is None else 'a turn'} at node {number}. Number nodes as they are generated."
            )
