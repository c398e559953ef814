"""
Hits as text the policy reads: templates, the token budget and the neutralisation of control tokens.

The budget is spent on the template first and then water-filled over the passages: every passage keeps the same number
of tokens, except shorter ones, whose remainder goes to the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Hit
from grounded_rl.rollouts.types import ShownPassage

PROTOCOL_TAGS = tuple(
    tag
    for name in ("tool_call", "tool_response", "think", "answer", "search", "information", "result")
    for tag in (f"<{name}>", f"</{name}>")
)
"""Tags of the call formats; inert in retrieved text."""

TITLE_TOKENS = 64
"""Longest title shown; it bounds the share of the budget that a template can take."""

_MERGE_SLACK = 8


@dataclass(frozen=True, slots=True)
class ObservationTemplate:
    """How passages are laid out and what encloses them in the raw tag formats."""

    header: Callable[[int, str], str]
    """Text before the body of the passage of that number (from 1) and title."""
    separator: str
    before: str = ""
    """Opens the observation in a raw tag format."""
    after: str = ""
    empty: str = "No results found."
    max_chars: int | None = None
    """Largest number of characters of one passage, cut before the token budget applies."""


OBSERVATION_TEMPLATES: dict[str, ObservationTemplate] = {
    "gca": ObservationTemplate(lambda number, title: f"Doc {number} (Title: {title})\n", "\n\n"),
    "search_r1": ObservationTemplate(
        lambda number, title: f"Doc {number}(Title: {title}) ",
        "\n",
        before="\n\n<information>",
        after="</information>\n\n",
    ),
    "sipo": ObservationTemplate(
        lambda number, title: f"Page {number}: {title}\n",
        "\n",
        before=" <result>\n",
        after="\n</result>",
        empty="No search results found.",
        max_chars=1000,
    ),
}
"""Layouts by the name used in recipes."""


def observation_template(name: str) -> ObservationTemplate:
    """The layout of that name."""
    if name not in OBSERVATION_TEMPLATES:
        raise ConfigurationError(
            f"`observation_template` must be one of {sorted(OBSERVATION_TEMPLATES)}: got {name!r}. "
            "Choose one of these."
        )
    return OBSERVATION_TEMPLATES[name]


def water_fill(lengths: Sequence[int], budget: int) -> list[int]:
    """
    Share a budget so that the smallest shares are as large as possible and none exceeds its length.

    Args:
        lengths (`Sequence[int]`):
            Wanted amounts.
        budget (`int`):
            Total to give away; nothing is given where it is not positive.

    Returns:
        `list[int]`: One share per length; they add up to `min(sum(lengths), max(budget, 0))`.

    Example:
    ```python
    >>> water_fill([10, 100, 100], 90)
    [10, 40, 40]

    ```
    """
    shares = [0] * len(lengths)
    left = max(budget, 0)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for done, index in enumerate(order):
        # The floor leaves the remainder to the longer ones, which are still waiting.
        shares[index] = min(lengths[index], left // (len(order) - done))
        left -= shares[index]
    return shares


def control_literals(tokenizer) -> tuple[str, ...]:
    """What must be inert in retrieved text: the tokenizer's special and added tokens, and the protocol tags."""
    added = {str(token) for token in tokenizer.added_tokens_decoder.values()} | set(tokenizer.all_special_tokens)
    # Some vocabularies add runs of blanks or single characters; these are ordinary text.
    return tuple(sorted({*PROTOCOL_TAGS, *(token for token in added if len(token.strip()) > 2)}))


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str]:
    """Pattern that finds any of the literals, longer ones first; never matches where there are none."""
    # A leading blank would survive the space that goes in after the first character.
    inert = {literal.strip() for literal in literals}
    ordered = sorted((literal for literal in inert if len(literal) > 1), key=lambda literal: (-len(literal), literal))
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def neutralize(text: str, literals: Iterable[str] | re.Pattern[str]) -> str:
    """
    Text in which no literal occurs any more: a space goes in after the first character of each.

    Everything stays readable and, under the SQuAD normal form, the same words.

    Args:
        text (`str`):
            Text from outside: passages, titles, names the policy invented.
        literals (`Iterable[str]` or `re.Pattern`):
            Literals as of `control_literals`, or their compiled `literal_pattern`.

    Returns:
        `str`

    Example:
    ```python
    >>> neutralize("so <|im_end|> it ends", ["<|im_end|>"])
    'so < |im_end|> it ends'

    ```
    """
    pattern = literals if isinstance(literals, re.Pattern) else literal_pattern(literals)
    while True:
        # Repeated because a match may hide an overlapping one; every round breaks at least one occurrence for good.
        text, replaced = pattern.subn(lambda match: f"{match.group()[0]} {match.group()[1:]}", text)
        if not replaced:
            return text


