"""Search by words on a real node: the contract, the scores, and the identity of the index."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

import pytest

pytest.importorskip("elasticsearch", reason="the extra `elasticsearch` is not installed")

from grounded_rl.errors import BackendUnavailableError, ConfigurationError, IndexMismatchError, RetrievalError
from grounded_rl.retrieval.base import Passage, RemoteRetriever
from grounded_rl.retrieval.build import known_item_recall
from grounded_rl.retrieval.elasticsearch import ElasticsearchRetriever, IndexSpec, read_pointer, write_pointer
from grounded_rl.retrieval.elasticsearch.queries import MAX_QUERY_TERMS, clip_query
from tests.retrieval import contract
from tests.retrieval.es_indices import build_index, call

pytestmark = pytest.mark.elasticsearch

ONE = [Passage("1", "Peru", "Its capital is Lima."), Passage("2", "Chile", "Its capital is Santiago.")]
OTHER = [Passage("1", "Peru", "Its largest city is Lima."), Passage("3", "Cuba", "Its capital is Havana.")]


@pytest.fixture(scope="module")
def contract_index(es_node):
    facts = build_index(es_node.url, "contract", contract.PASSAGES)
    yield facts
    call(es_node.url, "DELETE", "/contract-*")


@pytest.fixture(scope="module")
def retriever(es_node, contract_index):
    opened = ElasticsearchRetriever.connect(es_node.url, "contract", manifest=contract_index)
    yield opened
    opened.close()


@pytest.fixture
def connect(es_node):
    opened = []

    def open_index(index, **options):
        opened.append(ElasticsearchRetriever.connect(es_node.url, index, **options))
        return opened[-1]

    yield open_index
    for one in opened:
        one.close()


@pytest.mark.parametrize("check", contract.CHECKS + contract.LEXICAL_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check, retriever):
    check(retriever)


def test_it_is_remote_and_ready(retriever):
    assert isinstance(retriever, RemoteRetriever)
    retriever.ready(30.0)


def test_passages_are_found_by_their_own_words(retriever):
    sample = retriever.sample(10)
    assert len({passage.id for passage in sample}) == 10
    assert [contract.PASSAGES.index(passage) for passage in sample] == sorted(map(contract.PASSAGES.index, sample))
    assert known_item_recall(retriever, sample) == 1.0
    assert len(retriever.sample(10_000)) == len(contract.PASSAGES)


def test_what_decides_results_is_told(retriever, contract_index):
    assert retriever.manifest == contract_index
    assert retriever.search_parameters["mode"] == "lexical"
    json.dumps(retriever.search_parameters)


def english_terms(url: str, texts: list[str]) -> list[list[str]]:
    """Terms as the server's analyzer gives them; several texts per request, with a word between them."""
    terms: list[list[str]] = []
    for start in range(0, len(texts), 40):
        text = " qzqsep ".join(texts[start : start + 40])
        body = {"analyzer": "english", "text": text}
        terms.append([])
        for token in call(url, "POST", "/_analyze", body)["tokens"]:
            if token["token"] == "qzqsep":
                terms.append([])
            else:
                terms[-1].append(token["token"])
    assert len(terms) == len(texts)
    return terms


def lucene_length(length: int) -> int:
    """A length as one byte keeps it: exact below 40, then four significant bits above an offset of 24."""
    if length < 24:
        return length
    rest = length - 24
    shift = max(rest.bit_length() - 4, 0)
    return 24 + ((rest >> shift) << shift)


def reference_scores(terms: list[list[str]], query: list[str], k1: float, b: float) -> list[float]:
    """BM25 as Lucene 8 defines it, from the terms of all passages; with its constant factor of `k1 + 1`."""
    lengths = [len(words) for words in terms]
    average = sum(lengths) / len(terms)
    frequencies = [Counter(words) for words in terms]
    scores = [0.0] * len(terms)
    for word in query:
        holding = sum(word in counts for counts in frequencies)
        idf = math.log(1 + (len(terms) - holding + 0.5) / (holding + 0.5))
        for row, counts in enumerate(frequencies):
            if counts[word]:
                norm = k1 * (1 - b + b * lucene_length(lengths[row]) / average)
                scores[row] += idf * (k1 + 1) * counts[word] / (counts[word] + norm)
    return scores


