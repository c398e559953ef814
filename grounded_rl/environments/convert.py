"""Rollouts recorded by other code, as `Rollout`s."""

from __future__ import annotations

import re
from collections.abc import Mapping

from grounded_rl.environments.formats import TRUNCATED_CALL
from grounded_rl.environments.parsing import read_turn
from grounded_rl.environments.tags import spans
from grounded_rl.errors import RolloutError
from grounded_rl.rollouts.types import (
    Call,
    CallStatus,
    FinishReason,
    Rollout,
    ShownPassage,
    StopReason,
    Turn,
    TurnKind,
)

# What the host inserts between turns. A result that does not follow a call was invented by the policy.
_INSERTED = re.compile(
    r"(?<=</search>)\n\n<information>(?P<result>.*?)</information>\n\n"
    r"|\nMy previous action is invalid\..*?Let me try again\.\n",
    re.DOTALL,
)
_PASSAGE = re.compile(r"^Doc \d+\(Title: (?:\"(.*?)\"|(.*?))\) ", re.MULTILINE)


def rollout_from_search_r1(record: Mapping) -> Rollout:
    """
    Rollout from an evaluation record of Search-R1.

    The record holds text only; token ids are the bytes of the text, so lengths are not those of the policy's
    tokenizer. What the host did (answered a call, refused a turn) is taken from the record, not decided again.

    Args:
        record (`Mapping`):
            Record with `id`, `question`, `golden_answers` and `output`, the latter with `query` (the prompt),
            `final_response` (everything after it) and `stop_reason`.

    Returns:
        [`Rollout`]: With the host's own `em` and `pred` in `extras`.

    Raises:
        `RolloutError`: If a field is missing.
    """
    missing = [name for name in ("id", "question", "golden_answers", "output") if name not in record]
    missing += [name for name in ("query", "final_response") if name not in record.get("output", {})]
    if missing:
        raise RolloutError(
            f"`record` must hold a Search-R1 evaluation record: got one without {missing}. Check the file's origin."
        )
    output = record["output"]
    cut = output.get("stop_reason") == "length"
    response = output["final_response"]
    turns: list[Turn] = []
    position = 0
    for match in _INSERTED.finditer(response):
        turns.append(_host_turn(response[position : match.start()], match))
        position = match.end()
    rest = response[position:]
    answer = None
    if rest.strip():
        reading = read_turn(rest, format="search_r1", complete=not cut)
        calls = tuple(Call(call.query, CallStatus.NOT_EXECUTED) for call in reading.calls)
        finish = FinishReason.LENGTH if cut else FinishReason.STOP
        turns.append(Turn(_ids(rest), rest, reading.kind, finish, calls))
        answer = reading.answer
    ended = bool(turns) and turns[-1].kind is TurnKind.ANSWER and not cut
    return Rollout(
        question_id=str(record["id"]),
        question=record["question"],
        answers=tuple(record["golden_answers"]),
        prompt_ids=_ids(output["query"]),
        turns=tuple(turns),
        stop=StopReason.ANSWER if ended else StopReason.LENGTH if cut else StopReason.TURN_LIMIT,
        answer=answer,
        extras={"em": output.get("metric_score", {}).get("em"), "pred": output.get("pred")},
    )


def _ids(text: str) -> tuple[int, ...]:
    return tuple(text.encode("utf-8", "replace"))


def _host_turn(text: str, inserted: re.Match[str]) -> Turn:
    """A turn the host answered, with a result or with its notice that the turn was of no use."""
    reading = read_turn(text, format="search_r1")
    result = inserted.group("result")
    if result is None:
        errors = [error for call in reading.calls if (error := call.error) and error != TRUNCATED_CALL]
        calls = (Call(None, CallStatus.REJECTED, error=errors[0] if errors else "invalid_syntax"),)
        kind = TurnKind.MALFORMED
    else:
        queries = spans(text, "search")
        passages = _passages(result)
        status = CallStatus.OK if passages else CallStatus.EMPTY
        # The host runs the first pair of tags, whatever else the turn holds.
        calls = (Call(queries[0][1].strip() if queries else None, status, passages),)
        kind = TurnKind.SEARCH
    return Turn(
        ids=_ids(text) or (0,),
        text=text,
        kind=kind,
        calls=calls,
        observation_ids=_ids(inserted.group()),
        observation=inserted.group(),
    )


def _passages(result: str) -> tuple[ShownPassage, ...]:
    heads = list(_PASSAGE.finditer(result))
    ends = [head.start() for head in heads[1:]] + [len(result)]
    return tuple(
        ShownPassage(id=str(number), title=head.group(1) or head.group(2) or "", text=result[head.end() : end].strip())
        for number, (head, end) in enumerate(zip(heads, ends, strict=True))
    )
