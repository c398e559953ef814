"""
From the folder of an index to a retriever, and a check that an index finds its own passages.

To add a backend: write a module with a `BACKEND` name and an `open` function for its folder, and add a branch to
`build_retriever`. The module is imported only when an index asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Passage, Retriever
from grounded_rl.retrieval.manifest import load_manifest

BACKENDS = ("bm25",)
"""Names `build_retriever` knows."""

_OPENING_WORDS = 12


def build_retriever(index: str | Path, *, backend: str | None = None, **options: Any) -> Retriever:
    """
    Open an index with the backend that built it.

    Args:
        index (`str` or `Path`):
            Folder made by `grounded-rl index build`.
        backend (`str`, *optional*):
            Name the index must have been built with; refused if it was another. Taken from the manifest if left out.
        **options:
            Passed to the backend, for instance `num_threads` to `BM25Retriever.open`.

    Returns:
        `Retriever`: The open index.

    Raises:
        `ConfigurationError`: If the folder is not an intact index, or its backend is unknown or not `backend`.

    Example:
    ```python
    >>> retriever = build_retriever("indexes/corpus")  # doctest: +SKIP
    >>> retriever.search(["capital of Peru"], k=3)  # doctest: +SKIP

    ```
    """
    if backend is not None:
        check_backend(backend)
    built_with = load_manifest(index)["backend"]
    if backend is not None and backend != built_with:
        raise ConfigurationError(
            f"`backend` must be the one `{index}` was built with, `{built_with}`: got {backend!r}. "
            "Leave it out, or build another index."
        )
    check_backend(built_with)
    from grounded_rl.retrieval.bm25 import BM25Retriever

    return BM25Retriever.open(index, **options)


def check_backend(backend: str) -> None:
    """
    Refuse a backend this release does not know.

    Args:
        backend (`str`):
            Name to check.

    Raises:
        `ConfigurationError`: If it is not among `BACKENDS`; lists them.
    """
    if backend not in BACKENDS:
        raise ConfigurationError(
            f"`backend` must be one of {', '.join(f'`{name}`' for name in BACKENDS)}: got {backend!r}. "
            "Choose one of these."
        )


def known_item_recall(retriever: Retriever, passages: Sequence[Passage], *, k: int = 3) -> float:
    """
    Share of passages found by their own title and opening words: close to 1 for an index that works.

    A passage is found if a hit has its id, or repeats it word for word. An index whose queries and passages went
    through different analyses, or that answers every query alike, scores far lower.

    Args:
        retriever (`Retriever`):
            Index to check.
        passages (`Sequence[Passage]`):
            Passages known to be in the index, at least one.
        k (`int`, *optional*, defaults to 3):
            Hits looked at per query.

    Returns:
        `float`: Between 0 and 1.
    """
    queries = [" ".join([passage.title, *passage.text.split()[:_OPENING_WORDS]]) for passage in passages]
    found = 0
    for passage, hits in zip(passages, retriever.search(queries, k), strict=True):
        copies = ((hit.passage.title, hit.passage.text) == (passage.title, passage.text) for hit in hits)
        found += any(hit.passage.id == passage.id for hit in hits) or any(copies)
    return found / len(passages)
