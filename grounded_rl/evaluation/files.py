"""Atomic writing of small text files."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: str | os.PathLike, text: str) -> Path:
    """
    Write a text file so that readers see the old file or the whole new one.

    Args:
        path (`str` or `PathLike`):
            Target file. Parent folders are created.
        text (`str`):
            Content. Lone surrogates, which no encoding can hold, become `?`.

    Returns:
        `Path`: The target.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
