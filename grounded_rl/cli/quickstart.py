"""`grounded-rl quickstart`: the whole loop on the atlas, from facts to a report."""

from __future__ import annotations

import argparse
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grounded_rl.cli.evaluate import evaluate_model
from grounded_rl.cli.models import ATLAS_POLICY
from grounded_rl.cli.train import build_trainer, train
from grounded_rl.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from grounded_rl.data.rows import Question
    from grounded_rl.evaluation.comparison import Comparison
    from grounded_rl.rollouts import Rollout
    from grounded_rl.trainers import SearchAgentConfig

_EPILOG = """\
example:
  grounded-rl quickstart --config recipes/atlas/gca.yaml --out quickstart

Keys of the recipe can be given as `--key value`, for instance `--max_steps 20`.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "quickstart",
        help="the whole loop on a laptop, in minutes",
        description=(
            "Build the atlas and its index, evaluate the start policy, train it, evaluate again on the same held-out "
            "questions, and write a report."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, default=Path("recipes/atlas/gca.yaml"), metavar="RECIPE", help="recipe to train with"
    )
    parser.add_argument("--out", type=Path, default=Path("quickstart"), metavar="DIR", help="folder of the results")
    parser.add_argument(
        "--num-questions", type=int, default=300, metavar="N", help="held-out questions (default: 300)"
    )
    parser.set_defaults(run=_run, takes_overrides=True)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grounded_rl.cli.recipes import parse_recipe, recipe_dataclasses

    console = Console()
    started = time.monotonic()
    if not arguments.config.is_file():
        raise ConfigurationError(
            f"`--config` must be a recipe: got {arguments.config}, which does not exist. Run in a checkout of the "
            "repository, or name a recipe."
        )
    world, index, run = arguments.out / "atlas", arguments.out / "index", arguments.out / "run"
    overrides = [
        *("--train_file", str(world / "train.jsonl"), "--retrieval_index", str(index), "--output_dir", str(run)),
        *arguments.overrides,
    ]
    recipe = parse_recipe(arguments.config, overrides, recipe_dataclasses(arguments.config, overrides))
    questions = _prepare(console, world, index, arguments.num_questions)
    _heading(console, 3, f"Evaluate the start policy on {len(questions)} questions about cities it never saw")
    options = _evaluation_options(recipe[1])
    start = recipe[2].model_name_or_path or ATLAS_POLICY
    before = evaluate_model(start, questions, index, arguments.out / "before" / "rollouts.jsonl", **options)
    _heading(console, 4, f"Train with {recipe[0].method}")
    if run.exists():
        shutil.rmtree(run)
    trainer = build_trainer(*recipe)
    train(trainer)
    _heading(console, 5, "Evaluate the trained policy on the same questions")
    after = evaluate_model(str(run), questions, index, arguments.out / "after" / "rollouts.jsonl", **options)
    comparison = _report(arguments, recipe, before, after, trainer.state.log_history)
    _show(console, comparison, before, after)
    console.print(f"\nFinished in {(time.monotonic() - started) / 60:.1f} minutes. Next:")
    console.print(f"  {arguments.out / 'report.md'}  tables and plots", highlight=False)
    console.print(f"  grounded-rl inspect {arguments.out / 'rollouts.jsonl'} --type B", highlight=False)
    console.print(f"  grounded-rl inspect {run / 'rollouts.jsonl'} --credit --limit 2", highlight=False)
    return 0


def _heading(console: Console, number: int, text: str) -> None:
    console.rule(f"[bold]{number}/6 {text}", align="left")


def _prepare(console: Console, world: Path, index: Path, num_questions: int) -> list[Question]:
    """Write the world, build its index and return the held-out questions."""
    from grounded_rl.data.atlas import prepare_atlas
    from grounded_rl.data.rows import load_questions
    from grounded_rl.retrieval.bm25 import build_bm25_index

    _heading(console, 1, "Write the atlas: passages and questions")
    manifest = prepare_atlas(world, counts={"train": 8_000, "dev": 500, "test": max(1_000, num_questions)})
    console.print(f"{manifest['num_passages']:,} passages about real cities and countries; test cities are unseen")
    _heading(console, 2, "Build the index")
    started = time.monotonic()
    build_bm25_index(world / "corpus.jsonl", index, overwrite=index.exists())
    console.print(f"indexed in {time.monotonic() - started:.1f} s")
    return load_questions(world / "test.jsonl", limit=num_questions)


def _evaluation_options(config: SearchAgentConfig) -> dict[str, Any]:
    """Greedy evaluation under the environment of training."""
    return {
        "dtype": "float32",
        "prompt_style": config.prompt_style,
        "tool_format": config.tool_format,
        "max_turns": config.rollout_max_turns,
        "max_turn_tokens": config.rollout_max_turn_tokens,
        "max_completion_tokens": config.max_completion_length,
        "top_k": config.retrieval_top_k,
        "observation_tokens": config.rollout_observation_tokens,
        "batch_size": 100,
    }


def _report(
    arguments: argparse.Namespace,
    recipe: tuple[Any, ...],
    before: list[Rollout],
    after: list[Rollout],
    log_history: list[dict[str, float]],
) -> Comparison:
    from grounded_rl.evaluation.report import write_report
    from grounded_rl.rollouts import save_rollouts

    save_rollouts(arguments.out / "rollouts.jsonl", after)
    run = {
        "recipe": arguments.config,
        "policy": recipe[2].model_name_or_path,
        "decoding": "greedy",
        **asdict(recipe[0]),
        "steps": recipe[1].max_steps,
        "seed": recipe[1].seed,
    }
    files = {
        "Rollouts of the trained policy": "rollouts.jsonl",
        "Rollouts of the start policy": "before/rollouts.jsonl",
        "Training rollouts with token advantages": "run/rollouts.jsonl",
        "Trained policy": "run",
    }
    return write_report(
        arguments.out / "report.md",
        before=before,
        after=after,
        run=run,
        files=files,
        log_history=log_history,
        title="Quickstart: a search agent on the atlas",
    )


def _show(console: Console, comparison: Comparison, before: list[Rollout], after: list[Rollout]) -> None:
    """One rollout of each type, then the headline numbers."""
    from rich.table import Table

    from grounded_rl.evaluation.metrics import METRIC_LABELS
    from grounded_rl.evaluation.report import format_difference, format_value
    from grounded_rl.evaluation.terminal import render_examples

    _heading(console, 6, "One rollout of each type")
    console.print(render_examples([*after, *before]))
    table = Table(title=f"{comparison.num_questions} held-out questions, greedy")
    for column in ("metric", "before", "after", "difference [95 % interval]"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for name in ("em", "tool_hit", "sup_cor", "hit_acc", "grounded_share"):
        table.add_row(
            METRIC_LABELS[name],
            format_value(name, comparison.before[name]),
            format_value(name, comparison.after[name]),
            format_difference(name, comparison.intervals[name]),
        )
    console.print(table)
