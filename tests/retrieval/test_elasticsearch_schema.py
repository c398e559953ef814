"""Every request body is one that Elastic's description of Elasticsearch 9.5 allows, and the check is strict."""

from __future__ import annotations

import json

import numpy as np
import pytest

from grounded_rl.retrieval.elasticsearch.mapping import VECTOR_INDEXES, IndexSpec, index_body
from grounded_rl.retrieval.elasticsearch.queries import census_body, knn_body, lexical_body
from tests.retrieval.es_schema import ApiSchema, SchemaError

NDJSON = "application/vnd.elasticsearch+x-ndjson; compatible-with=9"
VECTOR = np.array([0.6, 0.8], dtype=np.float32)
HEADER = {"allow_partial_search_results": False}


@pytest.fixture(scope="module")
def schema(es_schema_path):
    return ApiSchema(es_schema_path)


def encoded(body) -> bytes:
    return json.dumps(body).encode()


def lines(*bodies) -> bytes:
    return b"".join(encoded(body) + b"\n" for body in bodies)


def changed(body: dict, path: str, value) -> dict:
    """A copy of a body with one entry set, or removed if the value is `...`."""
    copy = json.loads(json.dumps(body))
    *parents, last = path.split(".")
    place = copy
    for name in parents:
        place = place[int(name)] if name.isdigit() else place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return copy


def with_vectors(vector_index: str = "int8_hnsw") -> dict:
    return index_body(IndexSpec(dims=2, vector_index=vector_index, encoder={"model": "m"}), {"num_passages": 2})


@pytest.mark.parametrize("vector_index", VECTOR_INDEXES)
def test_indices_and_searches_of_every_kind_are_allowed(schema, vector_index):
    assert schema.check_request("PUT", "/wiki-18-1", encoded(with_vectors(vector_index))) == "indices.create"
    assert schema.check_request("PUT", "/wiki-18-1", encoded(index_body(IndexSpec()))) == "indices.create"
    bodies = [
        census_body(("contents", "vector")),
        lexical_body("who wrote it", 10),
        knn_body(VECTOR, 10, vector_index=vector_index),
        knn_body(VECTOR, 10, vector_index=vector_index, num_candidates=500),
    ]
    for body in bodies:
        assert schema.check_request("POST", "/wiki/_search", encoded(body)) == "search"
    packed = lines(*(part for body in bodies for part in (HEADER, body)))
    assert schema.check_request("POST", "/wiki/_msearch", packed, NDJSON) == "msearch"


def test_the_kind_of_vector_index_is_always_written_out():
    for vector_index in VECTOR_INDEXES:
        options = with_vectors(vector_index)["mappings"]["properties"]["vector"]["index_options"]
        assert options["type"] == vector_index


def test_quantised_vectors_are_compared_in_full_again():
    oversample = {
        kind: knn_body(VECTOR, 3, vector_index=kind)["knn"].get("rescore_vector", {}).get("oversample")
        for kind in VECTOR_INDEXES
    }
    assert oversample == {"hnsw": None, "int8_hnsw": 1.5, "int4_hnsw": 2.0, "bbq_hnsw": 3.0}


def test_candidates_grow_with_the_hits_up_to_what_the_server_takes():
    sizes = {3: 100, 50: 500, 2_000: 10_000, 10_000: 10_000}
    found = {size: knn_body(VECTOR, size, vector_index="hnsw")["knn"]["num_candidates"] for size in sizes}
    assert found == sizes
    assert knn_body(VECTOR, 50, vector_index="hnsw", num_candidates=10)["knn"]["num_candidates"] == 50


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("mappings.properties.vector.index_options.type", "int8hnsw", "type"),
        ("mappings.properties.vector.similarity", "inner_product", "similarity"),
        ("mappings.properties.vector.dimension", 2, "dimension"),
        ("mappings.properties.vector.dims", "2", "dims"),
        ("mappings.properties.vector.index_options.m", 1.5, "m"),
        ("mappings.properties.contents.type", "txt", "type"),
        ("mappings.properties.contents.analyser", "english", "analyser"),
        ("mappings.properties.title.copy_to", 3, "copy_to"),
        ("mappings.dynamic", "strictly", "dynamic"),
        ("mappings.propertys", {}, "propertys"),
        ("settings.index.similarity.lucene_bm25.type", "BM26", "type"),
        ("settings.index.similarity.lucene_bm25.k1", [], "k1"),
        ("setting", {}, "setting"),
    ],
)
def test_a_misspelt_mapping_is_found(schema, path, value, place):
    with pytest.raises(SchemaError, match=place):
        schema.check_request("PUT", "/wiki", encoded(changed(with_vectors(), path, value)))


