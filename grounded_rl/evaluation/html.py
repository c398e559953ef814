"""
The rollout viewer: one HTML page that needs no network, no server and no other file.

Rollouts travel as JSON in a script element that browsers do not execute, with every `<` escaped; the page builds its
elements from text alone, and its content security policy admits exactly the one script and style sheet it carries.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from grounded_rl.evaluation.files import write_text
from grounded_rl.evaluation.marking import Decode, Span, passage_spans, token_texts
from grounded_rl.evaluation.metrics import METRIC_LABELS, compute_metrics
from grounded_rl.evaluation.palette import SEGMENT_LABELS, TYPE_MEANINGS
from grounded_rl.evaluation.terminal import common_advantage
from grounded_rl.grounding import diagnose, segments
from grounded_rl.rollouts import Call, Rollout, ShownPassage, StopReason, Turn

HEADLINE_METRICS = ("em", "tool_hit", "sup_cor", "hit_acc", "grounded_share")
SCRIPTS = ("dom.js", "list.js", "rollout.js", "tree.js", "app.js")
STOP_LABELS: dict[str, str] = {
    StopReason.ANSWER: "by its answer",
    StopReason.TURN_LIMIT: "at the turn limit",
    StopReason.LENGTH: "at the token budget",
    StopReason.FAILED: "by a failure",
}

_MAX_EXTRAS = 2000


def _finite(value: float | None, digits: int = 6) -> float | None:
    """Number for JSON: NaN and infinity, which JSON lacks, become `None`."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}g}")


def utf16_spans(text: str, spans: Sequence[Span]) -> list[list[int]]:
    """Spans in UTF-16 units, as JavaScript counts characters."""

    def units(position: int) -> int:
        return position + sum(character > "\uffff" for character in text[:position])

    if not spans or text.isascii():
        return [list(span) for span in spans]
    return [[units(start), units(end)] for start, end in spans]


class _PageData:
    """Rollouts as the records that the page's script reads; passages and shared turns are stored once."""

    def __init__(self, decode: Decode | None):
        self._decode = decode
        self._passages: dict[tuple[str, str, str], int] = {}
        self._groups: dict[str, int] = {}
        self._paths: dict[tuple, int] = {}

    @property
    def passages(self) -> list[tuple[str, str, str]]:
        return list(self._passages)

    def rollout(self, rollout: Rollout) -> dict:
        diagnosis = diagnose(rollout)
        turns = zip(rollout.turns, segments(rollout, diagnosis), strict=True)
        extras = json.dumps(rollout.extras, default=str)[:_MAX_EXTRAS] if rollout.extras else None
        return {
            "id": rollout.question_id,
            "group": self._groups.setdefault(rollout.question_id, len(self._groups)),
            "question": rollout.question,
            "gold": rollout.answers,
            "answer": rollout.answer,
            "correct": bool(diagnosis.correct),
            "type": str(diagnosis.type),
            "kind": rollout.question_kind,
            "stop": str(rollout.stop),
            "sample": rollout.sample,
            "tokens": rollout.num_sampled_tokens,
            "rewards": {name: _finite(value) for name, value in rollout.rewards.items()},
            "error": rollout.error,
            "extras": extras,
            "base": _finite(common_advantage(rollout)),
            "path": self._path(rollout),
            "turns": [self._turn(turn, str(segment), rollout) for turn, segment in turns],
        }

    def _path(self, rollout: Rollout) -> list[int]:
        """A number per turn; two rollouts have the same one exactly where they agree in every token up to there."""
        path = []
        key: tuple = (rollout.question_id, rollout.prompt_ids)
        for turn in rollout.turns:
            key = (key, turn.ids, turn.observation_ids)
            number = self._paths.setdefault(key, len(self._paths))
            key = (number,)
            path.append(number)
        return path

    def _turn(self, turn: Turn, segment: str, rollout: Rollout) -> dict:
        record: dict = {
            "text": turn.text,
            "kind": str(turn.kind),
            "finish": str(turn.finish),
            "segment": segment,
            "tokens": len(turn.ids),
            "calls": [self._call(call, rollout) for call in turn.calls],
        }
        if turn.observation and not any(call.passages for call in turn.calls):
            record["observation"] = turn.observation
        if turn.advantages is not None:
            credit = {"values": [_finite(value) for value in turn.advantages]}
            if self._decode is not None:
                credit["texts"] = token_texts(turn, self._decode)[0]
            if turn.logps is not None:
                credit["logps"] = [_finite(value, 4) for value in turn.logps]
            record["credit"] = credit
        return record

    def _call(self, call: Call, rollout: Rollout) -> dict:
        return {
            "query": call.query,
            "status": str(call.status),
            "error": call.error,
            "cached": call.cached,
            "passages": [self._passage(passage, rollout) for passage in call.passages],
        }

    def _passage(self, passage: ShownPassage, rollout: Rollout) -> dict:
        key = (passage.id, passage.title, passage.text)
        in_title, in_text = passage_spans(passage, rollout.answers)
        was_cut = passage.num_tokens is not None and passage.num_tokens != passage.num_tokens_full is not None
        return {
            "passage": self._passages.setdefault(key, len(self._passages)),
            "score": _finite(passage.score),
            "cut": [passage.num_tokens, passage.num_tokens_full] if was_cut else None,
            "titleSpans": utf16_spans(passage.title, in_title),
            "textSpans": utf16_spans(passage.text, in_text),
        }


