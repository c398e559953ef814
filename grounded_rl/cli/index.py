"""`grounded-rl index`: build an index, describe it, check it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

BUILD_EXAMPLE = """example:
  grounded-rl index build --corpus corpus.jsonl --out indexes/wiki
"""
INFO_EXAMPLE = """example:
  grounded-rl index info indexes/wiki
"""
VERIFY_EXAMPLE = """example:
  grounded-rl index verify indexes/wiki --corpus corpus.jsonl
"""
CORPUS_HELP = 'JSON Lines, plain or .gz, with rows {"id", "title", "text"} or {"id", "contents"}'

_WRITER_HEAP_MB = 128
_MIN_HEAP_MB_PER_THREAD = 32
_NUM_KNOWN_ITEMS = 200
_MIN_KNOWN_ITEM_RECALL = 0.9


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """
    Add the command `index` with its actions.

    Args:
        subparsers (`argparse._SubParsersAction`):
            Where commands are added.
    """
    parser = subparsers.add_parser(
        "index",
        help="build, describe or check a search index",
        description="Build, describe or check a search index.",
        epilog=BUILD_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="{build,info,verify}")

    build = actions.add_parser(
        "build",
        help="build an index from a corpus",
        description="Build an index from a corpus. The folder appears when the index is complete.",
        epilog=BUILD_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    build.add_argument("--corpus", type=Path, required=True, metavar="FILE", help=CORPUS_HELP)
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    build.add_argument("--backend", default="bm25", help="kind of index (default: %(default)s)")
    build.add_argument("--threads", type=int, default=1, help="threads that write (default: %(default)s)")
    build.add_argument("--overwrite", action="store_true", help="replace an index that is already there")
    build.set_defaults(run=run_build)

    info = actions.add_parser(
        "info",
        help="print the manifest of an index",
        description="Print the manifest of an index as JSON, with the size of its files.",
        epilog=INFO_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    info.add_argument("index", type=Path, metavar="DIR", help="folder of the index")
    info.set_defaults(run=run_info)

    verify = actions.add_parser(
        "verify",
        help="check that an index is intact and finds its own passages",
        description=(
            "Check the files of an index against its manifest, and that sampled passages find themselves.\n"
            "With --corpus, check also that the index was built from exactly these passages."
        ),
        epilog=VERIFY_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verify.add_argument("index", type=Path, metavar="DIR", help="folder of the index")
    verify.add_argument("--corpus", type=Path, metavar="FILE", help="corpus to compare with")
    verify.set_defaults(run=run_verify)


def run_build(args: argparse.Namespace) -> int:
    """
    Build an index and say where it is.

    Args:
        args (`argparse.Namespace`):
            `corpus`, `out`, `backend`, `threads`, `overwrite`.

    Returns:
        `int`: Exit status.
    """
    from grounded_rl.retrieval.bm25 import build_bm25_index
    from grounded_rl.retrieval.build import check_backend

    check_backend(args.backend)
    started = time.perf_counter()
    with _ByteProgress("Indexing") as progress:
        manifest = build_bm25_index(
            args.corpus,
            args.out,
            overwrite=args.overwrite,
            writer_heap_mb=max(_WRITER_HEAP_MB, _MIN_HEAP_MB_PER_THREAD * args.threads),
            num_threads=args.threads,
            on_progress=progress.update,
        )
    seconds = time.perf_counter() - started
    print(
        f"Indexed {manifest['num_passages']:,} passages in {seconds:.1f} s: {args.out} "
        f"({manifest['backend']}, {_megabytes(manifest['files'])}, id {manifest['index_id']})"
    )
    return 0


def run_info(args: argparse.Namespace) -> int:
    """
    Print the manifest of an index as JSON.

    Args:
        args (`argparse.Namespace`):
            `index`.

    Returns:
        `int`: Exit status.
    """
    from grounded_rl.retrieval.manifest import load_manifest

    manifest = load_manifest(args.index)
    files = manifest.pop("files")
    manifest["num_bytes"] = sum(entry["bytes"] for entry in files.values())
    print(json.dumps(manifest, indent=2, ensure_ascii=False))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    """
    Check an index; one line per check that passed.

    Args:
        args (`argparse.Namespace`):
            `index`, `corpus` or `None`.

    Returns:
        `int`: Exit status.

    Raises:
        `ConfigurationError`: For the first check that fails.
    """
    from grounded_rl.errors import ConfigurationError
    from grounded_rl.retrieval.bm25 import BM25Retriever
    from grounded_rl.retrieval.build import known_item_recall
    from grounded_rl.retrieval.manifest import check_files, load_manifest

    manifest = load_manifest(args.index)
    check_files(args.index, manifest)
    print(f"files      ok: {len(manifest['files'])} files, {_megabytes(manifest['files'])}")
    retriever = BM25Retriever.open(args.index)
    print(f"passages   ok: {manifest['num_passages']:,}")
    sample = retriever.sample(_NUM_KNOWN_ITEMS)
    recall = known_item_recall(retriever, sample)
    if recall < _MIN_KNOWN_ITEM_RECALL:
        raise ConfigurationError(
            f"`{args.index}` must find at least {_MIN_KNOWN_ITEM_RECALL:.0%} of sampled passages by their own words: "
            f"got {recall:.0%} of {len(sample)}. Rebuild the index, and check that its passages differ."
        )
    print(f"known item ok: {recall:.0%} of {len(sample)} sampled passages found by title and first words")
    if args.corpus is not None:
        _compare_corpus(args.corpus, args.index, manifest)
        print(f"corpus     ok: {args.corpus} holds the same passages in the same order")
    return 0


def _compare_corpus(corpus: Path, index: Path, manifest: dict[str, object]) -> None:
    """Raise unless the corpus has the passages the index was built from."""
    from grounded_rl.errors import ConfigurationError
    from grounded_rl.retrieval.corpus import CorpusDigest, read_corpus

    digest = CorpusDigest(corpus)
    with _ByteProgress("Reading") as progress:
        for passage in read_corpus(corpus, on_progress=progress.update):
            digest.add(passage)
    digest.finish()
    if (digest.num_passages, digest.sha256) != (manifest["num_passages"], manifest["corpus_sha256"]):
        raise ConfigurationError(
            f"`{corpus}` must hold the passages `{index}` was built from "
            f"({manifest['num_passages']:,} passages, sha256 {manifest['corpus_sha256']}): "
            f"got {digest.num_passages:,} passages, sha256 {digest.sha256}. Rebuild the index."
        )


def _megabytes(files: dict[str, dict[str, int]]) -> str:
    """Total size of the files of a manifest."""
    return f"{sum(entry['bytes'] for entry in files.values()) / 1e6:.1f} MB"


class _ByteProgress:
    """Progress bar on the error stream for a file that is read; nothing where no one watches."""

    def __init__(self, label: str) -> None:
        from tqdm import tqdm

        self._bar = tqdm(desc=label, unit="B", unit_scale=True, disable=None, leave=False)

    def __enter__(self) -> _ByteProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, done: int, total: int) -> None:
        """Move the bar to `done` of `total` bytes."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
