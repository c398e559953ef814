"""
The report that says by how much a policy changed: a Markdown page, the same as JSON, and its figures.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.comparison import TYPES, Comparison, RunResult, compare
from grounded_rl.evaluation.files import write_text
from grounded_rl.evaluation.markdown import (
    format_difference,
    format_estimate,
    format_value,
    markdown_cell,
    markdown_table,
)
from grounded_rl.evaluation.metrics import METRIC_LABELS
from grounded_rl.rollouts import Rollout

KIND_METRICS = ("em", "tool_hit", "hit_acc")
"""Metrics shown for every kind of question."""

_PACKAGES = ("grounded-rl", "trl", "transformers", "torch")


def _metrics_section(comparison: Comparison) -> str:
    percent = f"{100 * comparison.confidence:g} %"
    rows = [
        [
            f"**{label}**" if comparison.intervals[name].excludes_zero else label,
            format_value(name, comparison.before[name]),
            format_value(name, comparison.after[name]),
            format_difference(name, comparison.intervals[name]),
        ]
        for name, label in METRIC_LABELS.items()
    ]
    table = markdown_table(["metric", "before", "after", f"difference [{percent} interval]"], rows)
    notes = [
        f"n = {comparison.num_questions:,} questions, answered by both policies. Intervals: paired percentile "
        "bootstrap over questions. Shares differ in percentage points. Bold: the interval excludes zero."
    ]
    if comparison.num_dropped:
        notes.append(f"{comparison.num_dropped:,} questions were left out because their rollouts failed on one side.")
    return f"## Before and after\n\n{table}\n\n{' '.join(notes)}"


def _kinds_section(comparison: Comparison) -> str:
    header = ["kind", "n"]
    for name in KIND_METRICS:
        label = METRIC_LABELS[name]
        header += [f"{label} before", f"{label} after", "difference"]
    rows = []
    for kind, part in comparison.kinds.items():
        row = [markdown_cell(kind), f"{part.num_questions:,}"]
        for name in KIND_METRICS:
            row += [format_value(name, part.before[name]), format_value(name, part.after[name])]
            row.append(format_difference(name, part.intervals[name]))
        rows.append(row)
    return f"## By kind of question\n\n{markdown_table(header, rows)}"


def _transitions_section(comparison: Comparison) -> str:
    rows = [
        [f"**before {letter.upper()}**", *(f"{count:g}" if count == int(count) else f"{count:.1f}" for count in row)]
        for letter, row in zip(TYPES, comparison.transitions, strict=True)
    ]
    table = markdown_table(["questions", *(f"after {letter.upper()}" for letter in TYPES)], rows)
    legend = (
        "A: a search showed the answer and the policy gave it. B: shown, but the policy answered otherwise. "
        "C: not shown, not right. D: right without having been shown."
    )
    return f"## Types, before and after\n\n{table}\n\n{legend}"


def library_versions() -> dict[str, str]:
    """Versions of this package and of the libraries that decide its numbers; those not installed are left out."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _run_section(run: Mapping[str, object]) -> str:
    rows = [[markdown_cell(name), markdown_cell(value)] for name, value in run.items()]
    return f"## What was run\n\n{markdown_table(['setting', 'value'], rows, numbers=False)}"


def report_markdown(
    comparison: Comparison,
    *,
    run: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
    figures: Mapping[str, str] | None = None,
    title: str = "Before and after training",
) -> str:
    """
    The report as Markdown.

    Args:
        comparison (`Comparison`):
            Result of `compare`.
        run (`Mapping[str, object]`, *optional*):
            What was run: policy, recipe, seed, versions.
        files (`Mapping[str, str]`, *optional*):
            Label to path of files that belong to the report.
        figures (`Mapping[str, str]`, *optional*):
            Caption to path of figures, relative to the report.
        title (`str`, *optional*, defaults to `"Before and after training"`):
            Headline.

    Returns:
        `str`: Markdown that ends in a newline.
    """
    em = comparison.intervals["em"]
    headline = (
        f"EM {format_value('em', comparison.before['em'])} → **{format_value('em', comparison.after['em'])}** "
        f"({format_difference('em', em)} points) on {comparison.num_questions:,} questions."
    )
    sections = [f"# {markdown_cell(title)}", headline, _metrics_section(comparison)]
    if len(comparison.kinds) > 1:
        sections.append(_kinds_section(comparison))
    sections.append(_transitions_section(comparison))
    if figures:
        sections.append("## Figures\n\n" + "\n\n".join(f"![{caption}]({path})" for caption, path in figures.items()))
    if run:
        sections.append(_run_section(run))
    if files:
        lines = [f"- {markdown_cell(label)}: {markdown_cell(path)}" for label, path in files.items()]
        sections.append("## Files\n\n" + "\n".join(lines))
    return "\n\n".join(sections) + "\n"


