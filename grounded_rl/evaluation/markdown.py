"""Numbers as people read them, and tables of them in Markdown."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from grounded_rl.evaluation.bootstrap import Estimate, Interval
from grounded_rl.evaluation.marking import printable

COUNTED = ("num_searches", "num_turns", "num_sampled_tokens")
"""Metrics that are amounts; all others are shares and shown in percent."""

# Underscores within a word are literal in Markdown; everything else that can start markup is escaped.
_MARKUP = re.compile(r"[\\`*|\[\]~]|(?<!\w)_|_(?!\w)")


def format_value(name: str, value: float) -> str:
    """A metric as reports show it: shares in percent, amounts plain, "–" where it is undefined."""
    if math.isnan(value):
        return "–"
    return f"{value:.2f}" if name in COUNTED else f"{100 * value:.1f} %"


def format_difference(name: str, interval: Interval) -> str:
    """A difference with its interval, in percentage points for shares."""
    if math.isnan(interval.difference):
        return "–"
    digits, scale = (2, 1) if name in COUNTED else (1, 100)
    # Adding 0.0 turns a rounded -0.0 into 0.0.
    difference, low, high = (
        round(scale * value, digits) + 0.0 for value in (interval.difference, interval.low, interval.high)
    )
    return f"{difference:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"


def format_estimate(name: str, estimate: Estimate) -> str:
    """A value with its interval."""
    if math.isnan(estimate.value):
        return "–"
    digits, scale = (2, 1) if name in COUNTED else (1, 100)
    limits = f"[{scale * estimate.low:.{digits}f}, {scale * estimate.high:.{digits}f}]"
    return f"{format_value(name, estimate.value)} {limits}"


def markdown_cell(text: object) -> str:
    """Text made safe for a cell of a Markdown table: one line, no markup, no HTML."""
    flat = " ".join(printable(str(text)).split())
    escaped = _MARKUP.sub(r"\\\g<0>", flat.replace("&", "&amp;"))
    return escaped.replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """
    A Markdown table, padded so that its source reads as a table too.

    Args:
        header (`Sequence[str]`):
            Heads of the columns.
        rows (`Sequence[Sequence[str]]`):
            Cells, safe for Markdown already.
        numbers (`bool`, *optional*, defaults to `True`):
            Align every column but the first to the right.

    Returns:
        `str`: Lines without a final line break.
    """
    widths = [max(3, *map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if number and numbers else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    ruler = ["-" * (width - 1) + (":" if number and numbers else "-") for number, width in enumerate(widths)]
    return "\n".join([line(header), line(ruler), *map(line, rows)])
