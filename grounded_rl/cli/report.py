"""`grounded-rl report`: compare evaluated runs, or check what selection did to the trees of training runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from grounded_rl.errors import ConfigurationError

EXAMPLE = """examples:
  grounded-rl report runs/grpo runs/gca
  grounded-rl report runs/*/eval --out comparison.md
  grounded-rl report quickstart --file rollouts_after.jsonl
  grounded-rl report --selection runs/atlas-at2po runs/atlas-sipo --out selection.md
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """
    Add the command `report`.

    Args:
        subparsers (`argparse._SubParsersAction`):
            Where commands are added.
    """
    parser = subparsers.add_parser(
        "report",
        help="compare evaluated runs",
        description="Print the metrics of runs side by side, and their paired differences to the first one. "
        "With --selection: diagnostics of trees, from the records that training wrote.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders with rollouts, or files of them")
    parser.add_argument(
        "--file", default="rollouts.jsonl", metavar="NAME", help="file to read in each folder (default: %(default)s)"
    )
    parser.add_argument(
        "--selection", action="store_true", help="report on the selection records of tree runs (AT²PO, SIPO)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="OUT.md",
        help="write the table to a Markdown file as well; with --selection, figures too",
    )
    parser.add_argument(
        "--num-resamples", type=int, metavar="N", help="bootstrap resamples (default: 10000; 2000 with --selection)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    Compare runs.

    Args:
        args (`argparse.Namespace`):
            The options of `add_parser`.

    Returns:
        `int`: 0.
    """
    from grounded_rl.cli.inspect import read_rollouts
    from grounded_rl.evaluation.comparison import compare_runs
    from grounded_rl.evaluation.files import write_text
    from grounded_rl.evaluation.report import runs_markdown

    for run_path in args.runs:
        if run_path.is_dir() and not (run_path / args.file).is_file():
            raise ConfigurationError(
                f"`RUN` must hold `{args.file}`: got {str(run_path)!r} without it. "
                "Name the folder of an evaluation, or another file with `--file`."
            )
    files = [path / args.file if path.is_dir() else path for path in args.runs]
    if args.selection:
        return _selection(args, files)
    rollouts = {name: read_rollouts(file) for name, file in zip(run_names(args.runs), files, strict=True)}
    num_resamples = 10_000 if args.num_resamples is None else args.num_resamples
    text = runs_markdown(compare_runs(rollouts, num_resamples=num_resamples, seed=args.seed))
    print(text, end="")
    if args.out is not None:
        print(f"\nwrote {write_text(args.out, text)}")
    return 0


def _selection(args: argparse.Namespace, files: Sequence[Path]) -> int:
    """Diagnostics of tree runs."""
    from grounded_rl.evaluation.selection import NUM_RESAMPLES, analyse_selections
    from grounded_rl.evaluation.selection_report import selection_markdown, write_selection_report
    from grounded_rl.rollouts import load_trees

    num_resamples = NUM_RESAMPLES if args.num_resamples is None else args.num_resamples
    if num_resamples < 1:
        raise ConfigurationError(f"`--num-resamples` must be at least 1: got {num_resamples}. Use 2000 for a report.")
    analyses = []
    for name, file in zip(run_names(args.runs), files, strict=True):
        trees = load_trees(file)
        if not trees:
            raise ConfigurationError(
                f"`RUN` must hold trees: got {str(file)!r} without any. "
                "Name the output folder of a run with `method: at2po`, `sipo` or `gca_sipo`."
            )
        analyses.append(analyse_selections(trees, name=name, num_resamples=num_resamples, seed=args.seed))
    command = f"grounded-rl report --selection {' '.join(str(path) for path in args.runs)}"
    print(selection_markdown(analyses), end="")
    if args.out is not None:
        for path in write_selection_report(args.out, analyses, command=f"{command} --out {args.out}"):
            print(f"wrote {path}")
    return 0


def run_names(paths: Sequence[Path]) -> list[str]:
    """
    The shortest ends of paths that tell all of them apart.

    Args:
        paths (`Sequence[Path]`):
            Paths of runs.

    Returns:
        `list[str]`: One name per path.

    Raises:
        `ConfigurationError`: If a path is given twice.
    """
    resolved = [path.resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise ConfigurationError("`RUN` must name different runs: got one twice. Give every run once.")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(resolved):
        depth += 1
    return ["/".join(path.parts[-depth:]) for path in resolved]
