"""
Builders that make a case one line.

`make_rollout("miss hit right")` reads: a search that finds nothing of use, one whose passage holds the answer, the
right answer. Words may be mixed with `Turn` objects wherever a test needs a text of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from grounded_rl.rollouts import (
    Call,
    CallStatus,
    FinishReason,
    Group,
    Rollout,
    ShownPassage,
    StopReason,
    Turn,
    TurnKind,
)

GOLD = "Paris"
WRONG = "Lyon"
TYPE_SCRIPTS = {"A": "hit right", "B": "hit wrong", "C": "miss wrong", "D": "right"}
"""One script per diagnosis type."""


def make_passage(text: str, *, title: str = "Title", passage_id: str = "p0") -> ShownPassage:
    """A passage with a score."""
    return ShownPassage(passage_id, title, text, score=1.0)


def search_turn(
    *passages: str | ShownPassage,
    query: str = "capital of France",
    status: CallStatus | None = None,
    ids: Sequence[int] = (1, 2, 3),
    text: str | None = None,
    advantages: Sequence[float] | None = None,
    logps: Sequence[float] | None = None,
) -> Turn:
    """A turn with one search that delivered `passages` (`EMPTY` without any)."""
    shown = tuple(
        make_passage(passage, passage_id=f"p{number}") if isinstance(passage, str) else passage
        for number, passage in enumerate(passages)
    )
    status = status or (CallStatus.OK if shown else CallStatus.EMPTY)
    if text is None:
        text = f'<tool_call>{{"name": "search", "arguments": {{"query": "{query}"}}}}</tool_call>'
    return Turn(
        ids=tuple(ids),
        text=text,
        kind=TurnKind.SEARCH,
        calls=(Call(query, status, shown),),
        observation_ids=(90, 91),
        observation="\n".join(passage.text for passage in shown),
        advantages=None if advantages is None else tuple(advantages),
        logps=None if logps is None else tuple(logps),
    )


def malformed_turn(*, text: str = "<tool_call>{oops</tool_call>", error: str = "invalid_json") -> Turn:
    """A turn whose only call cannot be executed."""
    return Turn(
        ids=(4, 5, 6),
        text=text,
        kind=TurnKind.MALFORMED,
        calls=(Call(None, CallStatus.REJECTED, error=error),),
        observation_ids=(92,),
        observation="The call could not be read.",
    )


def answer_turn(answer: str, *, ids: Sequence[int] = (7, 8), advantages: Sequence[float] | None = None) -> Turn:
    """A turn that ends the rollout with an answer."""
    return Turn(
        ids=tuple(ids),
        text=f"<answer>{answer}</answer>",
        kind=TurnKind.ANSWER,
        advantages=None if advantages is None else tuple(advantages),
    )


def cut_turn() -> Turn:
    """A turn that reached the token budget before it opened a call or an answer."""
    return Turn(ids=(9, 9, 9), text="I wonder whether", kind=TurnKind.UNLABELLED, finish=FinishReason.LENGTH)


def _turn(word: str, gold: str, wrong: str) -> Turn:
    turns = {
        "hit": lambda: search_turn(f"The place in question is {gold}, as everyone knows."),
        "miss": lambda: search_turn("Nothing of use stands here."),
        "empty": lambda: search_turn(),
        "limit": lambda: search_turn(status=CallStatus.NOT_EXECUTED),
        "malformed": malformed_turn,
        "cut": cut_turn,
        "right": lambda: answer_turn(gold),
        "wrong": lambda: answer_turn(wrong),
    }
    return turns[word]()


def make_rollout(
    script: str | Sequence[str | Turn] = "hit right",
    *,
    question_id: str = "q0",
    answers: Sequence[str] = (GOLD,),
    answer: str | None = None,
    error: str | None = None,
    **fields: object,
) -> Rollout:
    """
    A rollout from a script of words and turns.

    Words: `hit`, `miss`, `empty` (search outcomes), `malformed`, `limit` (a search that was not executed), `cut`
    (token budget), `right`, `wrong` (answers). `stop` and `answer` follow from the last word unless they are given;
    `error` makes the rollout a failed one. `fields` go to `Rollout`.
    """
    parts = script.split() if isinstance(script, str) else list(script)
    gold = answers[0] if answers else GOLD
    turns = tuple(_turn(part, gold, WRONG) if isinstance(part, str) else part for part in parts)
    last = parts[-1] if parts and isinstance(parts[-1], str) else None
    stops = {"cut": StopReason.LENGTH, "limit": StopReason.TURN_LIMIT}
    return Rollout(
        question_id=question_id,
        question=str(fields.pop("question", "What is the capital of France?")),
        answers=tuple(answers),
        prompt_ids=(0,),
        turns=turns,
        stop=StopReason.FAILED if error is not None else StopReason(fields.pop("stop", stops.get(last, "answer"))),
        answer={"right": gold, "wrong": WRONG}.get(last, answer) if answer is None else answer,
        error=error,
        **fields,
    )


def make_group(*scripts: str | Sequence[str | Turn], question_id: str = "q0", **fields: object) -> Group:
    """A group with one rollout per script, `sample` counting up."""
    samples = count()
    return Group(
        tuple(make_rollout(script, question_id=question_id, sample=next(samples), **fields) for script in scripts)
    )