def runs_markdown(results: Sequence[RunResult], *, confidence: float = 0.95) -> str:
    """
    Several runs side by side as Markdown: every metric with its interval, then the differences to the first run.

    Args:
        results (`Sequence[RunResult]`):
            Result of `compare_runs`, which must have been given the same `confidence`.
        confidence (`float`, *optional*, defaults to `0.95`):
            Coverage to name in the text.

    Returns:
        `str`: Markdown that ends in a newline.
    """
    names = [markdown_cell(result.name) for result in results]
    percent = f"{100 * confidence:g} %"
    rows = [
        [label, *(format_estimate(metric, result.estimates[metric]) for result in results)]
        for metric, label in METRIC_LABELS.items()
    ]
    for metric, label in (("num_questions", "Questions"), ("num_rollouts", "Rollouts"), ("num_failed", "Failed")):
        rows.append([label, *(f"{result.metrics[metric]:,.0f}" for result in results)])
    sections = [
        "# Runs",
        markdown_table(["metric", *names], rows),
        f"In brackets: {percent} percentile bootstrap interval over questions.",
    ]
    compared = [(name, result) for name, result in zip(names, results, strict=True) if result.differences is not None]
    if compared:
        rows = [
            [label, *(format_difference(metric, result.differences[metric]) for _, result in compared)]
            for metric, label in METRIC_LABELS.items()
        ]
        table = markdown_table(["metric", *(name for name, _ in compared)], rows)
        sections.append(f"## Difference to {names[0]}\n\n{table}\n\nPaired over questions, {percent} interval.")
    unpaired = [name for name, result in zip(names[1:], results[1:], strict=True) if result.differences is None]
    if unpaired:
        sections.append(f"No difference for {', '.join(unpaired)}: other questions were asked than in {names[0]}.")
    return "\n\n".join(sections) + "\n"


def _json_ready(value: object) -> object:
    """NaN becomes `null`: JSON has no NaN, and an undefined ratio must not become a number."""
    if isinstance(value, Mapping):
        return {str(name): _json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_ready(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def write_report(
    path: str | os.PathLike,
    *,
    before: Sequence[Rollout],
    after: Sequence[Rollout],
    run: Mapping[str, object] | None = None,
    files: Mapping[str, str] | None = None,
    log_history: Sequence[Mapping[str, float]] | None = None,
    title: str = "Before and after training",
    seed: int = 0,
) -> Comparison:
    """
    Write the report of a training run: `path` (Markdown), a `.json` next to it with the same numbers, and figures.

    Args:
        path (`str` or `PathLike`):
            Markdown file, for instance `runs/gca/report.md`. The figures go to `<stem>_metrics.png`,
            `<stem>_types.png` and, with `log_history`, `<stem>_training.png` in the same folder.
        before (`Sequence[Rollout]`):
            Evaluation of the start policy.
        after (`Sequence[Rollout]`):
            Evaluation of the trained policy on the same questions.
        run (`Mapping[str, object]`, *optional*):
            What was run: policy, recipe, seed. Versions of the libraries are added.
        files (`Mapping[str, str]`, *optional*):
            Label to path of further files to list.
        log_history (`Sequence[Mapping[str, float]]`, *optional*):
            Training log, as in `trainer_state.json`.
        title (`str`, *optional*, defaults to `"Before and after training"`):
            Headline.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the bootstrap.

    Returns:
        `Comparison`: The numbers that were written.

    Raises:
        `ConfigurationError`: If the two evaluations were asked different questions, or `path` has no Markdown suffix.
    """
    from grounded_rl.evaluation import plots

    path = Path(path)
    if path.suffix.lower() not in (".md", ".markdown"):
        raise ConfigurationError(f"`path` must end in `.md`: got {str(path)!r}. Name the report `report.md`.")
    comparison = compare(before, after, seed=seed)
    figures = {
        "Metrics before and after": plots.plot_comparison(comparison, path.with_name(f"{path.stem}_metrics.png")),
        "Types before and after": plots.plot_types(
            {"before": comparison.before, "after": comparison.after}, path.with_name(f"{path.stem}_types.png")
        ),
    }
    if log_history:
        figures["Training"] = plots.plot_training(log_history, path.with_name(f"{path.stem}_training.png"))
    figures = {caption: figure.name for caption, figure in figures.items()}
    run = {**(run or {}), **library_versions(), "bootstrap seed": seed}
    json_path = path.with_suffix(".json")
    files = {**(files or {}), "The numbers of this page": json_path.name}
    record = {"schema": 1, "title": title, "run": run, "files": files, "figures": figures, **asdict(comparison)}
    write_text(json_path, json.dumps(_json_ready(record), indent=2, ensure_ascii=False) + "\n")
    write_text(path, report_markdown(comparison, run=run, files=files, figures=figures, title=title))
    return comparison
