"""`grounded-rl inspect`: read rollouts in the terminal, or write them as one HTML page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grounded_rl.errors import ConfigurationError, RolloutError

if TYPE_CHECKING:
    from grounded_rl.rollouts import Rollout

EXAMPLE = """examples:
  grounded-rl inspect runs/gca/rollouts.jsonl --summary
  grounded-rl inspect runs/gca/rollouts.jsonl --type B --kind multi --limit 3
  grounded-rl inspect runs/gca --id q-00017 --residual --tokenizer runs/gca/final
  grounded-rl inspect runs/gca --html runs/gca/rollouts.html
"""

DEFAULT_FILE = "rollouts.jsonl"
DEFAULT_LIMIT = 10
_SCREEN_CHARACTERS, _ALL_CHARACTERS = 1500, 10_000_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """
    Add the command `inspect`.

    Args:
        subparsers (`argparse._SubParsersAction`):
            Where commands are added.
    """
    parser = subparsers.add_parser(
        "inspect",
        help="read rollouts in the terminal, or write them as one HTML page",
        description="Show rollouts: turns, queries, passages with the answer marked, diagnosis type, token credit.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help=f"rollouts as JSON Lines, or a folder with {DEFAULT_FILE}"
    )
    parser.add_argument(
        "--type",
        action="append",
        type=str.upper,
        choices=["A", "B", "C", "D"],
        metavar="TYPE",
        help="keep a diagnosis type (A, B, C or D); may be repeated",
    )
    parser.add_argument("--kind", action="append", metavar="KIND", help="keep a kind of question; may be repeated")
    parser.add_argument("--id", metavar="ID", help="keep the rollouts of one question")
    parser.add_argument(
        "--limit",
        type=int,
        metavar="N",
        help=f"keep the first N rollouts (default: {DEFAULT_LIMIT} in the terminal, all elsewhere)",
    )
    parser.add_argument("--summary", action="store_true", help="print metrics instead of rollouts")
    parser.add_argument("--credit", action="store_true", help="shade tokens by their advantage")
    parser.add_argument(
        "--residual", action="store_true", help="shade tokens by what was added to the rollout's common advantage"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer of the policy, for exact borders of shaded tokens"
    )
    parser.add_argument("--full", action="store_true", help="do not shorten long texts")
    parser.add_argument("--html", type=Path, metavar="OUT", help="write a self-contained HTML page instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    Show or export rollouts.

    Args:
        args (`argparse.Namespace`):
            The options of `add_parser`.

    Returns:
        `int`: 0, also when no rollout passes the filters.
    """
    if args.limit is not None and args.limit < 1:
        raise ConfigurationError(
            f"`--limit` must be at least 1: got {args.limit}. Leave it out to see the first ones."
        )
    rollouts = read_rollouts(args.file)
    kept = _filtered(rollouts, types=args.type, kinds=args.kind, question_id=args.id)
    if args.html is not None:
        return _export(args, kept[: args.limit])
    if args.summary:
        return _print_summary(args, kept[: args.limit])
    return _print_rollouts(args, kept, num_all=len(rollouts))


def read_rollouts(path: Path) -> list[Rollout]:
    """
    Rollouts of a file or of a folder's `rollouts.jsonl`, with a progress bar where someone is watching.

    Args:
        path (`Path`):
            File or folder.

    Returns:
        `list[Rollout]`: At least one.

    Raises:
        `RolloutError`: If a line is no rollout.
        `ConfigurationError`: If there is no rollout.
    """
    from tqdm import tqdm

    from grounded_rl.rollouts import iterate_rollouts

    file = path / DEFAULT_FILE if path.is_dir() else path
    try:
        # `disable=None` silences the bar where standard error is not a terminal.
        rollouts = list(tqdm(iterate_rollouts(file), unit=" rollouts", delay=1, leave=False, disable=None))
    except RecursionError as error:
        raise RolloutError(f"{file} must hold one rollout a line: got a line nested too deeply.") from error
    if not rollouts:
        raise ConfigurationError(f"`{file}` must hold at least one rollout: got none. Check that the run wrote it.")
    for number, rollout in enumerate(rollouts, start=1):
        if (value := next((text for text in _texts(rollout) if not isinstance(text, str)), None)) is not None:
            raise RolloutError(
                f"{file}: ids, titles and texts must be strings: got {value!r} in rollout {number}. "
                "Convert them when the file is written."
            )
    return rollouts


