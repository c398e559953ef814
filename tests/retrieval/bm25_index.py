"""Small BM25 indexes for tests."""

from __future__ import annotations

from pathlib import Path

from grounded_rl.retrieval import Passage
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from tests.retrieval import contract


def open_index_of(folder: Path, passages: list[Passage], **options) -> BM25Retriever:
    build_bm25_index(contract.write_corpus(folder / "corpus.jsonl", passages), folder / "index", overwrite=True)
    return BM25Retriever.open(folder / "index", **options)


# --- against a second implementation ---------------------------------------------------------------------------------
