"""`grounded-rl data`: prepare datasets."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    example = "example:\n  grounded-rl data prepare atlas --out data/atlas"
    parser = subparsers.add_parser(
        "data",
        help="prepare datasets",
        description="Prepare datasets.",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="data_command", metavar="COMMAND", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="write questions and corpus of a world",
        description="Write the questions and the corpus of a world as JSON Lines.",
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    prepare.add_argument("world", choices=["atlas"], help="world to write")
    prepare.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write to")
    prepare.add_argument("--seed", type=int, default=0, help="decides the splits and the questions (default: 0)")
    for split, count in (("train", 12_000), ("dev", 500), ("test", 1_000)):
        prepare.add_argument(
            f"--num-{split}", type=int, default=count, metavar="N", help=f"{split} questions (default: {count:,})"
        )
    prepare.set_defaults(run=_prepare)


def _prepare(arguments: argparse.Namespace) -> int:
    from grounded_rl.data.atlas import prepare_atlas

    counts = {"train": arguments.num_train, "dev": arguments.num_dev, "test": arguments.num_test}
    manifest = prepare_atlas(arguments.out, seed=arguments.seed, counts=counts)
    questions = ", ".join(f"{count:,} {split}" for split, count in manifest["num_questions"].items())
    print(f"wrote {manifest['num_passages']:,} passages and {questions} questions to {arguments.out}")
    return 0
