"""
Recall of the approximate dense indexes against exact search, on real passages with a real encoder.

    python benchmarks/dense_recall.py --corpus corpus.jsonl --questions questions.jsonl --passages 8000 \\
        --cache /tmp/dense-recall --out benchmarks/results/dense_recall.md

Passages are spread evenly over the corpus and encoded once, by a build that goes on where an earlier call of this
script ended. Queries are the questions as they stand. Recall@k is the share of the k best passages of exact search
that are among the k best of the other index.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grounded_rl.retrieval.base import Hit
from grounded_rl.retrieval.build import known_item_recall
from grounded_rl.retrieval.corpus import passage_line, read_corpus
from grounded_rl.retrieval.dense import DenseOptions, DenseRetriever, build_dense_index
from grounded_rl.retrieval.dense.files import map_vectors
from grounded_rl.retrieval.encoders import Encoder, load_encoder, passage_text

BATCH = 64
PROBES = (1, 4, 8, 16, 32, 64)


def main() -> None:
    """Build, search and print a Markdown report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True, help='JSON Lines with "question"')
    parser.add_argument("--passages", type=int, default=8_000)
    parser.add_argument("--queries", type=int, default=512)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--cache", type=Path, required=True, help="folder for the encoded passages")
    parser.add_argument("--out", type=Path, help="file for the report")
    args = parser.parse_args()
    encoder = load_encoder(args.model, dtype=args.dtype)
    subset = write_subset(args)
    flat = build_flat(args, subset, encoder)
    queries = read_questions(args.questions, args.queries)
    text = report(args, subset, flat, encoder, queries)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


def write_subset(args: argparse.Namespace) -> Path:
    """Corpus of evenly spread passages."""
    args.cache.mkdir(parents=True, exist_ok=True)
    path = args.cache / f"corpus-{args.passages}.jsonl"
    if not path.exists():
        passages = list(read_corpus(args.corpus))
        count = min(args.passages, len(passages))
        rows = [passages[(2 * row + 1) * len(passages) // (2 * count)] for row in range(count)]
        fields = ("id", "title", "text")
        lines = [json.dumps(dict(zip(fields, json.loads(passage_line(row)), strict=True))) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def build_flat(args: argparse.Namespace, corpus: Path, encoder: Encoder) -> Path:
    """The exact index, built or continued."""
    folder = args.cache / f"flat-{args.passages}-{args.dtype}"
    if not folder.exists():
        build_dense_index(
            corpus, folder, encoder, options=DenseOptions(kind="Flat", shard_passages=64), resume=True, on_stage=print
        )
    return folder


def read_questions(path: Path, count: int) -> list[str]:
    """Questions spread evenly over a file."""
    questions = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines()]
    count = min(count, len(questions))
    return [questions[(2 * row + 1) * len(questions) // (2 * count)] for row in range(count)]


class StoredEncoder:
    """An encoder that takes the vectors of passages, and of queries it has seen, from memory."""

    def __init__(self, encoder: Encoder, folder: Path, corpus: Path) -> None:
        self.settings = encoder.settings
        self.num_dims = encoder.num_dims
        self._encoder = encoder
        vectors = map_vectors(folder, encoder.num_dims, "float32")
        texts = (passage_text(passage) for passage in read_corpus(corpus))
        self._passages = dict(zip(texts, vectors, strict=True))
        self._queries: dict[str, np.ndarray] = {}

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """Stored vectors."""
        known = all(text in self._passages for text in texts)
        return np.stack([self._passages[text] for text in texts]) if known else self._encoder.encode_passages(texts)

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        """Vectors, computed once per query."""
        new = [query for query in queries if query not in self._queries]
        self._queries.update(zip(new, self._encoder.encode_queries(new), strict=True))
        return np.stack([self._queries[query] for query in queries])


def report(args: argparse.Namespace, corpus: Path, flat: Path, encoder: Encoder, queries: list[str]) -> str:
    """Measure and describe."""
    started = time.perf_counter()
    encoder.encode_queries(queries)
    query_ms = 1e3 * (time.perf_counter() - started) / len(queries)
    stored = StoredEncoder(encoder, flat, corpus)
    exact = DenseRetriever.open(flat, encoder=stored)
    known = known_item_recall(exact, exact.sample(200))
    rows = [measured("Flat", exact, exact, queries, folder_mb(flat))]
    for kind in ("IVF,SQ8", "HNSW"):
        folder = args.cache / f"other-{kind.replace(',', '-')}"
        shutil.rmtree(folder, ignore_errors=True)
        manifest = build_dense_index(corpus, folder, stored, options=DenseOptions(kind=kind))
        default = manifest["parameters"].get("nprobe")
        size = folder_mb(folder)
        retriever = DenseRetriever.open(folder, encoder=stored)
        label = f"{kind}, nlist {manifest['parameters']['nlist']}, nprobe {default} (default)" if default else kind
        rows.append(measured(f"**{label}**", retriever, exact, queries, size))
        for nprobe in (value for value in PROBES if default and value <= manifest["parameters"]["nlist"]):
            retriever = DenseRetriever.open(folder, encoder=stored, nprobe=nprobe)
            rows.append(measured(f"{kind}, nprobe {nprobe}", retriever, exact, queries, size))
    load = os.getloadavg()[1]
    head = [
        "# Recall of approximate dense indexes",
        "",
        f"`python benchmarks/dense_recall.py --passages {args.passages} --queries {args.queries} --model {args.model} "
        f"--dtype {args.dtype}`",
        "",
        f"{exact.manifest['num_passages']:,} Wikipedia passages, {len(queries)} questions, {args.model} in "
        f"{args.dtype} ({encoder.num_dims} dimensions, {encoder.settings.pooling} pooling, "
        f"query prefix {encoder.settings.query_prefix!r}).",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, load average {load:.1f}: times are upper "
        "bounds where it exceeds the CPUs.",
        f"Encoding a question took {query_ms:.1f} ms (batches of 32); times below are without it. Known-item check of "
        f"the exact index: {known:.1%} of 200 passages found by title and first words.",
        "",
        f"| index | recall@3 | recall@10 | ms per query, batches of {BATCH} | MB |",
        "|---|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *rows])


def measured(name: str, retriever: DenseRetriever, exact: DenseRetriever, queries: list[str], size: float) -> str:
    """One row of the table."""
    batches = [queries[start : start + BATCH] for start in range(0, len(queries), BATCH)]
    retriever.search(batches[0], 3)
    times, found = [], []
    for batch in batches:
        started = time.perf_counter()
        found += retriever.search(batch, 3)
        times.append(1e3 * (time.perf_counter() - started) / len(batch))
    recall3 = shared(found, exact.search(queries, 3))
    recall10 = shared(retriever.search(queries, 10), exact.search(queries, 10))
    return f"| {name} | {recall3:.3f} | {recall10:.3f} | {statistics.median(times):.2f} | {size:.1f} |"


def shared(found: list[list[Hit]], expected: list[list[Hit]]) -> float:
    """Share of the expected passages that were found."""
    hits = sum(
        len({hit.passage.id for hit in a} & {hit.passage.id for hit in b})
        for a, b in zip(found, expected, strict=True)
    )
    return hits / sum(len(row) for row in expected)


def folder_mb(folder: Path) -> float:
    """Size of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


if __name__ == "__main__":
    main()
