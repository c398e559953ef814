"""
The manifest of an index, and its publication as one folder.

An index is a folder with `manifest.json` and the files of its backend. It appears under its name in one step,
complete, so that a reader never meets a half-built one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grounded_rl.errors import ConfigurationError

MANIFEST_NAME = "manifest.json"
BUILD_STATE_NAME = "build.json"
"""File of an unfinished build; never part of an index."""
SCHEMA_VERSION = 1

_REQUIRED = {
    "backend": str,
    "corpus_name": str,
    "corpus_sha256": str,
    "num_passages": int,
    "library": str,
    "library_version": str,
    "parameters": dict,
    "index_id": str,
    "files": dict,
}


def index_id(manifest: Mapping[str, Any]) -> str:
    """
    Identity of what an index answers: equal for builds of one corpus with the same backend, library and parameters.

    Args:
        manifest (`Mapping[str, Any]`):
            Manifest; only the fields that decide results are read.

    Returns:
        `str`: Sixteen hexadecimal digits, fit for the key of a cache.
    """
    fields = ("backend", "corpus_sha256", "num_passages", "library", "library_version", "parameters")
    text = json.dumps({name: manifest[name] for name in fields}, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """
    Complete a manifest (schema version, identity, sizes and hashes of the files) and write it.

    Args:
        directory (`Path`):
            Folder that holds the finished files of the backend.
        manifest (`Mapping[str, Any]`):
            Fields of the backend.

    Returns:
        `dict[str, Any]`: The manifest as written.
    """
    files = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": _file_sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.name not in (MANIFEST_NAME, BUILD_STATE_NAME)
    }
    complete = {
        "schema_version": SCHEMA_VERSION,
        "index_id": index_id(manifest),
        **manifest,
        "files": files,
    }
    text = json.dumps(complete, indent=2, ensure_ascii=False)
    (directory / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")
    return complete


def load_manifest(index_dir: str | Path) -> dict[str, Any]:
    """
    Read the manifest of an index and check it against the files that are there.

    File sizes are compared, which finds missing and cut files at no cost; `check_files` compares contents.

    Args:
        index_dir (`str` or `Path`):
            Folder of the index.

    Returns:
        `dict[str, Any]`: The manifest.

    Raises:
        `ConfigurationError`: If there is no index, or its manifest or files are damaged, or a newer release wrote it.
    """
    directory = Path(index_dir)
    path = directory / MANIFEST_NAME
    if not path.is_file():
        state = "a folder without `manifest.json`" if directory.is_dir() else "no such folder"
        raise ConfigurationError(
            f"`index` must be the folder of an index: got `{directory}` ({state}). "
            "Build one with `grounded-rl index build`."
        )
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"`{path}` must be readable JSON: got {str(error)!r}. Rebuild the index.") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != SCHEMA_VERSION:
        raise ConfigurationError(
            f"`{path}` must have `schema_version` {SCHEMA_VERSION}: got {version!r}. "
            "Rebuild the index with this release, or use the release that wrote it."
        )
    for name, kind in _REQUIRED.items():
        if not isinstance(manifest.get(name), kind):
            raise ConfigurationError(
                f"`{path}` must have `{name}` of type {kind.__name__}: got {manifest.get(name)!r}. Rebuild the index."
            )
    if manifest["index_id"] != index_id(manifest):
        raise ConfigurationError(
            f"`{path}` must have `index_id` {index_id(manifest)!r}, the hash of its fields: "
            f"got {manifest['index_id']!r}. The manifest was edited: rebuild the index."
        )
    _check_sizes(directory, manifest)
    return manifest


def check_files(index_dir: str | Path, manifest: Mapping[str, Any]) -> None:
    """
    Compare the contents of every file of an index with its manifest.

    Args:
        index_dir (`str` or `Path`):
            Folder of the index.
        manifest (`Mapping[str, Any]`):
            Manifest from `load_manifest`.

    Raises:
        `ConfigurationError`: If a file differs; names it.
    """
    directory = Path(index_dir)
    _check_sizes(directory, manifest)
    for name, entry in manifest["files"].items():
        digest = _file_sha256(directory / name)
        if digest != entry["sha256"]:
            raise ConfigurationError(
                f"`{directory / name}` must have sha256 {entry['sha256']}: got {digest}. "
                "The file was changed: rebuild the index or copy it again."
            )


@contextlib.contextmanager
def staged_index(index_dir: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """
    Folder to build an index in; it takes the name `index_dir` when the block ends, and vanishes if the block raises.

    Args:
        index_dir (`str` or `Path`):
            Folder to publish.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an index that is there. A folder that is not an index is never replaced.

    Yields:
        `Path`: Empty sibling folder.

    Raises:
        `ConfigurationError`: If the target exists and may not be replaced, or its parent cannot be written.
    """
    target = Path(index_dir).absolute()
    check_target(target, overwrite)
    staging = target.with_name(f".{target.name}.building-{os.getpid()}")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise ConfigurationError(
            f"`{target.parent}` must be a folder you can write to: got {error.strerror!r}. Choose another one."
        ) from error
    try:
        yield staging
        check_target(target, overwrite)
        publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def publish(folder: Path, target: Path) -> None:
    """
    Give a finished folder its name; what had the name before is removed afterwards.

    Args:
        folder (`Path`):
            Sibling of the target.
        target (`Path`):
            Absolute path of the index, accepted by `check_target`.
    """
    retired = target.with_name(f".{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(retired)
    folder.rename(target)
    shutil.rmtree(retired, ignore_errors=True)


def check_target(target: Path, overwrite: bool) -> None:
    """
    Refuse a target that exists, unless it is an index that may be replaced or an empty folder.

    Args:
        target (`Path`):
            Folder to publish.
        overwrite (`bool`):
            Whether an index may be replaced.

    Raises:
        `ConfigurationError`: If it may not be replaced.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / MANIFEST_NAME).is_file():
        raise ConfigurationError(
            f"`{target}` must be absent or an index: got something else of that name, which is never overwritten. "
            "Choose another output folder."
        )
    if not overwrite:
        raise ConfigurationError(
            f"`{target}` must not exist: got an index. Choose another output folder, or replace it with `--overwrite`."
        )


def _check_sizes(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raise if a file is missing or has another size than the manifest says."""
    for name, entry in manifest["files"].items():
        path = directory / name
        size = path.stat().st_size if path.is_file() else None
        if size != entry["bytes"]:
            got = "no such file" if size is None else f"{size} bytes"
            raise ConfigurationError(
                f"`{path}` must have {entry['bytes']} bytes: got {got}. Rebuild the index or copy it again."
            )


def _file_sha256(path: Path) -> str:
    """Hash of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
