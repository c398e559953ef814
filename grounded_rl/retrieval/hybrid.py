"""
Several retrievers over one corpus as one: searched in parallel, their rankings fused.

A hybrid index is a folder whose manifest names the folders of its members; it holds no data of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from grounded_rl.errors import ConfigurationError, IndexMismatchError
from grounded_rl.retrieval.base import Hit, Retriever, check_ready, close_retriever
from grounded_rl.retrieval.fusion import reciprocal_rank_fusion, weighted_score_fusion
from grounded_rl.retrieval.manifest import index_id, load_manifest, staged_index, write_manifest

BACKEND: Final = "hybrid"

FUSIONS: Final[Mapping[str, Callable[..., list[Hit]]]] = {
    "rrf": reciprocal_rank_fusion,
    "weighted": weighted_score_fusion,
}
"""Ways to fuse rankings: by reciprocal ranks, or by scores scaled to [0, 1]."""

DEFAULT_WINDOW: Final = 100
"""Hits of each member that are fused."""

_SHARED_FIELDS: Final = ("corpus_sha256", "num_passages")


class HybridRetriever:
    """
    Searches all members in parallel and fuses their rankings.

    Args:
        members (`Sequence[Retriever]`):
            Two retrievers or more, over the same passages.
        fuse (`str`, *optional*, defaults to `"rrf"`):
            `"rrf"` (reciprocal ranks) or `"weighted"` (scores of each member scaled to [0, 1]).
        weights (`Sequence[float]`, *optional*):
            One weight above 0 per member. All are 1 if left out.
        window (`int`, *optional*, defaults to 100):
            Hits asked of each member; `k` if that is larger.

    Raises:
        `ConfigurationError`: If there are fewer than two members, or an argument is out of range.
        `IndexMismatchError`: If the members do not hold the same passages.

    Example:
    ```python
    >>> retriever = HybridRetriever([bm25, dense], weights=[1.0, 2.0])  # doctest: +SKIP
    >>> retriever.search(["capital of Peru"], k=3)  # doctest: +SKIP

    ```
    """

    def __init__(
        self,
        members: Sequence[Retriever],
        *,
        fuse: str = "rrf",
        weights: Sequence[float] | None = None,
        window: int = DEFAULT_WINDOW,
    ) -> None:
        self._manifest = _combined_manifest([member.manifest for member in members], fuse, weights, window)
        self._members = list(members)
        self._fuse = FUSIONS[fuse]
        self._weights = weights
        self._window = window
        self._pool = ThreadPoolExecutor(len(self._members), thread_name_prefix="hybrid")

    @property
    def manifest(self) -> Mapping[str, object]:
        """What the index was built from; `parameters` has the members and how they are fused."""
        return self._manifest

    @property
    def members(self) -> tuple[Retriever, ...]:
        """The retrievers that are searched."""
        return tuple(self._members)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """
        The best passages for every query, by the fused score.

        Args:
            queries (`Sequence[str]`):
                Queries, in any number.
            k (`int`):
                Largest number of hits per query, at least 1.

        Returns:
            `list[list[Hit]]`: One list per query, best first.

        Raises:
            `RetrievalError`: If a member could not be searched: half a hybrid is another retriever.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigurationError(f"`k` must be an integer of at least 1: got {k!r}. Ask for one hit or more.")
        window = max(self._window, k)
        pending = [self._pool.submit(member.search, queries, window) for member in self._members]
        found = [future.result() for future in pending]
        return [self._fuse(rankings, k, weights=self._weights) for rankings in zip(*found, strict=True)]

    def sample(self, count: int) -> list[Any]:
        """
        Passages of the first member, to check the index with.

        Args:
            count (`int`):
                Number of passages.

        Returns:
            `list[Passage]`: Passages.
        """
        sample: Callable[[int], list[Any]] = getattr(self._members[0], "sample")  # noqa: B009
        return sample(count)

    def ready(self, timeout: float = 5.0) -> None:
        """
        Return if every member would answer now.

        Args:
            timeout (`float`, *optional*, defaults to `5.0`):
                Seconds to wait for each.

        Raises:
            `RetrievalError`: If one would not.
        """
        for member in self._members:
            check_ready(member, timeout)

    def close(self) -> None:
        """Release threads, and what the members hold."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for member in self._members:
            close_retriever(member)


def combine_indexes(
    indexes: Sequence[str | Path],
    index_dir: str | Path,
    *,
    fuse: str = "rrf",
    weights: Sequence[float] | None = None,
    window: int = DEFAULT_WINDOW,
    overwrite: bool = False,
) -> dict[str, Any]:
    """
    Write a hybrid index over indexes of the same corpus.

    Args:
        indexes (`Sequence[str]` or `Sequence[Path]`):
            Folders of the members, two or more. They are found by their place relative to the new folder.
        index_dir (`str` or `Path`):
            Folder to create.
        fuse (`str`, *optional*, defaults to `"rrf"`):
            `"rrf"` or `"weighted"`.
        weights (`Sequence[float]`, *optional*):
            One weight above 0 per member.
        window (`int`, *optional*, defaults to 100):
            Hits asked of each member.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an index that is already there.

    Returns:
        `dict[str, Any]`: The manifest of the new index.

    Raises:
        `ConfigurationError`: If a folder is not an index, or an argument is out of range.
        `IndexMismatchError`: If the indexes do not hold the same passages.
    """
    manifests = [load_manifest(index) for index in indexes]
    combined = _combined_manifest(manifests, fuse, weights, window)
    target = Path(index_dir).absolute()
    combined["member_folders"] = [os.path.relpath(Path(index).absolute(), target) for index in indexes]
    with staged_index(index_dir, overwrite=overwrite) as staging:
        return write_manifest(staging, combined)


def open_hybrid(
    index_dir: str | Path, open_member: Callable[[Path, Mapping[str, Any]], Retriever], **options: Mapping[str, Any]
) -> HybridRetriever:
    """
    Open a hybrid index and its members.

    Args:
        index_dir (`str` or `Path`):
            Folder made by `combine_indexes`.
        open_member (`Callable[[Path, Mapping], Retriever]`):
            Opens the folder of a member with options.
        **options (`Mapping[str, Any]`):
            Options of members by the name of their backend, for instance `dense={"device": "cuda:0"}`.

    Returns:
        `HybridRetriever`: The open index.

    Raises:
        `ConfigurationError`: If a folder is not an index, or an option is for no member.
        `IndexMismatchError`: If a member is not the one that was combined.
    """
    folder = Path(index_dir).absolute()
    manifest = load_manifest(folder)
    parameters = manifest["parameters"]
    unused = sorted(options.keys() - {member["backend"] for member in parameters["members"]})
    if unused:
        raise ConfigurationError(
            f"Options of a hybrid index must be named after the backends of its members: got {unused}. "
            f"Use {sorted({member['backend'] for member in parameters['members']})}."
        )
    members = []
    for place, recorded in zip(manifest["member_folders"], parameters["members"], strict=True):
        path = Path(os.path.normpath(folder / place))
        now = load_manifest(path)["index_id"]
        if now != recorded["index_id"]:
            raise IndexMismatchError(
                f"`{path}` must be the index that was combined, {recorded['index_id']}: got {now}. "
                "Combine again with `grounded-rl index combine`."
            )
        members.append(open_member(path, options.get(recorded["backend"], {})))
    return HybridRetriever(
        members, fuse=parameters["fuse"], weights=parameters["weights"], window=parameters["window"]
    )


def _combined_manifest(
    manifests: Sequence[Mapping[str, Any]], fuse: str, weights: Sequence[float] | None, window: int
) -> dict[str, Any]:
    """Manifest of a hybrid; checks everything it is made of."""
    if len(manifests) < 2:
        raise ConfigurationError(f"A hybrid must have at least 2 members: got {len(manifests)}. Add an index.")
    if fuse not in FUSIONS:
        raise ConfigurationError(
            f"`fuse` must be one of {', '.join(f'`{name}`' for name in FUSIONS)}: got {fuse!r}. Choose one of these."
        )
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ConfigurationError(f"`window` must be an integer of at least 1: got {window!r}. Leave it out.")
    if weights is not None and len(weights) != len(manifests):
        raise ConfigurationError(
            f"`weights` must have one number for each of {len(manifests)} members: got {len(weights)}. Leave it out."
        )
    # The fusion checks the values of the weights.
    FUSIONS[fuse]([[] for _ in manifests], 1, weights=weights)
    for name in _SHARED_FIELDS:
        values = [manifest.get(name) for manifest in manifests]
        if any(value != values[0] for value in values):
            raise IndexMismatchError(
                f"Members of a hybrid must hold the same passages: got `{name}` {', '.join(map(str, values))}. "
                "Build them from one corpus."
            )
    combined = {
        "backend": BACKEND,
        "corpus_name": manifests[0]["corpus_name"],
        "corpus_sha256": manifests[0]["corpus_sha256"],
        "num_passages": manifests[0]["num_passages"],
        "library": "grounded_rl",
        "library_version": "1",
        "parameters": {
            "members": [{name: manifest[name] for name in ("backend", "index_id")} for manifest in manifests],
            "fuse": fuse,
            "weights": None if weights is None else [float(weight) for weight in weights],
            "window": window,
        },
    }
    return {**combined, "index_id": index_id(combined)}
