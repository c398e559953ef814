"""
The language of retrieval servers: Search-R1's `POST /retrieve`, and what ours adds to it.

A request is `{"queries": [str, …], "topk": int or null, "return_scores": bool}`. With scores a result is a list of
`{"document": {"id", "contents", …}, "score": float}`, without them a list of the documents alone; `contents` is the
title in double quotes on the first line and the body after it. Our documents also carry `title` and `text`, so that
nothing is guessed from `contents`, and our answers name their index in a header.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from grounded_rl.errors import BadResponseError
from grounded_rl.retrieval.base import Hit, Passage
from grounded_rl.retrieval.corpus import id_sort_key, split_contents

RETRIEVE_PATH: Final = "/retrieve"
READY_PATH: Final = "/ready"
INFO_PATH: Final = "/info"
TOKEN_VARIABLE: Final = "GROUNDED_RL_SERVER_TOKEN"
"""Environment variable with the bearer token of a retrieval server, for both sides."""

INDEX_ID_HEADER: Final = "X-Grounded-RL-Index-Id"
"""Response header with the `index_id` of the index that answered."""

# FAISS reports "no such neighbour" with the most negative float32; a server that looks up row -1 then returns the last
# passage of its corpus under this score.
_FILLER_SCORE = -3.4e38


def encode_results(results: Sequence[Sequence[Hit]], *, return_scores: bool) -> dict[str, Any]:
    """
    Body of an answer.

    Args:
        results (`Sequence[Sequence[Hit]]`):
            One list of hits per query.
        return_scores (`bool`):
            Whether every document comes with its score.

    Returns:
        `dict[str, Any]`: `{"result": …}`, ready for JSON.
    """
    if return_scores:
        return {"result": [[{"document": _document(hit.passage), "score": hit.score} for hit in r] for r in results]}
    return {"result": [[_document(hit.passage) for hit in hits] for hits in results]}


def decode_results(payload: object, *, num_queries: int, k: int) -> list[list[Hit]]:
    """
    Hits of an answer with scores; ties come in order of passage id, whatever the server's order was.

    Args:
        payload (`object`):
            Parsed JSON.
        num_queries (`int`):
            Queries that were sent.
        k (`int`):
            Hits that were asked for per query.

    Returns:
        `list[list[Hit]]`: One list per query, best first.

    Raises:
        `BadResponseError`: If anything is missing, empty, repeated, out of order or of another type.
    """
    results = payload.get("result") if isinstance(payload, Mapping) else None
    if not isinstance(results, list):
        raise BadResponseError(
            f'A retrieval server must answer `{{"result": [...]}}`: got {_excerpt(payload)}. Check its address.'
        )
    if len(results) != num_queries:
        raise BadResponseError(
            f"`result` must have one list for each of {num_queries} queries: got {len(results)}. "
            "The server lost queries; its answer was discarded."
        )
    return [_decode_hits(hits, k, f"result[{position}]") for position, hits in enumerate(results)]


def _document(passage: Passage) -> dict[str, str]:
    """A passage as Search-R1 writes it, with its parts beside it."""
    title = " ".join(passage.title.splitlines())
    contents = f'"{title}"\n{passage.text}'
    return {"id": passage.id, "contents": contents, "title": passage.title, "text": passage.text}


def _decode_hits(hits: object, k: int, where: str) -> list[Hit]:
    """Hits of one query; `where` opens every message."""
    if not isinstance(hits, list):
        raise BadResponseError(f"`{where}` must be a list: got {_excerpt(hits)}. Check the version of the server.")
    if len(hits) > k:
        raise BadResponseError(
            f"`{where}` must have at most {k} documents, as asked: got {len(hits)}. The server ignored `topk`."
        )
    decoded = [_decode_hit(item, f"{where}[{rank}]") for rank, item in enumerate(hits)]
    if len({hit.passage.id for hit in decoded}) != len(decoded):
        raise BadResponseError(
            f"`{where}` must not repeat a passage: got ids {_excerpt([hit.passage.id for hit in decoded])}. "
            "Check that the ids of the server's corpus are unique and that its index returns enough neighbours."
        )
    scores = [hit.score for hit in decoded]
    if any(later > earlier for earlier, later in itertools.pairwise(scores)):
        raise BadResponseError(
            f"`{where}` must have scores that do not increase: got {_excerpt(scores)}. "
            "The server must report similarities, best first, not distances."
        )
    return sorted(decoded, key=lambda hit: (-hit.score, id_sort_key(hit.passage.id)))


def _decode_hit(item: object, where: str) -> Hit:
    """One document with its score."""
    if not isinstance(item, Mapping) or "document" not in item or "score" not in item:
        raise BadResponseError(
            f"`{where}` must have `document` and `score`: got {_excerpt(item)}. The server ignored `return_scores`."
        )
    score = item["score"]
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
        raise BadResponseError(f"`{where}.score` must be a finite number: got {_excerpt(score)}. Check the server.")
    if score <= _FILLER_SCORE:
        raise BadResponseError(
            f"`{where}.score` must be the score of a neighbour: got {score}, the filler of an approximate index that "
            "found too few. Search more lists, or ask for fewer passages."
        )
    return Hit(passage=_decode_document(item["document"], f"{where}.document"), score=float(score))


def _decode_document(document: object, where: str) -> Passage:
    """The passage of a document: from `title` and `text` if it has them, else from `contents`."""
    if not isinstance(document, Mapping):
        raise BadResponseError(f"`{where}` must be an object: got {_excerpt(document)}. Check the server.")
    passage_id = document.get("id")
    if isinstance(passage_id, int) and not isinstance(passage_id, bool):
        passage_id = str(passage_id)
    if not isinstance(passage_id, str) or not passage_id:
        raise BadResponseError(f"`{where}.id` must be a string or an integer: got {_excerpt(passage_id)}.")
    title, text, contents = (document.get(name) for name in ("title", "text", "contents"))
    if isinstance(text, str) and text.strip() and (title is None or isinstance(title, str)):
        return Passage(id=passage_id, title=title or "", text=text)
    if isinstance(contents, str):
        title, text = split_contents(contents)
        if title.strip() or text.strip():
            return Passage(id=passage_id, title=title, text=text)
    raise BadResponseError(
        f"`{where}` must have a passage in `contents`, or in `title` and `text`: got {_excerpt(document)}. "
        "An empty passage would be read as a search that found nothing."
    )


def _excerpt(value: object, width: int = 120) -> str:
    """Start of a value, for a message."""
    text = repr(value)
    return text if len(text) <= width else text[:width] + "…"
