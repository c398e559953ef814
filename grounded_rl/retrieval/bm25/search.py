"""Search in an embedded BM25 index, from memory-mapped files in this process."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import tantivy

from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.retrieval.base import Hit, Passage, check_request
from grounded_rl.retrieval.bm25.analysis import (
    ANALYZER,
    BACKEND,
    FILES,
    PARAMETERS,
    analyzer,
    first_line,
    query_terms,
    stored_text,
)
from grounded_rl.retrieval.corpus import id_sort_key
from grounded_rl.retrieval.manifest import load_manifest

logger = logging.getLogger(__name__)

_TIE_MARGIN = 8
_REMOVAL_ATTEMPTS = 10
_MIN_QUERIES_PER_THREAD = 4


class BM25Retriever:
    """
    Searches a BM25 index. Make one with [`BM25Retriever.open`].

    Scores are BM25 with `k1 = 1.2` and `b = 0.75` over title and body, summed over the distinct words of a query. Hits
    are ordered by score, then by id (`corpus.id_sort_key`), exactly: passages whose score ties with the last hit are
    compared before the cut. Words that are in no passage are ignored; a query without any indexed word finds nothing.
    """

    def __init__(self, searcher: tantivy.Searcher, schema: tantivy.Schema, manifest: Mapping[str, Any], threads: int):
        self._searcher = searcher
        self._schema = schema
        self._manifest = dict(manifest)
        self._num_threads = threads
        self._analyzers = (analyzer(drop_function_words=True), analyzer())

    @classmethod
    def open(cls, index_dir: str | Path, *, num_threads: int | None = None) -> BM25Retriever:
        """
        Open an index. Files are mapped, not read: this takes milliseconds and little memory for any corpus.

        Args:
            index_dir (`str` or `Path`):
                Folder made by `build_bm25_index`.
            num_threads (`int`, *optional*):
                Threads of a large `search` call; results do not depend on it. Defaults to the CPUs of this process, at
                most 4.

        Returns:
            `BM25Retriever`: The open index.

        Raises:
            `ConfigurationError`: If the folder is not an intact BM25 index of this release.
        """
        if num_threads is not None and num_threads < 1:
            raise ConfigurationError(
                f"`num_threads` must be at least 1: got {num_threads}. Leave it out for the default."
            )
        manifest = load_manifest(index_dir)
        _check_compatible(Path(index_dir), manifest)
        try:
            searcher, schema = _open_searcher(Path(index_dir).absolute() / FILES)
        except (ValueError, OSError) as error:
            raise ConfigurationError(
                f"`{index_dir}` must be an intact index: got {first_line(error)!r}. Rebuild the index."
            ) from error
        if searcher.num_docs != manifest["num_passages"]:
            raise ConfigurationError(
                f"`{index_dir}` must hold {manifest['num_passages']} passages, as its manifest says: "
                f"got {searcher.num_docs}. Rebuild the index."
            )
        return cls(searcher, schema, manifest, num_threads or min(4, _num_cpus()))

    @property
    def manifest(self) -> Mapping[str, object]:
        """What the index was built from."""
        return self._manifest

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """
        The best passages for every query. Equal queries of one call are searched once.

        Args:
            queries (`Sequence[str]`):
                Queries, in any number. Any text is allowed: there is no syntax. At most `MAX_QUERY_CHARACTERS`
                characters and the first `MAX_QUERY_TERMS` distinct words are used.
            k (`int`):
                Largest number of hits per query, at least 1.

        Returns:
            `list[list[Hit]]`: One list per query, best first.

        Raises:
            `RetrievalError`: If the index could not be read.
            `ConfigurationError`: If `k` is below 1 or `queries` is not a sequence of strings.
        """
        check_request(queries, k)
        distinct = list(dict.fromkeys(queries))
        threads = min(self._num_threads, len(distinct) // _MIN_QUERIES_PER_THREAD)
        if threads > 1:
            # The searcher releases the interpreter lock, and queries do not share state.
            with ThreadPoolExecutor(threads) as pool:
                found = list(pool.map(lambda query: self._search_one(query, k), distinct))
        else:
            found = [self._search_one(query, k) for query in distinct]
        hits = dict(zip(distinct, found, strict=True))
        return [list(hits[query]) for query in queries]

    def sample(self, count: int) -> list[Passage]:
        """
        Passages at evenly spaced positions of the corpus, to check the index with.

        Args:
            count (`int`):
                Number of passages; all of them if the corpus has fewer.

        Returns:
            `list[Passage]`: Passages in corpus order.
        """
        total = self._searcher.num_docs
        count = min(count, total)
        ordinals = [(2 * i + 1) * total // (2 * count) for i in range(count)]
        return [self._passage(self._address(ordinal)) for ordinal in ordinals]

    def _address(self, ordinal: int) -> tantivy.DocAddress:
        """Where the passage of that position is stored."""
        query = tantivy.Query.range_query(
            self._schema, "ordinal", tantivy.FieldType.Unsigned, lower_bound=ordinal, upper_bound=ordinal
        )
        return self._searcher.search(query, 1, count=False).hits[0][1]

    def _search_one(self, query: str, k: int) -> list[Hit]:
        """Hits of one query."""
        without_function_words, with_all_words = self._analyzers
        terms = query_terms(without_function_words, query) or query_terms(with_all_words, query)
        if not terms:
            return []
        clauses = [
            (tantivy.Occur.Should, tantivy.Query.term_query(self._schema, "contents", term, "freq")) for term in terms
        ]
        try:
            best = self._candidates(tantivy.Query.boolean_query(clauses), k)
            return [Hit(passage=self._passage(address), score=score) for score, address in self._ordered(best)[:k]]
        except (ValueError, OSError) as error:
            raise RetrievalError(f"The BM25 index could not be searched: {first_line(error)}") from error

    def _candidates(self, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
        """Best `k` passages and all others that tie with the last of them, by descending score."""
        total = self._searcher.num_docs
        limit = min(k + _TIE_MARGIN, total)
        while True:
            found = self._searcher.search(query, limit, count=False).hits
            if len(found) <= k:
                return found
            cut = found[k - 1][0]
            if len(found) < limit or limit == total or found[-1][0] < cut:
                return [pair for pair in found if pair[0] >= cut]
            limit = min(4 * limit, total)

    def _ordered(self, found: list[tuple[float, tantivy.DocAddress]]) -> list[tuple[float, tantivy.DocAddress]]:
        """The same, with ties in order of passage id."""
        if len({score for score, _ in found}) == len(found):
            return found
        addresses = [address for _, address in found]
        keys: Iterable[Any]
        if self._manifest["ids_ascending"]:
            keys = self._searcher.fast_field_values("ordinal", addresses)
        else:
            keys = [id_sort_key(stored_text(self._searcher.doc(address), "id")) for address in addresses]
        ranked = sorted(zip(found, keys, strict=True), key=lambda item: (-item[0][0], item[1]))
        return [pair for pair, _ in ranked]

    def _passage(self, address: tantivy.DocAddress) -> Passage:
        """The stored passage."""
        document = self._searcher.doc(address)
        return Passage(**{name: stored_text(document, name) for name in ("id", "title", "text")})


def _open_searcher(folder: Path) -> tuple[tantivy.Searcher, tantivy.Schema]:
    """Searcher over the files of a folder, which is left untouched."""
    # The library takes a lock file next to the segments, which fails where the index is shared read-only. It takes it
    # here instead, beside links to the files; once they are mapped, the links are not needed.
    links = Path(tempfile.mkdtemp(prefix="grounded-rl-"))
    try:
        for path in folder.iterdir():
            if path.suffix != ".lock":
                (links / path.name).symlink_to(path)
        index = tantivy.Index.open(str(links))
        index.config_reader("manual")
        index.register_tokenizer(ANALYZER, analyzer())
        return index.searcher(), index.schema
    finally:
        _remove(links)


def _remove(links: Path) -> None:
    """Remove the links; the library's watcher of the files may write its lock beside them until it has stopped."""
    for attempt in range(_REMOVAL_ATTEMPTS):
        shutil.rmtree(links, ignore_errors=True)
        if not links.exists():
            return
        time.sleep(0.001 * 2**attempt)
    logger.warning("The temporary folder `%s` could not be removed; nothing needs it any more.", links)


def _num_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_compatible(index_dir: Path, manifest: Mapping[str, Any]) -> None:
    """Raise unless this code searches as the index was built: a difference would change scores silently."""
    if manifest["backend"] != BACKEND:
        raise ConfigurationError(
            f"`{index_dir}` must be a `{BACKEND}` index: got `{manifest['backend']}`. Open it with `build_retriever`."
        )
    if manifest["parameters"] != PARAMETERS:
        changed = [name for name in PARAMETERS if manifest["parameters"].get(name) != PARAMETERS[name]]
        raise ConfigurationError(
            f"`{index_dir}` must be built with the parameters of this release: got another value of "
            f"{', '.join(f'`{name}`' for name in changed) or 'an unknown parameter'}. Rebuild the index."
        )
    built, installed = manifest["library_version"], metadata.version("tantivy")
    if built.split(".")[:2] != installed.split(".")[:2]:
        raise ConfigurationError(
            f"`{index_dir}` must be searched with tantivy {built}, which built it: got {installed}. "
            f"Rebuild the index or install `tantivy=={built}`."
        )
