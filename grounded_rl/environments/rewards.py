"""
Rewards of one rollout: exact match and the format terms, as pure functions.

An answer is `None` when the policy gave none. Empty text is an answer, and a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grounded_rl.environments.parsing import rollout_format_ok
from grounded_rl.errors import ConfigurationError
from grounded_rl.rollouts.types import Rollout, StopReason
from grounded_rl.text import exact_match, exact_match_folded, token_f1

REWARD_SCHEMES = ("search_r1_v03", "em", "em_format_penalty")
"""Reward schemes by the name used in recipes; `"none"` as a format reward is `"em"`."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What can be said about an answer; only `reward` is trained on."""

    reward: float
    em: float
    """Official exact match, the headline."""
    em_folded: float
    """Exact match after Unicode folding, an extra column."""
    f1: float
    format_ok: bool
    has_answer: bool


def em(answer: str | None, answers: Sequence[str]) -> float:
    """`1.0` for an exact match, else `0.0`."""
    return float(exact_match(answer, answers))


def search_r1_v03(
    answer: str | None, answers: Sequence[str], format_ok: bool, *, structure: float = 0.2, final: float = 0.1
) -> float:
    """
    Exact match with Search-R1's format term, version 0.3.

    Args:
        answer (`str` or `None`):
            Extracted answer.
        answers (`Sequence[str]`):
            Gold answers.
        format_ok (`bool`):
            Whether the rollout keeps the format.
        structure (`float`, *optional*, defaults to `0.2`):
            Value of the format alone, and what a right answer loses without it.
        final (`float`, *optional*, defaults to `0.1`):
            Value of a wrong answer in a broken format.

    Returns:
        `float`: `1.0` or `0.8` for a right answer, `0.2` or `0.1` for a wrong one, `0.0` for none.
    """
    if answer is None:
        return 0.0
    if exact_match(answer, answers):
        return 1.0 if format_ok else 1.0 - structure
    return structure if format_ok else final


def em_format_penalty(answer: str | None, answers: Sequence[str], format_ok: bool) -> float:
    """Exact match, but `-1.0` for a broken format or no answer (the AT²PO release)."""
    return -1.0 if answer is None or not format_ok else em(answer, answers)


def reward(answer: str | None, answers: Sequence[str], format_ok: bool, *, scheme: str = "search_r1_v03") -> float:
    """Reward of an answer under a scheme of `REWARD_SCHEMES`."""
    if scheme == "search_r1_v03":
        return search_r1_v03(answer, answers, format_ok)
    if scheme in ("em", "none"):
        return em(answer, answers)
    if scheme == "em_format_penalty":
        return em_format_penalty(answer, answers, format_ok)
    raise ConfigurationError(
        f"`reward_scheme` must be one of {list(REWARD_SCHEMES)}: got {scheme!r}. Choose one of these."
    )


def score(answer: str | None, answers: Sequence[str], format_ok: bool, *, scheme: str = "search_r1_v03") -> Scores:
    """All scores of an answer."""
    return Scores(
        reward=reward(answer, answers, format_ok, scheme=scheme),
        em=em(answer, answers),
        em_folded=float(exact_match_folded(answer, answers)),
        f1=token_f1(answer, answers),
        format_ok=format_ok,
        has_answer=answer is not None,
    )


def reward_value(
    rollout: Rollout,
    *,
    scheme: str = "search_r1_v03",
    tool_format: str = "qwen",
    opened_think: bool = False,
) -> float | None:
    """
    Reward of a recorded rollout.

    Args:
        rollout ([`Rollout`]):
            The rollout; its extracted `answer` is scored, its turns are read for the format.
        scheme (`str`, *optional*, defaults to `"search_r1_v03"`):
            One of `REWARD_SCHEMES`.
        tool_format (`str`, *optional*, defaults to `"qwen"`):
            Format the turns are written in.
        opened_think (`bool`, *optional*, defaults to `False`):
            The generation prompt ends inside an open `<think>`.

    Returns:
        `float` or `None`: `None` for a failed rollout, which has no reward; never `0.0`.
    """
    if rollout.stop is StopReason.FAILED:
        return None
    format_ok = scheme in ("em", "none") or rollout_format_ok(
        rollout.turns, format=tool_format, opened_think=opened_think
    )
    return reward(rollout.answer, rollout.answers, format_ok, scheme=scheme)
