"""
Passages of a corpus, one at a time.

A corpus is JSON Lines (plain, `.gz` or `.zst`), Parquet, or a data set (`datasets:NAME`). Two row formats are read:
`{"id", "title", "text"}` and the Search-R1 format `{"id", "contents"}`, where `contents` is the title (in optional
double quotes) on the first line and the body after it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.corpus_rows import (
    ANSWER_FIELDS,
    CorpusSource,
    ProgressCallback,
    Row,
    numbered_rows,
    row_name,
)

__all__ = [
    "ANSWER_FIELDS",
    "CorpusDigest",
    "CorpusSource",
    "ProgressCallback",
    "id_sort_key",
    "passage_line",
    "read_corpus",
    "split_contents",
]

_FIRST_DUPLICATE_CHECK = 1 << 16


def id_sort_key(passage_id: str) -> tuple[bool, int, str]:
    """
    Order of passage ids: ids made of ASCII digits come first, by value; all others follow, as text.

    Args:
        passage_id (`str`):
            Id of a passage.

    Returns:
        `tuple[bool, int, str]`: Key for `sorted`. Distinct ids have distinct keys.

    Example:
    ```python
    >>> sorted(["10", "9", "a", "09"], key=id_sort_key)
    ['09', '9', '10', 'a']

    ```
    """
    # `int` refuses strings of more than 4,300 digits; such an id is text for us.
    if len(passage_id) <= 18 and passage_id.isascii() and passage_id.isdigit():
        return (False, int(passage_id), passage_id)
    return (True, 0, passage_id)


def split_contents(contents: str) -> tuple[str, str]:
    """
    Title and body of a Search-R1 `contents` string.

    The title is the first line without one pair of enclosing double quotes, so that quotes which belong to the title
    survive. A string without a line break has no title.

    Args:
        contents (`str`):
            Title line and body.

    Returns:
        `tuple[str, str]`: Title (`""` if there is none) and body.

    Example:
    ```python
    >>> split_contents('"Chechnya"\\nThe republic lies in the North Caucasus.')
    ('Chechnya', 'The republic lies in the North Caucasus.')
    >>> split_contents("no line break here")
    ('', 'no line break here')

    ```
    """
    first_line, line_break, body = contents.partition("\n")
    if not line_break:
        return "", contents
    title = first_line.strip()
    if len(title) >= 2 and title.startswith('"') and title.endswith('"'):
        title = title[1:-1].strip()
    return title, body


def read_corpus(path: CorpusSource, *, on_progress: ProgressCallback | None = None) -> Iterator[Passage]:
    """
    Passages of a corpus, in order, with bounded memory.

    Blank lines and a byte order mark are skipped. Uniqueness of ids is not checked here: see `CorpusDigest`.

    Args:
        path (`str` or `Path`):
            File whose suffix says what it is: `.parquet`, or JSON Lines, compressed if it ends in `.gz` or `.zst`.
            `"datasets:NAME"` or `"datasets:NAME#SPLIT"` reads a data set by its hub name or folder.
        on_progress (`Callable[[int, int], None]`, *optional*):
            Called now and then with the bytes read so far (compressed bytes, if it is) and the size of the file.

    Yields:
        `Passage`: One passage per row.

    Raises:
        `ConfigurationError`: If the file cannot be read or a row is malformed; names the file and the line.
    """
    for _, passage in _numbered_passages(path, on_progress):
        yield passage


def passage_line(passage: Passage) -> bytes:
    """
    The line that stands for a passage in the hash of a corpus.

    Args:
        passage (`Passage`):
            Any passage.

    Returns:
        `bytes`: `[id, title, text]` as JSON in UTF-8, with a line break.
    """
    fields = [passage.id, passage.title, passage.text]
    return json.dumps(fields, ensure_ascii=False).encode("utf-8") + b"\n"


def _numbered_passages(
    source: CorpusSource, on_progress: ProgressCallback | None = None
) -> Iterator[tuple[int, Passage]]:
    """Pairs of line number (from 1) and passage."""
    for number, row in numbered_rows(source, on_progress):
        yield number, _parse_row(row, row_name(source, number))


def _parse_row(row: Row, where: str) -> Passage:
    """The passage of one row; `where` opens every message."""
    fields = _parse_line(row, where) if isinstance(row, bytes) else row
    leaked = sorted(ANSWER_FIELDS & fields.keys())
    if leaked:
        names = ", ".join(f"`{name}`" for name in leaked)
        missing = ", ".join(f"`{name}`" for name in _missing_fields(fields)) or "none"
        raise ConfigurationError(
            f"{where}: a passage must not carry answer fields: got {names} (missing passage fields: {missing}). "
            "This looks like a question file; pass the corpus instead."
        )
    missing_fields = _missing_fields(fields)
    if missing_fields:
        raise ConfigurationError(
            f"{where}: must have `id` and either `text` or `contents`: got {sorted(fields)[:10]}. "
            f"Add {' and '.join(f'`{name}`' for name in missing_fields)}."
        )
    passage = _passage_from_row(fields, where)
    if not (passage.title.strip() or passage.text.strip()):
        raise ConfigurationError(f"{where}: must hold some text: got an empty passage. Remove the row.")
    return passage


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where}: must be UTF-8: got {error.reason!r}. Convert the file.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{where}: must hold one JSON object: got {_excerpt(line)} ({error}). Write one object per line."
        ) from error
    if not isinstance(row, dict):
        raise ConfigurationError(
            f"{where}: must hold one JSON object: got {_excerpt(line)}. Write one object per line."
        )
    return row


def _missing_fields(row: Mapping[str, Any]) -> list[str]:
    """Fields a passage needs and this row lacks."""
    missing = [] if "id" in row else ["id"]
    return missing if "text" in row or "contents" in row else [*missing, "text"]


def _passage_from_row(row: Mapping[str, Any], where: str) -> Passage:
    """The passage of a row that has all its fields."""
    passage_id = row["id"]
    if isinstance(passage_id, int) and not isinstance(passage_id, bool):
        passage_id = str(passage_id)
    if not isinstance(passage_id, str) or not passage_id:
        raise ConfigurationError(
            f"{where}: `id` must be an integer or a non-empty string: got {row['id']!r}. Give every row its own id."
        )
    if "text" in row:
        title, text = "" if row.get("title") is None else row["title"], row["text"]
    else:
        title, text = "", row["contents"]
    for name, value in (("title", title), ("text" if "text" in row else "contents", text)):
        if not isinstance(value, str):
            raise ConfigurationError(
                f"{where}: `{name}` must be a string: got {type(value).__name__}. Correct the row."
            )
    if "text" not in row:
        title, text = split_contents(text)
    try:
        (passage_id + title + text).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{where}: must be valid Unicode: got an unpaired surrogate. Remove it from the row."
        ) from error
    return Passage(id=passage_id, title=title, text=text)


def _excerpt(line: bytes, width: int = 60) -> str:
    """Start of a line, for a message."""
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= width else text[:width] + "…")


class CorpusDigest:
    """
    What an index remembers of its corpus: a hash of the passages in order, their number, the order of their ids.

    Holds 8 bytes per passage, to find repeated ids.

    Args:
        path (`str` or `Path`):
            Corpus; read again only to name the lines of a repeated id.
    """

    def __init__(self, path: CorpusSource) -> None:
        self._path = path
        self._hash = hashlib.sha256()
        self._id_hashes = array("q")
        self._previous_key: tuple[bool, int, str] | None = None
        self._next_check = _FIRST_DUPLICATE_CHECK
        self.ids_ascending = True
        """Whether ids came in the order of `id_sort_key`."""

    @property
    def num_passages(self) -> int:
        """Passages seen so far."""
        return len(self._id_hashes)

    @property
    def sha256(self) -> str:
        """Hexadecimal hash of the passages seen so far: of their `[id, title, text]` as JSON, one per line."""
        return self._hash.hexdigest()

    def add(self, passage: Passage) -> None:
        """
        Take in the next passage.

        Args:
            passage (`Passage`):
                Passage in the order of the corpus.
        """
        self._hash.update(passage_line(passage))
        self._id_hashes.append(hash(passage.id))
        if self.ids_ascending:
            key = id_sort_key(passage.id)
            self.ids_ascending = self._previous_key is None or self._previous_key < key
            self._previous_key = key
        if self.num_passages >= self._next_check:
            self._next_check *= 2
            self._check_unique()

    def finish(self) -> None:
        """
        Check the corpus as a whole.

        Raises:
            `ConfigurationError`: If there was no passage, or two rows share an id; names both lines.
        """
        if not self.num_passages:
            raise ConfigurationError(
                f"The corpus `{self._path}` must hold at least one passage: got none. Check the path."
            )
        self._check_unique()

    def _check_unique(self) -> None:
        """Raise if an id came twice; ids in ascending order cannot."""
        if self.ids_ascending:
            return
        ordered = np.sort(np.frombuffer(self._id_hashes, dtype=np.int64))
        repeated = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
        if not repeated:
            return
        first_lines: dict[str, int] = {}
        for number, passage in _numbered_passages(self._path):
            if hash(passage.id) not in repeated:
                continue
            first = first_lines.setdefault(passage.id, number)
            if first != number:
                raise ConfigurationError(
                    f"{row_name(self._path, number)}: `id` must be unique: got {passage.id!r}, "
                    f"used on {row_name(self._path, first).rpartition(', ')[2]}. Give every row its own id."
                )