def page_data(rollouts: Iterable[Rollout], *, title: str = "Rollouts", decode: Decode | None = None) -> dict:
    """Everything the page shows, as JSON-serialisable records."""
    rollouts = list(rollouts)
    data = _PageData(decode)
    records = [data.rollout(rollout) for rollout in rollouts]
    metrics = compute_metrics(rollouts)
    return {
        "title": title,
        "types": TYPE_MEANINGS,
        "segments": SEGMENT_LABELS,
        "stops": STOP_LABELS,
        "metrics": [[METRIC_LABELS[name], _finite(metrics[name])] for name in HEADLINE_METRICS],
        "passages": data.passages,
        "rollouts": records,
    }


def script_safe_json(value: object) -> str:
    """JSON in ASCII that can stand inside a script element: nothing in it can open or close an element."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _source(name: str) -> str:
    return files("grounded_rl.evaluation").joinpath("viewer", name).read_text(encoding="utf-8")


def _hash(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode("utf-8")).digest()).decode("ascii")


def render_html(rollouts: Iterable[Rollout], *, title: str = "Rollouts", decode: Decode | None = None) -> str:
    """
    The viewer page of a set of rollouts, as text.

    Args:
        rollouts (`Iterable[Rollout]`):
            What to show, in this order.
        title (`str`, *optional*, defaults to `"Rollouts"`):
            Heading.
        decode (`Callable[[Sequence[int]], str]`, *optional*):
            Decoder of the policy's tokenizer, for exact borders of tokens in the credit view.

    Returns:
        `str`: A complete HTML document. The same rollouts give the same document.
    """
    body = "\n".join(_source(name) for name in SCRIPTS)
    script = f'(() => {{\n"use strict";\n{body}}})();\n'
    style = _source("style.css")
    # One pass over the template: a placeholder's name inside a rollout stays text.
    return Template(_source("page.html")).substitute(
        title=escape(title),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
        data=script_safe_json(page_data(rollouts, title=title, decode=decode)),
    )


def write_html(
    path: str | os.PathLike,
    rollouts: Iterable[Rollout],
    *,
    title: str = "Rollouts",
    decode: Decode | None = None,
) -> Path:
    """
    Write the viewer page of a set of rollouts; see `render_html`.

    Args:
        path (`str` or `PathLike`):
            HTML file to write. Parent folders are created, an existing file is replaced atomically.
        rollouts (`Iterable[Rollout]`):
            What to show, in this order.
        title (`str`, *optional*, defaults to `"Rollouts"`):
            Heading.
        decode (`Callable[[Sequence[int]], str]`, *optional*):
            Decoder of the policy's tokenizer, for exact borders of tokens in the credit view.

    Returns:
        `Path`: The file.
    """
    return write_text(path, render_html(rollouts, title=title, decode=decode))
