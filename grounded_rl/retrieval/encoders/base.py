"""
What an encoder is: settings that decide its vectors, two methods, and a probe by which an index recognises it.

Prefixes, pooling, normalisation and length are part of an index: a query encoded without the prefix its passages were
encoded for finds passages all the same, only worse ones. So an index keeps the settings, and the vectors of a few
fixed texts, and refuses an encoder that gives others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError, IndexMismatchError
from grounded_rl.retrieval.base import Passage

PROBES = (
    "What is the capital of Peru?",
    "The lighthouse stands on a rock in the Gulf of Guinea.",
    "café, naïve & Ærøskøbing 1999-2001",
)
"""Texts whose vectors an index keeps, to recognise its encoder."""

MIN_PROBE_COSINE = 0.99
"""Least cosine of a probe's vectors. Half precision stays above 0.999; other weights, prefixes or pooling do not."""

_NORM_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """What decides the vector of a text. Equal settings and equal weights give equal vectors, up to rounding."""

    model: str
    """Name or folder of the model, as it was given."""
    query_prefix: str
    passage_prefix: str
    pooling: str
    """How token vectors become one: `mean`, `cls` or `lasttoken`."""
    normalize: bool
    """Whether vectors have length 1."""
    max_length: int
    """Tokens of a text that are read."""

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> EncoderSettings:
        """
        Settings from the values of `as_dict`.

        Args:
            record (`Mapping[str, Any]`):
                One value per field.

        Returns:
            `EncoderSettings`: The settings.

        Raises:
            `ConfigurationError`: If a field is missing or unknown.
        """
        names = {field.name for field in fields(cls)}
        if record.keys() != names:
            raise ConfigurationError(
                f"`encoder` must have the fields {sorted(names)}: got {sorted(record)}. Rebuild the index."
            )
        return cls(**record)


class Encoder(Protocol):
    """Turns texts into vectors. A text's vector depends on nothing but the text, up to rounding."""

    @property
    def settings(self) -> EncoderSettings:
        """What decides the vectors."""
        ...

    @property
    def num_dims(self) -> int:
        """Length of a vector."""
        ...

    def encode_queries(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """
        Vectors of queries.

        Args:
            queries (`Sequence[str]`):
                Queries, without prefix.

        Returns:
            `np.ndarray` of shape `(len(queries), num_dims)`, `float32`.
        """
        ...

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """
        Vectors of passages.

        Args:
            texts (`Sequence[str]`):
                What `passage_text` gives, without prefix.

        Returns:
            `np.ndarray` of shape `(len(texts), num_dims)`, `float32`.
        """
        ...


def passage_text(passage: Passage) -> str:
    """
    The text of a passage that is encoded: title, line break, body; the body alone if there is no title.

    Args:
        passage (`Passage`):
            Passage of a corpus.

    Returns:
        `str`: Text without prefix.
    """
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


def encode_checked(encoder: Encoder, passages: Sequence[Passage]) -> NDArray[np.float32]:
    """
    Vectors of passages, each of them finite and, if the encoder normalises, of length 1.

    Args:
        encoder (`Encoder`):
            Encoder of the index.
        passages (`Sequence[Passage]`):
            Passages to encode.

    Returns:
        `np.ndarray` of shape `(len(passages), num_dims)`, `float32`.

    Raises:
        `ConfigurationError`: If a passage has no such vector; names its id.
    """
    rows = encoder.encode_passages([passage_text(passage) for passage in passages])
    if rows.shape != (len(passages), encoder.num_dims):
        raise ConfigurationError(
            f"`encoder` must give {len(passages)} vectors of {encoder.num_dims} dimensions: got an array of "
            f"shape {rows.shape}. Check the encoder."
        )
    norms = np.linalg.norm(rows, axis=1)
    good = np.isfinite(norms)
    if encoder.settings.normalize:
        good &= np.abs(norms - 1) < _NORM_TOLERANCE
    if not good.all():
        ids = [passages[row].id for row in np.flatnonzero(~good)[:5]]
        raise ConfigurationError(
            f"`encoder` must give finite vectors{' of length 1' if encoder.settings.normalize else ''}: got "
            f"norms {norms[~good][:5].tolist()} for the passages {ids}. Use `float32`, or check these texts."
        )
    return rows


def probe(encoder: Encoder) -> NDArray[np.float32]:
    """
    Vectors of `PROBES` as queries, then as passages.

    Args:
        encoder (`Encoder`):
            Encoder to describe.

    Returns:
        `np.ndarray` of shape `(2 * len(PROBES), num_dims)`, `float32`.
    """
    return np.concatenate([encoder.encode_queries(PROBES), encoder.encode_passages(PROBES)])


def keep_probe(path: Path, encoder: Encoder) -> NDArray[np.float32]:
    """
    Write the probe of the encoder of a build, or compare it with the one that an earlier try wrote.

    Args:
        path (`Path`):
            File of the probe.
        encoder (`Encoder`):
            Encoder of the build.

    Returns:
        `np.ndarray` of shape `(2 * len(PROBES), num_dims)`, `float32`: What is in the file.

    Raises:
        `IndexMismatchError`: If the earlier try had another encoder: half an index would have other vectors.
    """
    if path.exists():
        vectors: NDArray[np.float32] = np.load(path)
        check_probe(encoder, vectors)
        return vectors
    vectors = probe(encoder)
    temporary = path.with_name("probe.new.npy")
    np.save(temporary, vectors)
    temporary.replace(path)
    return vectors


def check_probe(encoder: Encoder, probe_vectors: NDArray[np.float32]) -> None:
    """
    Refuse an encoder that gives other vectors than the one an index was built with.

    Args:
        encoder (`Encoder`):
            Encoder that is to search.
        probe_vectors (`np.ndarray` of shape `(2 * len(PROBES), num_dims)`):
            What `probe` gave for the encoder of the index.

    Raises:
        `IndexMismatchError`: If a vector has another length, norm or direction.
    """
    now = probe(encoder)
    if now.shape != probe_vectors.shape:
        raise IndexMismatchError(
            f"`encoder` must give vectors of {probe_vectors.shape[1]} dimensions, as the index has: "
            f"got {now.shape[1]} from `{encoder.settings.model}`. Load the model the index was built with."
        )
    norms, recorded_norms = np.linalg.norm(now, axis=1), np.linalg.norm(probe_vectors, axis=1)
    cosines = (now * probe_vectors).sum(axis=1) / np.maximum(norms * recorded_norms, 1e-12)
    if cosines.min() < MIN_PROBE_COSINE or not np.allclose(norms, recorded_norms, rtol=0.02):
        kind = "queries" if cosines[: len(PROBES)].min() < MIN_PROBE_COSINE else "passages"
        raise IndexMismatchError(
            f"`encoder` must give the vectors it gave when the index was built: got a cosine of {cosines.min():.3f} "
            f"for {kind} and norms of {norms.min():.3f} to {norms.max():.3f} from `{encoder.settings.model}`. "
            "The weights, the prefixes or the pooling differ: load the same model or rebuild the index."
        )
