from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.retrieval import Passage, bm25
from grounded_rl.retrieval.bm25 import BM25Retriever, analysis, build_bm25_index
from grounded_rl.retrieval.corpus import id_sort_key
from tests.retrieval import contract
from tests.retrieval.bm25_index import open_index_of

RELATIVE_TOLERANCE = 2e-6
"""Scores are sums of float32 terms."""


@pytest.fixture(scope="module")
def retriever(tmp_path_factory) -> BM25Retriever:
    folder = tmp_path_factory.mktemp("contract")
    build_bm25_index(contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES), folder / "index")
    return BM25Retriever.open(folder / "index")


@pytest.mark.parametrize("check", [*contract.CHECKS, *contract.LEXICAL_CHECKS], ids=lambda check: check.__name__)
def test_bm25_keeps_the_contract(check, retriever):
    check(retriever)


def stored_length(length: int) -> int:
    """Lengths are kept in one byte: exact up to 40 words, then with three significant bits after the first."""
    if length <= 40:
        return length
    step = 1 << ((length - 24).bit_length() - 4)
    return 24 + (length - 24) // step * step


def test_the_words_of_the_reference_survive_the_analysis():
    words = [word for document in random_documents(50, seed=0) for word in document]
    assert analysis.analyzer(drop_function_words=True).analyze(" ".join(words)) == words


def reference_scores(documents: list[list[str]], query: list[str]) -> np.ndarray:
    """BM25 of every document, as the formula is written."""
    k1, b = 1.2, 0.75
    counts = [Counter(words) for words in documents]
    mean_length = sum(len(words) for words in documents) / len(documents)
    scores = np.zeros(len(documents))
    for word in set(query):
        frequency = sum(word in count for count in counts)
        idf = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
        for row, count in enumerate(counts):
            length = stored_length(len(documents[row]))
            norm = k1 * (1 - b + b * length / mean_length)
            scores[row] += idf * count[word] * (k1 + 1) / (count[word] + norm)
    return scores


def random_documents(count: int, seed: int) -> list[list[str]]:
    rng = np.random.default_rng(seed)
    # Words the stemmer leaves alone, with a Zipf-like distribution.
    vocabulary = np.array([f"{a}{b}{c}" for a in "bdgk" for b in "aou" for c in "mnpg"])
    weights = 1 / np.arange(1, len(vocabulary) + 1)
    return [
        rng.choice(vocabulary, size=rng.integers(1, 120), p=weights / weights.sum()).tolist() for _ in range(count)
    ]


def test_scores_and_ranks_equal_a_plain_implementation(tmp_path):
    documents = random_documents(400, seed=0)
    passages = [
        # The first word is the title: title and body are one bag of words.
        Passage(str(row), words[0], " ".join(words[1:]) or "!")
        for row, words in enumerate(documents)
    ]
    retriever = open_index_of(tmp_path, passages)
    queries = [" ".join(words[:6]) for words in random_documents(40, seed=1)]
    for query, hits in zip(queries, retriever.search(queries, 400), strict=True):
        expected = reference_scores(documents, query.split())
        found = {int(hit.passage.id): hit.score for hit in hits}
        assert set(found) == set(np.flatnonzero(expected))
        for row, score in found.items():
            assert score == pytest.approx(expected[row], rel=RELATIVE_TOLERANCE)
        ranked = expected[[int(hit.passage.id) for hit in hits]]
        assert np.all(ranked[:-1] >= ranked[1:] * (1 - RELATIVE_TOLERANCE))


def test_the_score_of_one_word_can_be_computed_by_hand(tmp_path):
    retriever = open_index_of(tmp_path, [Passage("1", "", "lima"), Passage("2", "", "oslo bergen")])
    # N = 2, n = 1: idf = ln(1 + 1.5 / 1.5) = ln 2. Mean length 1.5, length 1: norm = 1.2 (0.25 + 0.75 / 1.5) = 0.9.
    # Score = ln 2 * 1 * 2.2 / (1 + 0.9) = 0.80259.
    ((hit,),) = retriever.search(["lima"], 2)
    assert hit.score == pytest.approx(math.log(2) * 2.2 / 1.9, rel=RELATIVE_TOLERANCE)


# --- order -----------------------------------------------------------------------------------------------------------

