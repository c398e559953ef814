"""
Load and quality of the Elasticsearch backend, on a real node that is started for it.

    python benchmarks/elasticsearch_load.py --corpus corpus.jsonl --questions questions.jsonl --seconds 60 \\
        --out benchmarks/results/elasticsearch.md

Load: threads ask one question at a time, as many as `--concurrency` says, and every answer is compared with the one
that the same question got alone beforehand. The same is done with one search per request, and with the official client
by itself. Quality: share of gold titles among the first 3 and 10 hits of every question, for the node and for the
embedded index. With `--url` the index is built on a server of yours instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from elasticsearch import Elasticsearch

from grounded_rl.retrieval.base import Hit, Retriever
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.corpus import CorpusDigest, read_corpus
from grounded_rl.retrieval.elasticsearch import (
    ElasticsearchClient,
    ElasticsearchRetriever,
    ElasticsearchSettings,
    ElasticsearchWriter,
    IndexSpec,
    index_facts,
    new_index_name,
)
from grounded_rl.retrieval.elasticsearch.queries import lexical_body, parse_hits
from tests.retrieval.es_node import ElasticsearchNode

K = 3
MULTI_HOP = ("hotpotqa", "2wikimultihopqa", "musique")
OFFICIAL_CONNECTIONS = 16


@dataclass
class Tally:
    """What became of the searches of one run."""

    seconds: float = 0.0
    answered: int = 0
    lost: int = 0
    mixed: int = 0
    latencies: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def rate(self) -> float:
        """Answers per second."""
        return self.answered / self.seconds


def main() -> None:
    """Build, search and print a Markdown report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--url", help="server to use instead of a node of its own")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.questions.read_text(encoding="utf-8").splitlines()]
    questions = [row for row in rows if row["evidence_ok"]]
    load_before = os.getloadavg()[0]
    with _server(arguments.url) as (url, version):
        name, build = _build(url, arguments.corpus)
        try:
            lines = _header(arguments, version, build, load_before)
            lines += _load_table(url, name, [row["question"] for row in questions], arguments)
            lines += ["", *_quality_table(url, name, arguments.corpus, questions)]
        finally:
            client = ElasticsearchClient(ElasticsearchSettings(url))
            client.request("DELETE", f"/{name}")
            client.close()
    report = "\n".join(lines) + "\n"
    sys.stdout.write(report)
    if arguments.out:
        arguments.out.write_text(report, encoding="utf-8")


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[tuple[str, str]]:
    """Address and description of a server."""
    if url is not None:
        client = ElasticsearchClient(ElasticsearchSettings(url))
        version = client.server_version()
        client.close()
        yield url, f"Elasticsearch {version} at an address of its own"
        return
    with ElasticsearchNode(heap_mb=1024, optimize=True) as node:
        yield node.url, "Elasticsearch 7.0.0 (the node of the tests) on the same machine, 1 GB of heap"


def _build(url: str, corpus: Path) -> tuple[str, str]:
    """Index the corpus; name of the index and how long it took."""
    started = time.monotonic()
    client = ElasticsearchClient(ElasticsearchSettings(url))
    writer = ElasticsearchWriter(client, new_index_name("load"), IndexSpec())
    writer.create()
    digest = CorpusDigest(corpus)

    def items() -> Iterator[tuple[int, Any, None]]:
        for ordinal, passage in enumerate(read_corpus(corpus)):
            digest.add(passage)
            yield ordinal, passage, None

    writer.write(items())
    facts = index_facts(
        IndexSpec(),
        corpus_name=corpus.name,
        corpus_sha256=digest.sha256,
        num_passages=digest.num_passages,
        server_version=writer.server_version(),
    )
    writer.finish(facts)
    client.close()
    return writer.index, f"{digest.num_passages:,} passages written and merged in {time.monotonic() - started:.1f} s"


def _header(arguments: argparse.Namespace, version: str, build: str, load_before: float) -> list[str]:
    """What was run, and where."""
    return [
        "# Elasticsearch: load and quality",
        "",
        f"`python benchmarks/elasticsearch_load.py --seconds {arguments.seconds:g}`",
        "",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}.",
        f"{version}.",
        f"The load average of the machine was {load_before:.1f} before the run, client and server share its CPUs.",
        f"{build}; BM25 with k1 = 0.9, b = 0.4, english analyzer. Questions as they stand, k = {K}.",
        "",
    ]


