"""The atlas, written once."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from grounded_rl.data import load_questions
from grounded_rl.data.atlas import prepare_atlas

SPLITS = ("train", "dev", "test")
COUNTS = {"train": 3000, "dev": 500, "test": 1000}


@pytest.fixture(scope="session")
def atlas(tmp_path_factory):
    """Folder, manifest, passages by id as `(title, text)`, and questions by split, all read from the written files."""
    folder = tmp_path_factory.mktemp("atlas")
    manifest = prepare_atlas(folder, seed=0, counts=COUNTS)
    passages = {}
    with (folder / "corpus.jsonl").open(encoding="utf-8") as stream:
        for line in stream:
            record = json.loads(line)
            title, _, text = record["contents"].partition("\n")
            passages[record["id"]] = (title.strip('"'), text)
    questions = {split: load_questions(folder / f"{split}.jsonl") for split in SPLITS}
    return SimpleNamespace(folder=folder, manifest=manifest, passages=passages, questions=questions)
