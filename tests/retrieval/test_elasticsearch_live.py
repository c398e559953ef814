"""
The backend against an Elasticsearch 8.18 or 9 of yours, vectors included: `ES_TEST_URL`, and `ES_API_KEY` if it is
secured. Indices named `grounded-rl-test-*` are made and removed. Run with `pytest -m network`.
"""

from __future__ import annotations

import os
import uuid

import numpy as np
import pytest

pytest.importorskip("elasticsearch", reason="the extra `elasticsearch` is not installed")

from grounded_rl.errors import IndexMismatchError
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.elasticsearch import (
    ElasticsearchClient,
    ElasticsearchRetriever,
    ElasticsearchSettings,
    ElasticsearchWriter,
    IndexSpec,
    index_facts,
)
from grounded_rl.retrieval.elasticsearch.mapping import VECTOR_INDEXES
from grounded_rl.retrieval.encoders import passage_text
from tests.retrieval import contract
from tests.retrieval.fake_encoder import WordEncoder

pytestmark = [
    pytest.mark.network,
    pytest.mark.skipif("ES_TEST_URL" not in os.environ, reason="needs a server: set `ES_TEST_URL`"),
]

DIMS = 128
MIN_RECALL = {"hnsw": 0.95, "int8_hnsw": 0.95, "int4_hnsw": 0.9, "bbq_hnsw": 0.8}


@pytest.fixture(scope="module")
def settings():
    options = {"ca_certs": os.environ["ES_TEST_CA_CERTS"]} if "ES_TEST_CA_CERTS" in os.environ else {}
    return ElasticsearchSettings(os.environ["ES_TEST_URL"], **options)


@pytest.fixture(scope="module")
def encoder():
    return WordEncoder(DIMS)


@pytest.fixture
def build(settings, encoder):
    client = ElasticsearchClient(settings)
    writers = []

    def make(alias: str, passages, *, vector_index: str | None = None) -> dict:
        dense = {"dims": DIMS, "encoder": encoder.settings.as_dict(), "vector_index": vector_index}
        spec = IndexSpec(**(dense if vector_index else {}))
        writer = ElasticsearchWriter(client, f"{alias}-{len(writers)}", spec)
        writers.append(writer)
        writer.create()
        vectors = (
            encoder.encode_passages([passage_text(p) for p in passages]) if vector_index else [None] * len(passages)
        )
        writer.write((row, passage, vectors[row]) for row, passage in enumerate(passages))
        facts = index_facts(
            spec,
            corpus_name="live",
            corpus_sha256="0" * 64,
            num_passages=len(passages),
            server_version=writer.server_version(),
        )
        writer.finish(facts)
        writer.publish(alias)
        return facts

    yield make
    for writer in writers:
        writer.delete()
    client.close()


@pytest.fixture
def alias():
    return f"grounded-rl-test-{uuid.uuid4().hex[:10]}"


def connect(settings, alias, **options):
    return ElasticsearchRetriever.connect(settings.url, alias, ca_certs=settings.ca_certs, **options)


def test_words_keep_the_contract(settings, build, alias):
    facts = build(alias, contract.PASSAGES)
    retriever = connect(settings, alias, manifest=facts)
    for check in contract.CHECKS + contract.LEXICAL_CHECKS:
        check(retriever)
    retriever.ready()
    retriever.close()


@pytest.mark.parametrize("vector_index", VECTOR_INDEXES)
def test_neighbours_are_found_and_scored(settings, build, alias, encoder, vector_index):
    rng = np.random.default_rng(5)
    words = [f"word{number}" for number in range(400)]
    passages = [Passage(str(row), "", " ".join(rng.choice(words, 20))) for row in range(2_000)]
    build(alias, passages, vector_index=vector_index)
    retriever = connect(settings, alias, mode="dense", encoder=encoder)
    queries = [" ".join(rng.choice(words, 8)) for _ in range(50)]
    vectors = encoder.encode_passages([passage.text for passage in passages]).astype(np.float64)
    scores = encoder.encode_queries(queries).astype(np.float64) @ vectors.T
    shares = []
    for row, hits in enumerate(retriever.search(queries, 10)):
        found = [int(hit.passage.id) for hit in hits]
        assert [hit.score for hit in hits] == pytest.approx([scores[row, at] for at in found], abs=2e-3)
        shares.append(len(set(found) & set(np.argsort(-scores[row])[:10].tolist())) / 10)
    assert np.mean(shares) >= MIN_RECALL[vector_index]
    retriever.close()


def test_both_are_fused(settings, build, alias, encoder):
    build(alias, contract.PASSAGES, vector_index="int8_hnsw")
    for fusion in ("rrf", "weighted"):
        retriever = connect(settings, alias, encoder=encoder, fusion=fusion)
        found = retriever.search(["capital of Peru", "glaciers without a title"], 3)
        assert [hits[0].passage.id for hits in found] == ["1000", "903"]
        retriever.close()


def test_an_alias_is_switched_and_a_removed_index_missed(settings, build, alias):
    build(alias, contract.PASSAGES)
    before = connect(settings, alias)
    build(alias, contract.PASSAGES[:5])
    after = connect(settings, alias)
    assert before.index_name != after.index_name
    assert len(before.sample(1_000)) == len(contract.PASSAGES)
    assert len(after.sample(1_000)) == 5
    client = ElasticsearchClient(settings)
    client.request("DELETE", f"/{before.index_name}")
    with pytest.raises(IndexMismatchError):
        before.search(["Peru"], 1)
    for opened in (before, after, client):
        opened.close()
