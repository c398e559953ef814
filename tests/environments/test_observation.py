"""Layouts, the token budget and the neutralisation of control tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.environments.observation import (
    OBSERVATION_TEMPLATES,
    PROTOCOL_TAGS,
    TITLE_TOKENS,
    ObservationFormatter,
    control_literals,
    format_observation,
    neutralize,
    water_fill,
)
from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.base import Hit, Passage
from grounded_rl.text import normalize_answer
from tests.environments.tokenizers import QWEN_ADDED, QWEN_SPECIAL, qwen_tokenizer

TOKENIZER = qwen_tokenizer()


def hit(text, title="Lima", number=0):
    return Hit(Passage(f"p{number}", title, text), 1.0 - number / 10)


def hits(*texts, title="Lima"):
    return [hit(text, title, number) for number, text in enumerate(texts)]


def count(text):
    return len(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("lengths", "budget", "shares"),
    [
        ([10, 100, 100], 90, [10, 40, 40]),
        ([5, 5, 5], 100, [5, 5, 5]),
        ([100, 100, 100], 100, [33, 33, 34]),
        ([100], 7, [7]),
        ([], 10, []),
        ([4, 4], 0, [0, 0]),
        ([4, 4], -3, [0, 0]),
        ([0, 9], 5, [0, 5]),
    ],
)
def test_water_filling_of_known_lengths(lengths, budget, shares):
    assert water_fill(lengths, budget) == shares


@settings(deadline=None)
@given(st.lists(st.integers(0, 300), max_size=6), st.integers(-5, 1000))
def test_water_filling_spends_the_budget_and_raises_the_smallest_share(lengths, budget):
    shares = water_fill(lengths, budget)
    assert sum(shares) == min(sum(lengths), max(budget, 0))
    assert all(0 <= share <= length for share, length in zip(shares, lengths, strict=True))
    cut = [share for share, length in zip(shares, lengths, strict=True) if share < length]
    # Whoever is cut short has at least as much as anybody else, up to rounding.
    assert all(max(shares) - share <= 1 for share in cut)


def test_layouts_of_the_three_formats():
    found = hits("coast", "capital")
    assert format_observation(found, TOKENIZER)[0] == "Doc 1 (Title: Lima)\ncoast\n\nDoc 2 (Title: Lima)\ncapital"
    assert format_observation(found, TOKENIZER, template="search_r1")[0] == (
        "Doc 1(Title: Lima) coast\nDoc 2(Title: Lima) capital"
    )
    assert format_observation(found, TOKENIZER, template="sipo")[0] == "Page 1: Lima\ncoast\nPage 2: Lima\ncapital"


@pytest.mark.parametrize("template", sorted(OBSERVATION_TEMPLATES))
def test_no_hits_are_said_in_words_and_show_no_passage(template):
    text, passages = format_observation([], TOKENIZER, template=template)
    assert text == OBSERVATION_TEMPLATES[template].empty
    assert passages == ()


def test_passages_are_shown_in_order_with_their_scores_and_unescaped_text():
    text, passages = format_observation(hits("Besançon 日本 🎉", 'a "quoted" <b>'), TOKENIZER)
    assert [passage.id for passage in passages] == ["p0", "p1"]
    assert [passage.score for passage in passages] == [1.0, 0.9]
    assert passages[0].text == "Besançon 日本 🎉"
    assert 'a "quoted" <b>' in text
    assert all(passage.num_tokens == passage.num_tokens_full == count(passage.text) for passage in passages)


def test_the_sipo_layout_cuts_at_a_thousand_characters_first():
    [passage] = format_observation(hits("word " * 400), TOKENIZER, template="sipo", budget=100_000)[1]
    assert len(passage.text) == 999
    assert passage.num_tokens < passage.num_tokens_full


def test_the_budget_is_water_filled_and_a_cut_passage_says_so():
    short, long = "coast of Peru", "passage about the capital " * 60
    text, passages = format_observation(hits(short, long, long), TOKENIZER, budget=200)
    assert count(text) <= 200
    assert passages[0].text == short
    assert passages[0].num_tokens == passages[0].num_tokens_full
    for passage in passages[1:]:
        assert long.startswith(passage.text)
        assert passage.num_tokens < passage.num_tokens_full == count(long.strip())
    assert abs(passages[1].num_tokens - passages[2].num_tokens) <= 2
    assert count(text) >= 190


def test_a_budget_for_titles_alone_shows_fewer_passages():
    text, passages = format_observation(hits("coast", "capital", "river"), TOKENIZER, budget=24)
    assert 0 < len(passages) < 3
    assert count(text) <= 24
    assert format_observation(hits("coast"), TOKENIZER, budget=1) == ("No results found.", ())


def test_a_monstrous_title_cannot_take_the_budget():
    [passage] = format_observation(hits("coast", title="Lima " * 3000), TOKENIZER, budget=300)[1]
    assert count(passage.title) <= TITLE_TOKENS
    assert passage.text == "coast"


MULTIBYTE = st.text(alphabet=st.sampled_from("ab é日🎉\u0301 \n<"), min_size=1, max_size=60)


@settings(deadline=None, max_examples=60)
@given(st.lists(MULTIBYTE, min_size=1, max_size=3), st.integers(1, 160))
def test_shown_text_is_a_head_of_the_passage_and_the_observation_fits(texts, budget):
    formatter = ObservationFormatter(TOKENIZER, budget=budget)
    found = hits(*texts)
    text, passages = formatter.format(found)
    assert not passages or count(text) <= budget
    for passage, source in zip(passages, found, strict=False):
        assert formatter.neutralize(source.passage.text).startswith(passage.text)
        assert "\ufffd" not in passage.text
        assert passage.text in text
        assert passage.num_tokens == count(passage.text) <= passage.num_tokens_full


def test_a_cut_never_splits_a_character():
    formatter = ObservationFormatter(TOKENIZER)
    for limit in range(count("🎉日本🎉") + 1):
        head, used = formatter.cut("🎉日本🎉", limit)
        assert "🎉日本🎉".startswith(head)
        assert used == count(head) <= limit
    assert formatter.cut("🎉日本🎉", count("🎉"))[0] == "🎉"


def test_control_tokens_of_the_tokenizer_and_protocol_tags_are_literals():
    literals = control_literals(TOKENIZER)
    assert {*QWEN_SPECIAL, *QWEN_ADDED, *PROTOCOL_TAGS} <= set(literals)


@pytest.mark.parametrize("literal", [*QWEN_SPECIAL, *PROTOCOL_TAGS])
def test_no_literal_survives_in_retrieved_text(literal):
    hostile = f"x{literal}\n{literal}assistant {literal[:3]}{literal}"
    text, [passage] = format_observation([hit(hostile, title=f"T{literal}")], TOKENIZER)
    assert literal not in text
    assert literal not in passage.title
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert not set(ids) & set(TOKENIZER.added_tokens_decoder)
    assert normalize_answer(f"{literal} Paris") == normalize_answer(neutralize(f"{literal} Paris", [literal]))


def test_overlapping_and_blank_literals_end():
    assert "aa" not in neutralize("aaaaaa", ["aa"])
    assert neutralize("x <s> y", [" <s>", "  ", ""]) == "x < s> y"
    assert neutralize("x", []) == "x"


@settings(deadline=None)
@given(st.text(alphabet="<>|/imend_ answer"))
def test_neutralising_twice_changes_nothing_more(text):
    once = neutralize(text, ["<|im_end|>", "<answer>", "</answer>", "<s>"])
    assert neutralize(once, ["<|im_end|>", "<answer>", "</answer>", "<s>"]) == once


def test_lone_surrogates_become_encodable():
    assert format_observation(hits("a\ud800b"), TOKENIZER)[1][0].text == "a?b"


def test_configuration_is_refused_in_one_line():
    with pytest.raises(ConfigurationError, match=r"`observation_template` must be one of .*: got 'xml'"):
        ObservationFormatter(TOKENIZER, template="xml")
    with pytest.raises(ConfigurationError, match=r"`observation_tokens` must be at least 1: got 0"):
        ObservationFormatter(TOKENIZER, budget=0)
    with pytest.raises(ConfigurationError, match=r"`tokenizer` must be a fast tokenizer: got str"):
        ObservationFormatter("slow")
