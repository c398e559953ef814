"""The build of an embedded BM25 index: one pass with bounded memory, committed and resumable every few passages."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any, Final

import tantivy

from grounded_rl.errors import ConfigurationError, GroundedRLError, RetrievalError
from grounded_rl.retrieval.bm25.analysis import (
    ANALYZER,
    BACKEND,
    FILES,
    PARAMETERS,
    analyzer,
    document,
    first_line,
    schema,
)
from grounded_rl.retrieval.building import BuildFolder, remaining_passages, resumable_index
from grounded_rl.retrieval.corpus import CorpusDigest, CorpusSource, ProgressCallback
from grounded_rl.retrieval.manifest import write_manifest

COMMIT_PASSAGES: Final = 250_000
"""Passages between two commits: what a killed build indexes again, at most."""

_MIN_HEAP_MB = 16


def build_bm25_index(
    corpus: CorpusSource,
    index_dir: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    writer_heap_mb: int = 128,
    num_threads: int = 1,
    commit_passages: int = COMMIT_PASSAGES,
    on_progress: ProgressCallback | None = None,
) -> dict[str, Any]:
    """
    Build a BM25 index from a corpus file and publish it in one step.

    The corpus is streamed; memory is bounded by the writer's heap plus 8 bytes per passage. What the index answers
    depends on the corpus alone, not on the heap or the threads.

    Args:
        corpus (`str` or `Path`):
            What `grounded_rl.retrieval.corpus.read_corpus` takes.
        index_dir (`str` or `Path`):
            Folder to create. It appears only when the index is complete.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an index that is already there.
        resume (`bool`, *optional*, defaults to `False`):
            Continue an unfinished build if there is one.
        writer_heap_mb (`int`, *optional*, defaults to 128):
            Memory of the writer before it starts a new segment, in MB; at least 16 per thread.
        num_threads (`int`, *optional*, defaults to 1):
            Threads that write. With one, the same passages fill the same segments in every build.
        commit_passages (`int`, *optional*, defaults to 250000):
            Passages between two commits. A build that is killed goes on at the last one.
        on_progress (`Callable[[int, int], None]`, *optional*):
            Called now and then with the bytes of the corpus read so far and its size in bytes.

    Returns:
        `dict[str, Any]`: The manifest of the new index.

    Raises:
        `ConfigurationError`: If a row of the corpus is malformed, two rows share an id, there is no row, or
            `index_dir` may not be replaced.
        `RetrievalError`: If the index could not be written, for instance because the disk is full.

    Example:
    ```python
    >>> manifest = build_bm25_index("corpus.jsonl", "indexes/corpus")  # doctest: +SKIP
    >>> BM25Retriever.open("indexes/corpus").search(["capital of Peru"], k=3)  # doctest: +SKIP

    ```
    """
    _check_sizes(writer_heap_mb, num_threads, commit_passages)
    digest = CorpusDigest(corpus)
    identity = {"backend": BACKEND, "corpus_name": Path(corpus).name, "commit_passages": commit_passages}
    with resumable_index(index_dir, identity, resume=resume, overwrite=overwrite) as build:
        writer = _open_writer(build, writer_heap_mb, num_threads)
        try:
            passages = remaining_passages(
                corpus,
                digest,
                num_done=build.progress.get("num_passages", 0),
                sha256=build.progress.get("corpus_sha256", ""),
                on_progress=on_progress,
            )
            for passage in passages:
                writer.add_document(document(passage, ordinal=digest.num_passages))
                digest.add(passage)
                if digest.num_passages % commit_passages == 0:
                    _commit(build, writer, digest)
            digest.finish()
            _commit(build, writer, digest)
        except BaseException as error:
            writer.rollback()
            if isinstance(error, GroundedRLError) or not isinstance(error, (ValueError, OSError)):
                raise
            raise RetrievalError(
                f"The index could not be written to `{Path(index_dir).absolute().parent}`: {first_line(error)} "
                "Check that the disk has room."
            ) from error
        finally:
            # Also after a failure: a writer that still runs would write into the folder while it is being removed.
            writer.wait_merging_threads()
        return write_manifest(
            build.path,
            {
                "backend": BACKEND,
                "corpus_name": Path(corpus).name,
                "corpus_sha256": digest.sha256,
                "num_passages": digest.num_passages,
                "ids_ascending": digest.ids_ascending,
                "library": "tantivy",
                "library_version": metadata.version("tantivy"),
                "parameters": dict(PARAMETERS),
            },
        )


def _check_sizes(writer_heap_mb: int, num_threads: int, commit_passages: int) -> None:
    """Raise for a size that is out of range."""
    if num_threads < 1:
        raise ConfigurationError(f"`num_threads` must be at least 1: got {num_threads}. Leave it out for one thread.")
    if commit_passages < 1:
        raise ConfigurationError(f"`commit_passages` must be at least 1: got {commit_passages}. Leave it out.")
    if writer_heap_mb < _MIN_HEAP_MB * num_threads:
        raise ConfigurationError(
            f"`writer_heap_mb` must be at least {_MIN_HEAP_MB} for each of {num_threads} threads: "
            f"got {writer_heap_mb}. Give the writer more memory or fewer threads."
        )


def _open_writer(build: BuildFolder, heap_mb: int, num_threads: int) -> tantivy.IndexWriter:
    """A writer at the last commit; what was written after it is dropped by the library."""
    folder = build.path / FILES
    if build.progress:
        index = tantivy.Index.open(str(folder))
        _settle(build, index.searcher().num_docs)
    else:
        folder.mkdir()
        index = tantivy.Index(schema(), path=str(folder))
    index.register_tokenizer(ANALYZER, analyzer())
    return index.writer(heap_mb * 1_000_000, num_threads)


def _commit(build: BuildFolder, writer: tantivy.IndexWriter, digest: CorpusDigest) -> None:
    """Make all passages of the digest durable, and record it. A crash between the two is settled when resuming."""
    now = {"num_passages": digest.num_passages, "corpus_sha256": digest.sha256}
    build.save(committing=now)
    writer.commit()
    build.save(**now, committing=None)


def _settle(build: BuildFolder, num_committed: int) -> None:
    """Take over a commit that was made but not recorded; raise if the index is at no recorded commit."""
    committing = build.progress.get("committing")
    if committing and committing["num_passages"] == num_committed:
        build.save(**committing, committing=None)
    if build.progress.get("num_passages", 0) != num_committed:
        raise ConfigurationError(
            f"`{build.path}` must hold {build.progress.get('num_passages', 0):,} passages, as was recorded: "
            f"got {num_committed:,}. The unfinished build is damaged: remove the folder and build again."
        )
