"""Plain-text scanning shared by all call formats: thinking, answer spans, boxes, end-of-turn tokens. Linear time."""

from __future__ import annotations

import re
from dataclasses import dataclass

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "</s>")
"""End-of-turn and end-of-text tokens of the supported model families, as they appear in decoded text."""

_THINK = re.compile(r"</?think>")
_BRACES = re.compile(r"\\boxed\{|\\[{}\\]|[{}]")


@dataclass(frozen=True, slots=True)
class Thinking:
    """A message split into reasoning and content."""

    content: str
    """What is left when closed thinking is taken out, stripped. Text after an unclosed `<think>` stays in."""
    reasoning: str | None
    """Text of the thinking, `None` if there is none or only blanks."""
    balanced: bool
    """Every `<think>` is closed before the next one opens, and nothing is closed that was not opened."""
    unclosed: bool
    """The last `<think>` is never closed."""


def split_thinking(text: str, *, opened: bool = False) -> Thinking:
    """
    Take closed thinking out of a message.

    A `</think>` closes the innermost place where thinking may have begun: the open `<think>` before it or, without
    one, the start of the message or the end of the previous thinking (models whose prompt opens the block never write
    the tag).

    Args:
        text (`str`):
            Decoded message, without the prompt.
        opened (`bool`, *optional*, defaults to `False`):
            The prompt ended inside an open `<think>`. A message that repeats the tag is still balanced.

    Returns:
        [`Thinking`]
    """
    content: list[str] = []
    reasoning: list[str] = []
    balanced = True
    start = 0  # first character not yet assigned
    think: int | None = 0 if opened else None  # where the reasoning of the open block begins
    for match in _THINK.finditer(text):
        if match.group() == "<think>":
            if think is None:
                content.append(text[start : match.start()])
                start, think = match.start(), match.end()
            elif not (opened and think == 0 and not text[: match.start()].strip()):
                balanced = False
            else:
                think = match.end()
            continue
        if think is None:
            balanced, think = False, start
        reasoning.append(text[think : match.start()])
        start, think = match.end(), None
    unclosed = think is not None
    content.append(text[start:])
    thoughts = "\n".join(reasoning).strip()
    return Thinking("\n".join(content).strip(), thoughts or None, balanced and not unclosed, unclosed)


def strip_end_tokens(text: str) -> str:
    """Message without the end-of-turn tokens (and blanks between them) at its end."""
    end = len(text)  # an index, because slicing once per token would be quadratic
    while True:
        last = end
        while last > 0 and text[last - 1].isspace():
            last -= 1
        token = next((token for token in END_TOKENS if text.endswith(token, 0, last)), None)
        if token is None:
            return text[:end]
        end = last - len(token)


def spans(text: str, tag: str) -> list[tuple[int, str]]:
    """Every `<tag>…</tag>`, left to right: where its content begins, and the content (may hold further `<tag>`s)."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    found, position = [], 0
    while (start := text.find(opening, position)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        found.append((start, text[start:end]))
        position = end + len(closing)
    return found


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}` with balanced braces, stripped; `None` if there is none."""
    stack: list[int] = []  # content start of a box, or -1 for any other brace
    best: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "\\boxed{":
            stack.append(match.end())
        elif token == "{":
            stack.append(-1)
        elif token == "}" and stack:
            start = stack.pop()
            if start >= 0 and (best is None or start > best[0]):
                best = (start, match.start())
    return None if best is None else text[best[0] : best[1]].strip()
