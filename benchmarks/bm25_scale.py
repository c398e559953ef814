"""
Time and memory of the embedded BM25 index on synthetic passages.

    python benchmarks/bm25_scale.py --passages 200000 --out benchmarks/results/bm25.md

Words follow Zipf's law, passages have about 100 words as in wiki-18, queries are ten consecutive words of a passage.
The build and the search run in processes of their own, so that each peak of memory is theirs alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

VOCABULARY = 300_000
WORDS_PER_QUERY = 10
BATCH = 64


def main() -> None:
    """Run both phases and print a Markdown report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=200_000)
    parser.add_argument("--batches", type=int, default=16, help="batches of 64 queries per setting")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--phase", choices=["build", "search"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase == "build":
        print(json.dumps(measure_build(args.folder)))
    elif args.phase == "search":
        print(json.dumps(measure_search(args.folder, args.threads)))
    else:
        text = report(args)
        print(text)
        if args.out is not None:
            args.out.write_text(text + "\n", encoding="utf-8")


def report(args: argparse.Namespace) -> str:
    """Measure and describe."""
    with tempfile.TemporaryDirectory(prefix="bm25-scale-") as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", args.passages)
        write_queries(folder, args.batches * BATCH)
        build = run_phase("build", folder, args)
        search = run_phase("search", folder, args)
        corpus_mb = (folder / "corpus.jsonl").stat().st_size / 1e6
    rows = [
        ("passages", f"{args.passages:,} ({corpus_mb:.0f} MB of JSON Lines)"),
        ("build", f"{build['seconds']:.1f} s ({build['cpu_seconds']:.1f} s of CPU)"),
        ("peak memory of the build", f"{build['peak_mb']:.0f} MB ({build['imports_mb']:.0f} MB of it imports)"),
        ("index", f"{build['index_mb']:.0f} MB with texts"),
        ("open", f"{search['open_ms']:.1f} ms, {search['open_mb']:+.0f} MB resident"),
    ]
    for threads, times in search["ms_per_query"].items():
        value = f"{statistics.median(times):.2f} ms (best batch {min(times):.2f}, worst {max(times):.2f})"
        cpu = search["cpu_ms_per_query"][threads]
        rows.append((f"per query, batches of {BATCH}, k = 3, {threads} thread(s)", f"{value}, {cpu:.2f} ms of CPU"))
    rows.append(("results equal for every number of threads", "yes" if search["equal"] else "NO"))
    command = f"python benchmarks/bm25_scale.py --passages {args.passages} --batches {args.batches}"
    lines = ["# Embedded BM25 at scale", "", f"`{command}`", ""]
    load = os.getloadavg()[1]
    lines += [f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}."]
    lines += [
        f"Median over batches. The load average of the machine was {load:.1f}: above its number of CPUs, wall-clock"
    ]
    lines += ["times are upper bounds and CPU times are what to compare.", "", "| what | value |", "|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {value} |" for what, value in rows)])


def run_phase(phase: str, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """Run one phase in a new process."""
    command = [sys.executable, __file__, "--phase", phase, "--folder", str(folder), "--threads"]
    done = subprocess.run([*command, *map(str, args.threads)], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def write_corpus(path: Path, count: int) -> None:
    """Passages of words drawn by Zipf's law, with two rare words as a title."""
    rng = np.random.default_rng(0)
    words = np.array([spelled(number) for number in range(VOCABULARY)])
    cumulative = np.cumsum(1 / np.arange(1, VOCABULARY + 1))
    with path.open("w", encoding="utf-8") as file:
        for row in range(count):
            length = int(rng.integers(60, 140))
            text = words[np.searchsorted(cumulative, rng.random(length) * cumulative[-1])]
            title = words[rng.integers(1000, VOCABULARY, size=2)]
            file.write(json.dumps({"id": row, "title": " ".join(title), "text": " ".join(text)}) + "\n")


def spelled(number: int) -> str:
    """A pronounceable word for a number."""
    word = ""
    while not word or number:
        number, rest = divmod(number, 100)
        word += "bcdfghjklmnprstvwxyz"[rest // 5] + "aeiou"[rest % 5]
    return word


def write_queries(folder: Path, count: int) -> None:
    """Queries of consecutive words of passages spread over the corpus."""
    rng = np.random.default_rng(1)
    size = (folder / "corpus.jsonl").stat().st_size
    with (folder / "corpus.jsonl").open("rb") as corpus, (folder / "queries.txt").open("w") as queries:
        for _ in range(count):
            corpus.seek(int(rng.integers(0, size * 9 // 10)))
            corpus.readline()
            text = json.loads(corpus.readline())["text"].split()
            start = int(rng.integers(0, len(text) - WORDS_PER_QUERY))
            queries.write(" ".join(text[start : start + WORDS_PER_QUERY]) + "\n")


def resident_mb() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def measure_build(folder: Path) -> dict[str, float]:
    """Time, peak memory and size of a build."""
    from grounded_rl.retrieval.bm25 import build_bm25_index

    imports_mb = resident_mb()
    started, cpu_started = time.perf_counter(), time.process_time()
    manifest = build_bm25_index(folder / "corpus.jsonl", folder / "index")
    return {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": time.process_time() - cpu_started,
        "imports_mb": imports_mb,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "index_mb": sum(entry["bytes"] for entry in manifest["files"].values()) / 1e6,
    }


def measure_search(folder: Path, thread_counts: list[int]) -> dict[str, object]:
    """Time and memory of opening, and time per query for every number of threads."""
    from grounded_rl.retrieval.bm25 import BM25Retriever

    before = resident_mb()
    started = time.perf_counter()
    BM25Retriever.open(folder / "index")
    open_ms = 1e3 * (time.perf_counter() - started)
    open_mb = resident_mb() - before

    queries = (folder / "queries.txt").read_text().splitlines()
    batches = [queries[start : start + BATCH] for start in range(0, len(queries), BATCH)]
    times: dict[int, list[float]] = {}
    cpu_times: dict[int, float] = {}
    results = []
    for threads in thread_counts:
        retriever = BM25Retriever.open(folder / "index", num_threads=threads)
        retriever.search(batches[0], 3)
        found = []
        times[threads] = []
        cpu_started = time.process_time()
        for batch in batches:
            started = time.perf_counter()
            found.append(retriever.search(batch, 3))
            times[threads].append(1e3 * (time.perf_counter() - started) / len(batch))
        cpu_times[threads] = 1e3 * (time.process_time() - cpu_started) / len(queries)
        results.append(found)
    equal = all(found == results[0] for found in results)
    return {
        "open_ms": open_ms,
        "open_mb": open_mb,
        "ms_per_query": times,
        "cpu_ms_per_query": cpu_times,
        "equal": equal,
    }


if __name__ == "__main__":
    main()
