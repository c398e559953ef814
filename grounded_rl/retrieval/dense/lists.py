"""
The FAISS structures of a dense index: inverted lists with one byte per number (`IVF,SQ8`), and a graph (`HNSW`).

Lists are built in three passes whose memory does not depend on the corpus: train on a sample, encode block by block
into one file, sort that file into the lists. Each pass can be repeated from the files of the one before. FAISS reads
the lists by memory map. A graph is built in memory, as FAISS needs it whole.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError
from grounded_rl.import_utils import require
from grounded_rl.retrieval.building import BuildFolder, cut_to, write_atomically
from grounded_rl.retrieval.dense.files import (
    CODES,
    GRAPH,
    LIST_SIZES,
    LISTS,
    VECTORS,
    sample_vectors,
    vector_blocks,
)

KINDS: Final = ("Flat", "IVF,SQ8", "HNSW")
FLAT, IVF, HNSW = KINDS

FLAT_LIMIT: Final = 1_000_000
"""Passages from which on inverted lists are the default."""

_TRAINING_BYTES: Final = 1 << 29
_TRAINING_PER_LIST: Final = 64
_MIN_TRAINING_PER_LIST: Final = 39
"""FAISS warns below this number."""
_MIN_PROBES: Final = 64
_BLOCK: Final = 16_384
_ID_BYTES: Final = 8
_GRAPH_LINKS: Final = 32
_GRAPH_EF_CONSTRUCTION: Final = 80


def default_kind(num_passages: int) -> str:
    """
    The structure for a number of passages: exact search up to a million, inverted lists above.

    Args:
        num_passages (`int`):
            Passages of the corpus.

    Returns:
        `str`: One of `KINDS`.
    """
    return FLAT if num_passages < FLAT_LIMIT else IVF


def structure_parameters(
    kind: str, num_passages: int, num_dims: int, *, nlist: int | None = None, nprobe: int | None = None
) -> dict[str, Any]:
    """
    What decides the answers of a structure.

    Lists number \\( n = 4 \\sqrt{N} \\), but no more than half a gigabyte of vectors can train. Of them
    \\( 2.5 \\sqrt{n} \\) are searched, at least 64: on 6 and on 31 thousand real passages that number found 95 % of
    the three best (`benchmarks/results/dense_recall.md`); beyond, it is an extrapolation.

    Args:
        kind (`str`):
            One of `KINDS`.
        num_passages (`int`):
            Passages of the corpus.
        num_dims (`int`):
            Length of a vector.
        nlist (`int`, *optional*):
            Number of lists.
        nprobe (`int`, *optional*):
            Lists that are searched.

    Returns:
        `dict[str, Any]`: Parameters for the manifest.
    """
    if kind == IVF:
        trainable = _TRAINING_BYTES // (4 * num_dims) // _MIN_TRAINING_PER_LIST
        most = max(1, min(trainable, num_passages // _MIN_TRAINING_PER_LIST))
        lists = nlist if nlist is not None else max(1, min(most, round(4 * num_passages**0.5)))
        if lists > num_passages:
            raise ConfigurationError(
                f"`nlist` must not exceed the {num_passages:,} passages: got {lists}. Leave it out."
            )
        probes = max(_MIN_PROBES, math.ceil(2.5 * lists**0.5)) if nprobe is None else nprobe
        return {"nlist": lists, "nprobe": min(probes, lists)}
    if kind == HNSW:
        return {"links": _GRAPH_LINKS, "ef_construction": _GRAPH_EF_CONSTRUCTION, "ef_search": 256}
    return {}


def build_structure(build: BuildFolder, parameters: Mapping[str, Any], on_stage: Callable[[str], None]) -> None:
    """
    Build the FAISS structure over the vectors of a folder, from wherever an earlier try ended.

    Args:
        build (`BuildFolder`):
            Folder with all vectors.
        parameters (`Mapping[str, Any]`):
            Parameters of the manifest: `kind`, `num_dims`, `vectors` and those of the structure.
        on_stage (`Callable[[str], None]`):
            Called with what is being done.
    """
    if build.progress.get("is_structured"):
        return
    faiss = require("faiss", "dense", needed_by="the backend `dense`")
    if parameters["kind"] == IVF:
        on_stage("training the lists")
        index = _trained_index(faiss, build.path, parameters, int(build.progress["num_passages"]))
        on_stage("encoding the vectors")
        _encode(build, index, parameters)
        on_stage("sorting the codes into lists")
        _sort_into_lists(build.path, index)
    elif parameters["kind"] == HNSW:
        on_stage("linking the graph")
        _build_graph(faiss, build.path, parameters)
    build.save(is_structured=True)


def open_structure(folder: Path, parameters: Mapping[str, Any]) -> Any:
    """
    The FAISS structure of an index; lists are mapped, a graph is mapped where FAISS can.

    Args:
        folder (`Path`):
            Folder of the index.
        parameters (`Mapping[str, Any]`):
            Parameters of the manifest.

    Returns:
        `faiss.Index` or `None`: The structure; exact search has none.
    """
    faiss = require("faiss", "dense", needed_by="the backend `dense`")
    if parameters["kind"] == IVF:
        index = faiss.read_index(str(folder / GRAPH))
        sizes = np.load(folder / LIST_SIZES)
        index.replace_invlists(_mapped_lists(faiss, folder / LISTS, sizes, index.code_size), True)
        index.ntotal = int(sizes.sum())
        index.nprobe = parameters["nprobe"]
        return index
    if parameters["kind"] == HNSW:
        # Older releases of FAISS read the graph into memory.
        index = faiss.read_index(str(folder / GRAPH), getattr(faiss, "IO_FLAG_MMAP_IFC", 0))
        index.hnsw.efSearch = parameters["ef_search"]
        return index
    return None


def _trained_index(faiss: Any, folder: Path, parameters: Mapping[str, Any], num_passages: int) -> Any:
    """The empty index with its centroids, trained on passages at even distances."""
    path = folder / GRAPH
    if path.exists():
        return faiss.read_index(str(path))
    num_dims, nlist = parameters["num_dims"], parameters["nlist"]
    quantizer = faiss.IndexFlatIP(num_dims)
    index = faiss.IndexIVFScalarQuantizer(
        quantizer, num_dims, nlist, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT, True
    )
    count = min(num_passages, _TRAINING_PER_LIST * nlist, _TRAINING_BYTES // (4 * num_dims))
    positions = [(2 * row + 1) * num_passages // (2 * count) for row in range(count)]
    index.cp.min_points_per_centroid = 1
    index.train(sample_vectors(folder, num_dims, parameters["vectors"], positions))
    write_atomically(path, faiss.serialize_index(index).tobytes())
    return index


def _encode(build: BuildFolder, index: Any, parameters: Mapping[str, Any]) -> None:
    """List number and code of every vector, appended to one file."""
    path = build.path / CODES
    num_dims, dtype, width = parameters["num_dims"], parameters["vectors"], index.sa_code_size()
    done = int(build.progress.get("num_encoded", 0))
    cut_to(path, done * width)
    with path.open("ab") as file:
        for block in vector_blocks(build.path, num_dims, dtype, first=done, block=_BLOCK):
            file.write(index.sa_encode(block).tobytes())
            file.flush()
            os.fsync(file.fileno())
            done += len(block)
            build.save(num_encoded=done)


def _sort_into_lists(folder: Path, index: Any) -> None:
    """Write codes and ids to their lists; a list has its codes first, then its ids, both in corpus order."""
    sizes = np.zeros(index.nlist, dtype=np.int64)
    for numbers, _ in _code_blocks(folder, index):
        sizes += np.bincount(numbers, minlength=index.nlist)
    starts = _list_starts(sizes, index.code_size)
    written = np.zeros(index.nlist, dtype=np.int64)
    first = 0
    with (folder / LISTS).open("wb") as file:
        file.truncate(int(sizes.sum()) * (index.code_size + _ID_BYTES))
        descriptor = file.fileno()
        for numbers, codes in _code_blocks(folder, index):
            order = np.argsort(numbers, kind="stable")
            present, begins = np.unique(numbers[order], return_index=True)
            for number, rows in zip(present.tolist(), np.split(order, begins[1:]), strict=True):
                before = int(written[number])
                ids_start = starts[number] + int(sizes[number]) * index.code_size
                os.pwrite(descriptor, codes[rows].tobytes(), starts[number] + before * index.code_size)
                os.pwrite(descriptor, (first + rows).astype("<i8").tobytes(), ids_start + before * _ID_BYTES)
                written[number] += len(rows)
            first += len(numbers)
        os.fsync(descriptor)
    np.save(folder / LIST_SIZES, sizes)


def _code_blocks(folder: Path, index: Any) -> Any:
    """Blocks of list numbers and codes, in the order of the corpus."""
    width = index.sa_code_size()
    number_bytes = width - index.code_size
    with (folder / CODES).open("rb") as file:
        while content := file.read(_BLOCK * width):
            rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
            numbers = np.zeros(len(rows), dtype=np.int64)
            for byte in range(number_bytes):
                numbers |= rows[:, byte].astype(np.int64) << (8 * byte)
            yield numbers, rows[:, number_bytes:]


def _list_starts(sizes: NDArray[np.int64], code_size: int) -> list[int]:
    """Where each list begins in its file."""
    ends = np.cumsum(sizes * (code_size + _ID_BYTES))
    return [0, *ends[:-1].tolist()]


def _mapped_lists(faiss: Any, path: Path, sizes: NDArray[np.int64], code_size: int) -> Any:
    """Inverted lists over a file."""
    lists = faiss.OnDiskInvertedLists(len(sizes), code_size, str(path.absolute()))
    entries = lists.lists
    entries.clear()
    for size, start in zip(sizes.tolist(), _list_starts(sizes, code_size), strict=True):
        entry = faiss.OnDiskOneList()
        entry.size = entry.capacity = size
        entry.offset = start
        entries.push_back(entry)
    lists.totsize = path.stat().st_size
    lists.read_only = True
    lists.do_mmap()
    lists.this.disown()
    return lists


def _build_graph(faiss: Any, folder: Path, parameters: Mapping[str, Any]) -> None:
    """A graph over codes of one byte per number."""
    num_dims = parameters["num_dims"]
    index = faiss.IndexHNSWSQ(num_dims, faiss.ScalarQuantizer.QT_8bit, parameters["links"], faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = parameters["ef_construction"]
    size = (folder / VECTORS).stat().st_size // (num_dims * np.dtype(parameters["vectors"]).itemsize)
    count = min(size, _TRAINING_BYTES // (4 * num_dims))
    positions = [(2 * row + 1) * size // (2 * count) for row in range(count)]
    index.train(sample_vectors(folder, num_dims, parameters["vectors"], positions))
    for block in vector_blocks(folder, num_dims, parameters["vectors"], block=_BLOCK):
        index.add(block)
    temporary = folder / (GRAPH + ".new")
    faiss.write_index(index, str(temporary))
    temporary.replace(folder / GRAPH)
