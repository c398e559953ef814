"""Fusion of rankings: definitions, ties, and what it must not depend on."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Hit, Passage
from grounded_rl.retrieval.corpus import id_sort_key
from grounded_rl.retrieval.fusion import reciprocal_rank_fusion, weighted_score_fusion

FUSIONS = [reciprocal_rank_fusion, weighted_score_fusion]
WEIGHTS = st.floats(0.01, 10.0, allow_nan=False)


def ranking(*pairs: tuple[str, float]) -> list[Hit]:
    return [Hit(Passage(name, f"title {name}", f"text {name}"), score) for name, score in pairs]


def ids(hits: list[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


@st.composite
def rankings(draw):
    """Up to four rankings of passages with small integer scores, so that ties are common."""
    result = []
    for _ in range(draw(st.integers(1, 4))):
        names = draw(st.lists(st.sampled_from(["0", "1", "2", "9", "10", "11", "a", "b"]), unique=True, max_size=8))
        scores = sorted((draw(st.integers(-3, 3)) for _ in names), reverse=True)
        result.append(ranking(*zip(names, map(float, scores), strict=True)))
    return result


def test_reciprocal_ranks_are_summed():
    # b: 1/62 + 1/61; a: 1/61; c: 1/62
    fused = reciprocal_rank_fusion([ranking(("a", 9), ("b", 8)), ranking(("b", 0.4), ("c", 0.1))], k=3)
    assert ids(fused) == ["b", "a", "c"]
    assert [hit.score for hit in fused] == pytest.approx([1 / 62 + 1 / 61, 1 / 61, 1 / 62], rel=1e-12)


def test_scores_are_scaled_between_the_lowest_and_the_highest_of_each_ranking():
    # words 10, 6, 2 -> 1, 0.5, 0; vectors 0.9, 0.5 -> 1, 0; weights 3 and 1
    words, vectors = ranking(("a", 10), ("b", 6), ("c", 2)), ranking(("c", 0.9), ("b", 0.5))
    fused = weighted_score_fusion([words, vectors], k=3, weights=[3, 1])
    assert [(hit.passage.id, hit.score) for hit in fused] == [("a", 3.0), ("b", 1.5), ("c", 1.0)]


def test_equal_scores_of_a_ranking_count_in_full():
    fused = weighted_score_fusion([ranking(("a", 4), ("b", 4)), ranking(("c", 1))], k=3)
    assert [(hit.passage.id, hit.score) for hit in fused] == [("a", 1.0), ("c", 1.0), ("b", 1.0)]


def test_passages_with_swapped_ranks_tie_and_come_in_order_of_id():
    for names in itertools.permutations(["10", "9", "x"]):
        first, second = ranking((names[0], 2), (names[1], 1)), ranking((names[1], 2), (names[0], 1))
        fused = reciprocal_rank_fusion([first, second], k=2, weights=[0.3, 0.3])
        assert fused[0].score == fused[1].score
        assert ids(fused) == sorted(names[:2], key=id_sort_key)


def test_a_better_single_rank_settles_a_tie_before_the_id():
    # With constant 1: `z` scores 1/2 at rank 1; `a` scores 1/4 + 1/4 at rank 3 of both.
    first = ranking(("z", 9), ("p", 8), ("a", 7))
    second = ranking(("q", 9), ("r", 8), ("a", 7))
    fused = reciprocal_rank_fusion([first, second], k=5, rank_constant=1)
    assert fused[0].score == fused[1].score == fused[2].score == 0.5
    assert ids(fused)[:3] == ["q", "z", "a"]


@given(rankings(), st.integers(1, 10))
def test_order_of_the_rankings_does_not_matter(lists, k):
    for fuse in FUSIONS:
        results = [fuse(list(order), k) for order in itertools.permutations(lists)]
        assert all(result == results[0] for result in results)


@given(rankings(), st.data())
def test_a_larger_k_only_adds_hits(lists, data):
    for fuse in FUSIONS:
        weights = [data.draw(WEIGHTS) for _ in lists]
        longest = fuse(lists, 100, weights=weights)
        assert {hit.passage.id for hit in longest} == {hit.passage.id for hits in lists for hit in hits}
        for k in (1, 2, 5):
            assert fuse(lists, k, weights=weights) == longest[:k]


@given(rankings())
def test_scores_never_increase_and_ties_have_an_order(lists):
    for fuse in FUSIONS:
        fused = fuse(lists, 100)
        best = {
            name: min(ids(hits).index(name) for hits in lists if name in ids(hits))
            for name in {hit.passage.id for hit in fused}
        }
        keys = [(-hit.score, best[hit.passage.id], id_sort_key(hit.passage.id)) for hit in fused]
        assert keys == sorted(keys)


@given(rankings())
def test_one_ranking_keeps_its_order_by_rank(lists):
    assert ids(reciprocal_rank_fusion(lists[:1], 100)) == ids(lists[0])


@given(rankings())
def test_the_scale_of_a_ranking_does_not_matter(lists):
    # Powers of two and small integers: the arithmetic is exact.
    scaled = [[Hit(hit.passage, hit.score * 2.0 + 16.0) for hit in hits] for hits in lists]
    assert weighted_score_fusion(scaled, 100) == weighted_score_fusion(lists, 100)
    assert reciprocal_rank_fusion(scaled, 100) == reciprocal_rank_fusion(lists, 100)


@pytest.mark.parametrize("fuse", FUSIONS)
def test_nothing_found_by_any_search_gives_nothing(fuse):
    assert fuse([], 3) == []
    assert fuse([[], []], 3) == []


@pytest.mark.parametrize("fuse", FUSIONS)
def test_what_cannot_be_fused_is_refused(fuse):
    lists = [ranking(("a", 1)), ranking(("b", 1))]
    with pytest.raises(ConfigurationError, match="`weights` must have one entry for each of 2 rankings: got 1"):
        fuse(lists, 3, weights=[1.0])
    for weights in ([0.0, 1.0], [-1.0, 1.0], [float("nan"), 1.0], [float("inf"), 1.0]):
        with pytest.raises(ConfigurationError, match="`weights` must be finite and above 0"):
            fuse(lists, 3, weights=weights)
    with pytest.raises(ConfigurationError, match="`k` must be an integer of at least 1: got 0"):
        fuse(lists, 0)
    with pytest.raises(ConfigurationError, match="`rankings` must name every passage once: got 'a' twice"):
        fuse([ranking(("a", 2), ("a", 1))], 3)


@pytest.mark.parametrize("constant", [0, -1, 60.0, True])
def test_the_rank_constant_is_a_positive_integer(constant):
    with pytest.raises(ConfigurationError, match="`rank_constant` must be an integer of at least 1"):
        reciprocal_rank_fusion([ranking(("a", 1))], 1, rank_constant=constant)
