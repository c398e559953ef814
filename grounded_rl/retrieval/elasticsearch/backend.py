"""Search on an Elasticsearch server: batched, verified, and never partial."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import BadResponseError, ConfigurationError, IndexMismatchError, RetrievalError
from grounded_rl.retrieval.base import Hit, Passage, check_request
from grounded_rl.retrieval.elasticsearch.client import ElasticsearchClient, ElasticsearchSettings
from grounded_rl.retrieval.elasticsearch.dispatch import Body, Dispatcher, InFlightLimit, Outcome, RetryPolicy, retried
from grounded_rl.retrieval.elasticsearch.failures import status_error
from grounded_rl.retrieval.elasticsearch.identity import OpenIndex, check_unchanged, find_index, searched_fields
from grounded_rl.retrieval.elasticsearch.plan import SearchPlan, check_encoder, check_vectors
from grounded_rl.retrieval.elasticsearch.pointer import PROBE_FILE, read_pointer
from grounded_rl.retrieval.elasticsearch.queries import (
    MAX_HITS,
    census_body,
    check_whole,
    clip_query,
    knn_body,
    lexical_body,
    parse_census,
    parse_hits,
    parse_neighbours,
)
from grounded_rl.retrieval.fusion import reciprocal_rank_fusion, weighted_score_fusion

if TYPE_CHECKING:
    from grounded_rl.retrieval.encoders import Encoder

_FIRST_SLOTS = 4
_TIE_MARGIN = 8
_TIE_GROWTH = 8
_TRUST_S = 30.0
_TRUST_AFTER_NOTHING_S = 1.0
_MSEARCH_HEADER: Final = {"allow_partial_search_results": False}


class ElasticsearchRetriever:
    """
    Searches one index of an Elasticsearch server. Thread-safe. Make one with `open` or `connect`.

    Searches of threads that wait at the same time share requests. What fails for a moment is tried again, each search
    by itself, for as long as `patience` says. No partial answer is ever returned, and none of another index than the
    one that was opened: an alias that is switched later does not change a run.
    """

    def __init__(
        self,
        client: ElasticsearchClient,
        index: OpenIndex,
        plan: SearchPlan,
        *,
        manifest: Mapping[str, Any] | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self._client = client
        self._index = index
        self._mode = plan.mode or ("hybrid" if index.spec.has_vectors else "lexical")
        self._plan = plan
        self._manifest = dict(index.meta if manifest is None else manifest)
        self._encoder = encoder
        self._encoder_lock = threading.Lock()
        self._fields = searched_fields(index.spec, self._mode)
        settings = client.settings
        self._retry = RetryPolicy(patience=settings.patience)
        limit = InFlightLimit(_FIRST_SLOTS, settings.max_in_flight)
        self._dispatcher = Dispatcher(self._transmit, limit, self._retry, max_batch_size=settings.max_batch_size)
        self._closed = threading.Event()
        self._verify_lock = threading.Lock()
        self._verified_at = time.monotonic()
        check_encoder(index, self._mode, encoder)

    @classmethod
    def open(
        cls, index_dir: str | Path, *, encoder: Encoder | None = None, url: str | None = None, **options: Any
    ) -> ElasticsearchRetriever:
        """
        Open the index that a folder points at.

        Args:
            index_dir (`str` or `Path`):
                Folder made by `grounded-rl index build --backend elasticsearch`.
            encoder ([`Encoder`], *optional*):
                Encoder of queries. Loaded as the folder records it if left out and needed.
            url (`str`, *optional*):
                Address of the server, if it is not the one that was built on.
            **options:
                Fields of [`SearchPlan`] and [`ElasticsearchSettings`].

        Returns:
            `ElasticsearchRetriever`: The open index.

        Raises:
            `ConfigurationError`: If the folder is no such index, an option is unknown, or the server cannot be used.
            `IndexMismatchError`: If the index on the server is not the one of the folder.
            `RetrievalError`: If the server does not answer.

        Example:
        ```python
        >>> retriever = ElasticsearchRetriever.open("indexes/wiki-18", mode="lexical")  # doctest: +SKIP
        >>> retriever.search(["capital of Peru"], k=3)  # doctest: +SKIP

        ```
        """
        manifest, address, name = read_pointer(index_dir)
        vectors = manifest["parameters"].get("vectors")
        if encoder is None and vectors is not None and options.get("mode") != "lexical":
            from grounded_rl.retrieval.encoders import load_recorded_encoder

            encoder = load_recorded_encoder(vectors["encoder"], np.load(Path(index_dir) / PROBE_FILE))
        return cls.connect(url or address, name, manifest=manifest, encoder=encoder, **options)

    @classmethod
    def connect(
        cls,
        url: str,
        index: str,
        *,
        manifest: Mapping[str, Any] | None = None,
        encoder: Encoder | None = None,
        node_class: type | None = None,
        **options: Any,
    ) -> ElasticsearchRetriever:
        """
        Open an index by its name.

        Args:
            url (`str`):
                Address of the server.
            index (`str`):
                Name of the index or of an alias. An alias is followed once, now.
            manifest (`Mapping[str, Any]`, *optional*):
                Manifest the index must have. Without it, the index is taken for what it says it is.
            encoder ([`Encoder`], *optional*):
                Encoder of queries, for an index with vectors.
            node_class (`type`, *optional*):
                Class of `elastic_transport` that carries requests, for tests.
            **options:
                Fields of [`SearchPlan`] and [`ElasticsearchSettings`].

        Returns:
            `ElasticsearchRetriever`: The open index.

        Raises:
            `ConfigurationError`: If an option is unknown or the server cannot be used.
            `IndexMismatchError`: If the index is missing, unfinished, changed, or not the one of the manifest.
            `RetrievalError`: If the server does not answer.
        """
        plan_fields = {field.name for field in fields(SearchPlan)}
        settings_fields = {field.name for field in fields(ElasticsearchSettings)} - {"url"}
        unknown = sorted(options.keys() - plan_fields - settings_fields)
        if unknown:
            raise ConfigurationError(
                f"`options` must be among {', '.join(sorted(plan_fields | settings_fields))}: got {unknown}. "
                "Correct the names."
            )
        plan = SearchPlan(**{name: value for name, value in options.items() if name in plan_fields})
        chosen = {name: value for name, value in options.items() if name in settings_fields}
        client = ElasticsearchClient(ElasticsearchSettings(url, **chosen), node_class=node_class)
        try:
            found = find_index(client, index, expected=manifest)
            return cls(client, found, plan, manifest=manifest, encoder=encoder)
        except BaseException:
            client.close()
            raise

    @property
    def manifest(self) -> Mapping[str, object]:
        """What the index was built from."""
        return self._manifest

    @property
    def search_parameters(self) -> Mapping[str, object]:
        """What decides results besides the index: part of the key of a cache."""
        return {**asdict(self._plan), "mode": self._mode}

    @property
    def index_name(self) -> str:
        """Name of the index on the server, never an alias."""
        return self._index.name

    @property
    def num_requests(self) -> int:
        """Requests with searches that were sent so far."""
        return self._dispatcher.num_requests

    @property
    def num_retries(self) -> int:
        """Searches that were sent again so far."""
        return self._dispatcher.num_retries

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """
        The best passages for every query. Equal queries of one call are searched once, blank ones not at all.

        Args:
            queries (`Sequence[str]`):
                Queries, in any number. Any text is allowed: there is no syntax. About the first thousand words are
                used.
            k (`int`):
                Largest number of hits per query, at least 1.

        Returns:
            `list[list[Hit]]`: One list per query, best first.

        Raises:
            `RetrievalError`: If any query could not be answered in full within `patience`.
            `ConfigurationError`: If `k` or `queries` cannot be used.
        """
        check_request(queries, k)
        size = min(k, int(self._index.meta["num_passages"]))
        if size > MAX_HITS:
            raise ConfigurationError(f"`k` must be at most {MAX_HITS} for Elasticsearch: got {k}. Ask for fewer hits.")
        clipped = [clip_query(query) for query in queries]
        distinct = list(dict.fromkeys(query for query in clipped if query.strip()))
        found: dict[str, list[Hit]] = {}
        if distinct:
            self._verify(_TRUST_S)
            found = self._found(distinct, size)
            if not all(found.values()):
                # Nothing found is a claim about the whole index: make sure that it is the index.
                self._verify(_TRUST_AFTER_NOTHING_S)
        return [list(found.get(query, ())) for query in clipped]

    def sample(self, count: int) -> list[Passage]:
        """
        Passages at evenly spaced positions of the corpus, to check the index with.

        Args:
            count (`int`):
                Number of passages, at most 10,000; all of them if the corpus has fewer.

        Returns:
            `list[Passage]`: Passages in corpus order.

        Raises:
            `RetrievalError`: If they could not be read.
        """
        total = int(self._index.meta["num_passages"])
        count = min(count, total, MAX_HITS)
        ordinals = [(2 * i + 1) * total // (2 * count) for i in range(count)]
        body: Body = {
            "query": {"constant_score": {"filter": {"terms": {"pid": ordinals}}}},
            "size": count,
            "sort": [{"pid": {"order": "asc"}}],
            "track_scores": True,
            "_source": ["id", "title", "text"],
        }
        ((response,),) = self._dispatcher.run([[body]])
        hits = parse_hits(response, self._index.name, count)
        if len(hits) != count:
            raise IndexMismatchError(
                f"The index `{self._index.name}` must hold a passage at every position: got {len(hits)} of {count}. "
                "Build it again."
            )
        return [hit.passage for hit in hits]

    def ready(self, timeout: float = 5.0) -> None:
        """
        Return if a search would be answered now, by the index that was opened.

        Args:
            timeout (`float`, *optional*, defaults to `5.0`):
                Seconds to wait for each answer; one try.

        Raises:
            `RetrievalError`: If not; `IndexMismatchError` if the index is gone or changed.
        """
        self._check_open()
        check_unchanged(self._client, self._index, timeout)
        self._verified_at = time.monotonic()

    def close(self) -> None:
        """Close all connections; searches under way fail."""
        if not self._closed.is_set():
            self._closed.set()
            self._dispatcher.close()
            self._client.close()

    def _found(self, queries: Sequence[str], size: int) -> dict[str, list[Hit]]:
        """Hits of every query; those whose last neighbour ties with others are asked again, with more of them."""
        found: dict[str, list[Hit]] = {}
        vectors = self._vectors(queries)
        remaining, margin = list(queries), _TIE_MARGIN
        reach = min(max(size, self._plan.window), MAX_HITS) if self._mode == "hybrid" else size
        limit = min(int(self._index.meta["num_passages"]), MAX_HITS)
        while remaining:
            asked = min(reach + margin, limit)
            bodies = [self._bodies(query, vectors.get(query), reach, asked) for query in remaining]
            answers = self._dispatcher.run(bodies)
            tied = []
            for query, responses in zip(remaining, answers, strict=True):
                words, neighbours = self._rankings(responses, reach)
                is_cut = len(neighbours) == asked < limit and neighbours[-1].score == neighbours[reach - 1].score
                if is_cut:
                    tied.append(query)
                else:
                    found[query] = self._fused(words, neighbours[:reach], size)
            remaining, margin = tied, _TIE_GROWTH * margin
        return found

    def _vectors(self, queries: Sequence[str]) -> dict[str, NDArray[np.float32]]:
        """Vectors of the queries, if vectors are searched."""
        if self._mode == "lexical":
            return {}
        assert self._encoder is not None
        with self._encoder_lock:
            vectors = self._encoder.encode_queries(queries)
        check_vectors(vectors, len(queries), int(self._index.spec.dims or 0))
        return dict(zip(queries, vectors, strict=True))

    def _bodies(self, query: str, vector: NDArray[np.float32] | None, reach: int, neighbours: int) -> list[Body]:
        """Bodies of a query: by words, by vector, or both in this order."""
        bodies = [] if self._mode == "dense" else [lexical_body(query, reach)]
        if vector is not None:
            kind, candidates = self._index.spec.vector_index, self._plan.num_candidates
            bodies.append(knn_body(vector, neighbours, vector_index=kind, num_candidates=candidates))
        return bodies

    def _rankings(self, responses: Sequence[Mapping[str, Any]], reach: int) -> tuple[list[Hit], list[Hit]]:
        """Hits by words and by vector from the answers to the bodies of one query."""
        name = self._index.name
        words = [] if self._mode == "dense" else parse_hits(responses[0], name, reach)
        if self._mode == "lexical":
            return words, []
        neighbours = parse_neighbours(responses[-1], name, MAX_HITS)
        if not neighbours:
            raise IndexMismatchError(
                f"The index `{name}` must have neighbours for every vector: got none. Build it again."
            )
        return words, neighbours

    def _fused(self, words: list[Hit], neighbours: list[Hit], size: int) -> list[Hit]:
        """The hits of a query."""
        if self._mode != "hybrid":
            return (words or neighbours)[:size]
        fuse = reciprocal_rank_fusion if self._plan.fusion == "rrf" else weighted_score_fusion
        return fuse([words, neighbours], size, weights=self._plan.weights)

    def _transmit(self, bodies: Sequence[Body]) -> list[Outcome]:
        """One request with a census in front: an answer or an error for every body."""
        lines: list[Mapping[str, Any]] = []
        for body in (census_body(self._fields), *bodies):
            lines += [_MSEARCH_HEADER, body]
        answer = self._client.request("POST", f"{self._index.path}/_msearch", lines=lines)
        responses = answer.get("responses")
        if not isinstance(responses, list) or len(responses) != len(bodies) + 1:
            got = f"{len(responses)} answers" if isinstance(responses, list) else repr(responses)[:120]
            raise BadResponseError(
                f"{self._client.settings.url} must give one answer for each of {len(bodies) + 1} searches: got {got}. "
                "All of them were discarded."
            )
        census, *outcomes = [self._outcome(item) for item in responses]
        if isinstance(census, RetrievalError):
            raise census
        counted, expected = parse_census(census), self._index.census[self._fields]
        if counted != expected:
            raise IndexMismatchError(
                f"The index `{self._index.name}` must have {expected} passages that can be searched, as when it was "
                f"opened: got {counted}. It was changed: build it again."
            )
        return outcomes

    def _outcome(self, item: object) -> Outcome:
        """A whole answer, or the error of one search; the status of the request says nothing about them."""
        if not isinstance(item, dict):
            return BadResponseError(f"An answer must be an object: got {str(item)[:120]!r}.")
        if "error" in item or item.get("status", 200) != 200:
            status = item.get("status")
            return status_error(status if isinstance(status, int) else 500, item, {}, self._client.settings.url)
        try:
            check_whole(item)
        except RetrievalError as error:
            return error
        return item

    def _verify(self, trust: float) -> None:
        """Check that the index is what it was, unless that was done within the last `trust` seconds."""
        self._check_open()
        with self._verify_lock:
            if time.monotonic() - self._verified_at >= trust:
                retried(lambda: check_unchanged(self._client, self._index), self._retry, self._closed)
                self._verified_at = time.monotonic()

    def _check_open(self) -> None:
        """Raise after `close`."""
        if self._closed.is_set():
            raise RetrievalError("The retriever was closed. Open it again.")
