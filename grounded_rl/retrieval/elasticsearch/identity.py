"""
Which index answers: found once by its name, then recognised by what it is.

A name may be an alias that is switched to a newer index, and an index may be removed and made anew under its old name.
A run keeps to the index it was opened on, and stops if that one is gone or no longer what its manifest says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from grounded_rl.errors import ConfigurationError, IndexMismatchError
from grounded_rl.retrieval.elasticsearch.client import ElasticsearchClient
from grounded_rl.retrieval.elasticsearch.failures import OLDEST_SERVER
from grounded_rl.retrieval.elasticsearch.mapping import (
    META_KEY,
    IndexSpec,
    mapping_differences,
    meta_of,
    similarity_differences,
)
from grounded_rl.retrieval.elasticsearch.queries import census_body, parse_census
from grounded_rl.retrieval.manifest import index_id

_FORBIDDEN_IN_NAMES: Final = set('\\/*?"<>| ,#:')


@dataclass(frozen=True, slots=True)
class OpenIndex:
    """An index as it was found and checked."""

    name: str
    """Its own name, never an alias."""
    uuid: str
    """The server's identity of it; an index made anew under the same name has another."""
    meta: Mapping[str, Any]
    """Facts of the manifest, as the index carries them."""
    spec: IndexSpec
    census: Mapping[tuple[str, ...], int]
    """Passages that have the searched fields; fixed, since a finished index is never written to."""

    @property
    def path(self) -> str:
        """Path of requests to it."""
        return f"/{quote(self.name, safe='')}"


