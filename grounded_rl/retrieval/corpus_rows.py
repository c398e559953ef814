"""
Rows of a corpus, whatever it is stored in: JSON Lines (plain, `.gz`, `.zst`), Parquet, or a data set.

To add a format: write a generator of `(number, row)` and a branch in `numbered_rows`. Rows are read one after another
with bounded memory; what is in them is checked by `grounded_rl.retrieval.corpus`.
"""

from __future__ import annotations

import gzip
import io
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from grounded_rl.errors import ConfigurationError
from grounded_rl.import_utils import require

PASSAGE_FIELDS = ("id", "title", "text", "contents")
"""Fields of a row that are read."""

ANSWER_FIELDS = frozenset({"question", "golden_answers", "gold_answers", "answers", "answer", "reward_model"})
"""Fields of question files. A corpus row that carries one would leak gold answers into observations."""

DATASETS_PREFIX = "datasets:"
"""Begins the name of a data set: `datasets:NAME`, `datasets:NAME#SPLIT`, or with a folder for `NAME`."""

CorpusSource = str | Path
"""Path of a file, or `datasets:NAME`."""

ProgressCallback = Callable[[int, int], None]
"""Called with the bytes read so far and the size of the file; counts rows for a data set."""

Row = bytes | Mapping[str, Any]
"""One line of JSON, or the fields of a row."""

_PROGRESS_INTERVAL = 1_000
_BATCH = 256
_SAMPLE_ROWS = 2_000
_BUFFER_BYTES = 1 << 20
_INPUT_BYTES = 1 << 16
_SUFFIX_PARQUET = (".parquet", ".pq")


def numbered_rows(source: CorpusSource, on_progress: ProgressCallback | None = None) -> Iterator[tuple[int, Row]]:
    """
    Rows of a corpus with their numbers, from 1.

    Args:
        source (`str` or `Path`):
            Path or name of the corpus; the suffix decides how it is read.
        on_progress (`Callable[[int, int], None]`, *optional*):
            Called now and then.

    Yields:
        `tuple[int, Row]`: Number and row; lines that are blank are left out, but counted.

    Raises:
        `ConfigurationError`: If the corpus cannot be read.
        `MissingDependencyError`: If the package that reads the format is not installed.
    """
    if is_dataset(source):
        yield from _dataset_rows(str(source), on_progress)
        return
    path = Path(source)
    is_parquet = path.suffix in _SUFFIX_PARQUET
    kind = "Parquet" if is_parquet else "JSON Lines"
    foreign: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)
    if is_parquet:
        foreign = (*foreign, require("pyarrow", "corpus", needed_by=f"--corpus {path.name}").ArrowException)
    elif path.suffix == ".zst":
        foreign = (*foreign, require("zstandard", "corpus", needed_by=f"--corpus {path.name}").ZstdError)
    try:
        yield from (_parquet_rows if is_parquet else _lines)(path, on_progress)
    except foreign as error:
        reason = getattr(error, "strerror", None) or str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"The corpus `{path}` must be a readable {kind} file: got {reason!r}. Check the path."
        ) from error


def is_dataset(source: CorpusSource) -> bool:
    """
    Whether a corpus is a data set and not a file.

    Args:
        source (`str` or `Path`):
            Path or name of the corpus.

    Returns:
        `bool`: `True` for `datasets:NAME`.
    """
    return isinstance(source, str) and source.startswith(DATASETS_PREFIX)


def row_name(source: CorpusSource, number: int) -> str:
    """
    How messages name a row.

    Args:
        source (`str` or `Path`):
            Path or name of the corpus.
        number (`int`):
            Number of the row, from 1.

    Returns:
        `str`: The corpus and the line or row.
    """
    is_lines = not is_dataset(source) and Path(source).suffix not in _SUFFIX_PARQUET
    return f"`{source}`, {'line' if is_lines else 'row'} {number}"