def _texts(rollout: Rollout) -> Iterator[object]:
    """Everything of a rollout that is read as text; absent values are left out."""
    texts = [rollout.question_id, rollout.question, rollout.answer, rollout.question_kind, *rollout.answers]
    for turn in rollout.turns:
        texts += [turn.text, turn.observation]
        for call in turn.calls:
            texts += [call.query, call.error]
            texts += [text for passage in call.passages for text in (passage.id, passage.title, passage.text)]
    return (text for text in texts if text is not None)


def _filtered(
    rollouts: Sequence[Rollout],
    *,
    types: Sequence[str] | None,
    kinds: Sequence[str] | None,
    question_id: str | None,
) -> list[Rollout]:
    from grounded_rl.evaluation.metrics import UNKNOWN_KIND
    from grounded_rl.grounding import diagnose

    known_kinds = sorted({rollout.question_kind or UNKNOWN_KIND for rollout in rollouts})
    for kind in kinds or ():
        if kind not in known_kinds:
            raise ConfigurationError(f"`--kind` must be one of {known_kinds[:20]}: got {kind!r}. Choose one of them.")
    if question_id is not None and all(rollout.question_id != question_id for rollout in rollouts):
        raise ConfigurationError(
            f"`--id` must be the id of a question in the file: got {question_id!r}. "
            f"The first one is {rollouts[0].question_id!r}."
        )
    return [
        rollout
        for rollout in rollouts
        if (question_id is None or rollout.question_id == question_id)
        and (not kinds or (rollout.question_kind or UNKNOWN_KIND) in kinds)
        and (not types or str(diagnose(rollout).type) in types)
    ]


def _decoder(path: str | None) -> Callable[[Sequence[int]], str] | None:
    if path is None:
        return None
    from grounded_rl.import_utils import require

    transformers = require("transformers", "train", needed_by="--tokenizer")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"`--tokenizer` must be a folder or name of a tokenizer: got {path!r}. Name the folder of the policy."
        ) from error
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _console():
    from rich.console import Console

    # A terminal that cannot show a character shows a question mark; it is no reason to stop.
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False, markup=False, emoji=False)


def _export(args: argparse.Namespace, rollouts: Sequence[Rollout]) -> int:
    from grounded_rl.evaluation.html import write_html

    path = write_html(args.html, rollouts, title=str(args.file), decode=_decoder(args.tokenizer))
    print(f"wrote {len(rollouts):,} rollouts to {path}")
    return 0


def _print_summary(args: argparse.Namespace, rollouts: Sequence[Rollout]) -> int:
    from grounded_rl.evaluation.terminal import render_summary

    _console().print(render_summary(rollouts, title=str(args.file)))
    return 0


def _print_rollouts(args: argparse.Namespace, kept: Sequence[Rollout], *, num_all: int) -> int:
    from grounded_rl.evaluation.terminal import render_rollout

    decode = _decoder(args.tokenizer)
    console = _console()
    shown = kept[: args.limit or DEFAULT_LIMIT]
    for rollout in shown:
        console.print(
            render_rollout(
                rollout,
                credit=args.credit,
                residual=args.residual,
                decode=decode,
                max_characters=_ALL_CHARACTERS if args.full else _SCREEN_CHARACTERS,
            )
        )
    more = " (raise `--limit` to see more)" if len(shown) < len(kept) else ""
    console.print(f"{len(shown):,} shown, {len(kept):,} match, {num_all:,} in the file{more}", style="dim")
    return 0