WORDS = st.lists(st.sampled_from(["lima", "oslo", "cairo", "tokyo"]), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(
    ids=st.lists(st.one_of(st.integers(0, 30).map(str), st.text("ab0", min_size=1)), min_size=1, unique=True),
    bodies=st.lists(WORDS, min_size=1, max_size=3),
    query=WORDS,
    k=st.integers(1, 12),
)
def test_hits_are_the_first_k_by_score_and_id(tmp_path_factory, ids, bodies, query, k):
    folder = tmp_path_factory.mktemp("order")
    passages = [Passage(name, "", " ".join(bodies[row % len(bodies)])) for row, name in enumerate(ids)]
    retriever = open_index_of(folder, passages)
    (everything,) = retriever.search([" ".join(query)], len(ids))
    expected = sorted(everything, key=lambda hit: (-hit.score, id_sort_key(hit.passage.id)))
    assert everything == expected
    assert retriever.search([" ".join(query)], k) == [expected[:k]]


@pytest.mark.parametrize("shuffled", [False, True], ids=["ids in order", "ids out of order"])
def test_a_thousand_ties_are_cut_by_id(tmp_path, shuffled):
    numbers = np.arange(1000)
    if shuffled:
        np.random.default_rng(0).shuffle(numbers)
    passages = [Passage(str(number), "Lighthouse", "on a rock") for number in numbers]
    retriever = open_index_of(tmp_path, passages)
    assert retriever.manifest["ids_ascending"] is not shuffled
    (hits,) = retriever.search(["a lighthouse on some rock"], 5)
    assert [hit.passage.id for hit in hits] == ["0", "1", "2", "3", "4"]


def test_threads_do_not_change_results(tmp_path):
    documents = random_documents(300, seed=2)
    passages = [Passage(str(row), "", " ".join(words)) for row, words in enumerate(documents)]
    one = open_index_of(tmp_path, passages, num_threads=1)
    many = BM25Retriever.open(tmp_path / "index", num_threads=4)
    queries = [" ".join(words[:5]) for words in random_documents(100, seed=3)]
    assert many.search(queries, 7) == one.search(queries, 7)


def test_heap_and_threads_of_the_writer_do_not_change_results(tmp_path):
    # Enough distinct words to fill the smallest heap several times.
    rng = np.random.default_rng(4)
    passages = [Passage(str(row), "", " ".join(f"w{n:x}" for n in rng.zipf(1.3, 60) % 10**7)) for row in range(12_000)]
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", passages)
    queries = [" ".join(passage.text.split()[:4]) for passage in passages[::600]]
    small = build_bm25_index(corpus, tmp_path / "small", writer_heap_mb=16)
    large = build_bm25_index(corpus, tmp_path / "large", writer_heap_mb=128)
    threads = build_bm25_index(corpus, tmp_path / "threads", num_threads=3)
    assert len(small["files"]) > len(large["files"]) < len(threads["files"])
    assert small["index_id"] == large["index_id"] == threads["index_id"]
    results = [BM25Retriever.open(tmp_path / name).search(queries, 10) for name in ("small", "large", "threads")]
    assert results[0] == results[1] == results[2]


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("São Tomé", "sao tome"),
        ("Sao Tome", "SÃO TOMÉ"),
        ("Beyonce\u0301", "Beyonc\u00e9"),
        ("Beyonc\u00e9", "beyonce"),
        ("Beyonce\u0301", "beyonce"),
        ("running shoes", "runs shoe"),
        ("Straße", "strasse"),
        ("rock-n-roll", "rock n roll"),
        ("it's 1,299.50 km²", "1 299 50 km²"),
    ],
)
def test_spellings_meet(tmp_path, text, query):
    retriever = open_index_of(tmp_path, [Passage("1", "", text), Passage("2", "", "something else")])
    (hits,) = retriever.search([query], 2)
    assert [hit.passage.id for hit in hits] == ["1"]


def test_a_repeated_word_counts_once_in_a_query(retriever):
    once, twice = retriever.search(["lima capital", "lima LIMA capital Lima"], 5)
    assert once == twice != []


def test_function_words_count_only_in_a_query_that_has_no_others(tmp_path):
    passages = [
        Passage("1", "It", "A novel."),
        Passage("2", "Lima", "To be the capital of it all."),
        Passage("3", "", "x"),
    ]
    retriever = open_index_of(tmp_path, passages)
    with_them, without_them = retriever.search(["the capital of it", "capital"], 3)
    assert with_them == without_them
    it, sentence = retriever.search(["It", "to be"], 3)
    assert [hit.passage.id for hit in it] == ["1", "2"]
    assert [hit.passage.id for hit in sentence] == ["2"]


def test_words_beyond_the_limit_of_a_query_are_not_searched(retriever):
    filler = " ".join(f"filler{number}" for number in range(bm25.MAX_QUERY_TERMS))
    within, beyond = retriever.search([f"{filler.rpartition(' ')[0]} Lima", f"{filler} Lima"], 1)
    assert [hit.passage.title for hit in within] == ["Peru"]
    assert beyond == []


def test_characters_beyond_the_limit_of_a_query_are_not_read(retriever):
    padding = " " * bm25.MAX_QUERY_CHARACTERS
    within, beyond = retriever.search([f"{padding[5:]} Lima", f"{padding} Lima"], 1)
    assert [hit.passage.title for hit in within] == ["Peru"]
    assert beyond == []


# --- cases from bug reports ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_case_r02_each_query_gets_its_own_list(retriever, count):
    results = retriever.search([f"capital of {name}" for name in ("Peru", "Chile", "Norway")][:count], 2)
    assert [hits[0].passage.title for hits in results] == ["Peru", "Chile", "Norway"][:count]


