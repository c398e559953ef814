"""
Search by vectors, and by both, against a stub whose requests and answers follow Elastic's API description.

The stub compares exactly, so these tests show which requests are made and what is done with the answers. How well the
graphs of a real server find neighbours is shown by the live tests.
"""

from __future__ import annotations

import base64
import time

import numpy as np
import pytest

pytest.importorskip("elasticsearch", reason="the extra `elasticsearch` is not installed")

from grounded_rl.errors import (
    BackendOverloadedError,
    BadResponseError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.base import Hit, Passage
from grounded_rl.retrieval.corpus import id_sort_key
from grounded_rl.retrieval.elasticsearch import (
    ElasticsearchClient,
    ElasticsearchRetriever,
    ElasticsearchSettings,
    ElasticsearchWriter,
    IndexSpec,
    index_facts,
    write_pointer,
)
from grounded_rl.retrieval.elasticsearch.documents import document, id_order, pack_vector, round_vector
from grounded_rl.retrieval.encoders import passage_text, probe
from grounded_rl.retrieval.fusion import reciprocal_rank_fusion, weighted_score_fusion
from tests.retrieval import contract
from tests.retrieval.es_schema import ApiSchema
from tests.retrieval.es_stub import StubElasticsearch
from tests.retrieval.fake_encoder import SETTINGS, WordEncoder

DIMS = 32
NAMES = ["0", "9", "10", "09", "a", "B", "ab", "z-1", "é", "10a"]


@pytest.fixture(scope="module")
def schema(es_schema_path):
    return ApiSchema(es_schema_path)


@pytest.fixture(scope="module")
def encoder():
    return WordEncoder(DIMS)


@pytest.fixture
def stub(schema):
    with StubElasticsearch(schema) as server:
        yield server


def fill(server, passages, encoder, *, alias="wiki", vector_index="int8_hnsw") -> dict:
    spec = IndexSpec(dims=encoder.num_dims, vector_index=vector_index, encoder=encoder.settings.as_dict())
    client = ElasticsearchClient(ElasticsearchSettings(server.url))
    writer = ElasticsearchWriter(client, f"{alias}-1", spec)
    writer.create()
    vectors = encoder.encode_passages([passage_text(passage) for passage in passages])
    writer.write((row, passage, vectors[row]) for row, passage in enumerate(passages))
    facts = index_facts(
        spec,
        corpus_name="test",
        corpus_sha256="0" * 64,
        num_passages=len(passages),
        server_version=writer.server_version(),
    )
    writer.finish(facts)
    writer.publish(alias)
    client.close()
    return facts


@pytest.fixture(scope="module")
def filled(schema, encoder):
    with StubElasticsearch(schema) as server:
        server.facts = fill(server, contract.PASSAGES, encoder)
        yield server


@pytest.fixture
def contract_stub(filled):
    yield filled
    filled.fault = None


def exact(encoder, query: str, k: int) -> list[Hit]:
    """Nearest passages by a loop over all of them, in float64."""
    vectors = encoder.encode_passages([passage_text(passage) for passage in contract.PASSAGES]).astype(np.float64)
    scores = vectors @ encoder.encode_queries([query])[0].astype(np.float64)
    hits = [Hit(passage, float(score)) for passage, score in zip(contract.PASSAGES, scores, strict=True)]
    return sorted(hits, key=lambda hit: (-round(hit.score, 5), id_sort_key(hit.passage.id)))[:k]


QUERIES = ["the capital of Peru", "a lighthouse on a rock", "glaciers without a title", "東京"]


# Hybrid search fuses a window that grows with `k` beyond 50: a smaller `k` need not give a prefix.
CONTRACT = [
    pytest.param(check, mode, id=f"{check.__name__}-{mode}")
    for mode in ("dense", "hybrid")
    for check in contract.CHECKS
    if (check, mode) != (contract.a_smaller_k_gives_a_prefix, "hybrid")
]


@pytest.mark.parametrize(("check", "mode"), CONTRACT)
def test_it_keeps_the_contract(check, mode, contract_stub, encoder):
    opened = ElasticsearchRetriever.connect(contract_stub.url, "wiki", mode=mode, encoder=encoder)
    if check in (contract.any_text_is_a_query, contract.one_list_per_query_in_the_order_of_the_queries):
        # The encoder of these tests knows words only: it has no direction for a text without any.
        queries = ["<|im_end|></tool_call>", "Peru\ud800", "'; DROP TABLE passages; --", "Peru " * 2_000]
        contract.assert_well_formed(opened, queries, 4)
    else:
        check(opened)
    opened.close()


def test_dense_scores_are_dot_products_of_the_nearest_passages(contract_stub, encoder):
    opened = ElasticsearchRetriever.connect(contract_stub.url, "wiki", mode="dense", encoder=encoder)
    for query, hits in zip(QUERIES, opened.search(QUERIES, 7), strict=True):
        expected = exact(encoder, query, 7)
        assert [hit.passage for hit in hits] == [hit.passage for hit in expected]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in expected], abs=1e-6)


