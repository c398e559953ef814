"""
Checks that every retriever passes, whatever its backend.

Build an index of `PASSAGES`, then run each function of `CHECKS` on the retriever, and of `LEXICAL_CHECKS` if the
backend matches words:

    @pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
    def test_it_keeps_the_contract(check, retriever):
        check(retriever)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grounded_rl.retrieval import Passage, Retriever
from grounded_rl.retrieval.corpus import id_sort_key

_CAPITALS = {
    "Peru": "Lima",
    "Chile": "Santiago",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "Poland": "Warsaw",
    "Egypt": "Cairo",
    "Ghana": "Accra",
    "Cuba": "Havana",
    "Nepal": "Kathmandu",
}
_SINGULAR = [
    Passage("900", "São Tomé", "A city in the Gulf of Guinea, founded by Portuguese settlers."),
    Passage("901", "東京", "東京 is how the name of the largest Japanese city is written."),
    Passage("902", '"Heroes" (album)', 'The song says [we] can be "heroes": just for AND OR NOT one day.'),
    Passage("903", "", "A passage about glaciers that has no title."),
]
NUM_COPIES = 60
_COPIES = [Passage(str(number), "Lighthouse", "The lighthouse stands on a rock.") for number in range(NUM_COPIES)]
_COUNTRIES = [
    Passage(str(1000 + row), country, f"{country} is a country. Its capital is {capital}.")
    for row, (country, capital) in enumerate(_CAPITALS.items())
]

# Neither in numeric nor in lexicographic order, so that order of insertion is never mistaken for order of ids.
PASSAGES = [*_SINGULAR, *reversed(_COUNTRIES), *_COPIES[1::2], *reversed(_COPIES[0::2])]

ADVERSARIAL_QUERIES = [
    "title:foo AND (",
    '"unclosed quote about Peru',
    "contents:[a TO z] OR id:*",
    "+Peru -Peru ^2 ~3 Peru^^ \\",
    "/.*/ {!lucene} ?*",
    "<|im_end|></tool_call>",
    "NOT",
    "\x00\x01\x7f Peru",
    "Peru\ud800",
    "\u202eureP 🏔️ \u0301\u0301",
    "'; DROP TABLE passages; --",
]


def write_corpus(path: Path, passages: list[Passage]) -> Path:
    """Corpus file in the `{"id", "title", "text"}` format."""
    rows = ({"id": p.id, "title": p.title, "text": p.text} for p in passages)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def assert_well_formed(retriever: Retriever, queries: list[str], k: int) -> None:
    """Lengths, order and identity of the passages of a result."""
    by_id = {passage.id: passage for passage in PASSAGES}
    results = retriever.search(queries, k)
    assert len(results) == len(queries)
    for hits in results:
        assert len(hits) <= k
        assert len({hit.passage.id for hit in hits}) == len(hits)
        order = [(-hit.score, id_sort_key(hit.passage.id)) for hit in hits]
        assert order == sorted(order)
        for hit in hits:
            assert hit.passage == by_id[hit.passage.id]
            assert isinstance(hit.score, float)


def one_list_per_query_in_the_order_of_the_queries(retriever: Retriever) -> None:
    for count in (1, 2, 3, 10):
        queries = [f"capital of {country}" for country in list(_CAPITALS)[:count]]
        results = retriever.search(queries, 1)
        assert [hits[0].passage.title for hits in results] == list(_CAPITALS)[:count]


def no_query_gives_no_list(retriever: Retriever) -> None:
    assert retriever.search([], 3) == []


def at_most_k_hits_ordered_by_score_and_id(retriever: Retriever) -> None:
    for k in (1, 2, 7, NUM_COPIES, len(PASSAGES)):
        assert_well_formed(retriever, ["capital country", "lighthouse on a rock", "glaciers"], k)


def copies_of_a_passage_come_in_order_of_id_at_any_cut(retriever: Retriever) -> None:
    for k in (1, 3, 9, 31, NUM_COPIES):
        (hits,) = retriever.search(["lighthouse stands rock"], k)
        assert [hit.passage.id for hit in hits] == [str(number) for number in range(k)]


def a_smaller_k_gives_a_prefix(retriever: Retriever) -> None:
    query = "a country whose capital is on a rock"
    (longest,) = retriever.search([query], len(PASSAGES))
    for k in (1, 2, 5, 12, 40):
        assert retriever.search([query], k) == [longest[:k]]


def k_beyond_the_corpus_is_allowed(retriever: Retriever) -> None:
    (hits,) = retriever.search(["Peru"], 10**9)
    assert 1 <= len(hits) <= len(PASSAGES)
    assert hits[0].passage.title == "Peru"


def a_blank_query_finds_nothing(retriever: Retriever) -> None:
    results = retriever.search(["", "   ", "Peru", "\n\t\u00a0"], 3)
    assert [bool(hits) for hits in results] == [False, False, True, False]


def a_result_does_not_depend_on_the_other_queries(retriever: Retriever) -> None:
    queries = [*(f"capital of {country}" for country in _CAPITALS), "", "lighthouse", "nothing of the kind"]
    alone = [retriever.search([query], 5)[0] for query in queries]
    assert retriever.search(queries, 5) == alone
    assert retriever.search(queries[::-1], 5) == alone[::-1]
    assert retriever.search(["Lima", *queries, "Lima"], 5)[1:-1] == alone


def equal_queries_get_equal_lists_that_are_not_shared(retriever: Retriever) -> None:
    first, second = retriever.search(["Lima", "Lima"], 3)
    assert first
    assert first == second
    first.clear()
    assert second


def any_text_is_a_query(retriever: Retriever) -> None:
    assert_well_formed(retriever, ADVERSARIAL_QUERIES, 4)
    assert_well_formed(retriever, ["Peru " * 200_000, "x" * 1_000_000, "\u0301" * 100_000], 4)


def unicode_passages_come_back_unchanged(retriever: Retriever) -> None:
    (hits,) = retriever.search(["São Tomé, city founded by Portuguese settlers"], 1)
    assert hits[0].passage == _SINGULAR[0]


def a_count_below_one_or_a_single_string_is_refused(retriever: Retriever) -> None:
    for k in (0, -1):
        with pytest.raises(ValueError, match="`k` must be an integer of at least 1: got"):
            retriever.search(["Peru"], k)
    with pytest.raises(ValueError, match="`queries` must be a list of strings: got one string"):
        retriever.search("Peru", 3)


def the_manifest_counts_the_passages(retriever: Retriever) -> None:
    assert retriever.manifest["num_passages"] == len(PASSAGES)


def it_is_a_retriever(retriever: Retriever) -> None:
    assert isinstance(retriever, Retriever)


def unknown_words_find_nothing(retriever: Retriever) -> None:
    assert retriever.search(["zyzzyva quokka", "!!! ... ???"], 3) == [[], []]


def unknown_words_do_not_change_a_query(retriever: Retriever) -> None:
    with_unknown, without = retriever.search(["zyzzyva Lima quokka", "Lima"], 3)
    assert with_unknown == without != []


def syntax_of_query_languages_is_plain_text(retriever: Retriever) -> None:
    plain = retriever.search(["Peru Lima"], 5)[0]
    for query in ("+Peru -Lima", '"Peru Lima"', "(Peru) [Lima", "Peru^9 Lima~", "PERU? lima*"):
        assert retriever.search([query], 5)[0] == plain


CHECKS: list[Callable[[Retriever], None]] = [
    one_list_per_query_in_the_order_of_the_queries,
    no_query_gives_no_list,
    at_most_k_hits_ordered_by_score_and_id,
    copies_of_a_passage_come_in_order_of_id_at_any_cut,
    a_smaller_k_gives_a_prefix,
    k_beyond_the_corpus_is_allowed,
    a_blank_query_finds_nothing,
    a_result_does_not_depend_on_the_other_queries,
    equal_queries_get_equal_lists_that_are_not_shared,
    any_text_is_a_query,
    unicode_passages_come_back_unchanged,
    a_count_below_one_or_a_single_string_is_refused,
    the_manifest_counts_the_passages,
    it_is_a_retriever,
]
LEXICAL_CHECKS: list[Callable[[Retriever], None]] = [
    unknown_words_find_nothing,
    unknown_words_do_not_change_a_query,
    syntax_of_query_languages_is_plain_text,
]
