"""What a reader of a rollout wants to see marked: where an answer stands in a text, and which text a token wrote."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

from grounded_rl.rollouts import ShownPassage, Turn
from grounded_rl.text import Matcher, as_answers, contains_alias, normalize_answer

Span = tuple[int, int]
"""Half-open range of characters."""

Decode = Callable[[Sequence[int]], str]

_PUNCTUATION = frozenset(string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_WORD = re.compile(r"\S+")
_MAX_UNDECODED = 8
"""Longest run of tokens that together make one character; byte-level tokens need at most four."""


def normalize_with_offsets(text: str) -> tuple[str, list[int]]:
    """
    `normalize_answer(text)`, and for each of its characters the index in `text` that it comes from.

    A space between words is given the index of the character before it.
    """
    lowered = text.lower()
    if len(lowered) == len(text):
        sources: Sequence[int] = range(len(text))
    else:  # a few characters have a lower-case form of two: "İ"
        sources = [index for index, character in enumerate(text) for _ in character.lower()]
    kept = [
        (character, index) for character, index in zip(lowered, sources, strict=True) if character not in _PUNCTUATION
    ]
    # Blanks of the same length in place of articles keep the characters aligned with their sources.
    blanked = _ARTICLES.sub(lambda match: " " * len(match.group()), "".join(character for character, _ in kept))
    characters: list[str] = []
    offsets: list[int] = []
    for word in _WORD.finditer(blanked):
        if characters:
            characters.append(" ")
            offsets.append(offsets[-1])
        characters.append(word.group())
        offsets += [kept[index][1] for index in range(*word.span())]
    return "".join(characters), offsets


def alias_spans(text: str, answers: str | Iterable[str], *, matcher: Matcher = "substring") -> list[Span]:
    """
    Where the aliases stand that make `contains_alias(text, answers)` true.

    Args:
        text (`str`):
            Text as it was shown.
        answers (`str` or `Iterable[str]`):
            Aliases.
        matcher (`str`, *optional*, defaults to `"substring"`):
            `"substring"` or `"word_boundary"`.

    Returns:
        `list[tuple[int, int]]`: Disjoint ranges of characters of `text`, in order; empty exactly when nothing matches.

    Example:
    ```python
    >>> alias_spans("Born in the U.S. in 1950", ["us"])
    [(12, 15)]

    ```
    """
    answers = as_answers(answers)
    # The check is many times faster than the offsets, and most passages hold no answer.
    if not contains_alias(text, answers, matcher=matcher):
        return []
    form, offsets = normalize_with_offsets(text)
    edge = (r"(?<!\S)", r"(?!\S)") if matcher == "word_boundary" else ("", "")
    found = []
    for alias in {normalize_answer(answer) for answer in answers} - {""}:
        for match in re.finditer(edge[0] + re.escape(alias) + edge[1], form):
            found.append((offsets[match.start()], offsets[match.end() - 1] + 1))
    return _merged(found)


def _merged(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


@lru_cache(maxsize=4096)
def _passage_spans(title: str, text: str, answers: tuple[str, ...], matcher: Matcher) -> tuple[list[Span], list[Span]]:
    # Diagnosis matches title and body as one text, so an alias may begin in the title and end in the body.
    border = len(title)
    spans = alias_spans(f"{title}\n{text}", answers, matcher=matcher)
    in_title = [(start, min(end, border)) for start, end in spans if start < border]
    in_text = [(max(start - border - 1, 0), end - border - 1) for start, end in spans if end > border + 1]
    return in_title, in_text


def passage_spans(
    passage: ShownPassage, answers: Sequence[str], *, matcher: Matcher = "substring"
) -> tuple[list[Span], list[Span]]:
    """Where the answer stands in the title and in the text of a passage; both empty where it is no hit."""
    return _passage_spans(passage.title, passage.text, tuple(answers), matcher)


def cut_at_spans(text: str, spans: Iterable[Span]) -> list[tuple[str, bool]]:
    """Text as pieces, each with whether it lies in a span; the pieces join to `text`, none is empty."""
    pieces = []
    position = 0
    for start, end in spans:
        pieces += [(text[position:start], False), (text[start:end], True)]
        position = end
    pieces.append((text[position:], False))
    return [piece for piece in pieces if piece[0]]


def token_texts(turn: Turn, decode: Decode | None = None) -> tuple[list[str], bool]:
    """
    Text that every sampled token of a turn stands for.

    Args:
        turn (`Turn`):
            A turn.
        decode (`Callable[[Sequence[int]], str]`, *optional*):
            Decoder of the policy's tokenizer. Without it the turn's text is spread evenly over its tokens.

    Returns:
        `tuple[list[str], bool]`: One text per sampled token, and whether they are exact. Of several tokens that write
        one character together, the last has the character and the others have none.
    """
    if decode is None:
        count, length = len(turn.ids), len(turn.text)
        edges = [number * length // count for number in range(count + 1)]
        return [turn.text[start:end] for start, end in pairwise(edges)], False
    texts: list[str] = []
    pending: list[int] = []
    for token in turn.ids:
        pending.append(token)
        text = decode(pending)
        if text.endswith("\ufffd") and len(pending) < _MAX_UNDECODED:
            texts.append("")
            continue
        texts.append(text)
        pending = []
    if pending:
        texts[-1] = decode(pending)
    return texts, True


def printable(text: str) -> str:
    """
    Text that cannot steer a terminal: control characters become visible, line breaks and tabs stay.

    C0 controls and DEL are shown as their pictures ("␛"); C1 controls, bidirectional overrides and lone surrogates as
    "�".
    """
    return text.translate(_VISIBLE) if not text.isascii() or not text.isprintable() else text


def _visible() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    table[0x7F] = "\u2421"
    hidden = [*range(0x80, 0xA0), *range(0xD800, 0xE000)]
    hidden += [code for code in range(0x2000, 0x2070) if unicodedata.bidirectional(chr(code)) in _OVERRIDES]
    table.update(dict.fromkeys(hidden, "\ufffd"))
    return table


_OVERRIDES = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
_VISIBLE = _visible()