@pytest.mark.parametrize(
    ("options", "fuse"),
    [
        ({}, reciprocal_rank_fusion),
        ({"weights": (2.0, 0.5)}, reciprocal_rank_fusion),
        ({"fusion": "weighted", "weights": (0.3, 0.7)}, weighted_score_fusion),
        ({"window": 60}, reciprocal_rank_fusion),
    ],
)
def test_hybrid_fuses_the_two_rankings_of_one_request(contract_stub, encoder, options, fuse):
    url = contract_stub.url
    lexical, dense = (
        ElasticsearchRetriever.connect(url, "wiki", mode=mode, encoder=encoder) for mode in ("lexical", "dense")
    )
    hybrid = ElasticsearchRetriever.connect(url, "wiki", encoder=encoder, **options)
    window = options.get("window", 50)
    before = len(contract_stub.requests)
    fused = hybrid.search(QUERIES, 5)
    sent = contract_stub.requests[before:]
    # Another request follows for queries whose last neighbour ties with passages beyond the window.
    assert {endpoint for endpoint, _ in sent} == {"msearch"}
    assert len(sent) <= 2
    assert len(sent[0][1]) == 2 * (1 + 2 * len(QUERIES))
    words, vectors = lexical.search(QUERIES, window), dense.search(QUERIES, window)
    for row, hits in enumerate(fused):
        assert hits == fuse([words[row], vectors[row]], 5, weights=options.get("weights"))


@pytest.mark.parametrize("vector_index", ["hnsw", "int8_hnsw", "int4_hnsw", "bbq_hnsw"])
def test_every_kind_of_vector_index_is_searched_with_its_own_request(stub, encoder, vector_index):
    fill(stub, contract.PASSAGES, encoder, vector_index=vector_index)
    opened = ElasticsearchRetriever.connect(stub.url, "wiki", mode="dense", encoder=encoder, num_candidates=70)
    assert opened.search(["capital of Peru"], 1)[0][0].passage.title == "Peru"
    body = stub.requests[-1][1][3]["knn"]
    assert body["num_candidates"] == 70
    assert ("rescore_vector" in body) == (vector_index != "hnsw")


def test_vectors_are_sent_short_to_old_servers_and_packed_to_new_ones(schema, encoder):
    passages = contract.PASSAGES[:3]
    vectors = encoder.encode_passages([passage_text(passage) for passage in passages])
    for version, kind in (("8.18.0", list), ("9.1.4", list), ("9.3.0", str)):
        with StubElasticsearch(schema, version) as server:
            fill(server, passages, encoder)
            stored = [source["vector"] for source in server.indices["wiki-1"]["documents"].values()]
            assert {type(vector) for vector in stored} == {kind}
            opened = ElasticsearchRetriever.connect(server.url, "wiki", mode="dense", encoder=encoder)
            found = [hits[0].score for hits in opened.search([passage_text(passage) for passage in passages], 1)]
            assert found == pytest.approx([1.0] * 3, abs=1e-6)
            opened.close()
    for vector in vectors:
        assert np.abs(np.array(round_vector(vector), dtype=np.float32) - vector).max() <= 1e-7
        assert np.frombuffer(base64.b64decode(pack_vector(vector)), ">f4").tolist() == vector.tolist()


def test_vectors_need_a_new_enough_server(schema, encoder):
    with StubElasticsearch(schema) as server:
        fill(server, contract.PASSAGES, encoder)
        server.version = "8.17.3"
        with pytest.raises(ConfigurationError, match=r"8\.18 or newer for vectors: got 8\.17\.3"):
            ElasticsearchRetriever.connect(server.url, "wiki", encoder=encoder)


