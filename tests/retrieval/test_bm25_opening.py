"""Opening a BM25 index: what is read, what is written, what outlives what."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from grounded_rl.retrieval import Passage
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.bm25.search import _remove
from tests.retrieval import contract
from tests.retrieval.bm25_index import open_index_of


def test_opening_and_searching_write_nothing_into_the_index(tmp_path):
    retriever = open_index_of(tmp_path, contract.PASSAGES)
    for lock in (tmp_path / "index").rglob("*.lock"):
        lock.unlink()
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "index").rglob("*"))}
    retriever = BM25Retriever.open(tmp_path / "index")
    assert retriever.search(["Lima"], 1)[0]
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "index").rglob("*"))} == before


def test_the_links_go_even_while_something_writes_beside_them(tmp_path, monkeypatch):
    folder = tmp_path / "links"
    folder.mkdir()
    remove = shutil.rmtree
    calls = []

    def disturbed(path, **options):
        remove(path, **options)
        calls.append(path)
        if len(calls) < 3:  # as if the lock had been written between the last look and the removal of the folder
            path.mkdir()
            (path / "meta.lock").touch()

    monkeypatch.setattr("grounded_rl.retrieval.bm25.search.shutil.rmtree", disturbed)
    _remove(folder)
    assert len(calls) == 3
    assert not folder.exists()


def test_an_open_index_outlives_its_replacement(tmp_path):
    old = open_index_of(tmp_path, [Passage("1", "", "lima"), Passage("2", "", "oslo")])
    new = open_index_of(tmp_path, [Passage("3", "", "lima"), Passage("4", "", "cairo")])
    assert [hits[0].passage.id for hits in old.search(["lima", "oslo"], 1)] == ["1", "2"]
    assert [hits[0].passage.id for hits in new.search(["lima", "cairo"], 1)] == ["3", "4"]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_opening_does_not_load_the_corpus(tmp_path):
    # Texts that do not compress: the files are about as large as the corpus.
    rng = np.random.default_rng(5)
    passages = [Passage(str(row), f"Title {row}", rng.bytes(4000).hex()) for row in range(8_000)]
    manifest = build_bm25_index(contract.write_corpus(tmp_path / "corpus.jsonl", passages), tmp_path / "index")
    size = sum(entry["bytes"] for entry in manifest["files"].values())
    assert size > 30e6
    # In its own process, where memory freed by other tests cannot hide growth.
    script = (
        "import os, sys\n"
        "from grounded_rl.retrieval.bm25 import BM25Retriever\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1]) * os.sysconf('SC_PAGE_SIZE')\n"
        "before = resident()\n"
        "retriever = BM25Retriever.open(sys.argv[1])\n"
        "assert retriever.search(['Title 77'], 1)[0][0].passage.title == 'Title 77'\n"
        "print(resident() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "index")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert int(done.stdout) < size / 4
