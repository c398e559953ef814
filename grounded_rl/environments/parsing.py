"""
Reading one assistant message: is it a search, a failed attempt at one, an answer, or cut off before it was any of
these?

Only text that the policy wrote in this turn is read, never the prompt or an observation. Nothing here raises on any
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grounded_rl.environments.formats import ParsedCall, ToolFormat, tool_format
from grounded_rl.environments.hosts import at2po_format_ok
from grounded_rl.environments.tags import Thinking, last_boxed, spans, split_thinking, strip_end_tokens
from grounded_rl.rollouts.types import FinishReason, Turn, TurnKind


@dataclass(frozen=True, slots=True)
class TurnReading:
    """What one assistant message says."""

    text: str
    """The message without end-of-turn tokens."""
    kind: TurnKind
    calls: tuple[ParsedCall, ...]
    """Calls in the order written, unreadable ones included."""
    answer: str | None
    """Last answer of the message; `None` without one. Empty text is an (always wrong) answer."""
    format_ok: bool
    """Balanced thinking and either exactly one good call and no answer, or exactly one answer and no call."""
    complete: bool = True
    """The policy ended the turn itself; `False` if a token budget cut it off."""
    reasoning: str | None = None
    """Text of the closed thinking."""
    events: tuple[str, ...] = ()
    """Names of the counters this message increments, for instance `"call_in_unclosed_think"`."""


def read_turn(text: str, *, format: str = "qwen", complete: bool = True, opened_think: bool = False) -> TurnReading:
    """
    Read one assistant message.

    Calls and answers inside a closed `<think>` are text. After an unclosed `<think>` they count, and the event
    `"call_in_unclosed_think"` is recorded. A message with a call is a search (or, if no call can be executed,
    malformed) even when it also holds an answer. In a message with a call, an answer after an invented result is none.

    Args:
        text (`str`):
            Decoded message, without the prompt.
        format (`str`, *optional*, defaults to `"qwen"`):
            Key of `TOOL_FORMATS`.
        complete (`bool`, *optional*, defaults to `True`):
            The policy ended the turn itself. A call that a token budget cut off is never executable.
        opened_think (`bool`, *optional*, defaults to `False`):
            The prompt ended inside an open `<think>`.

    Returns:
        [`TurnReading`]

    Raises:
        `ConfigurationError`: If `format` is unknown. Never because of the text.

    Example:
    ```python
    >>> read_turn('<tool_call>{"name": "search", "arguments": {"query": "Lima"}}</tool_call>').calls[0].query
    'Lima'
    >>> read_turn("<think>easy</think><answer>Lima</answer>").answer
    'Lima'

    ```
    """
    syntax = tool_format(format)
    message = strip_end_tokens(text)
    thinking = split_thinking(message, opened=opened_think)
    calls = syntax.read_calls(thinking.content, complete)
    kind = _kind(calls, thinking.content, complete=complete, boxed=syntax.boxed)
    answer, invented = _answer(thinking.content, syntax, has_calls=bool(calls))
    return TurnReading(
        text=message,
        kind=kind,
        calls=calls,
        answer=answer,
        format_ok=complete
        and thinking.balanced
        and not invented
        and (bool(calls) or answer is not None)
        and _one_action(calls, thinking.content),
        complete=complete,
        reasoning=thinking.reasoning,
        events=_events(calls, thinking, invented),
    )


def _kind(calls: tuple[ParsedCall, ...], content: str, *, complete: bool, boxed: bool) -> TurnKind:
    if any(call.error is None for call in calls):
        return TurnKind.SEARCH
    if calls:
        return TurnKind.MALFORMED
    if complete or "<answer>" in content or (boxed and "\\boxed{" in content):
        return TurnKind.ANSWER
    return TurnKind.UNLABELLED


def _answer(content: str, syntax: ToolFormat, *, has_calls: bool) -> tuple[str | None, bool]:
    """The last answer, and whether the message contains an invented result."""
    invented_at = content.find(f"<{syntax.response_tag}>")
    scored = content[:invented_at] if has_calls and invented_at >= 0 else content
    if syntax.boxed:
        return last_boxed(scored), invented_at >= 0
    found = spans(scored, "answer")
    return (found[-1][1].strip() if found else None), invented_at >= 0


def _one_action(calls: tuple[ParsedCall, ...], content: str) -> bool:
    opened, closed = content.count("<answer>"), content.count("</answer>")
    if calls:
        return len(calls) == 1 and calls[0].error is None and opened == closed == 0
    return opened == closed == 1 and len(spans(content, "answer")) == 1


def _events(calls: tuple[ParsedCall, ...], thinking: Thinking, invented: bool) -> tuple[str, ...]:
    events = [call.error for call in calls if call.error is not None]
    if calls and thinking.unclosed:
        events.append("call_in_unclosed_think")
    if invented:
        events.append("invented_result")
    if calls and "<answer>" in thinking.content:
        events.append("answer_beside_call")
    return tuple(events)


def read_rollout(
    turns: Sequence[Turn], *, format: str = "qwen", opened_think: bool = False
) -> tuple[TurnReading, ...]:
    """Readings of recorded turns, from their texts."""
    return tuple(
        read_turn(turn.text, format=format, complete=turn.finish is FinishReason.STOP, opened_think=opened_think)
        for turn in turns
    )


def rollout_answer(turns: Sequence[Turn], *, format: str = "qwen", opened_think: bool = False) -> str | None:
    """Answer of the final turn, the only one that counts; `None` without one."""
    return read_rollout(turns[-1:], format=format, opened_think=opened_think)[0].answer if turns else None


def rollout_format_ok(turns: Sequence[Turn], *, format: str = "qwen", opened_think: bool = False) -> bool:
    """
    Whether a rollout keeps the format.

    Every turn before the last is exactly one good call, the last is exactly one answer and no call, and thinking is
    balanced throughout. In the boxed format the test of AT²PO on the whole response, results included, takes its
    place.
    """
    if tool_format(format).boxed:
        return at2po_format_ok("".join(turn.text + turn.observation for turn in turns))
    readings = read_rollout(turns, format=format, opened_think=opened_think)
    if not readings or not all(reading.format_ok for reading in readings):
        return False
    *earlier, last = readings
    return last.kind is TurnKind.ANSWER and all(reading.kind is TurnKind.SEARCH for reading in earlier)
