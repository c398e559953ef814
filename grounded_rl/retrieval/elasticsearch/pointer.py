"""The folder of an index that lives on a server: a manifest that says where, and what recognises the encoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.elasticsearch.mapping import BACKEND
from grounded_rl.retrieval.manifest import load_manifest, staged_index, write_manifest

PROBE_FILE: Final = "encoder_probe.npy"
"""Vectors by which the encoder is recognised, as `encoders.probe` gives them."""


def write_pointer(
    index_dir: str | Path,
    facts: Mapping[str, Any],
    *,
    url: str,
    index: str,
    probe_vectors: NDArray[np.float32] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """
    Publish the folder that points at an index on a server, in one step.

    Args:
        index_dir (`str` or `Path`):
            Folder to create.
        facts (`Mapping[str, Any]`):
            Result of `index_facts`, the same that the index carries.
        url (`str`):
            Address of the server.
        index (`str`):
            Name of the index, or of an alias.
        probe_vectors (`np.ndarray`, *optional*):
            Vectors of the encoder's probes; required for an index with vectors.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an index that is there.

    Returns:
        `dict[str, Any]`: The manifest of the folder.

    Raises:
        `ConfigurationError`: If the folder may not be replaced, or the probes are missing.
    """
    if ("vectors" in facts["parameters"]) != (probe_vectors is not None):
        raise ConfigurationError(
            "`probe_vectors` must be given for an index with vectors, and for no other: got "
            f"{'none' if probe_vectors is None else 'some'}. Pass what `encoders.probe` gives for its encoder."
        )
    with staged_index(index_dir, overwrite=overwrite) as staging:
        if probe_vectors is not None:
            np.save(staging / PROBE_FILE, probe_vectors)
        return write_manifest(staging, {**facts, "server": {"url": url, "index": index}})


def read_pointer(index_dir: str | Path) -> tuple[dict[str, Any], str, str]:
    """
    Where a folder points.

    Args:
        index_dir (`str` or `Path`):
            Folder made by `write_pointer`.

    Returns:
        `tuple[dict[str, Any], str, str]`: Manifest, address of the server, name of the index.

    Raises:
        `ConfigurationError`: If the folder is no such index.
    """
    manifest = load_manifest(index_dir)
    target = manifest.get("server")
    if manifest["backend"] != BACKEND or not isinstance(target, Mapping):
        raise ConfigurationError(
            f"`{index_dir}` must be an `{BACKEND}` index: got `{manifest['backend']}`. Open it with `build_retriever`."
        )
    return manifest, str(target.get("url")), str(target.get("index"))
