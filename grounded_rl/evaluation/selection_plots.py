"""Figures of the selection report: displacement and calibration, branching signals, slope over time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grounded_rl.evaluation.palette import SEGMENT_COLORS, TYPE_COLORS
from grounded_rl.evaluation.plots import _figure, _save, _strip

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from grounded_rl.credit import CalibrationRow, Interval
    from grounded_rl.evaluation.selection import SelectionAnalysis

RUN_COLORS = (SEGMENT_COLORS["v_search"], TYPE_COLORS["B"], TYPE_COLORS["A"], TYPE_COLORS["D"], SEGMENT_COLORS["none"])
_SHORT = {
    "selected - fresh, as trained": "selected - fresh\nas trained",
    "fresh - fresh, as trained": "fresh - fresh\nas trained",
    "selected - fresh, without correction": "selected - fresh\nuncorrected",
    "fresh - fresh, without correction": "fresh - fresh\nuncorrected",
}


def _color(number: int) -> str:
    return RUN_COLORS[number % len(RUN_COLORS)]


def _arms(intervals: Sequence[Interval]) -> np.ndarray:
    """Lengths of error bars below and above; zero where an interval is undefined."""
    arms = [[each.estimate - each.low, each.high - each.estimate] for each in intervals]
    return np.maximum(np.nan_to_num(np.array(arms, dtype=float).reshape(-1, 2)), 0.0).T


def plot_displacement(analyses: Sequence[SelectionAnalysis], path: str | os.PathLike) -> Path:
    """
    Contrasts of selected and fresh branches, and predicted against observed displacement by rank and candidate count.

    Args:
        analyses (`Sequence[SelectionAnalysis]`):
            One per run.
        path (`str` or `PathLike`):
            PNG file to write.

    Returns:
        `Path`: The file.
    """
    figure = _figure(12.0, 4.2)
    left, ranks, counts = figure.subplots(1, 3)
    places = np.arange(len(_SHORT))
    for number, analysis in enumerate(analyses):
        intervals = [analysis.contrasts[label] for label in _SHORT]
        offset = 0.18 * (number - (len(analyses) - 1) / 2)
        points = [each.estimate for each in intervals]
        left.errorbar(
            places + offset, points, _arms(intervals), fmt="o", color=_color(number), capsize=3, label=analysis.name
        )
        for axes, prefix in ((ranks, "rank"), (counts, "candidates")):
            rows = [row for row in analysis.calibration if row.group.startswith(prefix)]
            _plot_calibration(axes, rows, _color(number), analysis.name)
    left.axhline(0.0, color="black", linewidth=0.8)
    left.set_xticks(places, list(_SHORT.values()), fontsize=7)
    left.set_ylabel("difference of node advantages")
    for axes, title in ((ranks, "by rank"), (counts, "by number of candidates")):
        axes.axline((0.0, 0.0), slope=1.0, color="black", linewidth=0.8, linestyle="--")
        axes.set_xlabel("predicted displacement (raw reward)")
        axes.set_ylabel("observed displacement")
        axes.set_title(title, fontsize=9, loc="left")
        axes.margins(0.15)
    for axes in (left, ranks, counts):
        _strip(axes)
    left.legend(frameon=False, fontsize=8)
    return _save(figure, path)


def _plot_calibration(axes: Axes, rows: Sequence[CalibrationRow], color: str, label: str) -> None:
    rows = [row for row in rows if math.isfinite(row.predicted.estimate) and math.isfinite(row.observed.estimate)]
    if not rows:
        return
    x = [row.predicted.estimate for row in rows]
    y = [row.observed.estimate for row in rows]
    axes.errorbar(
        x,
        y,
        _arms([row.observed for row in rows]),
        _arms([row.predicted for row in rows]),
        fmt="o",
        color=color,
        capsize=2,
        label=label,
    )
    for row, across, up in zip(rows, x, y, strict=True):
        axes.annotate(row.group, (across, up), textcoords="offset points", xytext=(4, 4), fontsize=7, color=color)


def plot_signals(analyses: Sequence[SelectionAnalysis], path: str | os.PathLike) -> Path:
    """
    Correlations with sibling disagreement, and the disagreement that ways of choosing reach.

    Args:
        analyses (`Sequence[SelectionAnalysis]`):
            One per run.
        path (`str` or `PathLike`):
            PNG file to write.

    Returns:
        `Path`: The file. What is undefined has no bar.
    """
    figure = _figure(9.0, 3.8)
    panels = figure.subplots(1, 2)
    entries = (
        {
            "score_correlation": "score",
            "surprisal_correlation": "surprisal",
            "ridge_correlation": "ridge fit\n(in sample)",
        },
        {
            "mean_disagreement": "all events",
            "chosen_by_score": "best-ranked",
            "chosen_by_ridge": "ridge fit\n(in sample)",
            "chosen_in_hindsight": "hindsight",
        },
    )
    titles = ("correlation with sibling disagreement", "sibling disagreement at the chosen event")
    width = 0.8 / len(analyses)
    for axes, labels, title in zip(panels, entries, titles, strict=True):
        for number, analysis in enumerate(analyses):
            heights = [getattr(analysis.signals, name) for name in labels]
            places = np.arange(len(labels)) + width * (number - (len(analyses) - 1) / 2)
            axes.bar(places, np.nan_to_num(np.array(heights)), 0.9 * width, color=_color(number), label=analysis.name)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_xticks(np.arange(len(labels)), list(labels.values()), fontsize=8)
        axes.set_title(title, fontsize=9, loc="left")
        _strip(axes)
    panels[0].legend(frameon=False, fontsize=8)
    return _save(figure, path)


def plot_slopes(analyses: Sequence[SelectionAnalysis], path: str | os.PathLike) -> Path:
    """
    Slope over time: what each step was corrected with, and what its own trees give.

    Args:
        analyses (`Sequence[SelectionAnalysis]`):
            One per run.
        path (`str` or `PathLike`):
            PNG file to write.

    Returns:
        `Path`: The file.
    """
    figure = _figure(7.0, 3.4)
    axes = figure.subplots()
    for number, analysis in enumerate(analyses):
        steps, used, own = np.array(analysis.slopes, dtype=float).T
        axes.plot(steps, own, color=_color(number), linewidth=0.9, alpha=0.6, label=f"{analysis.name}: own trees")
        axes.plot(steps, used, color=_color(number), linewidth=1.9, label=f"{analysis.name}: used")
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xlabel("step")
    axes.set_ylabel("slope of value on standardised score")
    axes.legend(frameon=False, fontsize=8)
    _strip(axes)
    return _save(figure, path)
