"""What is stored for a passage."""

from __future__ import annotations

import base64
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.corpus import id_sort_key

MAX_ID_BYTES: Final = 512
"""Longest id of a document the server takes."""

_NORM_TOLERANCE = 1e-4


def id_order(passage_id: str) -> str:
    """
    Text whose order by bytes is the order of `corpus.id_sort_key`: the server settles ties by it.

    Args:
        passage_id (`str`):
            Id of a passage.

    Returns:
        `str`: Sort key.

    Example:
    ```python
    >>> sorted(["10", "9", "a", "09"], key=id_order)
    ['09', '9', '10', 'a']

    ```
    """
    is_text, value, _ = id_sort_key(passage_id)
    return f"1{passage_id}" if is_text else f"0{value:018d}{passage_id}"


def document(
    passage: Passage, ordinal: int, vector: NDArray[np.float32] | None = None, *, packed: bool = False
) -> dict[str, Any]:
    """
    What is stored for one passage.

    Args:
        passage (`Passage`):
            Passage of the corpus.
        ordinal (`int`):
            Its position in the corpus, from 0.
        vector (`np.ndarray` of shape `(dims,)`, `float32`, *optional*):
            Its vector, of length 1.
        packed (`bool`, *optional*, defaults to `False`):
            Write the vector as `pack_vector` does, for servers from 9.3.

    Returns:
        `dict[str, Any]`: Source of the document.

    Raises:
        `ConfigurationError`: If the id is too long for the server, or the vector does not have length 1.
    """
    if not 1 <= len(passage.id.encode("utf-8")) <= MAX_ID_BYTES:
        raise ConfigurationError(
            f"`id` must have 1 to {MAX_ID_BYTES} bytes for Elasticsearch: got {passage.id[:60]!r}. Shorten it."
        )
    source: dict[str, Any] = {
        "id": passage.id,
        "id_order": id_order(passage.id),
        "pid": ordinal,
        "title": passage.title,
        "text": passage.text,
    }
    if vector is not None:
        norm = float(np.linalg.norm(vector.astype(np.float64)))
        if not abs(norm - 1.0) < _NORM_TOLERANCE:
            raise ConfigurationError(
                f"The vector of passage {passage.id!r} must have length 1: got {norm:.6g}. Use an encoder that "
                "normalises."
            )
        source["vector"] = pack_vector(vector) if packed else round_vector(vector)
    return source


def round_vector(vector: NDArray[np.float32]) -> list[float]:
    """
    A vector as JSON numbers of seven significant digits, half the size of exact ones and equal in `float32` rounding.

    Args:
        vector (`np.ndarray` of shape `(dims,)`, `float32`):
            Vector.

    Returns:
        `list[float]`: Its components.
    """
    return [float(f"{value:.7g}") for value in vector.tolist()]


def pack_vector(vector: NDArray[np.float32]) -> str:
    """
    A vector as base64 of big-endian `float32`, a quarter of the size of JSON numbers; for servers from 9.3.

    Args:
        vector (`np.ndarray` of shape `(dims,)`, `float32`):
            Vector.

    Returns:
        `str`: Base64 text.
    """
    return base64.b64encode(np.asarray(vector, dtype=">f4").tobytes()).decode("ascii")
