"""
Builds that survive being killed: a folder that keeps what is done, and appears under its name when all of it is.

A build writes into a hidden sibling of its target and records there, atomically, how far its files are valid. Whatever
was written after the last record is cut off when the build is resumed, so nothing is lost or written twice. The
corpus is read again from its start: its first passages must be those the files were made from.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.corpus import CorpusDigest, CorpusSource, ProgressCallback, read_corpus
from grounded_rl.retrieval.manifest import BUILD_STATE_NAME, check_target, publish

_LOCK_NAME = "build.lock"

StageCallback = Callable[[str], None]
"""Called with the name of a stage of a build when it begins."""


@dataclass(slots=True)
class BuildFolder:
    """
    Folder of an unfinished index.

    Args:
        path (`Path`):
            The folder.
        identity (`Mapping[str, Any]`):
            What the build makes; a build is resumed only with an equal one.
        progress (`dict[str, Any]`):
            Last record of `save`; empty for a new build.
    """

    path: Path
    identity: Mapping[str, Any]
    progress: dict[str, Any]

    def save(self, **progress: Any) -> None:
        """
        Record how far the files are valid, in one step. Files must have been flushed to the disk before.

        Args:
            **progress:
                JSON values; they replace the ones of the last record of the same names.
        """
        self.progress.update(progress)
        text = json.dumps({"identity": dict(self.identity), "progress": self.progress}, indent=2)
        write_atomically(self.path / BUILD_STATE_NAME, text.encode("utf-8"))


@contextlib.contextmanager
def resumable_index(
    index_dir: str | Path, identity: Mapping[str, Any], *, resume: bool = False, overwrite: bool = False
) -> Iterator[BuildFolder]:
    """
    Folder to build an index in; it takes the name `index_dir` when the block ends.

    If the block raises or the process dies, the folder stays, provided progress was recorded.

    Args:
        index_dir (`str` or `Path`):
            Folder to publish.
        identity (`Mapping[str, Any]`):
            What decides the contents: backend and parameters, as JSON values.
        resume (`bool`, *optional*, defaults to `False`):
            Continue an unfinished build of `index_dir` if there is one.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace an index that is there when the build is complete.

    Yields:
        `BuildFolder`: The folder and what is already done.

    Raises:
        `ConfigurationError`: If the target may not be replaced, an unfinished build is there and `resume` is `False`,
            it was of something else, or another process is at it.
    """
    target = Path(index_dir).absolute()
    check_target(target, overwrite)
    folder = _unfinished_folder(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK_NAME).open("w")
    except OSError as error:
        raise ConfigurationError(
            f"`{target.parent}` must be a folder you can write to: got {error.strerror!r}. Choose another one."
        ) from error
    with lock:
        _lock(lock.fileno(), target)
        build = BuildFolder(folder, identity, _recorded_progress(folder, target, identity, resume))
        if not build.progress:
            _clear(folder)
        try:
            yield build
        except BaseException:
            if not build.progress:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        check_target(target, overwrite)
        publish(folder, target)
        # After the publication, so that a process killed here has lost nothing.
        for name in (BUILD_STATE_NAME, _LOCK_NAME):
            (target / name).unlink(missing_ok=True)


def unfinished_bytes(index_dir: str | Path) -> int:
    """
    Size of what an unfinished build has written.

    Args:
        index_dir (`str` or `Path`):
            Folder to publish.

    Returns:
        `int`: Bytes; 0 if there is no unfinished build.
    """
    folder = _unfinished_folder(Path(index_dir).absolute())
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def remaining_passages(
    corpus: CorpusSource,
    digest: CorpusDigest,
    *,
    num_done: int,
    sha256: str,
    on_progress: ProgressCallback | None = None,
) -> Iterator[Passage]:
    """
    Passages of a corpus after those that are done, which are read, hashed and compared.

    Args:
        corpus (`str` or `Path`):
            What `read_corpus` takes.
        digest (`CorpusDigest`):
            Fresh digest; the passages that are done are added to it, the others are left to the caller.
        num_done (`int`):
            Passages that are done.
        sha256 (`str`):
            Digest of these, as recorded.
        on_progress (`Callable[[int, int], None]`, *optional*):
            Passed to `read_corpus`.

    Yields:
        `Passage`: Passages from number `num_done` on.

    Raises:
        `ConfigurationError`: If the corpus does not begin with the passages that are done.
    """
    passages = read_corpus(corpus, on_progress=on_progress)
    for passage in passages:
        if digest.num_passages == num_done:
            _check_prefix(corpus, digest, num_done, sha256)
            yield passage
            break
        digest.add(passage)
    else:
        _check_prefix(corpus, digest, num_done, sha256)
    yield from passages


def shards(passages: Iterator[Passage], size: int) -> Iterator[list[Passage]]:
    """
    Consecutive passages in lists.

    Args:
        passages (`Iterator[Passage]`):
            Any passages.
        size (`int`):
            Passages per list; the last may have fewer.

    Yields:
        `list[Passage]`: Lists that are not empty.
    """
    while shard := list(islice(passages, size)):
        yield shard


def write_atomically(path: Path, content: bytes) -> None:
    """
    Replace a file in one step, durably.

    Args:
        path (`Path`):
            File to write.
        content (`bytes`):
            New content.
    """
    temporary = path.with_name(path.name + ".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def cut_to(path: Path, num_bytes: int) -> None:
    """
    Cut off what was written to a file after the last record; the file is made if it is not there.

    Args:
        path (`Path`):
            File that only ever grows.
        num_bytes (`int`):
            Length at the last record.

    Raises:
        `ConfigurationError`: If the file is shorter than the record says.
    """
    size = path.stat().st_size if path.exists() else 0
    if size < num_bytes:
        raise ConfigurationError(
            f"`{path}` must have at least {num_bytes} bytes: got {size}. "
            "The unfinished build is damaged: remove its folder and build again."
        )
    with path.open("ab") as file:
        file.truncate(num_bytes)


class Meter:
    """
    Rate and remaining time of a build.

    Args:
        total (`int`, *optional*):
            Passages there will be, exactly or about.
        num_done (`int`, *optional*, defaults to 0):
            Passages that were done before; they do not count for the rate.
    """

    def __init__(self, total: int | None = None, num_done: int = 0) -> None:
        self._total = total
        self._first = num_done
        self._started = time.monotonic()

    def describe(self, num_done: int) -> str:
        """
        One line on the state of the build.

        Args:
            num_done (`int`):
                Passages done by now.

        Returns:
            `str`: Count, rate and remaining time, as far as they are known.
        """
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = (num_done - self._first) / seconds
        line = f"{num_done:,} passages, {rate:,.0f}/s"
        if self._total is None or rate <= 0:
            return line
        left = max(self._total - num_done, 0) / rate
        return f"{line}, {100 * min(num_done / max(self._total, 1), 1):.0f} %, {_duration(left)} left"


def _unfinished_folder(target: Path) -> Path:
    """Where an index is built until it is complete."""
    return target.with_name(f".{target.name}.unfinished")


def _duration(seconds: float) -> str:
    """A time span for people."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _check_prefix(corpus: CorpusSource, digest: CorpusDigest, num_done: int, sha256: str) -> None:
    """Raise unless the passages added so far are those that are done."""
    if digest.num_passages != num_done or (num_done and digest.sha256 != sha256):
        raise ConfigurationError(
            f"`{corpus}` must begin with the {num_done:,} passages of the unfinished build: got other ones. "
            "Restore the corpus, or remove the unfinished folder and build again."
        )