def find_index(
    client: ElasticsearchClient,
    name: str,
    *,
    expected: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> OpenIndex:
    """
    Look up an index by name or alias and check it against its own facts and an expected manifest.

    Args:
        client ([`ElasticsearchClient`]):
            Connection.
        name (`str`):
            Index or alias.
        expected (`Mapping[str, Any]`, *optional*):
            Manifest the index must have been built with.
        timeout (`float`, *optional*):
            Seconds for each of a few requests.

    Returns:
        `OpenIndex`: The index.

    Raises:
        `IndexMismatchError`: If it is missing, unfinished, changed, or not the expected one; names what differs.
        `ConfigurationError`: If the server is another product or too old for vectors.
        `RetrievalError`: If the server does not answer.
    """
    check_name(name)
    version = client.server_version(timeout)
    concrete, description = _describe(client, name, timeout)
    mappings = description.get("mappings", {})
    meta = mappings.get("_meta", {}).get(META_KEY) if isinstance(mappings.get("_meta", {}), Mapping) else None
    if not isinstance(meta, Mapping):
        raise IndexMismatchError(
            f"The index `{concrete}` must carry the facts of its build: got none. It is unfinished or was not built "
            "by `grounded-rl index build`: build it again."
        )
    if expected is not None:
        _compare_meta(concrete, meta, meta_of(expected))
    try:
        spec = IndexSpec.from_parameters(meta.get("parameters", {}))
        intact = meta.get("index_id") == index_id(meta)
    except (ConfigurationError, KeyError) as error:
        raise IndexMismatchError(f"The index `{concrete}` cannot be searched by this release: {error}") from error
    if not intact:
        raise IndexMismatchError(f"The facts of the index `{concrete}` were edited. Build it again.")
    if spec.has_vectors:
        _check_version(version, client.settings.url)
    found = OpenIndex(concrete, str(_settings(description).get("uuid")), dict(meta), spec, {})
    _check_description(found, description)
    total, census = _count(client, found, timeout)
    if total != meta["num_passages"]:
        raise IndexMismatchError(
            f"The index `{concrete}` must hold {meta['num_passages']} passages, as it says itself: got {total}. "
            "Build it again."
        )
    return OpenIndex(found.name, found.uuid, found.meta, spec, census)


def check_unchanged(client: ElasticsearchClient, index: OpenIndex, timeout: float | None = None) -> None:
    """
    Raise unless the index is still there and still what it was.

    Args:
        client ([`ElasticsearchClient`]):
            Connection.
        index ([`OpenIndex`]):
            The index as it was found.
        timeout (`float`, *optional*):
            Seconds for each of two requests.

    Raises:
        `IndexMismatchError`: If it is missing or changed; names what differs.
        `RetrievalError`: If the server does not answer.
    """
    concrete, description = _describe(client, index.name, timeout)
    uuid = _settings(description).get("uuid")
    if concrete != index.name or uuid != index.uuid:
        raise IndexMismatchError(
            f"The index `{index.name}` must be the one that was opened, {index.uuid}: got {concrete}, {uuid}. "
            "It was made anew: open it again, in a new run."
        )
    meta = description.get("mappings", {}).get("_meta", {}).get(META_KEY)
    _compare_meta(index.name, meta if isinstance(meta, Mapping) else {}, index.meta)
    _check_description(index, description)
    total, census = _count(client, index, timeout)
    if total != index.meta["num_passages"] or census != index.census:
        raise IndexMismatchError(
            f"The index `{index.name}` must hold the {index.meta['num_passages']} passages it was opened with: "
            f"got {total}, of which {dict(census)} can be searched. It was written to: build it again."
        )


def searched_fields(spec: IndexSpec, mode: str) -> tuple[str, ...]:
    """
    Fields a way of searching looks at.

    Args:
        spec ([`IndexSpec`]):
            What the index has.
        mode (`str`):
            `"lexical"`, `"dense"` or `"hybrid"`.

    Returns:
        `tuple[str, ...]`: Names of fields.
    """
    return {"lexical": ("contents",), "dense": ("vector",), "hybrid": ("contents", "vector")}[mode]


def check_name(name: str) -> None:
    """
    Refuse a name the server would not take.

    Args:
        name (`str`):
            Name of an index or alias.

    Raises:
        `ConfigurationError`: If it is empty, too long, or has characters the server forbids.
    """
    is_fine = 1 <= len(name.encode("utf-8", "replace")) <= 255 and name not in (".", "..") and name == name.lower()
    if not is_fine or name[0] in "-_+" or _FORBIDDEN_IN_NAMES & set(name):
        raise ConfigurationError(
            f"`index` must be a name of lower-case letters, digits, `-`, `_` and `.`, starting with a letter or "
            f"digit: got {name!r}. Choose another name."
        )


def _describe(client: ElasticsearchClient, name: str, timeout: float | None) -> tuple[str, Mapping[str, Any]]:
    """Own name and description of what a name stands for."""
    answer = client.request("GET", f"/{quote(name, safe='')}", timeout=timeout)
    if len(answer) != 1:
        raise IndexMismatchError(
            f"`{name}` must stand for one index: got {sorted(answer)}. Point the alias at one of them."
        )
    ((concrete, description),) = answer.items()
    if not isinstance(description, Mapping) or not isinstance(description.get("mappings"), Mapping):
        raise IndexMismatchError(f"The server must describe `{name}`: got {str(description)[:120]}.")
    return concrete, description


def _settings(description: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of an index."""
    settings = description.get("settings", {}).get("index", {})
    return settings if isinstance(settings, Mapping) else {}


def _check_description(index: OpenIndex, description: Mapping[str, Any]) -> None:
    """Raise if mapping or settings are not what the specification asks for."""
    differences = mapping_differences(description["mappings"], index.spec)
    differences += similarity_differences(_settings(description), index.spec)
    if differences:
        raise IndexMismatchError(
            f"The mapping of the index `{index.name}` must be the one it was built with: got "
            f"{'; '.join(differences)}. Build it again."
        )


def _count(
    client: ElasticsearchClient, index: OpenIndex, timeout: float | None
) -> tuple[int, dict[tuple[str, ...], int]]:
    """All passages, and those that have the fields of each way to search."""
    modes = ("lexical", "dense", "hybrid") if index.spec.has_vectors else ("lexical",)
    params = {"allow_partial_search_results": "false"}
    census = {}
    for mode in modes:
        fields = searched_fields(index.spec, mode)
        answer = client.request(
            "POST", f"{index.path}/_search", params=params, body=census_body(fields), timeout=timeout
        )
        census[fields] = parse_census(answer)
    answer = client.request(
        "POST", f"{index.path}/_search", params=params, body=census_body(("id_order",)), timeout=timeout
    )
    return parse_census(answer), census


def _compare_meta(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise if the facts differ."""
    differing = [field for field in expected if found.get(field) != expected[field]]
    if differing:
        shown = "; ".join(f"`{field}` {found.get(field)!r}, not {expected[field]!r}" for field in differing[:3])
        raise IndexMismatchError(
            f"The index `{name}` must be the one of the manifest: got {shown}. "
            "Point the folder at the right index, or build it again."
        )


def _check_version(version: str, url: str) -> None:
    """Raise if the server is too old for vectors."""
    numbers = version.split("-")[0].split(".")[:2]
    if not all(part.isdigit() for part in numbers) or tuple(int(part) for part in numbers) < OLDEST_SERVER:
        raise ConfigurationError(
            f"`url` must be Elasticsearch {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer for vectors: got {version} "
            f"at {url}. Use a newer server, or an index without vectors."
        )