def _load_table(url: str, name: str, questions: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """Searches under load, three ways."""
    lines = [
        "| threads | client | answers/s | requests/s | p50 ms | p95 ms | answered | lost | mixed up |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    reference = ElasticsearchRetriever.connect(url, name, max_batch_size=64)
    expected: dict[str, list[Hit]] = {}
    distinct = list(dict.fromkeys(questions))
    for start in range(0, len(distinct), 64):
        batch = distinct[start : start + 64]
        expected |= dict(zip(batch, reference.search(batch, K), strict=True))
    reference.close()
    ratios = []
    for threads in arguments.concurrency:
        rates = []
        for label, batch_size in (("batched, up to 64 searches per request", 64), ("one search per request", 1)):
            retriever = ElasticsearchRetriever.connect(url, name, max_batch_size=batch_size)
            before = retriever.num_requests
            tally = _press(lambda query, r=retriever: r.search([query], K)[0], expected, threads, arguments.seconds)
            lines.append(_row(threads, label, tally, (retriever.num_requests - before) / tally.seconds))
            rates.append(tally.rate)
            retriever.close()
        with Elasticsearch(url, connections_per_node=OFFICIAL_CONNECTIONS, request_timeout=60) as official:
            plain = _press(lambda query: _plain_search(official, name, query), expected, threads, arguments.seconds)
        label = f"official client alone, one `_search` each, {OFFICIAL_CONNECTIONS} connections"
        lines.append(_row(threads, label, plain, plain.rate))
        ratios.append(
            f"{threads} threads: {rates[0] / rates[1]:.1f} times the same client with one search per request, "
            f"{rates[0] / plain.rate:.1f} times the official client."
        )
    return [*lines, "", *ratios]


def _row(threads: int, label: str, tally: Tally, requests: float) -> str:
    """One line of the table."""
    ordered = sorted(tally.latencies)
    p50, p95 = statistics.median(ordered), ordered[int(0.95 * (len(ordered) - 1))]
    return (
        f"| {threads} | {label} | {tally.rate:,.0f} | {requests:,.0f} | {1e3 * p50:,.0f} | {1e3 * p95:,.0f} "
        f"| {tally.answered:,} | {tally.lost} | {tally.mixed} |"
    )


def _press(search: Callable[[str], list[Hit]], expected: dict[str, list[Hit]], threads: int, seconds: float) -> Tally:
    """Search from many threads for some time."""
    tally = Tally()
    questions = list(expected)
    stop = time.monotonic() + seconds

    def work(number: int) -> None:
        position = number * 7919
        while time.monotonic() < stop:
            question = questions[position % len(questions)]
            position += 1
            started = time.monotonic()
            try:
                hits = search(question)
            except Exception:
                with tally.lock:
                    tally.lost += 1
                continue
            took = time.monotonic() - started
            with tally.lock:
                tally.answered += 1
                tally.mixed += hits != expected[question]
                tally.latencies.append(took)

    started = time.monotonic()
    pool = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()
    tally.seconds = time.monotonic() - started
    return tally


def _plain_search(client: Elasticsearch, name: str, query: str) -> list[Hit]:
    """One search as somebody would write it with the official client."""
    body = lexical_body(query, K)
    body["source"] = body.pop("_source")
    return parse_hits(client.search(index=name, **body).body, name, K)


def _quality_table(url: str, name: str, corpus: Path, questions: Sequence[dict[str, Any]]) -> list[str]:
    """Title recall of the node and of the embedded index."""
    node = ElasticsearchRetriever.connect(url, name)
    with tempfile.TemporaryDirectory() as folder:
        build_bm25_index(corpus, Path(folder) / "index")
        embedded = BM25Retriever.open(Path(folder) / "index")
        recalls = [_recalls(retriever, questions) for retriever in (node, embedded)]
    node.close()
    lines = [
        "Title recall @3 / @10: of multi-hop questions (HotpotQA, 2WikiMultihopQA, MuSiQue) the mean share of gold",
        "titles found, of the others the share of questions with a gold title found. Only questions whose evidence is",
        "in the corpus.",
        "",
        "| questions | number | node, k1 0.9, b 0.4 | embedded, k1 1.2, b 0.75 |",
        "|---|---:|---:|---:|",
    ]
    for dataset in sorted(recalls[0]):
        number = sum(row["dataset"] == dataset for row in questions)
        cells = " | ".join(" / ".join(f"{value:.3f}" for value in recall[dataset]) for recall in recalls)
        lines.append(f"| {dataset} | {number} | {cells} |")
    return lines


def _recalls(retriever: Retriever, questions: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Recall at 3 and at 10 per set of questions."""
    values: dict[str, list[tuple[float, float]]] = {}
    for start in range(0, len(questions), 64):
        batch = questions[start : start + 64]
        found = retriever.search([row["question"] for row in batch], 10)
        for row, hits in zip(batch, found, strict=True):
            gold = {title.casefold() for title in row["gold_titles"]}
            shares = [len(gold & {hit.passage.title.casefold() for hit in hits[:k]}) / len(gold) for k in (3, 10)]
            if row["dataset"] not in MULTI_HOP:
                shares = [float(share > 0) for share in shares]
            values.setdefault(row["dataset"], []).append((shares[0], shares[1]))
    return {
        dataset: (statistics.mean(pair[0] for pair in pairs), statistics.mean(pair[1] for pair in pairs))
        for dataset, pairs in values.items()
    }


if __name__ == "__main__":
    main()