def _recorded_progress(folder: Path, target: Path, identity: Mapping[str, Any], resume: bool) -> dict[str, Any]:
    """Progress of an unfinished build, or an empty record if there is none."""
    path = folder / BUILD_STATE_NAME
    if not path.exists():
        return {}
    state = json.loads(path.read_text(encoding="utf-8"))
    if not state["progress"]:
        return {}
    if not resume:
        raise ConfigurationError(
            f"`{target}` must not have an unfinished build: got `{folder}`. "
            "Continue it with `--resume`, or remove that folder."
        )
    now = json.loads(json.dumps(dict(identity)))
    if state["identity"] != now:
        names = sorted(state["identity"].keys() | now.keys())
        changed = [name for name in names if state["identity"].get(name) != now.get(name)]
        raise ConfigurationError(
            f"`--resume` must continue with the same {', '.join(f'`{name}`' for name in changed)}: "
            f"got {', '.join(repr(now.get(name)) for name in changed)}, "
            f"begun with {', '.join(repr(state['identity'].get(name)) for name in changed)}. "
            f"Use the first values, or remove `{folder}`."
        )
    return dict(state["progress"])


def _lock(descriptor: int, target: Path) -> None:
    """Take the lock of the folder; the system releases it when the process ends, however it ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigurationError(
            f"`{target}` must not be built twice at a time: got another process that is building it. Wait for it."
        ) from error


def _clear(folder: Path) -> None:
    """Remove what a build left that had not recorded anything."""
    for path in folder.iterdir():
        if path.name != _LOCK_NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
