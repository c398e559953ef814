"""What a search request must look like."""

from __future__ import annotations

import json
from dataclasses import dataclass

from grounded_rl.errors import GroundedRLError
from grounded_rl.retrieval.server.settings import ServerSettings

UNPROCESSABLE = 422
TOO_LARGE = 413
TIMED_OUT = 408


class InvalidRequestError(GroundedRLError, ValueError):
    """
    A request that is refused as it is.

    Args:
        detail (`str`):
            What is wrong with it.
        status (`int`, *optional*, defaults to 422):
            HTTP status of the answer.
    """

    def __init__(self, detail: str, status: int = UNPROCESSABLE):
        super().__init__(detail, status)
        self.detail = detail
        self.status = status


@dataclass(frozen=True)
class SearchRequest:
    """A valid `POST /retrieve`."""

    queries: list[str]
    k: int
    return_scores: bool


def parse_request(body: bytes, settings: ServerSettings) -> SearchRequest:
    """
    Read a search request; unknown fields are ignored, as Search-R1's server does.

    Args:
        body (`bytes`):
            Body of the request.
        settings ([`ServerSettings`]):
            Limits.

    Returns:
        `SearchRequest`: What to search.

    Raises:
        `InvalidRequestError`: If a field is missing, of another type or out of range.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The body must be JSON: got an error ({error}).") from error
    if not isinstance(fields, dict):
        raise InvalidRequestError(f"The body must be a JSON object: got {type(fields).__name__}.")
    queries = fields.get("queries")
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise InvalidRequestError("`queries` must be a list of strings.")
    if len(queries) > settings.max_queries:
        raise InvalidRequestError(
            f"`queries` must have at most {settings.max_queries} entries: got {len(queries)}. Send several requests."
        )
    k = fields.get("topk")
    k = settings.default_k if k is None else k
    if type(k) is not int or not 1 <= k <= settings.max_k:
        raise InvalidRequestError(f"`topk` must be an integer from 1 to {settings.max_k}: got {str(k)[:40]!r}.")
    return_scores = fields.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise InvalidRequestError("`return_scores` must be true or false.")
    # Unpaired surrogates (a model's broken byte sequences) are legal in JSON but in no encoder.
    readable = [query.encode("utf-8", "replace").decode("utf-8") for query in queries]
    return SearchRequest(queries=readable, k=k, return_scores=return_scores)
