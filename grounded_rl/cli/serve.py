"""`grounded-rl serve`: an index behind a retrieval server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

EXAMPLE = """examples:
  grounded-rl serve --index indexes/wiki
  grounded-rl serve --index indexes/wiki --port 0 --max-batch 128 --max-wait-ms 5
  GROUNDED_RL_SERVER_TOKEN=$(cat token.txt) grounded-rl serve --index indexes/wiki --host 0.0.0.0

  curl http://127.0.0.1:8000/retrieve -H 'Content-Type: application/json' \\
      -d '{"queries": ["capital of Peru"], "topk": 3, "return_scores": true}'
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """
    Add the command `serve`.

    Args:
        subparsers (`argparse._SubParsersAction`):
            Where commands are added.
    """
    parser = subparsers.add_parser(
        "serve",
        help="serve an index over HTTP",
        description=(
            "Serve an index over HTTP: POST /retrieve as Search-R1 defines it, GET /health, /ready, /info, /metrics.\n"
            "Listens on the loopback interface unless told otherwise. Other addresses need a bearer token in the\n"
            "environment variable GROUNDED_RL_SERVER_TOKEN. Stops on Ctrl-C or SIGTERM when all requests are answered."
        ),
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--index", type=Path, required=True, metavar="DIR", help="folder of the index")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--allow-unauthenticated", action="store_true", help="serve other addresses than loopback without a token"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM certificate; serves https")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM key of the certificate")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--default-k", type=int, default=3, metavar="K", help="passages without `topk` (default: %(default)s)"
    )
    limits.add_argument("--max-k", type=int, default=100, metavar="K", help="most passages (default: %(default)s)")
    limits.add_argument(
        "--max-queries", type=int, default=512, metavar="N", help="most queries per request (default: %(default)s)"
    )
    limits.add_argument(
        "--queue", type=int, default=4096, metavar="N", help="most queries that wait (default: %(default)s)"
    )
    limits.add_argument(
        "--request-timeout", type=float, default=60.0, metavar="S", help="seconds per request (default: %(default)s)"
    )
    batching = parser.add_argument_group("batching")
    batching.add_argument(
        "--max-batch", type=int, default=256, metavar="N", help="most queries per search (default: %(default)s)"
    )
    batching.add_argument(
        "--max-wait-ms", type=float, default=2.0, metavar="MS", help="longest wait for others (default: %(default)s)"
    )
    batching.add_argument(
        "--workers", type=int, default=1, metavar="N", help="searches at once (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """
    Serve until told to stop.

    Args:
        args (`argparse.Namespace`):
            `index` and the fields of `ServerSettings`.

    Returns:
        `int`: Exit status; being stopped is no failure.
    """
    from grounded_rl import __version__
    from grounded_rl.retrieval.build import build_retriever
    from grounded_rl.retrieval.manifest import load_manifest
    from grounded_rl.retrieval.server import ServedIndex, ServerSettings, serve
    from grounded_rl.retrieval.wire import TOKEN_VARIABLE

    names = ("host", "port", "allow_unauthenticated", "tls_cert", "tls_key", "default_k", "max_k", "max_queries")
    names += ("queue", "request_timeout", "max_batch", "max_wait_ms", "workers")
    settings = ServerSettings(
        **{name: getattr(args, name) for name in names},
        token=os.environ.get(TOKEN_VARIABLE, "").strip() or None,
        version=__version__,
    )
    manifest = load_manifest(args.index)
    index = ServedIndex(lambda: build_retriever(args.index), manifest=manifest)

    def announce(address: str) -> None:
        access = "with a token" if settings.token else "without a token"
        what = f"{manifest['num_passages']:,} passages, {manifest['backend']}, id {manifest['index_id']}"
        print(f"Serving {args.index} ({what}) at {address} {access}; ready when {address}/ready says so", flush=True)

    serve(index, settings, on_listening=announce)
    print("Stopped", flush=True)
    return 0
