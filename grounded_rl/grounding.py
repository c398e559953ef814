"""
What a rollout did with the evidence: hits, diagnosis, segments, retrievability.

|                     | right answer      | wrong answer |
|---------------------|-------------------|--------------|
| evidence delivered  | `A` grounded      | `B` misused  |
| never delivered     | `D` parametric    | `C` missed   |

Evidence counts as the policy received it: delivered passages after truncation. The question, queries, thinking, error
texts and results the policy invented never count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from grounded_rl.rollouts.types import Group, Rollout, ShownPassage, TurnKind
from grounded_rl.text import Matcher, contains_alias, exact_match, normalize_answer

ORACLE_TEMPLATES = ("{question}", "{alias}", "{question} {alias}")
"""Queries that probe whether the corpus holds an answer; those with `{alias}` may use the gold answers."""

MAX_ORACLE_ALIASES = 3

_PLACEHOLDER = re.compile(r"\{(question|alias)\}")


class RolloutType(StrEnum):
    """Diagnosis of a rollout, see the table of the module."""

    A = "A"
    """Evidence delivered, answer right."""
    B = "B"
    """Evidence delivered, answer wrong."""
    C = "C"
    """No evidence, answer wrong."""
    D = "D"
    """No evidence, answer right: known or guessed."""


class Segment(StrEnum):
    """Function of a turn."""

    V_SEARCH = "v_search"
    """Valid search up to and including the first hit."""
    R_SEARCH = "r_search"
    """Any other search, and any failed attempt at one."""
    ANSWER = "answer"
    """The answer turn."""
    NONE = "none"
    """Cut off before it was any of these; receives no residual credit."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Signals of one rollout."""

    hit: bool
    """Some delivered response holds an alias (H)."""
    first_hit: int | None
    """Index of the first such response among the responses of the rollout, from 0 (k*); `None` without a hit."""
    first_hit_turn: int | None
    """Index of the turn that received it, from 0; `None` without a hit."""
    correct: bool
    """Exact match of the extracted answer (C), never a shaped reward."""

    @property
    def type(self) -> RolloutType:
        """Cell of the table."""
        if self.hit:
            return RolloutType.A if self.correct else RolloutType.B
        return RolloutType.D if self.correct else RolloutType.C


def passages_hit(
    passages: Sequence[ShownPassage],
    answers: Sequence[str],
    *,
    matcher: Matcher = "substring",
    fold_unicode: bool = False,
    titles: bool = True,
) -> bool:
    """Whether title and text of one of the passages contain an alias; no match runs across two passages."""
    return any(
        contains_alias(
            f"{passage.title}\n{passage.text}" if titles else passage.text,
            answers,
            matcher=matcher,
            fold_unicode=fold_unicode,
        )
        for passage in passages
    )


def diagnose(
    rollout: Rollout, *, matcher: Matcher = "substring", fold_unicode: bool = False, titles: bool = True
) -> Diagnosis:
    """
    Diagnosis of a rollout from its answer and the passages it received.

    Args:
        rollout ([`Rollout`]):
            The rollout.
        matcher (`str`, *optional*, defaults to `"substring"`):
            How aliases are looked for, see [`~text.contains_alias`].
        fold_unicode (`bool`, *optional*, defaults to `False`):
            Fold accents, dashes and quotes when looking for aliases. The answer is always judged by the official
            match.
        titles (`bool`, *optional*, defaults to `True`):
            Look in the titles too.

    Returns:
        [`Diagnosis`]
    """
    correct = exact_match(rollout.answer, rollout.answers)
    response = 0
    for number, turn in enumerate(rollout.turns):
        for call in turn.calls:
            if passages_hit(call.passages, rollout.answers, matcher=matcher, fold_unicode=fold_unicode, titles=titles):
                return Diagnosis(True, response, number, correct)
            response += call.status in _RESPONDED
    return Diagnosis(False, None, None, correct)


_RESPONDED = ("ok", "empty")


def segments(rollout: Rollout, diagnosis: Diagnosis | None = None) -> tuple[Segment, ...]:
    """
    Segment of every turn.

    Args:
        rollout ([`Rollout`]):
            The rollout.
        diagnosis ([`Diagnosis`], *optional*):
            Its diagnosis; made with the default matcher if not given.

    Returns:
        `tuple[Segment, ...]`: One per turn. Several calls in one turn are one search.
    """
    first = (diagnosis or diagnose(rollout)).first_hit_turn

    def segment(number: int, kind: TurnKind) -> Segment:
        if kind is TurnKind.SEARCH:
            return Segment.V_SEARCH if first is not None and number <= first else Segment.R_SEARCH
        if kind is TurnKind.MALFORMED:
            return Segment.R_SEARCH
        return Segment.ANSWER if kind is TurnKind.ANSWER else Segment.NONE

    return tuple(segment(number, turn.kind) for number, turn in enumerate(rollout.turns))


