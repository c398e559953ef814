"""
A world of bare token ids for tests of the rollout loop and of trees: no tokenizer, no index.

The last id of a turn says what it does: `CALL` searches for its other ids, `BROKEN` is a call that cannot be read,
`ANSWER` answers with its first id. Observations are `(OBSERVATION,)`, the prompt is `(PROMPT,)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grounded_rl.data.rows import Question
from grounded_rl.environments.formats import ParsedCall
from grounded_rl.environments.parsing import TurnReading
from grounded_rl.environments.search import Observation
from grounded_rl.errors import RetrievalError
from grounded_rl.retrieval.base import Hit, Passage
from grounded_rl.rollouts import Call, CallStatus, FinishReason, Turn, TurnKind
from grounded_rl.sampling import Completion, RolloutRequest, RolloutSampler

PROMPT, CALL, ANSWER, BROKEN, OBSERVATION = 1, 2, 3, 4, 5
FIRST_WORD = 10
"""Ids from here on are words."""
ENDS = (CALL, ANSWER, BROKEN)


class TokenEnvironment:
    """Stands in for `SearchEnvironment`."""

    top_k = 1

    def __init__(self, max_turns: int = 4) -> None:
        self.max_turns = max_turns

    def prompt_ids(self, question: str) -> list[int]:
        return [PROMPT]

    def read(self, ids: Sequence[int], *, finish: FinishReason) -> TurnReading:
        complete = finish is FinishReason.STOP
        text = " ".join(map(str, ids))
        kinds = {CALL: TurnKind.SEARCH, BROKEN: TurnKind.MALFORMED, ANSWER: TurnKind.ANSWER}
        kind = kinds[ids[-1]] if complete else TurnKind.UNLABELLED
        calls = {
            TurnKind.SEARCH: (ParsedCall(query=text),),
            TurnKind.MALFORMED: (ParsedCall(query=None, error="invalid_json"),),
        }
        answer = str(ids[0]) if kind is TurnKind.ANSWER else None
        return TurnReading(text, kind, calls.get(kind, ()), answer, kind is not TurnKind.MALFORMED, complete)

    def executable_queries(self, reading: TurnReading) -> list[str]:
        return [call.query for call in reading.calls if call.query is not None]

    def observe(self, reading, responses, *, turns_left, cached=()) -> Observation:
        if reading.kind is TurnKind.MALFORMED:
            calls = (Call(None, CallStatus.REJECTED, error="invalid_json"),)
        else:
            calls = tuple(
                Call(call.query, CallStatus.EMPTY, cached=flag)
                for call, flag in zip(reading.calls, cached, strict=True)
            )
        return Observation((OBSERVATION,), f"{turns_left} left", calls)

    def unanswered_calls(self, reading: TurnReading) -> tuple[Call, ...]:
        return tuple(Call(call.query, CallStatus.NOT_EXECUTED) for call in reading.calls)

    def answer(self, turns: Sequence[Turn]) -> str | None:
        return str(turns[-1].ids[0]) if turns[-1].kind is TurnKind.ANSWER else None


class FakeRetriever:
    """Finds one passage for everything, except queries that hold a word of `failing`."""

    def __init__(self, failing: Sequence[int] = ()) -> None:
        self.failing = {str(word) for word in failing}
        self.batches: list[list[str]] = []

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        if any(self.failing & set(query.split()) for query in queries):
            raise RetrievalError("the index is down")
        return [[Hit(Passage(id="p", title="Title", text="text"), 1.0)] for _ in queries]


class FunctionEngine:
    """Samples what a function of context and rollout number says; remembers every context it was given."""

    def __init__(self, policy: Callable[[Sequence[int], int], tuple[list[int], list[float] | None]]) -> None:
        self.policy = policy
        self.seen: dict[int, list[list[int]]] = {}
        self.batches: list[list[int]] = []

    def generate(self, contexts: Sequence[Sequence[int]], rollouts: Sequence[int]) -> list[Completion]:
        self.batches.append(list(rollouts))
        completions = []
        for context, rollout in zip(contexts, rollouts, strict=True):
            self.seen.setdefault(rollout, []).append(list(context))
            ids, logps = self.policy(context, rollout)
            finish = FinishReason.STOP if ids[-1] in ENDS else FinishReason.LENGTH
            completions.append(Completion(ids, finish, logps))
        return completions


def make_sampler(*, max_turns: int = 4, failing: Sequence[int] = (), **options) -> RolloutSampler:
    """A rollout loop over the token world."""
    options = {"on_search_failure": "mask", **options}
    return RolloutSampler(TokenEnvironment(max_turns), FakeRetriever(failing), **options)


def make_requests(count: int = 1) -> list[RolloutRequest]:
    """One request per question."""
    return [RolloutRequest(Question(f"q{number}", "?", ("10",)), (PROMPT,)) for number in range(count)]
