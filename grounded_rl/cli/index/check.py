"""`grounded-rl index info`, `index verify` and `index plan`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grounded_rl.cli.index.build import megabytes
from grounded_rl.cli.index.progress import CorpusProgress

if TYPE_CHECKING:
    from grounded_rl.retrieval.base import Passage

_NUM_KNOWN_ITEMS = 200
_NUM_VECTORS = 16
_MIN_KNOWN_ITEM_RECALL = 0.9


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


def run_plan(args: argparse.Namespace) -> int:
    """
    Print what every kind of index would need.

    Args:
        args (`argparse.Namespace`):
            `passages`, `dims`, `links`.

    Returns:
        `int`: Exit status.
    """
    from grounded_rl.retrieval.plan import estimates, plan_table

    print(plan_table(estimates(args.passages, args.dims, links=args.links)))
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
        `RetrievalError`: If an index on a server is not the one of the folder, or does not answer.
    """
    from grounded_rl.errors import ConfigurationError
    from grounded_rl.retrieval.base import check_ready, close_retriever
    from grounded_rl.retrieval.build import build_retriever, known_item_recall
    from grounded_rl.retrieval.manifest import check_files, load_manifest

    manifest = load_manifest(args.index)
    check_files(args.index, manifest)
    print(f"files      ok: {len(manifest['files'])} files, {megabytes(manifest['files'])}")
    # Opening compares what is stored, here or on a server, with the number of passages of the manifest.
    retriever: Any = build_retriever(args.index)
    try:
        check_ready(retriever)
        print(f"passages   ok: {manifest['num_passages']:,}")
        if hasattr(retriever, "check_vectors"):
            cosine = retriever.check_vectors(_NUM_VECTORS)
            print(f"vectors    ok: sampled passages encode to what is stored, cosine {cosine:.4f} or more")
        sample = retriever.sample(_NUM_KNOWN_ITEMS)
        recall = known_item_recall(retriever, sample)
        if recall < _MIN_KNOWN_ITEM_RECALL:
            raise ConfigurationError(
                f"`{args.index}` must find at least {_MIN_KNOWN_ITEM_RECALL:.0%} of sampled passages by their own "
                f"words: got {recall:.0%} of {len(sample)}. Rebuild the index, and check that its passages differ."
            )
        print(f"known item ok: {recall:.0%} of {len(sample)} sampled passages found by title and first words")
        if args.corpus is not None:
            _compare_corpus(args.corpus, args.index, manifest, sample)
            print(
                f"corpus     ok: {args.corpus} holds the same passages in the same order, "
                f"and {len(sample)} sampled ones are stored word for word"
            )
    finally:
        close_retriever(retriever)
    return 0


def _compare_corpus(corpus: Any, index: Any, manifest: Mapping[str, Any], sample: Sequence[Passage]) -> None:
    """Raise unless the corpus has the passages the index was built from, and the sample is among them."""
    from grounded_rl.errors import ConfigurationError
    from grounded_rl.retrieval.corpus import CorpusDigest, read_corpus

    digest = CorpusDigest(corpus)
    stored = {passage.id: passage for passage in sample}
    differing = []
    with CorpusProgress("Reading") as progress:
        for passage in read_corpus(corpus, on_progress=progress.update):
            digest.add(passage)
            if stored.pop(passage.id, passage) != passage:
                differing.append(passage.id)
    digest.finish()
    if (digest.num_passages, digest.sha256) != (manifest["num_passages"], manifest["corpus_sha256"]):
        raise ConfigurationError(
            f"`{corpus}` must hold the passages `{index}` was built from "
            f"({manifest['num_passages']:,} passages, sha256 {manifest['corpus_sha256']}): "
            f"got {digest.num_passages:,} passages, sha256 {digest.sha256}. Rebuild the index."
        )
    if differing or stored:
        raise ConfigurationError(
            f"`{index}` must store the passages of `{corpus}`: got other texts for "
            f"{[*differing, *stored][:5]}. Rebuild the index."
        )
