"""An index is opened only by what can search it as its manifest says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.manifest import index_id
from tests.retrieval import contract


def edited(tmp_path: Path, **changes) -> Path:
    """An index whose manifest says something else, with a matching identity."""
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    build_bm25_index(corpus, tmp_path / "index")
    path = tmp_path / "index" / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    manifest["index_id"] = index_id(manifest)
    path.write_text(json.dumps(manifest))
    return tmp_path / "index"


def test_an_index_of_another_analysis_is_refused(tmp_path):
    parameters = {"k1": 0.9, "b": 0.75, "searched": "text", "analysis": "whitespace"}
    with pytest.raises(ConfigurationError, match="got another value of `k1`, `searched`, `query`, `analysis`"):
        BM25Retriever.open(edited(tmp_path, parameters=parameters))


def test_an_index_of_another_library_version_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"must be searched with tantivy 0\.1\.0, which built it"):
        BM25Retriever.open(edited(tmp_path, library_version="0.1.0"))


def test_an_index_with_another_number_of_passages_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"must hold 7 passages, as its manifest says: got \d+"):
        BM25Retriever.open(edited(tmp_path, num_passages=7))


def test_a_damaged_index_is_one_line(tmp_path):
    index = edited(tmp_path)
    path = index / "tantivy" / "meta.json"
    path.write_text("?" * path.stat().st_size)
    with pytest.raises(ConfigurationError, match=r"^[^\n]*must be an intact index[^\n]*$"):
        BM25Retriever.open(index)


# --- memory ----------------------------------------------------------------------------------------------------------