def estimate_num_rows(source: CorpusSource) -> int | None:
    """
    About how many rows a corpus has, for estimates of memory and time: exact for Parquet and small files.

    Args:
        source (`str` or `Path`):
            Path or name of the corpus.

    Returns:
        `int` or `None`: Rows, or `None` for a data set that does not say.
    """
    if not is_dataset(source) and Path(source).suffix in _SUFFIX_PARQUET:
        parquet = require("pyarrow.parquet", "corpus", needed_by="a Parquet corpus")
        return int(parquet.read_metadata(source).num_rows)
    seen: list[tuple[int, int]] = []
    rows = numbered_rows(source, lambda done, total: seen.append((done, total)))
    count = sum(1 for _ in itertools.islice(rows, _SAMPLE_ROWS))
    if count < _SAMPLE_ROWS or not seen or not seen[-1][0]:
        return count if count < _SAMPLE_ROWS else None
    done, total = seen[-1]
    # The last report came after a whole number of intervals.
    return count // _PROGRESS_INTERVAL * _PROGRESS_INTERVAL * total // done


def _lines(path: Path, on_progress: ProgressCallback | None) -> Iterator[tuple[int, bytes]]:
    """Lines of a file."""
    with path.open("rb") as raw:
        total = path.stat().st_size
        lines: Any = raw
        if path.suffix == ".gz":
            lines = gzip.GzipFile(fileobj=raw)
        elif path.suffix == ".zst":
            lines = io.BufferedReader(_ZstandardStream(raw), _BUFFER_BYTES)
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if on_progress is not None and number % _PROGRESS_INTERVAL == 0:
                on_progress(raw.tell(), total)
            if line.strip():
                yield number, line
        if on_progress is not None:
            on_progress(total, total)


class _ZstandardStream(io.RawIOBase):
    """
    Contents of a file of zstandard frames.

    The reader of the library takes a file that was cut for one that ends: a corpus would lack its last passages.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._library = require("zstandard", "corpus", needed_by="a .zst corpus")
        self._raw = raw
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        """Whether the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; 0 at the end of the last frame."""
        while not self._output and self._advance():
            pass
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _advance(self) -> bool:
        """Decompress the next piece; whether there was one."""
        self._input = self._input or self._raw.read(_INPUT_BYTES)
        if not self._input:
            if self._frame is not None:
                raise EOFError("the file ends in the middle of a frame")
            return False
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        self._output = self._frame.decompress(self._input)
        self._input = self._frame.unused_data if self._frame.eof else b""
        self._frame = None if self._frame.eof else self._frame
        return True


def _parquet_rows(path: Path, on_progress: ProgressCallback | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a Parquet file."""
    parquet = require("pyarrow.parquet", "corpus", needed_by=f"--corpus {path.name}")
    total = path.stat().st_size
    # Buffered and not read ahead: a row group may hold the whole corpus.
    with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        names = [name for name in file.schema_arrow.names if name in {*PASSAGE_FIELDS, *ANSWER_FIELDS}]
        num_rows = file.metadata.num_rows
        number = 0
        for batch in file.iter_batches(batch_size=_BATCH, columns=names, use_threads=False):
            for row in batch.to_pylist():
                number += 1
                if on_progress is not None and number % _PROGRESS_INTERVAL == 0:
                    on_progress(number * total // num_rows, total)
                yield number, row
        if on_progress is not None:
            on_progress(total, total)


def _dataset_rows(source: str, on_progress: ProgressCallback | None) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows of a data set: a saved folder, or a name that is streamed."""
    datasets = require("datasets", "corpus", needed_by=f"--corpus {source}")
    name, _, split = source.removeprefix(DATASETS_PREFIX).partition("#")
    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            dataset = datasets.load_from_disk(name)
            dataset = dataset[split or "train"] if isinstance(dataset, datasets.DatasetDict) else dataset
        else:
            dataset = datasets.load_dataset(name, split=split or "train", streaming=True)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigurationError(
            f"The corpus `{source}` must be a data set: got {str(error).strip().partition(chr(10))[0]!r}. "
            f"Write `{DATASETS_PREFIX}NAME` or `{DATASETS_PREFIX}NAME#SPLIT`."
        ) from error
    total = getattr(dataset, "num_rows", None)
    number = 0
    for batch in dataset.iter(batch_size=_BATCH):
        names = [name for name in batch if name in {*PASSAGE_FIELDS, *ANSWER_FIELDS}]
        for values in zip(*(batch[name] for name in names), strict=True):
            number += 1
            if on_progress is not None and total and number % _PROGRESS_INTERVAL == 0:
                on_progress(number, total)
            yield number, dict(zip(names, values, strict=True))
