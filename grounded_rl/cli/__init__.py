"""
The command line: `grounded-rl COMMAND …`, also `python -m grounded_rl COMMAND …`.

Every command is a module of this package named like the command, with one function `add_parser(subparsers)` that
declares its options and sets the default `run`, a function of the parsed arguments. A command that also takes recipe
keys sets the default `takes_overrides=True` and finds them, unparsed, in `arguments.overrides`. What is heavy is
imported inside `run`, so that `--help` answers at once. To add one: write the module, append its name to `COMMANDS`.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from grounded_rl import __version__
from grounded_rl.cli._parser import CommandParser, nearest
from grounded_rl.errors import ConfigurationError, GroundedRLError

__all__ = ["COMMANDS", "build_parser", "main"]

COMMANDS: tuple[str, ...] = (
    "quickstart",
    "train",
    "evaluate",
    "data",
    "index",
    "search",
    "serve",
    "inspect",
    "report",
)
"""Names of the subcommands, in the order of `--help`."""

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_EXAMPLES = """\
examples:
  grounded-rl quickstart --out quickstart                        the whole loop on a laptop, in minutes
  grounded-rl data prepare atlas --out data/atlas                questions and corpus of the embedded world
  grounded-rl index build --corpus data/atlas/corpus.jsonl --out indexes/atlas
  grounded-rl search "capital of France" --index indexes/atlas
  grounded-rl train --config recipes/atlas/gca.yaml --learning_rate 5e-5
  accelerate launch --config_file recipes/accelerate/8gpu.yaml -m grounded_rl train --config RECIPE.yaml
  grounded-rl inspect runs/gca/rollouts.jsonl

`grounded-rl COMMAND --help` explains one command.
"""


def build_parser() -> CommandParser:
    """The parser of the whole command line."""
    parser = CommandParser(
        prog="grounded-rl",
        description="Train, evaluate and read LLM search agents.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("--version", action="version", version=f"grounded-rl {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name in COMMANDS:
        importlib.import_module(f"grounded_rl.cli.{name}").add_parser(subparsers)
    parser.set_defaults(subparsers=subparsers.choices)
    return parser


def _run(argv: Sequence[str]) -> int:
    parser = build_parser()
    if not argv:
        parser.print_help()
        return EXIT_USER_ERROR
    known = parser.get_default("subparsers")
    if not argv[0].startswith("-") and argv[0] not in known:
        match = nearest(argv[0], list(known))
        hint = f"Did you mean `{match}`?" if match else "See `grounded-rl --help`."
        raise ConfigurationError(f"the command must be one of {', '.join(known)}: got `{argv[0]}`. {hint}")
    arguments, rest = parser.parse_known_args(argv)
    if rest and not getattr(arguments, "takes_overrides", False):
        known.get(arguments.command, parser).refuse(rest)
    if arguments.command is None:
        parser.print_help()
        return EXIT_USER_ERROR
    arguments.overrides = rest
    return int(arguments.run(arguments) or 0)


def _describe(error: Exception) -> str:
    """One line for an error the user can correct."""
    if isinstance(error, UnicodeDecodeError):
        return f"a text file must be UTF-8: got another encoding at byte {error.start}. Convert or replace the file."
    if isinstance(error, OSError) and error.filename is not None:
        return f"{os.fspath(error.filename)}: {(error.strerror or type(error).__name__).lower()}. Check the path."
    return " ".join(str(error).split())


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command line.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments without the program's name; those of the process by default.

    Returns:
        `int`: Exit code: 0 on success, 2 with one line on stderr for input the user can correct, 130 when interrupted.
    """
    # TRL's own defaults set the old name, so users can do nothing about it.
    warnings.filterwarnings("ignore", message=r"`(is_)?gradient_checkpointing` is deprecated", category=FutureWarning)
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse leaves this way after --help and --version
        return int(stop.code or 0)
    except BrokenPipeError:
        # The reader of a pipe left: send the interpreter's last flush to nowhere, so that it stays quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (
        GroundedRLError,
        UnicodeDecodeError,
        FileNotFoundError,
        FileExistsError,
        PermissionError,
        IsADirectoryError,
        NotADirectoryError,
    ) as error:
        print(f"error: {_describe(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
