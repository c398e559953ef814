"""
Search over a corpus of passages.

`build_retriever` opens an index by its manifest; `bm25` builds and searches the embedded one. No backend is imported
until an index asks for it.
"""

from grounded_rl.retrieval.base import Hit, Passage, Retriever
from grounded_rl.retrieval.build import build_retriever

__all__ = ["Hit", "Passage", "Retriever", "build_retriever"]
