"""`grounded-rl search`: look into an index from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grounded_rl.retrieval.base import Hit

EXAMPLE = """examples:
  grounded-rl search --index indexes/wiki "capital of Peru" "currency of Chile" --k 5
  cat questions.txt | grounded-rl search --index indexes/wiki - --json
  grounded-rl search --index http://127.0.0.1:8000 "capital of Peru"
"""

_BATCH = 256


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """
    Add the command `search`.

    Args:
        subparsers (`argparse._SubParsersAction`):
            Where commands are added.
    """
    parser = subparsers.add_parser(
        "search",
        help="search an index",
        description="Search an index and print the best passages.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "queries", nargs="+", metavar="QUERY", help="queries; - reads one per line from standard input"
    )
    parser.add_argument(
        "--index", required=True, metavar="DIR", help="folder of the index, or URL of a retrieval server"
    )
    parser.add_argument("--k", type=int, default=3, help="passages per query (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per query")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    Search and print.

    Args:
        args (`argparse.Namespace`):
            `index`, `queries`, `k`, `json`.

    Returns:
        `int`: Exit status; finding nothing is no failure.
    """
    from grounded_rl.retrieval.base import close_retriever
    from grounded_rl.retrieval.build import build_retriever

    retriever = build_retriever(args.index)
    given = [line for query in args.queries for line in (_stdin_lines() if query == "-" else [query])]
    # Arguments that are not UTF-8 arrive as unpaired surrogates, which could not be printed.
    queries = [query.encode("utf-8", "replace").decode("utf-8") for query in given]
    try:
        for start in range(0, len(queries), _BATCH):
            batch = queries[start : start + _BATCH]
            for query, hits in zip(batch, retriever.search(batch, args.k), strict=True):
                if args.json:
                    print(_as_json(query, hits))
                else:
                    _print_table(query, hits)
    finally:
        close_retriever(retriever)
    return 0


def _stdin_lines() -> list[str]:
    """Non-blank lines of standard input."""
    return [line.strip() for line in sys.stdin if line.strip()]


def _as_json(query: str, hits: Sequence[Hit]) -> str:
    """One line of JSON for one query."""
    rows = [
        {"id": hit.passage.id, "title": hit.passage.title, "text": hit.passage.text, "score": hit.score}
        for hit in hits
    ]
    return json.dumps({"query": query, "hits": rows}, ensure_ascii=False)


def _print_table(query: str, hits: Sequence[Hit]) -> None:
    """A table of hits for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(query, style="bold"))
    if not hits:
        console.print(Text("  nothing found", style="dim"))
        return
    table = Table(show_lines=True)
    table.add_column("score", justify="right")
    table.add_column("id")
    table.add_column("title", max_width=30)
    table.add_column("text")
    for hit in hits:
        # Text objects: passages hold square brackets, which rich would read as markup.
        table.add_row(f"{hit.score:.2f}", Text(hit.passage.id), Text(hit.passage.title), Text(hit.passage.text))
    console.print(table)
