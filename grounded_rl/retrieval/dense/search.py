"""
Search in a dense index: candidates from FAISS, ranked by the inner products of the stored vectors.

FAISS computes a product in single precision and in an order that depends on how many queries there are, and an
approximate structure compares codes. So its candidates are scored again, one by one, from the stored vectors: scores
are comparable between structures, and do not depend on the other queries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError, IndexMismatchError, RetrievalError
from grounded_rl.import_utils import require
from grounded_rl.retrieval.base import Hit, Passage, check_request
from grounded_rl.retrieval.corpus import id_sort_key
from grounded_rl.retrieval.dense.build import BACKEND
from grounded_rl.retrieval.dense.files import PROBE, PassageFile, map_vectors
from grounded_rl.retrieval.dense.lists import FLAT, IVF, open_structure
from grounded_rl.retrieval.encoders import Encoder, check_probe, encode_checked, load_recorded_encoder
from grounded_rl.retrieval.encoders.base import MIN_PROBE_COSINE
from grounded_rl.retrieval.manifest import index_id, load_manifest

MAX_QUERY_CHARACTERS = 65_536
"""What follows in a longer query is not read."""

SCORE_DECIMALS = 5
"""Scores are rounded: a model gives a text vectors that differ in the seventh digit from batch to batch."""

_QUERIES_PER_CALL = 256
_FLAT_BLOCK = 65_536
_EXTRA_CANDIDATES = 32
_MARGIN = 2e-5


class DenseRetriever:
    """
    Searches a dense index. Make one with [`DenseRetriever.open`].

    Scores are inner products of the query's and the passage's vector, rounded to five decimals. Hits are ordered by
    score, then by id (`corpus.id_sort_key`); passages that tie with the last hit are compared before the cut. A
    `"Flat"` index is exact; the others may miss passages that an exact search would find.
    """

    def __init__(self, folder: Path, manifest: Mapping[str, Any], encoder: Encoder):
        self._manifest = dict(manifest)
        self._parameters: Mapping[str, Any] = self._manifest["parameters"]
        self._encoder = encoder
        self._passages = PassageFile(folder, self._manifest["num_passages"])
        self._vectors = map_vectors(folder, self._parameters["num_dims"], self._parameters["vectors"])
        self._structure = open_structure(folder, self._parameters)
        self._faiss = require("faiss", "dense", needed_by="the backend `dense`")
        if len(self._vectors) != self._manifest["num_passages"]:
            raise ConfigurationError(
                f"`{folder}` must hold {self._manifest['num_passages']:,} vectors: got {len(self._vectors):,}. "
                "Rebuild the index."
            )

    @classmethod
    def open(
        cls,
        index_dir: str | Path,
        *,
        encoder: Encoder | str | None = None,
        device: str = "cpu",
        dtype: str = "float32",
        nprobe: int | None = None,
    ) -> DenseRetriever:
        """
        Open an index and its encoder. Files are mapped, not read, but for the graph of an `"HNSW"` index.

        Args:
            index_dir (`str` or `Path`):
                Folder made by `build_dense_index`.
            encoder (`Encoder` or `str`, *optional*):
                Where the encoder's model is on this machine, or the encoder. The recorded name if left out. It must
                give the vectors the index was built with.
            device (`str`, *optional*):
                Device of the encoder, for instance `"cuda:0"`.
            dtype (`str`, *optional*, defaults to `"float32"`):
                Precision of the encoder.
            nprobe (`int`, *optional*):
                Lists of `"IVF,SQ8"` that a query looks into, instead of the recorded number.

        Returns:
            `DenseRetriever`: The open index.

        Raises:
            `ConfigurationError`: If the folder is not an intact dense index, or the encoder cannot be loaded.
            `IndexMismatchError`: If the encoder is another one.
        """
        folder = Path(index_dir)
        manifest = _with_nprobe(_compatible_manifest(folder), nprobe)
        record = manifest["parameters"]["encoder"]
        probe_vectors = np.load(folder / PROBE)
        if encoder is None or isinstance(encoder, str):
            loaded: Encoder = load_recorded_encoder(record, probe_vectors, model=encoder, device=device, dtype=dtype)
        else:
            loaded = encoder
            _check_settings(loaded, record)
            check_probe(loaded, probe_vectors)
        return cls(folder, manifest, loaded)

    @property
    def manifest(self) -> Mapping[str, object]:
        """What the index was built from."""
        return self._manifest

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """
        The best passages for every query. Equal queries of one call are searched once, blank ones find nothing.

        Args:
            queries (`Sequence[str]`):
                Queries, in any number. At most `MAX_QUERY_CHARACTERS` characters are read; the encoder reads as many
                tokens as were recorded.
            k (`int`):
                Largest number of hits per query, at least 1.

        Returns:
            `list[list[Hit]]`: One list per query, best first.

        Raises:
            `RetrievalError`: If the index could not be read or the encoder failed.
            `ConfigurationError`: If `k` is below 1 or `queries` is not a sequence of strings.
        """
        check_request(queries, k)
        distinct = list(dict.fromkeys(query[:MAX_QUERY_CHARACTERS] for query in queries if query.strip()))
        found: dict[str, list[Hit]] = {}
        for start in range(0, len(distinct), _QUERIES_PER_CALL):
            batch = distinct[start : start + _QUERIES_PER_CALL]
            found.update(zip(batch, self._search_batch(batch, k), strict=True))
        return [list(found[query[:MAX_QUERY_CHARACTERS]]) if query.strip() else [] for query in queries]

    def sample(self, count: int) -> list[Passage]:
        """
        Passages at evenly spaced positions of the corpus, to check the index with.

        Args:
            count (`int`):
                Number of passages; all of them if the corpus has fewer.

        Returns:
            `list[Passage]`: Passages in corpus order.
        """
        total = len(self._vectors)
        count = min(count, total)
        return [self._passages.read((2 * i + 1) * total // (2 * count)) for i in range(count)]

    def check_vectors(self, count: int) -> float:
        """
        Encode sampled passages again and compare with what is stored.

        Args:
            count (`int`):
                Number of passages.

        Returns:
            `float`: Smallest cosine.

        Raises:
            `IndexMismatchError`: If it is below `MIN_PROBE_COSINE`; names the passage.
        """
        total = len(self._vectors)
        count = min(count, total)
        positions = [(2 * i + 1) * total // (2 * count) for i in range(count)]
        passages = [self._passages.read(position) for position in positions]
        stored = self._vectors[positions].astype(np.float32)
        now = encode_checked(self._encoder, passages)
        norms = np.linalg.norm(stored, axis=1) * np.linalg.norm(now, axis=1)
        cosines = (stored * now).sum(axis=1) / np.maximum(norms, 1e-12)
        worst = int(cosines.argmin())
        if cosines[worst] < MIN_PROBE_COSINE:
            raise IndexMismatchError(
                f"Passage {passages[worst].id!r} must encode to the vector that is stored for it: got a cosine of "
                f"{cosines[worst]:.3f}. Vectors and passages do not belong together: rebuild the index."
            )
        return float(cosines[worst])

    def _search_batch(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Hits of a few distinct queries."""
        try:
            vectors = self._encoder.encode_queries(queries)
        except RuntimeError as error:
            if isinstance(error, RetrievalError):
                raise
            raise RetrievalError(f"The encoder failed: {str(error).partition(chr(10))[0]}") from error
        if not np.isfinite(vectors).all():
            raise RetrievalError("The encoder gave a vector that is not finite. Load it with `dtype` float32.")
        return [self._hits(ranked, k) for ranked in self._ranked(vectors, k)]

    def _ranked(self, vectors: NDArray[np.float32], k: int) -> list[list[tuple[float, int]]]:
        """Scores and positions of the candidates of every query, all that tie with the best `k` among them."""
        total = len(self._vectors)
        limit = min(k + _EXTRA_CANDIDATES, total)
        results: list[list[tuple[float, int]]] = [[] for _ in vectors]
        pending = list(range(len(vectors)))
        while pending:
            approximate, positions = self._candidates(vectors[pending], limit)
            unsettled = []
            for row, query in enumerate(pending):
                # FAISS fills up with -1 when it finds fewer.
                kept = positions[row] >= 0
                results[query] = self._scored(vectors[query], positions[row][kept])
                if kept.all() and limit < total and _may_tie(approximate[row], positions[row], results[query], k):
                    unsettled.append(query)
            pending = unsettled
            limit = min(4 * limit, total)
        return results

    def _candidates(self, vectors: NDArray[np.float32], limit: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """The `limit` best positions of every query and their scores, as FAISS sees them."""
        if self._structure is None:
            return self._exact_candidates(vectors, limit)
        scores, positions = self._structure.search(np.ascontiguousarray(vectors), limit)
        return scores, positions

    def _exact_candidates(
        self, vectors: NDArray[np.float32], limit: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Candidates of an exact search, block by block of the mapped vectors."""
        best_scores = np.zeros((len(vectors), 0), dtype=np.float32)
        best_positions = np.zeros((len(vectors), 0), dtype=np.int64)
        for start in range(0, len(self._vectors), _FLAT_BLOCK):
            block = np.ascontiguousarray(self._vectors[start : start + _FLAT_BLOCK], dtype=np.float32)
            scores, positions = self._faiss.knn(
                vectors, block, min(limit, len(block)), metric=self._faiss.METRIC_INNER_PRODUCT
            )
            best_scores = np.concatenate([best_scores, scores], axis=1)
            best_positions = np.concatenate([best_positions, positions + start], axis=1)
            order = np.argsort(-best_scores, axis=1, kind="stable")[:, :limit]
            best_scores = np.take_along_axis(best_scores, order, axis=1)
            best_positions = np.take_along_axis(best_positions, order, axis=1)
        return best_scores, best_positions

    def _scored(self, vector: NDArray[np.float32], positions: NDArray[np.int64]) -> list[tuple[float, int]]:
        """Rounded products with the stored vectors at some positions, best first."""
        rows = self._vectors[positions].astype(np.float64)
        scores = np.round((rows * vector.astype(np.float64)).sum(axis=1), SCORE_DECIMALS)
        order = np.lexsort((positions, -scores))
        return [(float(scores[row]), int(positions[row])) for row in order]

    def _hits(self, ranked: list[tuple[float, int]], k: int) -> list[Hit]:
        """The best `k`, ties in order of id."""
        if len(ranked) > k:
            cut = ranked[k - 1][0]
            ranked = [pair for pair in ranked if pair[0] >= cut]
        if self._manifest["ids_ascending"]:
            # Positions are in the order of ids, and candidates of equal score in the order of positions.
            return [Hit(self._passages.read(position), score) for score, position in ranked[:k]]
        hits = [Hit(self._passages.read(position), score) for score, position in ranked]
        return sorted(hits, key=lambda hit: (-hit.score, id_sort_key(hit.passage.id)))[:k]


def _may_tie(
    approximate: NDArray[np.float32], positions: NDArray[np.int64], ranked: list[tuple[float, int]], k: int
) -> bool:
    """Whether a passage beyond the candidates may tie with one of the best `k`."""
    best = np.isin(positions, [position for _, position in ranked[:k]])
    lowest = float(approximate[best].min())
    return float(approximate[-1]) >= lowest - _MARGIN * max(1.0, abs(lowest))


def _compatible_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a dense index that this release and the installed FAISS can read."""
    manifest = load_manifest(folder)
    if manifest["backend"] != BACKEND:
        raise ConfigurationError(
            f"`{folder}` must be a `{BACKEND}` index: got `{manifest['backend']}`. Open it with `build_retriever`."
        )
    needed = {"kind", "num_dims", "vectors", "encoder", "metric", "embedded"}
    missing = sorted(needed - manifest["parameters"].keys())
    if missing or manifest["parameters"]["metric"] != "inner product":
        raise ConfigurationError(
            f"`{folder}` must be built with the parameters of this release: got another value of "
            f"{', '.join(f'`{name}`' for name in missing) or '`metric`'}. Rebuild the index."
        )
    if manifest["parameters"]["kind"] == FLAT:
        return manifest
    faiss = require("faiss", "dense", needed_by="the backend `dense`")
    if manifest["library_version"].split(".")[0] != faiss.__version__.split(".")[0]:
        raise ConfigurationError(
            f"`{folder}` must be searched with FAISS {manifest['library_version']}, which built it: "
            f"got {faiss.__version__}. Rebuild the index or install that version."
        )
    return manifest


def _with_nprobe(manifest: dict[str, Any], nprobe: int | None) -> dict[str, Any]:
    """The manifest with another number of lists to look into, and the identity that belongs to it."""
    if nprobe is None:
        return manifest
    parameters = manifest["parameters"]
    if parameters["kind"] != IVF or not 1 <= nprobe <= parameters["nlist"]:
        most = parameters.get("nlist", 0)
        raise ConfigurationError(
            f"`nprobe` must lie in [1, {most}] and is of use to `{IVF}` indexes only: got {nprobe} for a "
            f"`{parameters['kind']}` index. Leave it out."
        )
    changed = {**manifest, "parameters": {**parameters, "nprobe": nprobe}}
    return {**changed, "index_id": index_id(changed)}


def _check_settings(encoder: Encoder, record: Mapping[str, Any]) -> None:
    """Raise unless an encoder's settings are the recorded ones; its model may be elsewhere."""
    now = encoder.settings.as_dict()
    changed = [name for name in record if name != "model" and now[name] != record[name]]
    if changed:
        raise IndexMismatchError(
            f"`encoder` must have the settings the index was built with: got "
            f"{', '.join(f'`{name}` {now[name]!r} for {record[name]!r}' for name in changed)}. Load it with those."
        )
