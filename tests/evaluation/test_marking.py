from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grounded_rl.evaluation.marking import (
    alias_spans,
    cut_at_spans,
    normalize_with_offsets,
    passage_spans,
    printable,
    token_texts,
)
from grounded_rl.text import contains_alias, normalize_answer
from tests.builders import make_passage, search_turn

# Characters on which normalisation and offsets can disagree: articles, punctuation, letters that change length or
# context in lower case, wide characters, odd spaces.
TEXTS = st.text(alphabet="aAnNthe TİΣς-.’\"' \n\u00a0\u2003éß😀xyz1_", max_size=60)


def marked(text, answers, **kwargs):
    return [text[start:end] for start, end in alias_spans(text, answers, **kwargs)]


@given(TEXTS)
@example("İstanbul, the İ")
@example("ΟΔΟΣ Σ")
def test_the_form_with_offsets_is_the_normal_form(text):
    form, offsets = normalize_with_offsets(text)
    assert form == normalize_answer(text)
    assert len(offsets) == len(form)
    assert offsets == sorted(offsets)
    assert all(0 <= offset < len(text) for offset in offsets)


@given(TEXTS, st.lists(TEXTS, max_size=3), st.sampled_from(["substring", "word_boundary"]))
def test_something_is_marked_exactly_where_the_matcher_finds_an_alias(text, answers, matcher):
    spans = alias_spans(text, answers, matcher=matcher)
    assert bool(spans) == contains_alias(text, answers, matcher=matcher)
    assert all(start < end for start, end in spans)
    assert all(left[1] < right[0] for left, right in pairwise(spans))


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=2))
def test_pieces_join_to_the_text(text, answers):
    pieces = cut_at_spans(text, alias_spans(text, answers))
    assert "".join(piece for piece, _ in pieces) == text
    assert all(piece for piece, _ in pieces)


def test_marks_cover_the_text_as_written():
    assert marked("Born in the U.S. in 1950.", ["us"]) == ["U.S"]
    assert marked("He wrote The Lord of the Rings twice", ["Lord of Rings"]) == ["Lord of the Rings"]
    assert marked("in Zürich, ZÜRICH and Zurich", ["zürich"]) == ["Zürich", "ZÜRICH"]
    assert marked("İzmir is a city", ["city"]) == ["city"]


def test_every_occurrence_of_every_alias_is_marked_once():
    assert marked("New York, York and new york", ["York", "New York"]) == ["New York", "York", "new york"]


def test_word_boundaries_leave_parts_of_words_unmarked():
    assert marked("house of us", ["us"]) == ["us", "us"]
    assert alias_spans("house of us", ["us"], matcher="word_boundary") == [(9, 11)]


def test_an_alias_across_title_and_text_is_marked_in_both():
    in_title, in_text = passage_spans(make_passage("Moon River is a song", title="Blue"), ["blue moon"])
    assert (in_title, in_text) == ([(0, 4)], [(0, 4)])


def test_title_and_text_are_marked_in_their_own_coordinates():
    in_title, in_text = passage_spans(make_passage("A town near Paris.", title="Paris (Texas)"), ["Paris"])
    assert (in_title, in_text) == ([(0, 5)], [(12, 17)])


def test_without_a_decoder_the_text_is_spread_over_the_tokens():
    texts, exact = token_texts(search_turn(ids=(1, 2, 3), text="abcdefgh"))
    assert (texts, exact) == (["ab", "cde", "fgh"], False)


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    pieces = {1: b"a", 2: b"\xc3", 3: b"\xa9", 4: b"!"}

    def decode(ids):
        return b"".join(pieces[token] for token in ids).decode("utf-8", errors="replace")

    texts, exact = token_texts(search_turn(ids=(1, 2, 3, 4)), decode)
    assert (texts, exact) == (["a", "", "é", "!"], True)


def test_a_cut_character_at_the_end_is_shown_as_its_replacement():
    def decode(ids):
        return {(1,): "a", (2,): "\ufffd"}[tuple(ids)]

    assert token_texts(search_turn(ids=(1, 2)), decode)[0] == ["a", "\ufffd"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", "␛[2J␛]0;title␇"),
        ("a\tb\nc", "a\tb\nc"),
        ("back\rforth", "back␍forth"),
        ("user\u202etxt.exe", "user�txt.exe"),
        ("\ud800 alone", "� alone"),
        ("\x9b31m", "�31m"),
        ("naïve café 東京 😀", "naïve café 東京 😀"),
    ],
)
def test_nothing_that_steers_a_terminal_stays(text, shown):
    assert printable(text) == shown


@given(st.text(max_size=50))
def test_printable_text_keeps_its_length_and_can_be_encoded(text):
    assert len(printable(text)) == len(text)
    printable(text).encode("utf-8")
