"""The build of a dense index: a pass over the corpus that encodes, then the FAISS structure; resumable everywhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError
from grounded_rl.import_utils import require
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.building import (
    BuildFolder,
    Meter,
    cut_to,
    remaining_passages,
    resumable_index,
    shards,
    unfinished_bytes,
)
from grounded_rl.retrieval.corpus import CorpusDigest, CorpusSource, ProgressCallback, passage_line
from grounded_rl.retrieval.corpus_rows import estimate_num_rows
from grounded_rl.retrieval.dense.files import CODES, OFFSET_BYTES, OFFSETS, PASSAGES, PROBE, VECTOR_DTYPES, VECTORS
from grounded_rl.retrieval.dense.lists import KINDS, build_structure, default_kind, structure_parameters
from grounded_rl.retrieval.encoders import Encoder, encode_checked, keep_probe
from grounded_rl.retrieval.manifest import write_manifest
from grounded_rl.retrieval.plan import check_resources, dense_estimate

BACKEND: Final = "dense"


@dataclass(frozen=True, slots=True)
class DenseOptions:
    """
    How vectors are stored and searched.

    Args:
        kind (`str`, *optional*):
            `"Flat"` (exact), `"IVF,SQ8"` or `"HNSW"`. `"Flat"` below a million passages if left out, else
            `"IVF,SQ8"`.
        nlist (`int`, *optional*):
            Lists of `"IVF,SQ8"`. Chosen from the number of passages if left out.
        nprobe (`int`, *optional*):
            Lists that a query looks into. Chosen from `nlist` if left out.
        vectors (`str`, *optional*, defaults to `"float32"`):
            How vectors are stored: `"float32"` or `"float16"`. Candidates of every kind are ranked by these.
        shard_passages (`int`, *optional*, defaults to 4096):
            Passages between two records of progress: what a killed build encodes again, at most.

    Raises:
        `ConfigurationError`: If a value is out of range.
    """

    kind: str | None = None
    nlist: int | None = None
    nprobe: int | None = None
    vectors: str = "float32"
    shard_passages: int = 4_096

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in KINDS:
            raise ConfigurationError(
                f"`kind` must be one of {', '.join(f'`{name}`' for name in KINDS)}: got {self.kind!r}. Leave it "
                "out to choose by the number of passages."
            )
        if self.vectors not in VECTOR_DTYPES:
            raise ConfigurationError(
                f"`vectors` must be one of {', '.join(f'`{name}`' for name in VECTOR_DTYPES)}: got {self.vectors!r}. "
                "Choose one of these."
            )
        for name in ("nlist", "nprobe", "shard_passages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"`{name}` must be at least 1: got {value}. Leave it out for the default.")


def build_dense_index(
    corpus: CorpusSource,
    index_dir: str | Path,
    encoder: Encoder,
    *,
    options: DenseOptions | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_progress: ProgressCallback | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """
    Build a dense index from a corpus and publish it in one step.

    Memory is that of the encoder, one shard and the sample that trains the lists; it does not grow with the corpus but
    for 8 bytes per passage (`kind="HNSW"` excepted: FAISS builds a graph in memory). A build that was killed goes on
    from its last shard with `resume=True`, and gives the index it would have given.

    Args:
        corpus (`str` or `Path`):
            What `grounded_rl.retrieval.corpus.read_corpus` takes.
        index_dir (`str` or `Path`):
            Folder to create. It appears only when the index is complete.
        encoder (`Encoder`):
            Gives the vectors; its settings are recorded.
        options ([`DenseOptions`], *optional*):
            How vectors are stored and searched.
        resume (`bool`, *optional*, defaults to `False`):
            Continue an unfinished build if there is one.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an index that is already there.
        on_progress (`Callable[[int, int], None]`, *optional*):
            Called now and then with the bytes of the corpus read so far and its size in bytes.
        on_stage (`Callable[[str], None]`, *optional*):
            Called with a line on what is being done, and how fast.

    Returns:
        `dict[str, Any]`: The manifest of the new index.

    Raises:
        `ConfigurationError`: If a row of the corpus is malformed, two rows share an id, a text has no finite vector of
            the recorded length, an argument is out of range, the machine is too small, or the target may not be
            written.

    Example:
    ```python
    >>> from grounded_rl.retrieval.encoders import load_encoder
    >>> manifest = build_dense_index("corpus.jsonl", "indexes/dense", load_encoder("minilm"))  # doctest: +SKIP

    ```
    """
    options = options or DenseOptions()
    stage = on_stage or (lambda _: None)
    target = Path(index_dir).absolute()
    expected = estimate_num_rows(corpus)
    if expected is not None:
        size = np.dtype(options.vectors).itemsize
        needed = dense_estimate(options.kind or default_kind(expected), expected, encoder.num_dims, vector_bytes=size)
        check_resources(needed, target.parent, num_bytes_there=unfinished_bytes(target))
    identity = {
        "backend": BACKEND,
        "corpus_name": Path(corpus).name,
        "encoder": encoder.settings.as_dict(),
        "num_dims": encoder.num_dims,
        "kind": options.kind,
        "nlist": options.nlist,
        "nprobe": options.nprobe,
        "vectors": options.vectors,
    }
    with resumable_index(target, identity, resume=resume, overwrite=overwrite) as build:
        if not build.progress.get("is_encoded"):
            meter = Meter(expected, build.progress.get("num_passages", 0))
            _Encoding(build, corpus, encoder, options, meter).carry_out(on_progress, stage)
        parameters = _parameters(build, identity, encoder)
        build_structure(build, parameters, stage)
        stage("hashing the files")
        return write_manifest(_only_results(build.path), _manifest(build, identity, parameters))


class _Encoding:
    """The pass that writes passages and vectors, shard by shard."""

    def __init__(
        self, build: BuildFolder, corpus: CorpusSource, encoder: Encoder, options: DenseOptions, meter: Meter
    ):
        self._build = build
        self._corpus = corpus
        self._encoder = encoder
        self._shard_passages = options.shard_passages
        self._dtype = np.dtype(options.vectors).newbyteorder("<")
        self._meter = meter
        self._passages_end = int(build.progress.get("passages_bytes", 0))

    def carry_out(self, on_progress: ProgressCallback | None, stage: Callable[[str], None]) -> None:
        """Encode what is left of the corpus, and check it as a whole."""
        progress = self._build.progress
        num_done = int(progress.get("num_passages", 0))
        keep_probe(self._build.path / PROBE, self._encoder)
        digest = CorpusDigest(self._corpus)
        passages = remaining_passages(
            self._corpus,
            digest,
            num_done=num_done,
            sha256=progress.get("corpus_sha256", ""),
            on_progress=on_progress,
        )
        for shard in shards(passages, self._shard_passages):
            # All vectors before any file is touched: encoding is where time is spent and where a failure is likely.
            rows = encode_checked(self._encoder, shard).astype(self._dtype)
            for passage in shard:
                digest.add(passage)
            self._append(shard, rows)
            self._record(digest)
            stage(f"encoding: {self._meter.describe(digest.num_passages)}")
        digest.finish()
        self._record(digest, is_encoded=True)

    def _append(self, shard: list[Passage], rows: NDArray[np.floating]) -> None:
        """Write a shard to the end of the three files, at the lengths of the last record."""
        folder, num_done = self._build.path, int(self._build.progress.get("num_passages", 0))
        lines = [passage_line(passage) for passage in shard]
        ends = self._passages_end + np.cumsum([len(line) for line in lines])
        contents = {
            PASSAGES: (self._passages_end, b"".join(lines)),
            OFFSETS: (num_done * OFFSET_BYTES, ends.astype("<u8").tobytes()),
            VECTORS: (num_done * rows.shape[1] * rows.itemsize, rows.tobytes()),
        }
        with ExitStack() as stack:
            for name, (start, content) in contents.items():
                cut_to(folder / name, start)
                file = stack.enter_context((folder / name).open("ab"))
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        self._passages_end = int(ends[-1])

    def _record(self, digest: CorpusDigest, **more: Any) -> None:
        """Record that all passages of the digest are written."""
        self._build.save(
            num_passages=digest.num_passages,
            passages_bytes=self._passages_end,
            corpus_sha256=digest.sha256,
            ids_ascending=digest.ids_ascending,
            **more,
        )


def _parameters(build: BuildFolder, identity: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    """What decides the answers of the index."""
    num_passages = int(build.progress["num_passages"])
    kind = identity["kind"] or default_kind(num_passages)
    structure = structure_parameters(
        kind, num_passages, encoder.num_dims, nlist=identity["nlist"], nprobe=identity["nprobe"]
    )
    return {
        "kind": kind,
        **structure,
        "metric": "inner product",
        "num_dims": encoder.num_dims,
        "vectors": identity["vectors"],
        "embedded": "title + line break + text",
        "encoder": encoder.settings.as_dict(),
        # Other weights under the same name make another index.
        "encoder_probe": hashlib.sha256((build.path / PROBE).read_bytes()).hexdigest()[:16],
    }


def _manifest(build: BuildFolder, identity: dict[str, Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """Fields of the manifest."""
    faiss = require("faiss", "dense", needed_by="the backend `dense`")
    return {
        "backend": BACKEND,
        "corpus_name": identity["corpus_name"],
        "corpus_sha256": build.progress["corpus_sha256"],
        "num_passages": build.progress["num_passages"],
        "ids_ascending": build.progress["ids_ascending"],
        "library": "faiss",
        "library_version": faiss.__version__,
        "parameters": parameters,
    }


def _only_results(folder: Path) -> Path:
    """The folder without files that only the build needs."""
    (folder / CODES).unlink(missing_ok=True)
    for path in folder.glob("*.new*"):
        path.unlink()
    return folder
