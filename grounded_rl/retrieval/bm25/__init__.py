"""
Embedded BM25 index: built in one pass with bounded memory, searched from memory-mapped files in this process.

`build_bm25_index` makes one, [`BM25Retriever`] searches it.
"""

from grounded_rl.retrieval.bm25.analysis import BACKEND, MAX_QUERY_CHARACTERS, MAX_QUERY_TERMS
from grounded_rl.retrieval.bm25.build import build_bm25_index
from grounded_rl.retrieval.bm25.search import BM25Retriever

__all__ = ["BACKEND", "MAX_QUERY_CHARACTERS", "MAX_QUERY_TERMS", "BM25Retriever", "build_bm25_index"]
