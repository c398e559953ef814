"""
From a place to a retriever, and a check that an index finds its own passages.

To add a backend: write a module whose class has `open(folder, **options)`, and add one entry to `_OPENERS`. The
module is imported only when an index asks for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Passage, Retriever
from grounded_rl.retrieval.manifest import load_manifest

_OPENERS: Final[Mapping[str, tuple[str, str]]] = {
    "bm25": ("grounded_rl.retrieval.bm25", "BM25Retriever.open"),
    "dense": ("grounded_rl.retrieval.dense", "DenseRetriever.open"),
    "elasticsearch": ("grounded_rl.retrieval.elasticsearch", "ElasticsearchRetriever.open"),
    "hybrid": ("grounded_rl.retrieval.build", "_open_hybrid"),
}
"""Module of a backend, and what opens a folder in it."""

BACKENDS = tuple(_OPENERS)
"""Names `build_retriever` knows."""

_URL_PREFIXES = ("http://", "https://")
_OPENING_WORDS = 12


def build_retriever(index: str | Path, *, backend: str | None = None, **options: Any) -> Retriever:
    """
    Open an index with the backend that built it, or connect to a retrieval server.

    Args:
        index (`str` or `Path`):
            Folder made by `grounded-rl index build` or `index combine`; or the URL of a server (`grounded-rl serve`,
            or one that speaks Search-R1's protocol), or several URLs of equal servers with commas between them.
        backend (`str`, *optional*):
            Name the index must have been built with; refused if it was another. Taken from the manifest if left out.
        **options:
            Passed to the backend, for instance `num_threads` to `BM25Retriever.open`, `device` to
            `DenseRetriever.open`, or `dense={"device": "cuda:0"}` to a hybrid index.

    Returns:
        `Retriever`: The open index.

    Raises:
        `ConfigurationError`: If the folder is not an intact index, or its backend is unknown or not `backend`.
        `RetrievalError`: If a server cannot be reached.

    Example:
    ```python
    >>> retriever = build_retriever("indexes/corpus")  # doctest: +SKIP
    >>> retriever.search(["capital of Peru"], k=3)  # doctest: +SKIP
    >>> retriever = build_retriever("http://node1:8000,http://node2:8000")  # doctest: +SKIP

    ```
    """
    if backend is not None:
        check_backend(backend)
    if is_url(index):
        return _connect(str(index), **options)
    built_with = load_manifest(index)["backend"]
    if backend is not None and backend != built_with:
        raise ConfigurationError(
            f"`backend` must be the one `{index}` was built with, `{built_with}`: got {backend!r}. "
            "Leave it out, or build another index."
        )
    check_backend(built_with)
    module_name, path = _OPENERS[built_with]
    opener: Any = importlib.import_module(module_name)
    for name in path.split("."):
        opener = getattr(opener, name)
    retriever: Retriever = opener(index, **options)
    return retriever


def is_url(index: str | Path) -> bool:
    """
    Whether an index is a retrieval server and not a folder.

    Args:
        index (`str` or `Path`):
            Folder or URL.

    Returns:
        `bool`: `True` for `http://` and `https://`.
    """
    return isinstance(index, str) and index.startswith(_URL_PREFIXES)


def _connect(urls: str, **options: Any) -> Retriever:
    """A client of one server, or of several that hold the same index."""
    from grounded_rl.retrieval.balanced import BalancedRetriever
    from grounded_rl.retrieval.http import HTTPRetriever

    places = [url.strip() for url in urls.split(",") if url.strip()]
    if len(places) == 1:
        return HTTPRetriever.connect(places[0], **options)
    # Not connected one by one: a server that is away at the start must not stop a run that others can serve.
    return BalancedRetriever([HTTPRetriever(url, **options) for url in places])


def _open_hybrid(index: str | Path, **options: Mapping[str, Any]) -> Retriever:
    """A hybrid index with its members."""
    from grounded_rl.retrieval.hybrid import open_hybrid

    def open_member(path: Path, chosen: Mapping[str, Any]) -> Retriever:
        return build_retriever(path, **chosen)

    return open_hybrid(index, open_member, **options)


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
