"""
Bodies of searches, and what is read from their answers.

Bodies are plain dictionaries in the dialect of Elasticsearch 8.18 and 9. An answer is taken only if it is whole: every
shard answered, no time limit was hit, and every hit is a passage of the expected index with a finite score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import BackendTimeoutError, BackendUnavailableError, BadResponseError
from grounded_rl.retrieval.base import Hit, Passage
from grounded_rl.retrieval.corpus import id_sort_key
from grounded_rl.retrieval.elasticsearch.mapping import OVERSAMPLING

MAX_QUERY_TERMS: Final = 1_000
"""Words of a query that are searched for, the first ones; the server refuses more than 1,024."""

MAX_HITS: Final = 10_000
"""Most hits of one query; the server refuses more."""

_MIN_CANDIDATES = 100
_CANDIDATES_PER_HIT = 10
_MAX_CANDIDATES = 10_000
_MAX_WORD_CHARACTERS = 255
_PASSAGE_FIELDS = ("id", "title", "text")


def clip_query(query: str) -> str:
    """
    A query the server will accept: valid Unicode, and not more words than it takes.

    A word of plain letters and digits counts as one; any other counts as its characters: it may be split at each.

    Args:
        query (`str`):
            Any text.

    Returns:
        `str`: The same text, or its beginning.
    """
    # A model's broken byte sequences leave unpaired surrogates, which cannot be sent.
    query = query.encode("utf-8", "replace").decode("utf-8")
    if len(query) <= MAX_QUERY_TERMS:
        return query
    budget = MAX_QUERY_TERMS
    words = []
    for word in query.split():
        is_plain = len(word) <= _MAX_WORD_CHARACTERS and word.isascii() and word.isalnum()
        cost = 1 if is_plain else len(word)
        words.append(word[:budget] if cost > budget else word)
        budget -= cost
        if budget <= 0:
            break
    return " ".join(words)


def lexical_body(query: str, size: int) -> dict[str, Any]:
    """
    Search by words: BM25 over `contents`, ties in order of passage id.

    Args:
        query (`str`):
            Query, clipped.
        size (`int`):
            Largest number of hits.

    Returns:
        `dict[str, Any]`: Body of a search.
    """
    return {
        "query": {"match": {"contents": {"query": query}}},
        "size": size,
        "sort": [{"_score": {"order": "desc"}}, {"id_order": {"order": "asc"}}],
        "track_scores": True,
        "track_total_hits": False,
        "_source": list(_PASSAGE_FIELDS),
    }


def knn_body(vector: NDArray[np.float32], size: int, *, vector_index: str, num_candidates: int | None = None) -> dict:
    """
    Search by vector, through the graph, with the best candidates of a quantised one compared by their full vectors.

    Args:
        vector (`np.ndarray` of shape `(dims,)`, `float32`):
            Vector of the query.
        size (`int`):
            Largest number of hits.
        vector_index (`str`):
            Structure of the index, one of `mapping.VECTOR_INDEXES`.
        num_candidates (`int`, *optional*):
            Candidates per shard. Ten per hit and at least 100 if left out.

    Returns:
        `dict[str, Any]`: Body of a search.
    """
    candidates = num_candidates or max(_MIN_CANDIDATES, _CANDIDATES_PER_HIT * size)
    knn: dict[str, Any] = {
        "field": "vector",
        "query_vector": [float(f"{value:.7g}") for value in vector.tolist()],
        "k": size,
        "num_candidates": min(max(candidates, size), _MAX_CANDIDATES),
    }
    if OVERSAMPLING[vector_index] > 1:
        knn["rescore_vector"] = {"oversample": OVERSAMPLING[vector_index]}
    return {"knn": knn, "size": size, "track_total_hits": False, "_source": list(_PASSAGE_FIELDS)}


def census_body(fields: tuple[str, ...]) -> dict[str, Any]:
    """
    Count of the passages that have the searched fields.

    It goes with every request: a search on an index that was emptied, refilled or mapped anew finds nothing and says
    so without an error, but this number changes.

    Args:
        fields (`tuple[str, ...]`):
            Fields that are searched.

    Returns:
        `dict[str, Any]`: Body of a search.
    """
    return {
        "query": {"bool": {"filter": [{"exists": {"field": field}} for field in fields]}},
        "size": 0,
        "track_total_hits": True,
    }


def parse_census(response: Mapping[str, Any]) -> int:
    """
    Number of passages from the answer to `census_body`.

    Args:
        response (`Mapping[str, Any]`):
            One answer of a search.

    Returns:
        `int`: Passages.

    Raises:
        `RetrievalError`: If the answer is not whole.
    """
    check_whole(response)
    total = _found(response).get("total")
    if not isinstance(total, Mapping) or total.get("relation") != "eq" or type(total.get("value")) is not int:
        raise BadResponseError(
            f"`hits.total` must be an exact count: got {_excerpt(total)}. Check the server's version."
        )
    return int(total["value"])


def parse_hits(response: Mapping[str, Any], index: str, size: int) -> list[Hit]:
    """
    Hits from the answer of a search by words, in the server's order.

    Args:
        response (`Mapping[str, Any]`):
            One answer of a search.
        index (`str`):
            Name of the index every hit must come from.
        size (`int`):
            Hits that were asked for.

    Returns:
        `list[Hit]`: Hits, best first.

    Raises:
        `RetrievalError`: If the answer is not whole, or anything in it is missing, empty, repeated or out of order.
    """
    check_whole(response)
    items = _found(response).get("hits")
    if not isinstance(items, list):
        raise BadResponseError(
            f"`hits.hits` must be a list: got {_excerpt(items)}. Check what answers at this address."
        )
    if len(items) > size:
        raise BadResponseError(f"`hits.hits` must have at most {size} hits, as asked: got {len(items)}.")
    hits = [_parse_hit(item, index) for item in items]
    if len({hit.passage.id for hit in hits}) != len(hits):
        raise BadResponseError(f"`hits.hits` must not repeat a passage: got {[hit.passage.id for hit in hits]}.")
    if any(hits[i].score < hits[i + 1].score for i in range(len(hits) - 1)):
        raise BadResponseError(f"`hits.hits` must come best first: got scores {[hit.score for hit in hits]}.")
    return hits


def parse_neighbours(response: Mapping[str, Any], index: str, size: int) -> list[Hit]:
    """
    Hits from the answer of a search by vector, with dot products as scores and ties in order of id.

    The server reports \\( (1 + x \\cdot y) / 2 \\).

    Args:
        response (`Mapping[str, Any]`):
            One answer of a search.
        index (`str`):
            Name of the index every hit must come from.
        size (`int`):
            Hits that were asked for.

    Returns:
        `list[Hit]`: Hits, best first.

    Raises:
        `RetrievalError`: As `parse_hits`.
    """
    hits = [Hit(hit.passage, 2.0 * hit.score - 1.0) for hit in parse_hits(response, index, size)]
    return sorted(hits, key=lambda hit: (-hit.score, id_sort_key(hit.passage.id)))


def check_whole(response: Mapping[str, Any]) -> None:
    """
    Refuse an answer that covers only a part of the index; the server reports those with status 200.

    Args:
        response (`Mapping[str, Any]`):
            One answer of a search.

    Raises:
        `RetrievalError`: If a time limit was hit or a shard did not answer.
    """
    if response.get("timed_out") is not False:
        if response.get("timed_out") is True:
            raise BackendTimeoutError("The search hit the server's time limit; its partial hits were discarded.")
        raise BadResponseError(f"An answer must say `timed_out`: got {_excerpt(dict(response))}.")
    shards = response.get("_shards")
    counts: list[Any] = []
    if isinstance(shards, Mapping):
        counts = [shards.get(name) for name in ("total", "successful", "failed")]
    if len(counts) != 3 or any(type(count) is not int for count in counts):
        raise BadResponseError(f"An answer must count its `_shards`: got {_excerpt(shards)}.")
    total, successful, failed = counts
    if failed or successful != total or total < 1:
        raise BackendUnavailableError(
            f"Only {successful} of {total} shards answered ({failed} failed); the partial hits were discarded."
        )


def _found(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `hits` of an answer."""
    found = response.get("hits")
    if not isinstance(found, Mapping):
        raise BadResponseError(f"An answer must have `hits`: got {_excerpt(dict(response))}.")
    return found


def _parse_hit(item: object, index: str) -> Hit:
    """One hit."""
    if not isinstance(item, Mapping) or not isinstance(item.get("_source"), Mapping):
        raise BadResponseError(f"A hit must have `_source`: got {_excerpt(item)}.")
    if item.get("_index") != index:
        raise BadResponseError(f"A hit must come from the index `{index}`: got `{item.get('_index')}`.")
    source, score = item["_source"], item.get("_score")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise BadResponseError(f"A hit must have a finite `_score`: got {_excerpt(score)}.")
    values = {name: source.get(name) for name in _PASSAGE_FIELDS}
    if not all(isinstance(value, str) for value in values.values()) or values["id"] != item.get("_id"):
        raise BadResponseError(f"A hit must hold the passage `{item.get('_id')}`: got {_excerpt(values)}.")
    if not (values["title"].strip() or values["text"].strip()):
        raise BadResponseError(f"A hit must hold some text: passage `{item.get('_id')}` came back empty.")
    return Hit(passage=Passage(**values), score=float(score))


def _excerpt(value: object, width: int = 160) -> str:
    """Start of a value, for a message."""
    text = repr(value)
    return text if len(text) <= width else text[:width] + "…"
