"""
Memory and disk of every kind of index, before one is built.

Formulas count what grows with the corpus; `basis` says where each comes from. N passages, d dimensions, m links per
node of a graph.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from grounded_rl.errors import ConfigurationError

TEXT_BYTES_PER_PASSAGE = 660
"""Id, title and body of a passage of 100 words, as JSON (mean of a corpus of 31,029 Wikipedia passages)."""

BM25_BYTES_PER_PASSAGE = 550
"""Embedded BM25 index with compressed text, measured on 200,000 passages of 100 words."""

LUCENE_BYTES_PER_PASSAGE = 800
"""Inverted index and stored text of Elasticsearch: 15 to 20 GB for 21 million passages."""

GRAPH_LINKS = 16
_GIB = 1 << 30
_BM25_BUILD_BYTES = 200 << 20
_DENSE_BUILD_BYTES = 1 << 30
_MODEL_BYTES = 1 << 30
_HEAP_BYTES = 8 << 30


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one kind of index needs, in bytes."""

    backend: str
    kind: str
    build_memory: int
    """Memory of the process that builds, models included."""
    search_memory: int
    """What should fit into memory for fast searches: page cache for files that are mapped, heap for the rest."""
    disk: int
    basis: str
    """Where the figures come from."""


def estimates(num_passages: int, num_dims: int, *, links: int = GRAPH_LINKS) -> list[Estimate]:
    """
    What every kind of index needs.

    Args:
        num_passages (`int`):
            Passages of the corpus.
        num_dims (`int`):
            Length of a vector.
        links (`int`, *optional*, defaults to 16):
            Links per node of an Elasticsearch graph (`m`).

    Returns:
        `list[Estimate]`: One estimate per backend and kind.

    Raises:
        `ConfigurationError`: If a number is below 1.
    """
    for name, value in (("passages", num_passages), ("dims", num_dims), ("links", links)):
        if value < 1:
            raise ConfigurationError(f"`{name}` must be at least 1: got {value}. Pass the size of the index.")
    bm25 = BM25_BYTES_PER_PASSAGE * num_passages
    return [
        Estimate("bm25", "tantivy", _BM25_BUILD_BYTES + 8 * num_passages, bm25, bm25, "measured, 200 k passages"),
        *(dense_estimate(kind, num_passages, num_dims) for kind in ("Flat", "IVF,SQ8", "HNSW")),
        *_elasticsearch_estimates(num_passages, num_dims, links),
    ]


def dense_estimate(kind: str, num_passages: int, num_dims: int, *, vector_bytes: int = 4) -> Estimate:
    """
    What a dense index needs.

    Args:
        kind (`str`):
            `"Flat"`, `"IVF,SQ8"` or `"HNSW"`.
        num_passages (`int`):
            Passages of the corpus.
        num_dims (`int`):
            Length of a vector.
        vector_bytes (`int`, *optional*, defaults to 4):
            Bytes per number of the stored vectors: 4 for `float32`, 2 for `float16`.

    Returns:
        `Estimate`: The estimate.
    """
    raw = num_passages * num_dims * vector_bytes
    stored = raw + num_passages * (TEXT_BYTES_PER_PASSAGE + 8)
    fixed = _MODEL_BYTES + min(_DENSE_BUILD_BYTES, 4 * raw) + 8 * num_passages
    if kind == "Flat":
        return Estimate("dense", kind, fixed, raw, stored, "formula: N d bytes per number")
    if kind == "IVF,SQ8":
        lists = num_passages * (num_dims + 8)
        return Estimate("dense", kind, fixed, lists, stored + 2 * lists, "formula: N (d + 8); disk while it is built")
    graph = num_passages * (num_dims + 2 * 32 * 4 + 16)
    return Estimate("dense", kind, fixed + graph, graph, stored + graph, "formula: N (d + 8 m + 16), m = 32")


def _elasticsearch_estimates(num_passages: int, num_dims: int, links: int) -> list[Estimate]:
    """Estimates by the formulas of Elastic's documentation; raw vectors stay on the disk beside the small ones."""
    text = LUCENE_BYTES_PER_PASSAGE * num_passages
    raw = 4 * num_passages * num_dims
    graph = 4 * links * num_passages
    quantized = {
        "hnsw": (raw, "Elastic: 4 N d + 4 N m"),
        "int8_hnsw": (num_passages * (num_dims + 4), "Elastic: N (d + 4) + 4 N m"),
        "int4_hnsw": (num_passages * (num_dims // 2 + 4), "Elastic: N (d/2 + 4) + 4 N m"),
        "bbq_hnsw": (num_passages * (num_dims // 8 + 14), "Elastic: N (d/8 + 14) + 4 N m"),
    }
    rows = [Estimate("elasticsearch", "bm25 only", _DENSE_BUILD_BYTES, _HEAP_BYTES + text, text, "estimate")]
    for kind, (vectors, basis) in quantized.items():
        disk = text + raw + graph + (0 if kind == "hnsw" else vectors)
        memory = _HEAP_BYTES + text + vectors + graph
        rows.append(Estimate("elasticsearch", kind, _DENSE_BUILD_BYTES + _MODEL_BYTES, memory, disk, basis))
    return rows


def plan_table(rows: Iterable[Estimate]) -> str:
    """
    Estimates as a Markdown table.

    Args:
        rows (`Iterable[Estimate]`):
            Estimates.

    Returns:
        `str`: One line per estimate, sizes in GiB.
    """
    lines = [
        "| backend | kind | build memory GiB | search memory GiB | disk GiB | basis |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in rows:
        sizes = " | ".join(f"{size / _GIB:,.1f}" for size in (row.build_memory, row.search_memory, row.disk))
        lines.append(f"| {row.backend} | {row.kind} | {sizes} | {row.basis} |")
    return "\n".join(lines)


def check_resources(estimate: Estimate, folder: Path, *, num_bytes_there: int = 0) -> None:
    """
    Refuse a build that this machine cannot hold.

    Args:
        estimate (`Estimate`):
            What the index needs.
        folder (`Path`):
            Where it will be written.
        num_bytes_there (`int`, *optional*, defaults to 0):
            Bytes of it that an earlier try has written.

    Raises:
        `ConfigurationError`: If memory or disk are too small.
    """
    memory = available_memory()
    if memory is not None and estimate.build_memory > memory:
        raise ConfigurationError(
            f"`{estimate.kind}` must fit into memory while it is built, about {gibibytes(estimate.build_memory)}: "
            f"got {gibibytes(memory)} available. Choose another kind (`grounded-rl index plan`) or a larger machine."
        )
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free + num_bytes_there
    if estimate.disk > free:
        raise ConfigurationError(
            f"`{folder}` must have room for about {gibibytes(estimate.disk)}: got {gibibytes(free)} free. "
            "Choose another disk or smaller vectors."
        )


def available_memory() -> int | None:
    """
    Memory this process may still take, by the system and by the limit of its container.

    Returns:
        `int` or `None`: Bytes, or `None` where the system does not say.
    """
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(1024 * int(line.split()[1]))
    except OSError:
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
            found.append(max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def gibibytes(size: int) -> str:
    """
    A size for people.

    Args:
        size (`int`):
            Bytes.

    Returns:
        `str`: In GiB with one decimal.
    """
    return f"{size / _GIB:,.1f} GiB"