def test_case_r03_different_questions_get_different_passages(tmp_path):
    passages = [
        Passage("1", "Edward Tulane", "The Miraculous Journey of Edward Tulane is a novel. Publication date: 2006."),
        Passage("2", "Ojos del Salado", "The tallest volcano on Earth lies between Argentina and Chile."),
    ]
    retriever = open_index_of(tmp_path, passages)
    novel, volcano = retriever.search(["Edward Tulane publication date", "tallest volcano"], 1)
    assert [novel[0].passage.id, volcano[0].passage.id] == ["1", "2"]


def test_case_r04_both_row_formats_are_indexed_and_counted(tmp_path):
    rows = [
        {"id": "7", "contents": '"Chechnya"\nThe republic lies in the North Caucasus.'},
        {"id": "8", "contents": "no newline here"},
        {"id": 9, "title": "Lima", "text": "Capital of Peru."},
    ]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("\n".join(json.dumps(row) for row in rows))
    assert build_bm25_index(corpus, tmp_path / "index")["num_passages"] == 3
    results = BM25Retriever.open(tmp_path / "index").search(["Chechnya", "newline", "Lima"], 1)
    assert [hits[0].passage for hits in results] == [
        Passage("7", "Chechnya", "The republic lies in the North Caucasus."),
        Passage("8", "", "no newline here"),
        Passage("9", "Lima", "Capital of Peru."),
    ]


def test_case_r05_a_cut_list_keeps_every_score_with_its_passage(retriever):
    (three,) = retriever.search(["capital country"], 3)
    (two,) = retriever.search(["capital country"], 2)
    assert len(two) == 2
    assert [(hit.passage.id, hit.score) for hit in two] == [(hit.passage.id, hit.score) for hit in three[:2]]


def test_case_r17_a_question_file_never_becomes_an_index(tmp_path):
    corpus = tmp_path / "train.jsonl"
    corpus.write_text(json.dumps({"id": "1", "question": "Capital of Peru?", "golden_answers": ["Lima"]}))
    with pytest.raises(ConfigurationError, match=r"line 1: .*`golden_answers`, `question` \(missing .*`text`\)"):
        build_bm25_index(corpus, tmp_path / "index")
    assert list(tmp_path.iterdir()) == [corpus]


# --- building and opening --------------------------------------------------------------------------------------------


def test_two_builds_of_one_corpus_have_one_identity(tmp_path):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    first = build_bm25_index(corpus, tmp_path / "one")
    second = build_bm25_index(corpus, tmp_path / "two")
    assert first["index_id"] == second["index_id"]
    contract.write_corpus(corpus, contract.PASSAGES[::-1])
    assert build_bm25_index(corpus, tmp_path / "three")["index_id"] != first["index_id"]


def test_progress_ends_at_the_size_of_the_corpus(tmp_path):
    passages = [Passage(str(row), "", f"passage {row}") for row in range(2500)]
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", passages)
    seen: list[tuple[int, int]] = []
    build_bm25_index(corpus, tmp_path / "index", on_progress=lambda done, total: seen.append((done, total)))
    size = corpus.stat().st_size
    assert len(seen) >= 3
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)


def test_a_heap_below_the_least_is_refused(tmp_path):
    for threads in (1, 8):
        message = f"`writer_heap_mb` must be at least 16 for each of {threads} threads: got {16 * threads - 1}"
        with pytest.raises(ConfigurationError, match=message):
            build_bm25_index(
                tmp_path / "corpus.jsonl",
                tmp_path / "index",
                writer_heap_mb=16 * threads - 1,
                num_threads=threads,
            )


def test_no_threads_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="`num_threads` must be at least 1: got 0"):
        BM25Retriever.open(tmp_path, num_threads=0)
    with pytest.raises(ConfigurationError, match="`num_threads` must be at least 1: got 0"):
        build_bm25_index(tmp_path / "corpus.jsonl", tmp_path / "index", num_threads=0)


def test_a_query_that_is_no_string_is_refused(retriever):
    with pytest.raises(ConfigurationError, match="`queries` must hold strings: got NoneType at position 1"):
        retriever.search(["Lima", None], 1)


def test_a_failing_library_is_a_retrieval_error(retriever, monkeypatch):
    class BrokenSearcher:
        num_docs = 5

        def search(self, *_, **__):
            raise ValueError("store is damaged\nbacktrace")

    monkeypatch.setattr(retriever, "_searcher", BrokenSearcher())
    with pytest.raises(RetrievalError, match="could not be searched: store is damaged$"):
        retriever.search(["Lima"], 1)


def test_the_analysis_is_the_one_the_manifest_names():
    analyzer = analysis.analyzer()
    assert analyzer.analyze("The RUNNING Café's l'été-2020!") == ["the", "run", "cafe", "s", "l", "ete", "2020"]
    assert analyzer.analyze("x" * 39 + " " + "y" * 40) == ["x" * 39]
    assert analysis.analyzer(drop_function_words=True).analyze("The city of Then, AND us") == ["citi", "us"]
