"""Figures of reports as PNG files: metrics before and after, type shares, training curves."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.comparison import TYPES, Comparison
from grounded_rl.evaluation.metrics import METRIC_LABELS
from grounded_rl.evaluation.palette import AFTER_COLOR, BEFORE_COLOR, TYPE_COLORS, TYPE_MEANINGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADLINE_METRICS = ("em", "tool_hit", "sup_cor", "hit_acc", "grounded_share")
"""Metrics of the before/after figure."""

TRAINING_PRIORITY = (
    "reward",
    "eval_em",
    "rollout/em",
    "rollout/tool_hit",
    "rollout/",
    "retrieval/",
    "credit/",
    "entropy",
    "kl",
    "loss",
    "grad_norm",
    "completions/mean_length",
)
"""Which logged quantities are plotted first: exact names and prefixes."""

_NOT_PLOTTED = ("step", "epoch", "total_flos", "num_tokens", "learning_rate")
_DPI = 150


def _figure(width: float, height: float) -> Figure:
    # The object interface: no global state, no display, usable in threads and notebooks alike.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _strip(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#D8DCE2", linewidth=0.7)
    axes.set_axisbelow(True)


def _save(figure: Figure, path: str | os.PathLike) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # No version or date in the file: the same numbers give the same bytes.
        figure.savefig(temporary, format="png", dpi=_DPI, metadata={"Software": None})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def plot_comparison(comparison: Comparison, path: str | os.PathLike) -> Path:
    """
    Bars of the headline metrics before and after, and below them the paired differences with their intervals.

    Args:
        comparison (`Comparison`):
            Result of [`~grounded_rl.evaluation.compare`].
        path (`str` or `PathLike`):
            PNG file to write.

    Returns:
        `Path`: The file. A metric that is undefined has no bar.
    """
    figure = _figure(7.5, 5.6)
    values, differences = figure.subplots(2, 1, height_ratios=[3, 2])
    positions = np.arange(len(HEADLINE_METRICS))
    labels = [METRIC_LABELS[name] for name in HEADLINE_METRICS]
    for offset, side, color in ((-0.2, "before", BEFORE_COLOR), (0.2, "after", AFTER_COLOR)):
        heights = np.array([100 * getattr(comparison, side)[name] for name in HEADLINE_METRICS])
        bars = values.bar(positions + offset, np.nan_to_num(heights), width=0.38, color=color, label=side)
        values.bar_label(bars, ["–" if math.isnan(height) else f"{height:.0f}" for height in heights], fontsize=9)
    values.set(xticks=positions, xticklabels=labels, ylabel="percent", ylim=(0, 108))
    values.set_title(f"{comparison.num_questions:,} questions", loc="left", fontsize=10, color="#4A5160")
    values.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.16))
    _strip(values)

    intervals = [comparison.intervals[name] for name in HEADLINE_METRICS]
    points = np.array([[100 * x for x in (i.difference, i.low, i.high)] for i in intervals])
    # A percentile interval need not contain its point in degenerate cases; a length is never negative.
    lengths = np.nan_to_num(np.maximum(np.abs(points[:, [0, 0]] - points[:, [1, 2]]), 0)).T
    differences.axhline(0, color="#4A5160", linewidth=1)
    differences.errorbar(positions, points[:, 0], yerr=lengths, fmt="o", color=AFTER_COLOR, capsize=5, linewidth=1.8)
    differences.set(xticks=positions, xticklabels=labels, xlim=values.get_xlim())
    differences.set_ylabel(f"difference, points\n({100 * comparison.confidence:g} % interval)")
    _strip(differences)
    return _save(figure, path)


def plot_types(runs: Mapping[str, Mapping[str, float]], path: str | os.PathLike) -> Path:
    """
    Shares of the diagnosis types, one stacked bar per run.

    Args:
        runs (`Mapping[str, Mapping[str, float]]`):
            Name to metrics, as [`~grounded_rl.evaluation.compute_metrics`] gives them.
        path (`str` or `PathLike`):
            PNG file to write.

    Returns:
        `Path`: The file.
    """
    figure = _figure(7.5, 1.5 + 0.55 * len(runs))
    axes = figure.subplots()
    left = np.zeros(len(runs))
    for letter in (name.upper() for name in TYPES):
        shares = np.nan_to_num([100 * metrics[f"type_{letter.lower()}"] for metrics in runs.values()])
        label = f"{letter}: {TYPE_MEANINGS[letter]}"
        bars = axes.barh(list(runs), shares, left=left, color=TYPE_COLORS[letter], label=label, height=0.62)
        texts = [f"{letter} {share:.0f} %" if share >= 8 else "" for share in shares]
        axes.bar_label(bars, texts, label_type="center", fontsize=9, color="#15181D")
        left += shares
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="percent of questions")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(*axes.get_legend_handles_labels(), frameon=False, ncols=2, loc="outside upper left", fontsize=9)
    return _save(figure, path)


def load_log_history(path: str | os.PathLike) -> list[dict[str, float]]:
    """
    Training log of a `trainer_state.json`.

    Args:
        path (`str` or `PathLike`):
            The file, or the folder (a run or a checkpoint) that holds it.

    Returns:
        `list[dict[str, float]]`: One entry per logged step.

    Raises:
        `ConfigurationError`: If the file does not exist or holds no `log_history`.
    """
    path = Path(path)
    file = path / "trainer_state.json" if path.is_dir() else path
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["log_history"])
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"`path` must be a `trainer_state.json` or its folder: got {str(path)!r}. Name the folder of a checkpoint."
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"`{file}` must hold a `log_history`: got {error!r}. Use the file that the trainer saved."
        ) from error


def _series(log_history: Sequence[Mapping[str, object]]) -> dict[str, tuple[list[float], list[float]]]:
    """Steps and values of every quantity that was logged at least twice with a finite number."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for number, entry in enumerate(log_history, start=1):
        step = entry.get("step", number)
        for name, value in entry.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and name not in _NOT_PLOTTED and not name.endswith(("_runtime", "_per_second")):
                steps, values = series.setdefault(name, ([], []))
                steps.append(float(step))
                values.append(float(value))
    return {name: columns for name, columns in series.items() if len(columns[0]) >= 2}


