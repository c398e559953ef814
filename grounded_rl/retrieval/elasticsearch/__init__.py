"""
Search on an Elasticsearch server: by words, by vectors, or both.

`ElasticsearchRetriever` searches an index, `ElasticsearchWriter` fills one. Made for the client of version 9 and
servers from 8.18 on. Nothing is imported from the package `elasticsearch` until a connection is made.
"""

from grounded_rl.retrieval.elasticsearch.backend import ElasticsearchRetriever
from grounded_rl.retrieval.elasticsearch.client import ElasticsearchClient, ElasticsearchSettings
from grounded_rl.retrieval.elasticsearch.mapping import BACKEND, IndexSpec, index_facts
from grounded_rl.retrieval.elasticsearch.plan import SearchPlan
from grounded_rl.retrieval.elasticsearch.pointer import read_pointer, write_pointer
from grounded_rl.retrieval.elasticsearch.writer import ElasticsearchWriter, WriteLimits, new_index_name

__all__ = [
    "BACKEND",
    "ElasticsearchClient",
    "ElasticsearchRetriever",
    "ElasticsearchSettings",
    "ElasticsearchWriter",
    "IndexSpec",
    "SearchPlan",
    "WriteLimits",
    "index_facts",
    "new_index_name",
    "read_pointer",
    "write_pointer",
]