def test_lengths_are_kept_as_lucene_keeps_them():
    kept = {39: 39, 40: 40, 41: 40, 55: 54, 56: 56, 100: 96, 103: 96, 104: 104, 1000: 984}
    assert {length: lucene_length(length) for length in kept} == kept


def test_scores_are_those_of_lucene_with_the_parameters_of_the_index(es_node, es_index, connect):
    long_text = "The lighthouse keeper counted ships. " * 30
    passages = [
        Passage("1", "Lighthouse", "The lighthouse stands on a rock."),
        Passage("2", "", "Ships and lighthouses: a keeper's account of ships."),
        Passage("3", "Keeper", long_text),
        Passage("4", "Rock", "A rock band plays rock on rocks."),
        Passage("5", "Unrelated", "Nothing of the kind."),
    ]
    queries = ["lighthouse keeper", "rocks rock", "ships ships counted", "the of a keeper"]
    for k1, b in ((0.9, 0.4), (1.2, 0.75), (2.0, 0.0)):
        build_index(es_node.url, es_index, passages, spec=IndexSpec(k1=k1, b=b))
        opened = connect(es_index)
        terms = english_terms(es_node.url, [f"{passage.title}\n{passage.text}" for passage in passages])
        for query, words in zip(queries, english_terms(es_node.url, queries), strict=True):
            expected = reference_scores(terms, words, k1, b)
            found = {hit.passage.id: hit.score for hit in opened.search([query], 5)[0]}
            wanted = {str(row + 1): pytest.approx(score, rel=1e-5) for row, score in enumerate(expected) if score}
            assert found == wanted