def _rank(name: str) -> tuple[int, str]:
    matches = (
        number
        for number, wanted in enumerate(TRAINING_PRIORITY)
        if name == wanted or (wanted.endswith("/") and name.startswith(wanted))
    )
    return next(matches, len(TRAINING_PRIORITY)), name


def _smoothed(values: Sequence[float], window: int) -> np.ndarray:
    """Centred moving mean whose window shrinks at the ends."""
    half = window // 2
    return np.array([np.mean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))])


def _frame(axes: Axes, values: Sequence[float]) -> None:
    """Limits of a panel; a constant is drawn as a flat line instead of as a magnified rounding error."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= 1e-6 * size or size == 0:
        margin = 0.1 * size or 1.0
        axes.set_ylim(low - margin, high + margin)
        axes.ticklabel_format(axis="y", useOffset=False)


def plot_training(
    log_history: Sequence[Mapping[str, object]],
    path: str | os.PathLike,
    *,
    metrics: Sequence[str] | None = None,
    max_panels: int = 12,
) -> Path:
    """
    Training curves, one panel per logged quantity: the values and their moving mean.

    Args:
        log_history (`Sequence[Mapping[str, object]]`):
            Log entries with `step` and any numbers, as in `trainer_state.json`.
        path (`str` or `PathLike`):
            PNG file to write.
        metrics (`Sequence[str]`, *optional*):
            Quantities to plot, in this order. By default those of `TRAINING_PRIORITY` first, then the others.
        max_panels (`int`, *optional*, defaults to `12`):
            Largest number of panels when `metrics` is not given.

    Returns:
        `Path`: The file.

    Raises:
        `ConfigurationError`: If nothing can be plotted, or a named quantity was not logged twice.
    """
    series = _series(log_history)
    names = sorted(series, key=_rank)[:max_panels] if metrics is None else list(metrics)
    unknown = [name for name in names if name not in series]
    if unknown or not names:
        raise ConfigurationError(
            "`log_history` must hold at least two finite values of everything that is plotted: got "
            f"{f'none of {unknown}' if unknown else f'{len(log_history)} entries without any'}. "
            f"Choose from {sorted(series)[:10]}."
        )
    num_columns = min(3, len(names))
    num_rows = -(-len(names) // num_columns)
    figure = _figure(3.6 * num_columns, 2.3 * num_rows + 0.3)
    panels = figure.subplots(num_rows, num_columns, squeeze=False).ravel()
    for axes, name in zip(panels, names, strict=False):
        steps, values = series[name]
        axes.plot(steps, values, color=BEFORE_COLOR, linewidth=0.9, alpha=0.65)
        axes.plot(steps, _smoothed(values, max(1, len(values) // 10)), color=AFTER_COLOR, linewidth=1.9)
        axes.set_title(name.replace("$", r"\$"), fontsize=9, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.margins(x=0.01)
        _frame(axes, values)
        _strip(axes)
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    return _save(figure, path)
