"""
Peak memory of the index builders at two sizes of a synthetic corpus.

    python benchmarks/index_memory.py --passages 10000 1000000 --out benchmarks/results/index_memory.md

Passages have about 100 words by Zipf's law (`bm25_scale.py`). The dense builds use an encoder that draws a vector from
a hash of the text, so that what is measured is the builder and not a model. Every build runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bm25_scale import resident_mb, write_corpus

BUILDS = ("bm25", "Flat", "IVF,SQ8", "HNSW")


class HashEncoder:
    """Unit vectors drawn from a hash of the text."""

    def __init__(self, num_dims: int) -> None:
        from grounded_rl.retrieval.encoders import EncoderSettings

        self.settings = EncoderSettings("hash", "", "", "mean", True, 256)
        self.num_dims = num_dims

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        """One vector per text."""
        rows = [np.random.default_rng(zlib.crc32(text.encode())).normal(size=self.num_dims) for text in texts]
        return (np.stack(rows) / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)

    encode_queries = encode_passages


def main() -> None:
    """Run every build and print a Markdown report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--dims", type=int, default=64)
    parser.add_argument("--builds", nargs="+", choices=BUILDS, default=list(BUILDS[:3]))
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="file for the report")
    parser.add_argument("--phase", choices=BUILDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase is not None:
        print(json.dumps(measure(args.phase, args.folder, args.dims)))
        return
    text = report(args)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


def report(args: argparse.Namespace) -> str:
    """Measure and describe."""
    rows = []
    for count in args.passages:
        with tempfile.TemporaryDirectory(prefix="index-memory-", dir=args.folder) as name:
            folder = Path(name)
            write_corpus(folder / "corpus.jsonl", count)
            for build in args.builds:
                found = run_phase(build, folder, args.dims)
                rows.append(
                    f"| {build} | {count:,} | {found['seconds']:,.0f} | {found['imports_mb']:.0f} "
                    f"| {found['peak_mb']:.0f} | {found['anonymous_mb']:.0f} | {found['index_mb']:,.0f} |"
                )
                print(rows[-1], file=sys.stderr, flush=True)
    command = f"python benchmarks/index_memory.py --passages {' '.join(map(str, args.passages))} --dims {args.dims}"
    head = [
        "# Memory of the index builders",
        "",
        f"`{command} --builds {' '.join(args.builds)}`",
        "",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, load average {os.getloadavg()[1]:.1f} at "
        "the end: times are upper bounds where it exceeds the CPUs.",
        f"Dense builds: {args.dims} dimensions, vectors drawn from a hash (no model).",
        "",
        "| build | passages | seconds | MB after imports | peak MB | of it not backed by files | index MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    return "\n".join([*head, *rows])


def run_phase(build: str, folder: Path, dims: int) -> dict[str, float]:
    """Run one build in a new process."""
    command = [sys.executable, __file__, "--phase", build, "--folder", str(folder), "--dims", str(dims)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def measure(build: str, folder: Path, dims: int) -> dict[str, float]:
    """Time, peak memory and size of a build."""
    from grounded_rl.retrieval.bm25 import build_bm25_index
    from grounded_rl.retrieval.dense import DenseOptions, build_dense_index

    if build != "bm25":
        import faiss  # noqa: F401
    imports_mb = resident_mb()
    started = time.perf_counter()
    anonymous = 0.0

    def watch(*_: object) -> None:
        nonlocal anonymous
        anonymous = max(anonymous, anonymous_mb())

    if build == "bm25":
        manifest = build_bm25_index(folder / "corpus.jsonl", folder / "bm25", on_progress=watch)
    else:
        options = DenseOptions(kind=build)
        manifest = build_dense_index(
            folder / "corpus.jsonl",
            folder / build.replace(",", "-"),
            HashEncoder(dims),
            options=options,
            on_progress=watch,
            on_stage=watch,
        )
    watch()
    return {
        "seconds": time.perf_counter() - started,
        "imports_mb": imports_mb,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "anonymous_mb": anonymous,
        "index_mb": sum(entry["bytes"] for entry in manifest["files"].values()) / 1e6,
    }


def anonymous_mb() -> float:
    """Memory of this process that no file backs, now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e6
    return float("nan")


if __name__ == "__main__":
    main()