def test_real_passages_score_as_an_independent_bm25(es_node, es_index, connect, shared_dir):
    rows = (shared_dir / "data" / "mini_wiki" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()[:2000]
    passages = [Passage(str(row["id"]), row["title"] or "", row["text"]) for row in map(json.loads, rows)]
    lines = (shared_dir / "data" / "mini_wiki" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    questions = [json.loads(line)["question"] for line in lines[:: len(lines) // 100][:100]]
    build_index(es_node.url, es_index, passages)
    opened = connect(es_index)
    terms = english_terms(es_node.url, [f"{passage.title}\n{passage.text}" for passage in passages])
    postings: dict[str, list[int]] = {}
    for row, words in enumerate(terms):
        for word in set(words):
            postings.setdefault(word, []).append(row)
    frequencies = [Counter(words) for words in terms]
    average = sum(map(len, terms)) / len(terms)
    assert len(questions) == 100
    for query, words in zip(questions, english_terms(es_node.url, questions), strict=True):
        scores: dict[int, float] = {}
        for word in words:
            rows_with = postings.get(word, [])
            idf = math.log(1 + (len(terms) - len(rows_with) + 0.5) / (len(rows_with) + 0.5))
            for row in rows_with:
                norm = 0.9 * (0.6 + 0.4 * lucene_length(len(terms[row])) / average)
                count = frequencies[row][word]
                scores[row] = scores.get(row, 0.0) + idf * 1.9 * count / (count + norm)
        best = sorted(scores.values(), reverse=True)[:10]
        hits = opened.search([query], 10)[0]
        assert [hit.score for hit in hits] == pytest.approx(best, rel=1e-5)
        by_id = {passage.id: row for row, passage in enumerate(passages)}
        assert [hit.score for hit in hits] == pytest.approx([scores[by_id[h.passage.id]] for h in hits], rel=1e-5)


def test_an_alias_that_is_switched_does_not_change_an_open_index(es_node, es_index, connect):
    build_index(es_node.url, es_index, ONE)
    before = connect(es_index)
    build_index(es_node.url, es_index, OTHER)
    after = connect(es_index)
    assert before.index_name != after.index_name
    assert [hit.passage for hit in before.search(["Lima"], 3)[0]] == [ONE[0]]
    assert [hit.passage for hit in after.search(["Lima"], 3)[0]] == [OTHER[0]]
    before.ready(30.0)


def test_the_index_of_another_manifest_is_refused(es_node, es_index, connect):
    facts = build_index(es_node.url, es_index, ONE)
    build_index(es_node.url, es_index, OTHER, sha256="1" * 64)
    with pytest.raises(IndexMismatchError, match=f"`corpus_sha256` '{'1' * 64}', not '{'0' * 64}'"):
        connect(es_index, manifest=facts)


def test_a_missing_or_foreign_index_is_refused(es_node, es_index, connect):
    with pytest.raises(IndexMismatchError, match="not on the server"):
        connect(es_index)
    call(es_node.url, "PUT", f"/{es_index}-foreign", {})
    with pytest.raises(IndexMismatchError, match="must carry the facts of its build: got none"):
        connect(f"{es_index}-foreign")


def test_an_index_that_was_changed_is_refused_when_it_is_opened(es_node, es_index, connect):
    build_index(es_node.url, es_index, ONE)
    name = connect(es_index).index_name
    call(es_node.url, "PUT", f"/{name}/_settings", {"index": {"blocks": {"write": False}}})
    call(es_node.url, "DELETE", f"/{name}/_doc/2?refresh=true")
    with pytest.raises(IndexMismatchError, match="must hold 2 passages, as it says itself: got 1"):
        connect(es_index)
    call(es_node.url, "PUT", f"/{name}/_mapping", {"properties": {"extra": {"type": "keyword"}}})
    with pytest.raises(IndexMismatchError, match="field `extra` is unknown"):
        connect(es_index)


def test_an_alias_of_two_indices_is_refused(es_node, es_index, connect):
    for suffix in ("a", "b"):
        call(es_node.url, "PUT", f"/{es_index}-{suffix}", {"aliases": {es_index: {}}})
    with pytest.raises(IndexMismatchError, match="must stand for one index: got"):
        connect(es_index)


def test_an_index_without_vectors_is_searched_by_words_only(es_node, es_index, connect):
    build_index(es_node.url, es_index, ONE)
    for mode in ("dense", "hybrid"):
        with pytest.raises(ConfigurationError, match="`mode` must be `lexical`"):
            connect(es_index, mode=mode)


def test_unknown_options_are_refused(es_node):
    with pytest.raises(ConfigurationError, match=r"`options` must be among .*: got \['retries'\]"):
        ElasticsearchRetriever.connect(es_node.url, "contract", retries=3)


def test_a_folder_points_at_the_index(es_node, es_index, tmp_path):
    facts = build_index(es_node.url, es_index, ONE)
    manifest = write_pointer(tmp_path / "index", facts, url=es_node.url, index=es_index)
    assert read_pointer(tmp_path / "index") == (manifest, es_node.url, es_index)
    opened = ElasticsearchRetriever.open(tmp_path / "index", timeout=20.0)
    assert opened.manifest == manifest
    assert opened.search(["Santiago"], 1)[0][0].passage == ONE[1]
    opened.close()
    opened.close()
    for attempt in (lambda: opened.search(["Lima"], 1), opened.ready):
        with pytest.raises(RetrievalError, match="was closed"):
            attempt()


def test_a_server_that_is_not_there_is_unavailable():
    with pytest.raises(BackendUnavailableError, match=r"127\.0\.0\.1:9 could not be reached"):
        ElasticsearchRetriever.connect("http://127.0.0.1:9", "contract")


def test_long_queries_are_cut_to_what_the_server_takes(retriever):
    assert clip_query("short, punctuated — query") == "short, punctuated — query"
    words = [f"word{number}" for number in range(3_000)]
    assert clip_query(" ".join(words)).split() == words[:MAX_QUERY_TERMS]
    for text in ("東" * 5_000, "a²" * 5_000, "a-b " * 5_000, "x" * 300_000, "😀 " * 4_000):
        clipped = clip_query(text)
        assert len(re.findall(r"\S", clipped)) <= MAX_QUERY_TERMS
        assert retriever.search([text + " Peru"], 1) is not None