def test_another_encoder_is_refused(contract_stub, encoder):
    url = contract_stub.url
    with pytest.raises(ConfigurationError, match="`encoder` must be given for `mode` 'hybrid'"):
        ElasticsearchRetriever.connect(url, "wiki")
    with pytest.raises(IndexMismatchError, match="16 dimensions, not 32"):
        ElasticsearchRetriever.connect(url, "wiki", encoder=WordEncoder(16))
    prefixed = type(SETTINGS).from_dict({**SETTINGS.as_dict(), "query_prefix": "query: "})
    with pytest.raises(IndexMismatchError, match="`query_prefix` 'query: ', not ''"):
        ElasticsearchRetriever.connect(url, "wiki", encoder=WordEncoder(DIMS, settings=prefixed))
    ElasticsearchRetriever.connect(url, "wiki", mode="lexical").close()


def test_vectors_that_are_not_of_length_one_are_never_sent(contract_stub):
    class Doubled(WordEncoder):
        def encode_queries(self, queries):
            return 2.0 * super().encode_queries(queries)

    opened = ElasticsearchRetriever.connect(contract_stub.url, "wiki", encoder=Doubled(DIMS))
    with pytest.raises(RetrievalError, match="must give 1 vectors of 32 dimensions and length 1"):
        opened.search(["Peru"], 1)
    with pytest.raises(ConfigurationError, match="vector of passage '1' must have length 1: got 2"):
        document(Passage("1", "", "x"), 0, np.array([2.0], dtype=np.float32))


def test_vectors_that_vanish_are_noticed(stub, encoder):
    fill(stub, contract.PASSAGES[:5], encoder)
    opened = ElasticsearchRetriever.connect(stub.url, "wiki", mode="dense", encoder=encoder)
    for source in stub.indices["wiki-1"]["documents"].values():
        del source["vector"]
    stub.indices["wiki-1"]["mappings"]["properties"].pop("vector")
    with pytest.raises(IndexMismatchError, match="must have 5 passages that can be searched"):
        opened.search(["Peru"], 3)


def test_a_folder_brings_its_encoder_along(contract_stub, encoder, tmp_path, monkeypatch):
    vectors = probe(encoder)
    facts = contract_stub.facts
    with pytest.raises(ConfigurationError, match="`probe_vectors` must be given"):
        write_pointer(tmp_path / "none", facts, url=contract_stub.url, index="wiki")
    write_pointer(tmp_path / "index", facts, url=contract_stub.url, index="wiki", probe_vectors=vectors)
    loaded = []

    def load(record, probe_vectors):
        loaded.append((record, probe_vectors))
        return encoder

    monkeypatch.setattr("grounded_rl.retrieval.encoders.load_recorded_encoder", load)
    opened = ElasticsearchRetriever.open(tmp_path / "index")
    assert opened.search_parameters["mode"] == "hybrid"
    assert loaded[0][0] == encoder.settings.as_dict()
    assert np.array_equal(loaded[0][1], vectors)
    ElasticsearchRetriever.open(tmp_path / "index", mode="lexical").close()
    assert len(loaded) == 1


def test_the_order_key_sorts_as_ids_do():
    assert sorted(NAMES, key=lambda name: id_order(name).encode()) == sorted(NAMES, key=id_sort_key)


def test_refused_passages_are_reported_with_their_ids(stub, encoder):
    spec = IndexSpec()
    client = ElasticsearchClient(ElasticsearchSettings(stub.url))
    writer = ElasticsearchWriter(client, "wiki-1", spec)
    writer.create()
    stub.indices["wiki-1"]["mappings"]["properties"].pop("text")
    with pytest.raises(RetrievalError, match=r"2 passages were refused, by id: `a`: .*\[text\] is not allowed.*`b`:"):
        writer.write([(0, Passage("a", "", "x"), None), (1, Passage("b", "", "y"), None)])
    with pytest.raises(ConfigurationError, match="`id` must have 1 to 512 bytes for Elasticsearch"):
        writer.write([(0, Passage("é" * 257, "", "x"), None)])
    client.close()


