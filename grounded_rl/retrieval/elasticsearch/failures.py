"""What a server's refusal means: an HTTP status and an explanation become one of the types of `grounded_rl.errors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    BadResponseError,
    IndexMismatchError,
    RetrievalError,
)

API_KEY_VARIABLE: Final = "ES_API_KEY"
"""Environment variable with the API key; it is taken from nowhere else."""

OLDEST_SERVER: Final = (8, 18)
"""First server with every feature of a search by vector."""

_MEDIA_TYPES = ("media_type_header_exception", "Content-Type header", "not supported")
_EXPLANATION_CHARACTERS = 300


class ForeignServerError(BadResponseError):
    """What answers is not Elasticsearch, or not of a version that this client can talk to."""


def status_error(status: int, body: Any, headers: Mapping[str, str], url: str) -> RetrievalError:
    """
    Our type for a status that is not success, of a whole request or of one item.

    Args:
        status (`int`):
            HTTP status.
        body (`Any`):
            Parsed body.
        headers (`Mapping[str, str]`):
            Headers of the answer; empty for an item.
        url (`str`):
            Address, for the message.

    Returns:
        `RetrievalError`: To be raised.
    """
    kind, reason, durability = _explanation(body)
    said = f"{kind}: {reason}" if kind else reason
    if status in (429, 503):
        if durability == "PERMANENT":
            return RetrievalError(f"{url} will never carry out this search ({said}). Raise the server's memory.")
        return BackendOverloadedError(f"{url} refused work for now ({status}, {said}).", _retry_after(headers))
    if status in (408, 504) or "Time exceeded" in reason or "timed out" in reason.lower():
        return BackendTimeoutError(f"{url} did not finish in time ({status}, {said}).")
    if status >= 500:
        return BackendUnavailableError(f"{url} failed ({status}, {said}).")
    if status == 404 and kind in ("index_not_found_exception", "alias_missing_exception", "index_closed_exception"):
        return IndexMismatchError(f"The index is not on the server at {url} ({said}). Build it, or check its name.")
    if status in (401, 403):
        return RetrievalError(
            f"{url} does not let us in ({status}, {said}). Set `{API_KEY_VARIABLE}` to a key with the right "
            "privileges."
        )
    if status in (400, 406) and any(word in said for word in _MEDIA_TYPES):
        return ForeignServerError(
            f"`url` must be Elasticsearch {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer: got a server at {url} that "
            f"refuses the media types of version 9 ({said}). Use a newer server."
        )
    if status == 400 and ("No mapping found" in reason or "failed to find" in reason or "unknown field" in reason):
        return IndexMismatchError(f"The mapping of the index at {url} is not the one it was built with ({said}).")
    return BadResponseError(f"{url} did not accept the request ({status}, {said}).")


def _explanation(body: Any) -> tuple[str, str, str]:
    """Type, reason and durability of the root of an error; a reason from whatever was sent."""
    error = body.get("error", body) if isinstance(body, Mapping) else body
    if not isinstance(error, Mapping):
        return "", str(error)[:_EXPLANATION_CHARACTERS], ""
    causes = [error]
    for cause in causes:
        shards = [shard.get("reason") for shard in cause.get("failed_shards", ()) if isinstance(shard, Mapping)]
        causes += [
            inner for inner in (*cause.get("root_cause", ()), cause.get("caused_by"), *shards) if _is_cause(inner)
        ]
        if len(causes) > 32:
            break
    specific = next((c for c in causes[1:] if c.get("type")), error)
    durability = next((str(c["durability"]) for c in causes if c.get("durability")), "")
    reasons = list(dict.fromkeys(str(c.get("reason")) for c in causes if c.get("reason")))
    reason = "; ".join(reasons)[:_EXPLANATION_CHARACTERS] or json.dumps(error)[:_EXPLANATION_CHARACTERS]
    return str(specific.get("type", "")), reason, durability


def _is_cause(value: object) -> bool:
    """Whether a value describes an error."""
    return isinstance(value, Mapping) and ("type" in value or "reason" in value)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds a server or a proxy asked to wait; dates are not read."""
    try:
        seconds = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(seconds, 600.0) if seconds >= 0 else None
