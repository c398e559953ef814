"""
Answer text: normalisation, exact match, token F1 and alias matching.

`exact_match` is the reward and the headline metric: the SQuAD normaliser on both sides, no Unicode folding. Every
looser rule has a name of its own (`exact_match_folded`, `exact_match_numeric`, …): two rules are never mixed silently.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

Matcher = Literal["substring", "word_boundary"]

_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation))
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_YES_NO = frozenset({"yes", "no", "noanswer"})

_DASHES = "‐‑‒–—―−﹘﹣－"
_QUOTES = {"‘": "'", "’": "'", "‚": "'", "‛": "'", "′": "'", "“": '"', "”": '"', "„": '"', "‟": '"', "″": '"'}
_FOLDS = str.maketrans({**dict.fromkeys(_DASHES, "-"), **_QUOTES})

_UNITS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NUMBER_WORDS = {word: value for value, word in enumerate(_UNITS)}
_NUMBER_WORDS |= {word: 10 * value for value, word in enumerate(_TENS, start=2)}
_NUMBER_WORD = re.compile(rf"\b(?:(?:{'|'.join(_TENS)})[-\s](?:{'|'.join(_UNITS[1:10])})|{'|'.join(_NUMBER_WORDS)})\b")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")


def as_answers(answers: str | Iterable[str]) -> list[str]:
    """Gold answers as a list; a plain string is one answer, not a sequence of characters."""
    return [answers] if isinstance(answers, str) else [str(answer) for answer in answers]


def normalize_answer(s: str) -> str:
    """
    SQuAD normal form: lower case, ASCII punctuation deleted, articles replaced by a space, whitespace collapsed.

    Non-ASCII dashes, quotes and accents stay as they are; Unicode spaces collapse. It may be empty: "The", "!!".

    Example:
    ```python
    >>> normalize_answer("The  U.S. Army")
    'us army'

    ```
    """
    return " ".join(_ARTICLES.sub(" ", s.lower().translate(_PUNCTUATION)).split())


def fold_unicode_text(s: str) -> str:
    """Compatibility form without accents, with ASCII dashes and quotes: `"1914–1918"` becomes `"1914-1918"`."""
    decomposed = unicodedata.normalize("NFKD", s.translate(_FOLDS))
    return "".join(character for character in decomposed if not unicodedata.combining(character)).translate(_FOLDS)


def fold_number_words(s: str) -> str:
    """Lower-cased text whose number words below one hundred are digits: `"Twenty-one"` becomes `"21"`."""

    def digits(match: re.Match[str]) -> str:
        return str(sum(_NUMBER_WORDS[part] for part in re.split(r"[-\s]", match.group())))

    return _NUMBER_WORD.sub(digits, s.lower())


def exact_match(prediction: str | None, answers: str | Iterable[str], *, empty_matches: bool = False) -> bool:
    """
    Whether the normalised prediction equals a normalised answer.

    Args:
        prediction (`str` or `None`):
            Extracted answer; `None` (no answer) matches nothing.
        answers (`str` or `Iterable[str]`):
            Gold answers; one equal answer suffices.
        empty_matches (`bool`, *optional*, defaults to `False`):
            Let two texts that both normalise to nothing match, as Search-R1 and verl do. It pays for empty answers
            wherever an alias is an article or punctuation.

    Returns:
        `bool`: `False` for an empty list of answers.

    Example:
    ```python
    >>> exact_match("the Cat.", ["a cat"]), exact_match("", ["The"])
    (True, False)

    ```
    """
    return matched_answer(prediction, answers, empty_matches=empty_matches) is not None


def matched_answer(prediction: str | None, answers: str | Iterable[str], *, empty_matches: bool = False) -> str | None:
    """First gold answer that makes `exact_match` true, for audits of suspicious aliases; `None` if there is none."""
    if prediction is None:
        return None
    form = normalize_answer(prediction)
    if not form and not empty_matches:
        return None
    return next((answer for answer in as_answers(answers) if normalize_answer(answer) == form), None)


def _folded_form(s: str) -> str:
    """Folded normal form that keeps articles where nothing else would be left ("A", "The The")."""
    folded = fold_unicode_text(s)
    return normalize_answer(folded) or " ".join(folded.lower().translate(_PUNCTUATION).split())


def exact_match_folded(prediction: str | None, answers: str | Iterable[str], *, number_words: bool = False) -> bool:
    """
    Exact match after Unicode folding; an extra column, never the reward.

    Folds accents, dashes, quotes and full-width forms, and keeps articles where a text consists of nothing else.

    Args:
        prediction (`str` or `None`):
            Extracted answer.
        answers (`str` or `Iterable[str]`):
            Gold answers.
        number_words (`bool`, *optional*, defaults to `False`):
            Also compare number words below one hundred as digits ("four" equals "4").

    Returns:
        `bool`: `False` where either side is empty.
    """
    if prediction is None:
        return False

    def form(s: str) -> str:
        return _folded_form(fold_number_words(fold_unicode_text(s)) if number_words else s)

    folded = form(prediction)
    return bool(folded) and any(form(answer) == folded for answer in as_answers(answers))


def _number(s: str) -> Fraction | None:
    """Value of a text that is one decimal number, thousands separators allowed."""
    text = fold_unicode_text(s).strip()
    # The length bound keeps an adversarial million-digit answer from becoming a million-digit integer.
    if len(text) > 40 or not _NUMBER.fullmatch(text) or not text[-1:].isdigit():
        return None
    return Fraction(text.replace(",", ""))


def exact_match_numeric(prediction: str | None, answers: str | Iterable[str]) -> bool:
    """
    Exact match that compares numbers by value: `"1.0"` equals `"1"`, `"3.5"` is not `"35"`, `"-5"` is not `"5"`.

    Wherever one of the two is not a plain number, this is `exact_match`. An extra column, never the reward.
    """
    if prediction is None:
        return False
    value = _number(prediction)
    for answer in as_answers(answers):
        gold = _number(answer)
        if value is not None and gold is not None:
            if value == gold:
                return True
        elif exact_match(prediction, [answer]):
            return True
    return False


def token_f1(prediction: str | None, answers: str | Iterable[str]) -> float:
    """
    Largest token F1 over the answers, on the SQuAD normal form.

    Where either side is "yes", "no" or "noanswer" the value is 1 for equality and 0 otherwise (the HotpotQA rule).
    `0.0` where either side is empty.
    """
    if prediction is None:
        return 0.0
    form = normalize_answer(prediction)
    return max((_pair_f1(form, normalize_answer(answer)) for answer in as_answers(answers)), default=0.0)


def _pair_f1(form: str, gold: str) -> float:
    if form in _YES_NO or gold in _YES_NO:
        return float(form == gold)
    left, right = form.split(), gold.split()
    common = sum((Counter(left) & Counter(right)).values())
    return 2 * common / (len(left) + len(right)) if common else 0.0


def contains_alias(
    text: str,
    answers: str | Iterable[str],
    *,
    matcher: Matcher = "substring",
    fold_unicode: bool = False,
    empty_matches: bool = False,
) -> bool:
    """
    Whether the normalised text contains a normalised alias.

    Args:
        text (`str`):
            Text to search, unescaped.
        answers (`str` or `Iterable[str]`):
            Aliases; one contained alias suffices. Aliases that normalise to nothing are ignored.
        matcher (`str`, *optional*, defaults to `"substring"`):
            `"substring"` finds "us" in "house"; `"word_boundary"` finds whole words only.
        fold_unicode (`bool`, *optional*, defaults to `False`):
            Fold accents, dashes and quotes on both sides first.
        empty_matches (`bool`, *optional*, defaults to `False`):
            Let an alias that normalises to nothing be contained in every text, as in Search-R1's check.

    Returns:
        `bool`: `False` for an empty list of aliases.

    Raises:
        `ValueError`: If `matcher` is unknown.

    Example:
    ```python
    >>> contains_alias("house music in Russia", ["US"]), contains_alias("house music", ["US"], matcher="word_boundary")
    (True, False)

    ```
    """
    if matcher not in ("substring", "word_boundary"):
        raise ValueError(
            f"`matcher` must be one of ['substring', 'word_boundary']: got {matcher!r}. Choose one of the two."
        )

    def form(s: str) -> str:
        return normalize_answer(fold_unicode_text(s) if fold_unicode else s)

    haystack = form(text)
    if matcher == "word_boundary":
        haystack = f" {haystack} "
    for alias in map(form, as_answers(answers)):
        if not alias:
            if empty_matches:
                return True
            continue
        if (f" {alias} " if matcher == "word_boundary" else alias) in haystack:
            return True
    return False