@pytest.mark.parametrize(
    ("body", "path", "value"),
    [
        ("lexical", "query.match.contents.querry", "x"),
        ("lexical", "query.match.contents.query", ...),
        ("lexical", "query.term", {"contents": "x"}),
        ("lexical", "query", {"matches": {}}),
        ("lexical", "sort.1.id_order.order", "up"),
        ("lexical", "sort.1.id_order.ordering", "asc"),
        ("lexical", "sort.1.pid", {"order": "asc"}),
        ("lexical", "track_total_hits", "no"),
        ("lexical", "size", "3"),
        ("lexical", "top_k", 3),
        ("knn", "knn.num_candidate", 100),
        ("knn", "knn.field", ...),
        ("knn", "knn.k", 3.5),
        ("knn", "knn.query_vector", ["a"]),
        ("knn", "knn.rescore_vector.oversampling", 2.0),
        ("knn", "knn.rescore_vector", {}),
    ],
)
def test_a_misspelt_search_is_found(schema, body, path, value):
    bodies = {"lexical": lexical_body("x", 3), "knn": knn_body(VECTOR, 3, vector_index="int8_hnsw")}
    wrong = changed(bodies[body], path, value)
    with pytest.raises(SchemaError):
        schema.check_request("POST", "/wiki/_search", encoded(wrong))
    with pytest.raises(SchemaError):
        schema.check_request("POST", "/wiki/_msearch", lines(HEADER, wrong), NDJSON)


@pytest.mark.parametrize(
    ("method", "target", "body", "media_type"),
    [
        ("POST", "/wiki/_searches", b"{}", ""),
        ("PATCH", "/wiki/_search", b"{}", ""),
        ("POST", "/wiki/_search?allow_partial=false", b"{}", ""),
        ("POST", "/wiki/_search?allow_partial_search_results=maybe", b"{}", ""),
        ("POST", "/wiki/_msearch", lines({"indx": "wiki"}, {}), NDJSON),
        ("POST", "/wiki/_msearch", lines(HEADER), NDJSON),
        ("POST", "/wiki/_msearch", lines(HEADER, {"query": {}})[:-1], NDJSON),
        ("POST", "/wiki/_bulk", lines({"indexing": {"_id": "1"}}, {}), NDJSON),
        ("POST", "/wiki/_bulk", lines({"index": {"_id": "1"}}), NDJSON),
        ("POST", "/wiki/_bulk", lines({"index": {"_id": "1"}, "create": {}}, {}), NDJSON),
        ("POST", "/wiki/_refresh", b'{"now": true}', ""),
        ("POST", "/wiki/_forcemerge?max_num_segments=one", b"", ""),
        ("POST", "/_aliases", encoded({"actions": [{"add": {"index": "a", "name": "b"}}]}), ""),
        ("POST", "/_aliases", encoded({"actions": [{"add": {}, "remove": {}}]}), ""),
        ("POST", "/wiki/_search?size=ten", b"{}", ""),
    ],
)
def test_a_misspelt_request_is_found(schema, method, target, body, media_type):
    with pytest.raises(SchemaError):
        schema.check_request(method, target, body, media_type)


def test_answers_are_checked_as_well(schema):
    whole = {
        "took": 1,
        "timed_out": False,
        "_shards": {"total": 1, "successful": 1, "failed": 0},
        "hits": {"hits": [{"_index": "wiki", "_id": "1", "_score": 1.0, "_source": {"any": "thing"}}]},
    }
    schema.check_response("search", whole)
    schema.check_response("msearch", {"took": 1, "responses": [whole | {"status": 200}]})
    for path, value in (
        ("timed_out", ...),
        ("timed_out", "false"),
        ("_shards.failed", ...),
        ("hits.hits.0._index", ...),
        ("hits.hits.0._identity", "1"),
        ("hits.total", {"value": 1}),
    ):
        with pytest.raises(SchemaError):
            schema.check_response("search", changed(whole, path, value))
