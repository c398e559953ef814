"""
Rollouts as data, independent of the engine that sampled them.

    Group ─ Rollout ─ Turn ─ Call ─ ShownPassage

A turn is one assistant message and the observation that follows it. Token ids are the ones the policy sampled or read:
the concatenation `prompt_ids + turn.ids + turn.observation_ids + …` is exactly what the model saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from grounded_rl.errors import RolloutError


class StopReason(StrEnum):
    """Why a rollout ended."""

    ANSWER = "answer"
    """The policy wrote a turn without a call."""
    TURN_LIMIT = "turn_limit"
    """The last allowed turn attempted a call, which was not executed."""
    LENGTH = "length"
    """A turn or the whole completion reached its token budget."""
    FAILED = "failed"
    """An infrastructural fault; the rollout is excluded from statistics and loss."""


class TurnKind(StrEnum):
    """What a turn did; exactly one per turn."""

    SEARCH = "search"
    """Contains at least one call that can be executed."""
    MALFORMED = "malformed"
    """Attempts a call, none of which can be executed."""
    ANSWER = "answer"
    """Ends the rollout with text and no call (or, cut off, had opened its answer)."""
    UNLABELLED = "unlabelled"
    """Cut off by a token budget before it opened a call or an answer."""


class CallStatus(StrEnum):
    """What became of one call."""

    OK = "ok"
    """Passages were delivered."""
    EMPTY = "empty"
    """The search ran and found nothing."""
    REJECTED = "rejected"
    """The policy's mistake (`Call.error` names its kind); answered with an error observation."""
    NOT_EXECUTED = "not_executed"
    """Never answered: turn limit, token budget, or a call cut off while it was written."""


class FinishReason(StrEnum):
    """Why generation of one turn ended."""

    STOP = "stop"
    """An end-of-turn token, included in the ids."""
    LENGTH = "length"
    """The token budget of the turn."""


@dataclass(frozen=True, slots=True)
class ShownPassage:
    """A passage as the policy received it: after truncation and neutralisation of control tokens."""

    id: str
    title: str
    text: str
    score: float | None = None
    num_tokens: int | None = None
    """Policy tokens of the text that was shown."""
    num_tokens_full: int | None = None
    """Policy tokens of the untruncated text; larger than `num_tokens` exactly when the passage was cut."""


@dataclass(frozen=True, slots=True)
class Call:
    """One search call of a turn and its response."""

    query: str | None
    """The query; `None` when it could not be read."""
    status: CallStatus
    passages: tuple[ShownPassage, ...] = ()
    """Delivered passages, best first; empty unless `status` is `OK`."""
    error: str | None = None
    """Kind of the policy's mistake, for instance `"invalid_json"`; `None` unless `status` is `REJECTED`."""
    cached: bool = False
    """Served from an identical earlier call of the same rollout."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant message and the observation that follows it."""

    ids: tuple[int, ...]
    """Sampled token ids, the end-of-turn token included when there is one. Never empty."""
    text: str
    """The message, decoded for reading and parsing only."""
    kind: TurnKind
    finish: FinishReason = FinishReason.STOP
    calls: tuple[Call, ...] = ()
    logps: tuple[float, ...] | None = None
    """Log-probability of every sampled token under the sampling policy, in nats; `None` if the engine gives none."""
    observation_ids: tuple[int, ...] = ()
    """Ids the environment appended after the message (template tokens and the next generation prompt included)."""
    observation: str = ""
    """The observation's text, without template tokens."""
    advantages: tuple[float, ...] | None = None
    """Advantage of every sampled token. `None` means never scored, `0.0` means scored and without signal."""

    def __post_init__(self):
        if not self.ids:
            raise RolloutError(
                "`ids` must hold at least one sampled token: got none. Drop the turn, or record its ids."
            )
        for name in ("logps", "advantages"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.ids):
                raise RolloutError(
                    f"`{name}` must have one entry per sampled token ({len(self.ids)}): got {len(values)}. "
                    "Pass `None` where a turn has no such values."
                )


T = TypeVar("T")


def sampled_parts(turns: Iterable[Turn], values: Sequence[T]) -> Iterator[Sequence[T]]:
    """
    What belongs to the sampled tokens of every turn.

    Args:
        turns (`Iterable[Turn]`):
            Turns of a rollout, in order.
        values (`Sequence`):
            One value per token of the completion, observations included; what lies beyond the last turn is ignored.

    Yields:
        `Sequence`: One value per sampled token of the turn.
    """
    start = 0
    for turn in turns:
        yield values[start : start + len(turn.ids)]
        start += len(turn.ids) + len(turn.observation_ids)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One complete interaction, prompt to stop."""

    question_id: str
    question: str
    answers: tuple[str, ...]
    """Gold answers; any of them is right."""
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    stop: StopReason
    answer: str | None = None
    """The extracted answer; `None` when the policy gave none."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Value of every reward function by name; `None` marks a reward that could not be computed."""
    question_kind: str | None = None
    sample: int = 0
    """Index within its group."""
    error: str | None = None
    """What failed, for `StopReason.FAILED`."""
    extras: Mapping[str, object] = field(default_factory=dict)
    """Free-form provenance: step, index manifest, policy."""

    def __post_init__(self):
        if (self.stop is StopReason.FAILED) != (self.error is not None):
            raise RolloutError(
                "`error` must be given exactly when `stop` is `failed`: "
                f"got stop={self.stop.value!r}, error={self.error!r}. Set both or neither."
            )

    @property
    def completion_ids(self) -> list[int]:
        """Everything after the prompt, observations included."""
        return [token for turn in self.turns for token in (*turn.ids, *turn.observation_ids)]

    @property
    def sampled_mask(self) -> list[int]:
        """1 for tokens the policy sampled, 0 for observations; aligned with `completion_ids`."""
        return [flag for turn in self.turns for flag in (*(1 for _ in turn.ids), *(0 for _ in turn.observation_ids))]

    @property
    def turn_ids(self) -> list[int]:
        """Index of the turn that sampled each token, -1 for observations; aligned with `completion_ids`."""
        return [
            index
            for number, turn in enumerate(self.turns)
            for index in (*(number for _ in turn.ids), *(-1 for _ in turn.observation_ids))
        ]

    @property
    def logps(self) -> list[float] | None:
        """Sampling log-probabilities along `completion_ids`, 0.0 at observations; `None` if any turn has none."""
        if not self.turns or any(turn.logps is None for turn in self.turns):
            return None
        return [value for turn in self.turns for value in (*(turn.logps or ()), *(0.0 for _ in turn.observation_ids))]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy sampled."""
        return sum(len(turn.ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one prompt."""

    rollouts: tuple[Rollout, ...]

    def __post_init__(self):
        ids = {rollout.question_id for rollout in self.rollouts}
        if len(ids) != 1:
            raise RolloutError(
                f"`rollouts` of a group must answer one question: got question ids {sorted(ids)}. "
                "Build one group per question."
            )

    @property
    def question_id(self) -> str:
        """Question every rollout of the group answers."""
        return self.rollouts[0].question_id