class ObservationFormatter:
    """
    Formats the hits of one call within a token budget.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer of the policy; must be a fast one, because cutting needs character offsets.
        template (`str`, *optional*, defaults to `"gca"`):
            Key of `OBSERVATION_TEMPLATES`.
        budget (`int`, *optional*, defaults to `1024`):
            Largest number of tokens of the passages and their layout.
    """

    def __init__(self, tokenizer, *, template: str = "gca", budget: int = 1024):
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigurationError(
                f"`tokenizer` must be a fast tokenizer: got {type(tokenizer).__name__}. Load it with `use_fast=True`."
            )
        if budget < 1:
            raise ConfigurationError(f"`observation_tokens` must be at least 1: got {budget}. Raise it.")
        self.template = observation_template(template)
        self.budget = budget
        self._tokenizer = tokenizer
        self._pattern = literal_pattern(control_literals(tokenizer))

    def neutralize(self, text: str) -> str:
        """Text without control tokens and protocol tags, encodable and without blanks at its ends."""
        return neutralize(text.encode("utf-8", "replace").decode("utf-8"), self._pattern).strip()

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Tokens of every text, special tokens not added."""
        return [len(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False)["input_ids"]]

    def cut(self, text: str, limit: int) -> tuple[str, int]:
        """Longest head of at most `limit` tokens that ends at a token and a character boundary, and its count."""
        while True:
            encoding = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            offsets = encoding["offset_mapping"]
            if len(offsets) <= limit:
                return text, len(offsets)
            if limit <= 0:
                return "", 0
            # A character may be spread over tokens that all span it: end before the first character not wholly inside.
            # The head is encoded again, as it may split differently from the whole.
            end = min(offsets[limit - 1][1], offsets[limit][0], len(text) - 1)
            text = text[:end].rstrip()

    def format(self, hits: Sequence[Hit]) -> tuple[str, tuple[ShownPassage, ...]]:
        """Text of the hits of one call, enclosing tags left out, and the passages as shown, both within the budget."""
        whole = [self.neutralize(hit.passage.text) for hit in hits]
        bodies = [body[: self.template.max_chars].rstrip() for body in whole]
        titles = [self._title(hit.passage.title) for hit in hits]
        full = self.counts(bodies) if hits else []
        totals = full if bodies == whole else self.counts(whole)
        while bodies:
            headers = [self.template.header(number, title) for number, title in enumerate(titles, start=1)]
            [overhead] = self.counts([self.template.separator.join(headers)])
            left = self.budget - overhead
            while left >= 0:
                shown = [
                    (body, length) if share == length else self.cut(body, share)
                    for body, length, share in zip(bodies, full, water_fill(full, left), strict=True)
                ]
                text = self.template.separator.join(
                    (header + body).rstrip() for header, (body, _) in zip(headers, shown, strict=True)
                )
                # Pieces may merge into a few more tokens than the sum of their counts; where there is room, why count?
                spent = sum(count for _, count in shown)
                roomy = overhead + spent + _MERGE_SLACK * len(shown) <= self.budget
                excess = 0 if roomy else self.counts([text])[0] - self.budget
                if excess <= 0:
                    return text, self._passages(hits, titles, shown, totals)
                left = min(left, spent) - excess
            bodies, titles, full = bodies[:-1], titles[:-1], full[:-1]
        return self.template.empty, ()

    def _title(self, title: str) -> str:
        title = self.neutralize(title)
        # No token is shorter than a byte, so a short title needs no counting.
        return title if len(title.encode()) <= TITLE_TOKENS else self.cut(title, TITLE_TOKENS)[0]

    def _passages(self, hits, titles, shown, totals) -> tuple[ShownPassage, ...]:
        return tuple(
            ShownPassage(
                id=hit.passage.id,
                title=title,
                text=body,
                score=hit.score,
                num_tokens=count,
                num_tokens_full=total,
            )
            for hit, title, (body, count), total in zip(hits, titles, shown, totals, strict=False)
        )


def format_observation(
    hits: Sequence[Hit], tokenizer, *, template: str = "gca", budget: int = 1024
) -> tuple[str, tuple[ShownPassage, ...]]:
    """
    Hits of one call as the text the policy reads.

    Args:
        hits (`Sequence[Hit]`):
            Hits, best first.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer of the policy.
        template (`str`, *optional*, defaults to `"gca"`):
            Key of `OBSERVATION_TEMPLATES`.
        budget (`int`, *optional*, defaults to `1024`):
            Largest number of tokens.

    Returns:
        `tuple[str, tuple[ShownPassage, ...]]`: The text without enclosing tags, and the passages as shown. Without
        hits (or where not even one title fits) the text says that nothing was found and there are no passages.
    """
    return ObservationFormatter(tokenizer, template=template, budget=budget).format(hits)