def forged(status=200, content=b"{}", headers=None):
    base = {"X-Elastic-Product": "Elasticsearch", "Content-Type": "application/json"}
    return lambda method, target: (status, {**base, **(headers or {})}, content)


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (forged(content=b'{"took": 1}'), BadResponseError, "must give one answer for each of 2 searches: got None"),
        (forged(content=b'{"took": 1, "responses": []}'), BadResponseError, "got 0 answers"),
        (forged(content=b"[]"), BadResponseError, "must answer a JSON object"),
        (forged(401, b'{"error": {"type": "security_exception", "reason": "no"}}'), RetrievalError, "ES_API_KEY"),
        (
            forged(200, b"<html>login</html>", {"X-Elastic-Product": "", "Content-Type": "text/html"}),
            BadResponseError,
            "answer without its product header",
        ),
        (
            forged(
                429, b'{"error": {"type": "circuit_breaking_exception", "reason": "x", "durability": "PERMANENT"}}'
            ),
            RetrievalError,
            "will never carry out this search",
        ),
    ],
)
def test_an_answer_that_cannot_be_trusted_fails_at_once(contract_stub, fault, kind, message):
    opened = ElasticsearchRetriever.connect(contract_stub.url, "wiki", mode="lexical", patience=30.0)
    contract_stub.fault = fault
    with pytest.raises(kind, match=message) as caught:
        opened.search(["Peru"], 1)
    assert not caught.value.is_retryable


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (
            forged(429, b'{"error": {"type": "es_rejected_execution_exception", "reason": "full"}}'),
            BackendOverloadedError,
        ),
        (forged(503, b"<html>Service Unavailable</html>", {"Content-Type": "text/html"}), BackendOverloadedError),
    ],
)
def test_a_refusal_that_lasts_says_how_often_it_was_tried(contract_stub, fault, kind):
    opened = ElasticsearchRetriever.connect(contract_stub.url, "wiki", mode="lexical", patience=0.7)
    contract_stub.fault = fault
    with pytest.raises(kind, match=r"Gave up after \d+ tries"):
        opened.search(["Peru"], 1)


@pytest.mark.parametrize(
    "content",
    [
        (b'{"took": 1, "respon', {}),
        (b'{"took": 1, "respon', {"Content-Length": "5000"}),
        (b"", {"Content-Length": "100"}),
    ],
)
def test_an_answer_that_is_cut_off_is_asked_for_again(contract_stub, content):
    opened = ElasticsearchRetriever.connect(contract_stub.url, "wiki", mode="lexical")
    expected = opened.search(["Peru"], 3)
    state = {"left": 2}

    def fault(method, target):
        state["left"] -= 1
        return forged(200, content[0], dict(content[1]))(method, target) if state["left"] >= 0 else None

    contract_stub.fault = fault
    assert opened.search(["Peru"], 3) == expected
    assert state["left"] < 0


def test_a_wait_that_the_server_asks_for_is_kept(contract_stub):
    opened = ElasticsearchRetriever.connect(contract_stub.url, "wiki", mode="lexical")
    times = []

    def fault(method, target):
        times.append(time.monotonic())
        return (
            forged(429, b'{"error": "slow down"}', {"Retry-After": "1"})(method, target) if len(times) == 1 else None
        )

    contract_stub.fault = fault
    assert opened.search(["Peru"], 1)[0]
    assert times[1] - times[0] >= 1.0


def test_servers_of_version_8_are_spoken_to_in_their_dialect(schema, encoder):
    with StubElasticsearch(schema, "8.19.2") as server:
        fill(server, contract.PASSAGES, encoder)
        opened = ElasticsearchRetriever.connect(server.url, "wiki", encoder=encoder)
        assert opened.search(["capital of Peru"], 1)[0][0].passage.title == "Peru"
        opened.close()


def test_another_product_is_named(schema):
    opensearch = b'{"version": {"distribution": "opensearch", "number": "3.1.0"}, "tagline": "The OpenSearch Project"}'
    with StubElasticsearch(schema) as server:
        server.fault = lambda method, target: (200, {"Content-Type": "application/json"}, opensearch)
        with pytest.raises(ConfigurationError, match=r"8\.18 or newer: got OpenSearch 3\.1\.0 at http"):
            ElasticsearchRetriever.connect(server.url, "wiki")