def oracle_queries(
    question: str, answers: Sequence[str], templates: Sequence[str] = ORACLE_TEMPLATES
) -> tuple[str, ...]:
    """
    Queries that probe whether an answer can be retrieved, without repetitions.

    Args:
        question (`str`):
            The question.
        answers (`Sequence[str]`):
            Gold answers; the first three that do not normalise to nothing are used.
        templates (`Sequence[str]`, *optional*):
            Texts with `{question}` and `{alias}`; one with `{alias}` gives a query per alias.

    Returns:
        `tuple[str, ...]`
    """
    aliases = [answer for answer in answers if normalize_answer(answer)][:MAX_ORACLE_ALIASES]
    queries = [
        _PLACEHOLDER.sub(lambda match, alias=alias: alias if match[1] == "alias" else question, template)
        for template in templates
        for alias in (aliases if "{alias}" in template else [""])
    ]
    return tuple(dict.fromkeys(query.strip() for query in queries if query.strip()))


class _Searchable(Protocol):
    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Any]]: ...


class Retrievability:
    r"""
    Whether the corpus can deliver an answer: \\( \mathrm{Retr}(x) \\), asked only where it decides something.

    A question is retrievable if a rollout of its group was hit or if one of the oracle queries is. The queries are
    run only for groups without a hit that hold a right answer (type `D`), all of them in one call, and remembered by
    question id.

    Args:
        retriever ([`~retrieval.Retriever`]):
            The retriever of the rollouts.
        show (`Callable`):
            Hits as the policy would receive them, for instance `SearchEnvironment.show`.
        top_k (`int`, *optional*, defaults to `3`):
            Passages per query.
        templates (`Sequence[str]`, *optional*):
            See [`oracle_queries`]. With `{alias}` almost everything is retrievable; without, many rollouts get masked.
        matcher (`str`, *optional*, defaults to `"substring"`):
            As for [`diagnose`].
        fold_unicode (`bool`, *optional*, defaults to `False`):
            As for [`diagnose`].
    """

    def __init__(
        self,
        retriever: _Searchable,
        show: Callable[[Sequence[Any]], Sequence[ShownPassage]],
        *,
        top_k: int = 3,
        templates: Sequence[str] = ORACLE_TEMPLATES,
        matcher: Matcher = "substring",
        fold_unicode: bool = False,
    ):
        self._retriever = retriever
        self._show = show
        self._top_k = top_k
        self._templates = tuple(templates)
        self._matching: Mapping[str, Any] = {"matcher": matcher, "fold_unicode": fold_unicode}
        self.cache: dict[str, bool] = {}
        """Answers of the oracle by question id."""

    def __call__(self, groups: Sequence[Group], diagnoses: Sequence[Sequence[Diagnosis]] | None = None) -> list[bool]:
        """
        Retrievability of every group's question.

        Args:
            groups (`Sequence[Group]`):
                Groups of one step.
            diagnoses (`Sequence[Sequence[Diagnosis]]`, *optional*):
                Diagnoses of their rollouts, aligned with the groups; made here if not given.

        Returns:
            `list[bool]`: One per group. `True` without asking where it decides nothing (no rollout of type `D`).
        """
        if diagnoses is None:
            diagnoses = [[diagnose(rollout, **self._matching) for rollout in group.rollouts] for group in groups]
        open_groups = [
            group
            for group, found in zip(groups, diagnoses, strict=True)
            if not any(one.hit for one in found) and any(one.correct for one in found)
        ]
        self.ask({group.question_id: group.rollouts[0] for group in open_groups})
        undecided = {group.question_id for group in open_groups}
        return [self.cache[group.question_id] if group.question_id in undecided else True for group in groups]

    def ask(self, questions: Mapping[str, Rollout]) -> None:
        """Put the oracle queries of all questions that are not in the cache, in one search."""
        queries = {
            key: oracle_queries(rollout.question, rollout.answers, self._templates)
            for key, rollout in questions.items()
            if key not in self.cache
        }
        flat = [query for asked in queries.values() for query in asked]
        responses = iter(self._retriever.search(flat, self._top_k) if flat else ())
        for key, asked in queries.items():
            shown = [self._show(next(responses)) for _ in asked]
            self.cache[key] = any(
                passages_hit(passages, questions[key].answers, **self._matching) for passages in shown
            )


@dataclass(frozen=True, slots=True)
class AliasIssue:
    """Something to know about one gold answer before rewards are read off it."""

    alias: str
    kind: str
    """`"empty"`, `"short"`, `"yes_no"` or `"unrelated"`."""


def audit_aliases(answers: Sequence[str]) -> tuple[AliasIssue, ...]:
    """
    Doubtful gold answers of one question.

    `"empty"` normalises to nothing and never matches; `"short"` (under three characters) is contained in almost any
    text; `"yes_no"` cannot be found as evidence; `"unrelated"` shares no word with the first answer and may be a wrong
    redirect.

    Args:
        answers (`Sequence[str]`):
            Gold answers, the preferred one first.

    Returns:
        `tuple[AliasIssue, ...]`: In the order of the answers; an answer may have several.
    """

    def issues() -> Iterator[AliasIssue]:
        first = set(normalize_answer(answers[0]).split()) if answers else set()
        for alias in answers:
            form = normalize_answer(alias)
            if not form:
                yield AliasIssue(alias, "empty")
                continue
            if len(form) < 3:
                yield AliasIssue(alias, "short")
            if form in ("yes", "no"):
                yield AliasIssue(alias, "yes_no")
            if first and not first & set(form.split()):
                yield AliasIssue(alias, "unrelated")

    return tuple(issues())
