"""
Files of a dense index, and how they are read without holding them in memory.

`passages.jsonl` has one `[id, title, text]` per line and is, byte for byte, what the hash of the corpus is taken of;
`offsets.bin` has the place of each line; `vectors.bin` has one row per passage, in the order of the corpus.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.retrieval.base import Passage

PASSAGES: Final = "passages.jsonl"
OFFSETS: Final = "offsets.bin"
VECTORS: Final = "vectors.bin"
PROBE: Final = "probe.npy"
GRAPH: Final = "index.faiss"
"""A trained FAISS index: the whole of an HNSW index, or the empty one whose lists are in `LISTS`."""
LISTS: Final = "lists.bin"
LIST_SIZES: Final = "list_sizes.npy"
CODES: Final = "codes.unsorted"
"""Codes in the order of the corpus; only while lists are built."""

VECTOR_DTYPES: Final = ("float32", "float16")
OFFSET_BYTES: Final = 8


class PassageFile:
    """
    Passages by their position in the corpus.

    Args:
        folder (`Path`):
            Folder with `PASSAGES` and `OFFSETS`.
        num_passages (`int`):
            Passages there must be.

    Raises:
        `ConfigurationError`: If the files do not hold that many passages.
    """

    def __init__(self, folder: Path, num_passages: int) -> None:
        self._path = folder / PASSAGES
        # One offset per passage: where its line ends.
        self._ends = np.memmap(folder / OFFSETS, dtype="<u8", mode="r")
        size = self._path.stat().st_size
        if len(self._ends) != num_passages or int(self._ends[-1]) != size:
            raise ConfigurationError(
                f"`{folder}` must hold {num_passages:,} passages: got {len(self._ends):,} offsets and {size:,} bytes. "
                "Rebuild the index."
            )
        self._descriptor = os.open(self._path, os.O_RDONLY)

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def read(self, position: int) -> Passage:
        """
        One passage.

        Args:
            position (`int`):
                Position in the corpus, from 0.

        Returns:
            `Passage`: The passage.

        Raises:
            `RetrievalError`: If it cannot be read.
        """
        start = int(self._ends[position - 1]) if position else 0
        length = int(self._ends[position]) - start
        try:
            line = os.pread(self._descriptor, length, start)
            passage_id, title, text = json.loads(line)
        except (OSError, ValueError) as error:
            raise RetrievalError(f"Passage {position} of `{self._path}` could not be read: {error}") from error
        return Passage(passage_id, title, text)


def map_vectors(folder: Path, num_dims: int, dtype: str) -> NDArray[np.floating]:
    """
    The vectors of an index as one array that is mapped, not read.

    Args:
        folder (`Path`):
            Folder with `VECTORS`.
        num_dims (`int`):
            Length of a vector.
        dtype (`str`):
            One of `VECTOR_DTYPES`.

    Returns:
        `np.memmap` of shape `(N, num_dims)`.
    """
    vectors: NDArray[np.floating] = np.memmap(folder / VECTORS, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    return vectors.reshape(-1, num_dims)


def vector_blocks(
    folder: Path, num_dims: int, dtype: str, *, first: int = 0, block: int = 16_384
) -> Iterator[NDArray[np.float32]]:
    """
    The vectors of an index in blocks that are read, so that memory does not grow with the file.

    Args:
        folder (`Path`):
            Folder with `VECTORS`.
        num_dims (`int`):
            Length of a vector.
        dtype (`str`):
            One of `VECTOR_DTYPES`.
        first (`int`, *optional*, defaults to 0):
            Position to begin at.
        block (`int`, *optional*, defaults to 16384):
            Vectors per block.

    Yields:
        `np.ndarray` of shape `(n, num_dims)`, `float32`: Consecutive vectors.
    """
    width = num_dims * np.dtype(dtype).itemsize
    with (folder / VECTORS).open("rb") as file:
        file.seek(first * width)
        while content := file.read(block * width):
            rows = np.frombuffer(content, dtype=np.dtype(dtype).newbyteorder("<")).reshape(-1, num_dims)
            yield np.ascontiguousarray(rows, dtype=np.float32)


def sample_vectors(folder: Path, num_dims: int, dtype: str, positions: Sequence[int]) -> NDArray[np.float32]:
    """
    Vectors at some positions.

    Args:
        folder (`Path`):
            Folder with `VECTORS`.
        num_dims (`int`):
            Length of a vector.
        dtype (`str`):
            One of `VECTOR_DTYPES`.
        positions (`Sequence[int]`):
            Positions in the corpus, ascending.

    Returns:
        `np.ndarray` of shape `(len(positions), num_dims)`, `float32`.
    """
    width = num_dims * np.dtype(dtype).itemsize
    sample = np.empty((len(positions), num_dims), dtype=np.float32)
    with (folder / VECTORS).open("rb") as file:
        for row, position in enumerate(positions):
            file.seek(position * width)
            sample[row] = np.frombuffer(file.read(width), dtype=np.dtype(dtype).newbyteorder("<"))
    return sample
