"""The selection report of tree runs: tables as Markdown, the same numbers as JSON, and figures."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from grounded_rl.credit import Interval
from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.files import write_text
from grounded_rl.evaluation.markdown import markdown_cell, markdown_table
from grounded_rl.evaluation.selection import SelectionAnalysis

_COUNTS = ("trees", "steps", "leaves", "selection events", "tokens", "choices")


def _number(value: float, digits: int = 4) -> str:
    return "–" if math.isnan(value) else f"{value + 0.0:.{digits}f}"


def _interval(interval: Interval) -> str:
    if math.isnan(interval.estimate):
        return "–"
    limits = "" if math.isnan(interval.low) else f" [{interval.low:+.4f}, {interval.high:+.4f}]"
    text = f"{interval.estimate:+.4f}{limits}"
    return f"**{text}**" if interval.low > 0 or interval.high < 0 else text


def _fact(name: str, value: float) -> str:
    is_count = name.startswith(_COUNTS) or name.endswith("tokens") or "no reward" in name
    return f"{value:,.0f}" if is_count or name == "tokens of as many linear rollouts" else _number(value)


def _facts_table(analyses: Sequence[SelectionAnalysis]) -> str:
    rows = [[name, *(_fact(name, analysis.facts[name]) for analysis in analyses)] for name in analyses[0].facts]
    return markdown_table(["", *(markdown_cell(analysis.name) for analysis in analyses)], rows)


def _contrasts_table(analyses: Sequence[SelectionAnalysis]) -> str:
    rows = [
        [label, *(_interval(analysis.contrasts[label]) for analysis in analyses)] for label in analyses[0].contrasts
    ]
    counts = [
        f"{analysis.name}: {analysis.contrasts['selected - fresh, as trained'].num_entries:,} events in "
        f"{analysis.contrasts['selected - fresh, as trained'].num_trees:,} trees"
        for analysis in analyses
    ]
    table = markdown_table(["contrast", *(markdown_cell(analysis.name) for analysis in analyses)], rows)
    return f"{table}\n\n{markdown_cell('; '.join(counts))}."


def _calibration_table(analysis: SelectionAnalysis) -> str:
    rows = [
        [
            row.group,
            f"{row.observed.num_entries:,}",
            f"{row.observed.num_trees:,}",
            _interval(row.observed),
            _interval(row.predicted),
            _interval(row.residual),
        ]
        for row in analysis.calibration
    ]
    return markdown_table(["group", "pairs", "trees", "observed", "predicted", "residual"], rows)


def _prefix_table(analysis: SelectionAnalysis) -> str:
    rows = [
        [
            str(row.depth),
            _number(row.leaves_per_tree, 1),
            _number(row.clusters_per_tree, 1),
            _number(row.cluster_size, 2),
            _interval(row.correlation),
            _number(row.correlation_with_questions, 3),
            _number(row.effective_leaves, 1),
        ]
        for row in analysis.prefixes
    ]
    header = ["depth", "leaves/tree", "clusters/tree", "m0", "ρ within trees", "ρ with questions", "ESS/tree"]
    return markdown_table(header, rows)


def _signals_table(analyses: Sequence[SelectionAnalysis]) -> str:
    labels = {
        "num_events": "events",
        "score_correlation": "correlation of the score with sibling disagreement",
        "surprisal_correlation": "correlation of the surprisal with it",
        "ridge_correlation": "correlation of an in-sample ridge fit with it",
        "mean_disagreement": "mean disagreement of the chosen events",
        "chosen_by_score": "at the best-ranked event",
        "chosen_by_ridge": "at the event the ridge fit prefers",
        "chosen_in_hindsight": "at the event chosen in hindsight",
    }
    rows = [
        [label, *(_number(getattr(analysis.signals, name), 0 if name == "num_events" else 4) for analysis in analyses)]
        for name, label in labels.items()
    ]
    return markdown_table(["", *(markdown_cell(analysis.name) for analysis in analyses)], rows)


def _slope_table(analysis: SelectionAnalysis, max_rows: int = 12) -> str:
    stride = -(-len(analysis.slopes) // max_rows)
    rows = [[str(step), _number(used), _number(own)] for step, used, own in analysis.slopes[::stride]]
    return markdown_table(["step", "slope used", "slope of the step's own trees"], rows)


def selection_markdown(
    analyses: Sequence[SelectionAnalysis], *, figures: dict[str, str] | None = None, command: str | None = None
) -> str:
    """
    The selection report as Markdown.

    Args:
        analyses (`Sequence[SelectionAnalysis]`):
            One per run.
        figures (`dict[str, str]`, *optional*):
            Caption to path of figures, relative to the report.
        command (`str`, *optional*):
            The command that made the report.

    Returns:
        `str`: Markdown that ends in a newline.
    """
    sections = [
        "# Selection report",
        *([f"Made by `{command}`."] if command else []),
        "Intervals: 95 %, from resampling whole trees within their step. Bold: the interval excludes zero.",
        "## The trees",
        _facts_table(analyses),
        "## Selected and fresh branches",
        _contrasts_table(analyses),
        "Differences of node advantages within a selection event: the incumbent less its first fresh sibling, and the "
        "first less the second fresh sibling, which is zero but for noise. A contrast without two fresh siblings is "
        "undefined.",
    ]
    for analysis in analyses:
        sections += [
            f"## {markdown_cell(analysis.name)}: calibration of the rank model",
            _calibration_table(analysis),
            "Last expansion round, raw reward: incumbent less fresh, against the slope of the step before times the "
            "expected order statistic; the slope is fitted again in every resample.",
            f"## {markdown_cell(analysis.name)}: leaves that share a prefix",
            _prefix_table(analysis),
            f"## {markdown_cell(analysis.name)}: slope over time",
            _slope_table(analysis),
        ]
    sections += [
        "## Could the branch points be told in advance?",
        _signals_table(analyses),
        "Disagreement of an event: standard deviation of the mean rewards below the incumbent and its fresh siblings. "
        "The fit is read where it was fitted, and the choice in hindsight uses outcomes: both are upper bounds.",
    ]
    if figures:
        sections += ["## Figures", *(f"![{caption}]({path})" for caption, path in figures.items())]
    return "\n\n".join(sections) + "\n"


def write_selection_report(
    path: str | os.PathLike, analyses: Sequence[SelectionAnalysis], *, command: str | None = None
) -> list[Path]:
    """
    Write the selection report: `path` (Markdown), a `.json` next to it, and three figures.

    Args:
        path (`str` or `PathLike`):
            Markdown file.
        analyses (`Sequence[SelectionAnalysis]`):
            One per run.
        command (`str`, *optional*):
            The command that made the report.

    Returns:
        `list[Path]`: The files, the report first.

    Raises:
        `ConfigurationError`: If `path` has no Markdown suffix.
    """
    from grounded_rl.evaluation import selection_plots as plots

    path = Path(path)
    if path.suffix.lower() not in (".md", ".markdown"):
        raise ConfigurationError(f"`path` must end in `.md`: got {str(path)!r}. Name the report `selection.md`.")
    figures = {
        "Displacement and calibration": plots.plot_displacement(
            analyses, path.with_name(f"{path.stem}_displacement.png")
        ),
        "Branching signals": plots.plot_signals(analyses, path.with_name(f"{path.stem}_signals.png")),
        "Slope over time": plots.plot_slopes(analyses, path.with_name(f"{path.stem}_slope.png")),
    }
    record = {"schema": 1, "command": command, "runs": [_plain(asdict(analysis)) for analysis in analyses]}
    numbers = write_text(path.with_suffix(".json"), json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    names = {caption: figure.name for caption, figure in figures.items()}
    report = write_text(path, selection_markdown(analyses, figures=names, command=command))
    return [report, numbers, *figures.values()]


def _plain(value: object) -> object:
    """NaN becomes `null`: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
