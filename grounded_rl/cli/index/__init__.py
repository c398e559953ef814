"""`grounded-rl index`: build an index, combine indexes, describe one, check one, plan one."""

from __future__ import annotations

import argparse
from pathlib import Path

from grounded_rl.cli.index.build import add_build_options, run_build, run_combine
from grounded_rl.cli.index.check import run_info, run_plan, run_verify

BUILD_EXAMPLE = """examples:
  grounded-rl index build --corpus corpus.jsonl --out indexes/wiki
  grounded-rl index build --corpus corpus.jsonl.zst --out indexes/e5 --backend dense --encoder intfloat/e5-base-v2 \\
      --resume
  ES_API_KEY=… grounded-rl index build --corpus wiki.parquet --out indexes/es --backend elasticsearch \\
      --url https://search:9200
"""
COMBINE_EXAMPLE = """example:
  grounded-rl index combine indexes/wiki indexes/e5 --out indexes/hybrid --weights 1 2
"""
INFO_EXAMPLE = """example:
  grounded-rl index info indexes/wiki
"""
VERIFY_EXAMPLE = """example:
  grounded-rl index verify indexes/wiki --corpus corpus.jsonl
"""
PLAN_EXAMPLE = """example:
  grounded-rl index plan --passages 21015324 --dims 768
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """
    Add the command `index` with its actions.

    Args:
        subparsers (`argparse._SubParsersAction`):
            Where commands are added.
    """
    parser = subparsers.add_parser(
        "index",
        help="build, combine, describe, check or plan a search index",
        description="Build, combine, describe, check or plan a search index.",
        epilog=BUILD_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{build,combine,info,verify,plan}")
    build = _action(
        actions,
        "build",
        "build an index from a corpus",
        "Build an index from a corpus. The folder appears when the index is complete; a build that was\n"
        "interrupted goes on where it was with --resume.",
        BUILD_EXAMPLE,
    )
    add_build_options(build)
    build.set_defaults(run=run_build)
    _add_combine(actions)

    info = _action(
        actions,
        "info",
        "print the manifest of an index",
        "Print the manifest of an index as JSON, with the size of its files.",
        INFO_EXAMPLE,
    )
    info.add_argument("index", type=Path, metavar="DIR", help="folder of the index")
    info.set_defaults(run=run_info)

    verify = _action(
        actions,
        "verify",
        "check that an index is intact and finds its own passages",
        "Check the files of an index against its manifest, and that sampled passages find themselves.\n"
        "With --corpus, check also that the index was built from exactly these passages.",
        VERIFY_EXAMPLE,
    )
    verify.add_argument("index", type=Path, metavar="DIR", help="folder of the index")
    verify.add_argument("--corpus", metavar="FILE", help="corpus to compare with")
    verify.set_defaults(run=run_verify)

    plan = _action(
        actions,
        "plan",
        "print what every kind of index would need",
        "Print the memory and the disk that every kind of index would need, and the basis of each figure.",
        PLAN_EXAMPLE,
    )
    plan.add_argument("--passages", type=int, required=True, metavar="N", help="passages of the corpus")
    plan.add_argument("--dims", type=int, default=768, metavar="D", help="length of a vector (default: %(default)s)")
    plan.add_argument("--links", type=int, default=16, metavar="M", help="links per node of a graph on the server")
    plan.set_defaults(run=run_plan)


def _add_combine(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the action `combine`."""
    combine = _action(
        actions,
        "combine",
        "make a hybrid of indexes of one corpus",
        "Make a hybrid index: its members are searched in parallel and their rankings fused.",
        COMBINE_EXAMPLE,
    )
    combine.add_argument("indexes", nargs="+", type=Path, metavar="DIR", help="folders of the members")
    combine.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    combine.add_argument("--fuse", default="rrf", help="rrf (by ranks) or weighted (by scores); default: %(default)s")
    combine.add_argument("--weights", type=float, nargs="+", metavar="W", help="one weight per member (default: 1)")
    combine.add_argument("--window", type=int, default=100, help="hits of each member that are fused (%(default)s)")
    combine.add_argument("--overwrite", action="store_true", help="replace an index that is already there")
    combine.set_defaults(run=run_combine)


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """Parser of one action."""
    return actions.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
