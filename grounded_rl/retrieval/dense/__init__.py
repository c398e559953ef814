"""
Dense index on FAISS: passages and queries as vectors of one encoder.

`build_dense_index` makes one, [`DenseRetriever`] searches it. Needs the extra `dense`.
"""

from grounded_rl.retrieval.dense.build import BACKEND, DenseOptions, build_dense_index
from grounded_rl.retrieval.dense.lists import KINDS
from grounded_rl.retrieval.dense.search import DenseRetriever

__all__ = ["BACKEND", "KINDS", "DenseOptions", "DenseRetriever", "build_dense_index"]
