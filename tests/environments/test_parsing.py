"""Reading turns in the chat formats; `t03` and the like name known defects of other projects."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.environments import parsing
from grounded_rl.environments.formats import CALL_ERRORS, TOOL_FORMATS, tool_format
from grounded_rl.environments.parsing import read_turn, rollout_answer, rollout_format_ok
from grounded_rl.errors import ConfigurationError
from grounded_rl.rollouts import FinishReason, TurnKind
from tests.builders import answer_turn, malformed_turn, search_turn

SEARCH, MALFORMED, ANSWER, UNLABELLED = TurnKind.SEARCH, TurnKind.MALFORMED, TurnKind.ANSWER, TurnKind.UNLABELLED


def call(query="x", name="search"):
    return (
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'query': query}}, ensure_ascii=False)}\n</tool_call>"
    )


def outcomes(reading):
    return [parsed.query if parsed.error is None else f"!{parsed.error}" for parsed in reading.calls]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('{"name": "search", "arguments": {"query": x}}', "invalid_json"),
        ('{"name": "search", "arguments": {"query": "Marie Curie"', "invalid_json"),
        ('{{"name": "search", "arguments": {"query": "a"}}}', "invalid_json"),
        ('{"name": "search", "arguments": {"query": "a"},}', "invalid_json"),
        ("{'name': 'search', 'arguments': {'query': 'a'}}", "invalid_json"),
        ('```json\n{"name": "search"}\n```', "invalid_json"),
        ('{"name": "search", "arguments": {"query": "a"}} thanks', "invalid_json"),
        ("", "invalid_json"),
        ("[" * 100_000, "invalid_json"),
        ("1" * 5000, "invalid_json"),
        ('{"name": "search", "arguments": {"query": "a"}}\n{"name": "search"}', "several_calls_in_block"),
        ('{"name": "search", "arguments": {"query": "a"}},{"name": "search"}', "several_calls_in_block"),
        ("[1]", "not_an_object"),
        ('"search"', "not_an_object"),
        ("NaN", "not_an_object"),
        ('{"arguments": {"query": "a"}}', "missing_name"),
        ('{"name": 3, "arguments": {"query": "a"}}', "missing_name"),
        ('{"name": "python", "arguments": {"query": "a"}}', "unknown_tool"),
        ('{"name": "Search", "arguments": {"query": "a"}}', "unknown_tool"),
        ('{"name": "search"}', "invalid_arguments"),
        ('{"name": "search", "arguments": "hamlet"}', "invalid_arguments"),
        ('{"name": "search", "arguments": ["hamlet"]}', "invalid_arguments"),
        ('{"name": "search", "arguments": {}}', "missing_query"),
        ('{"name": "search", "arguments": {"q": "a"}}', "missing_query"),
        ('{"name": "search", "arguments": {"query": null}}', "missing_query"),
        ('{"name": "search", "arguments": {"query": {"x": 1}}}', "invalid_query"),
        ('{"name": "search", "arguments": {"query": 5}}', "invalid_query"),
        ('{"name": "search", "arguments": {"query": ["a", 5]}}', "invalid_query"),
        ('{"name": "search", "arguments": {"query": " \\n"}}', "empty_query"),
        ('{"name": "search", "arguments": {"query_list": []}}', "empty_query"),
        ('see <tool_call>{"name": "search", "arguments": {"query": "a"}}', "nested_call"),
    ],
)
def test_every_kind_of_mistake_has_its_own_name_and_message(body, error):
    reading = read_turn(f"<tool_call>{body}</tool_call>")
    assert outcomes(reading) == [f"!{error}"]
    assert reading.kind is MALFORMED
    assert not reading.format_ok
    assert reading.events == (error,)
    assert error in CALL_ERRORS


def test_t02_two_objects_in_one_block_are_one_malformed_call():
    body = '{"name":"search","arguments":{"query":"a"}}\n{"name":"search","arguments":{"query":"b"}}'
    reading = read_turn(f"<tool_call>\n{body}\n</tool_call>")
    assert outcomes(reading) == ["!several_calls_in_block"]
    assert reading.kind is MALFORMED


def test_several_blocks_are_several_calls_in_order():
    reading = read_turn(f"{call('a')}\n{call('b')}")
    assert outcomes(reading) == ["a", "b"]
    assert reading.kind is SEARCH
    assert not reading.format_ok


def test_a_good_call_survives_a_bad_neighbour():
    reading = read_turn(f"<tool_call>oops</tool_call>{call('b')}<tool_call>")
    assert outcomes(reading) == ["!invalid_json", "b", "!unclosed_call"]
    assert reading.kind is SEARCH


def test_t03_a_draft_inside_closed_thinking_is_text():
    reading = read_turn(f"<think>I could do {call('draft')} first</think>\n{call('final')}")
    assert outcomes(reading) == ["final"]
    assert "draft" in reading.reasoning
    assert reading.format_ok


def test_t03_an_answer_inside_closed_thinking_is_text():
    reading = read_turn("<think>perhaps <answer>Rome</answer></think>I do not know")
    assert reading.kind is ANSWER
    assert reading.answer is None
    assert read_turn("<think><answer>Rome</answer></think><answer>Lima</answer>").answer == "Lima"


def test_t03_thinking_opened_by_the_prompt_is_thinking():
    reading = read_turn(f"I could do {call('draft')} first</think>\n{call('final')}", opened_think=True)
    assert outcomes(reading) == ["final"]
    assert reading.format_ok
    unopened = read_turn(f"I could do {call('draft')} first</think>\n{call('final')}")
    assert outcomes(unopened) == ["final"]
    assert not unopened.format_ok


def test_t04_a_complete_call_after_unclosed_thinking_counts_and_is_counted():
    reading = read_turn(f"<think>I need facts. {call('x')}<|im_end|>")
    assert outcomes(reading) == ["x"]
    assert reading.kind is SEARCH
    assert reading.events == ("call_in_unclosed_think",)
    assert not reading.format_ok
    later = read_turn(f"<think>a</think>b<think>c {call('y')}")
    assert outcomes(later) == ["y"]
    assert later.events == ("call_in_unclosed_think",)


def test_t05_broken_json_names_what_is_wrong():
    text = '<tool_call>\n{"name":"search","arguments":{"query":"Marie Curie"\n</tool_call>'
    [parsed] = read_turn(text).calls
    assert parsed.query is None
    assert parsed.error == "invalid_json"
    assert "delimiter" in parsed.detail


def test_t07_a_malformed_call_is_no_final_answer():
    text = 'Let me check. <tool_call>\n{"name": "search", "arguments": {"query": x}}\n</tool_call>'
    reading = read_turn(text)
    assert reading.kind is MALFORMED
    assert reading.answer is None


@pytest.mark.parametrize(
    "text",
    ['<tool_call>{"name":"search","arguments":{"query":"capital of', "<tool_call>", f"{call('x')[:-5]}"],
)
def test_t13_a_call_cut_off_by_the_budget_is_never_executable(text):
    cut = read_turn(text, complete=False)
    assert outcomes(cut) == ["!truncated_call"]
    assert cut.kind is MALFORMED
    assert cut.answer is None
    assert not cut.complete
    assert outcomes(read_turn(text)) == ["!unclosed_call"]


def test_a_complete_call_before_the_cut_stays_a_search():
    assert read_turn(f"{call('x')} and", complete=False).kind is SEARCH


@pytest.mark.parametrize(
    ("text", "kind", "answer"),
    [
        ("I wonder", UNLABELLED, None),
        ("", UNLABELLED, None),
        ("<think>I wonder", UNLABELLED, None),
        ("<think>I wonder</think> perhaps <answ", UNLABELLED, None),
        ("<answer>Par", ANSWER, None),
        ("<answer>Paris</answer> becau", ANSWER, "Paris"),
        ("<answer>Paris</answer><tool_call>{", MALFORMED, "Paris"),
    ],
)
def test_turns_cut_off_by_the_budget(text, kind, answer):
    reading = read_turn(text, complete=False)
    assert (reading.kind, reading.answer, reading.format_ok) == (kind, answer, False)


@pytest.mark.parametrize(
    "query",
    [
        "set {1,2 union {3}",
        'say "hi"',
        "Who founded O'Brien's Tower?",
        "back\\slash",
        "é 日本 🎉",
        "a < b & c > d",
        "what does </tool_call> do",
        "</tool_call></tool_call> and <tool_call>",
        "what does <tool_call> do",
    ],
)
def test_t15_text_values_are_data(query):
    assert outcomes(read_turn(call(query))) == [query]


def test_a_text_value_never_swallows_the_next_call():
    reading = read_turn(f'<tool_call>{{"name":"search","arguments":{{"query":"Marie</tool_call>\n{call("b")}')
    assert outcomes(reading) == ["!invalid_json", "b"]


@settings(deadline=None)
@given(st.text().filter(str.strip))
def test_t15_any_text_round_trips_through_a_call(query):
    text = f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': query}})}</tool_call>"
    assert outcomes(read_turn(text)) == [query]


def test_a_query_list_is_one_call_per_query():
    text = '<tool_call>{"name": "search", "arguments": {"query_list": ["a", " ", "b"]}}</tool_call>'
    assert outcomes(read_turn(text)) == ["a", "!empty_query", "b"]
    assert read_turn(text).kind is SEARCH
    assert outcomes(read_turn(text.replace("query_list", "query"))) == ["a", "!empty_query", "b"]


def test_further_arguments_are_ignored():
    text = '<tool_call>{"name": "search", "arguments": {"query": "a", "top_k": 50}, "id": 1}</tool_call>'
    assert outcomes(read_turn(text)) == ["a"]


def test_lone_surrogates_become_encodable():
    text = '<tool_call>{"name": "search", "arguments": {"query": "a\\ud800b"}}</tool_call>'
    assert outcomes(read_turn(text)) == ["a?b"]
    pair = '<tool_call>{"name": "search", "arguments": {"query": "\\ud83c\\udf89"}}</tool_call>'
    assert outcomes(read_turn(pair)) == ["🎉"]


def test_t19_an_answer_after_an_invented_result_is_not_scored():
    text = f"{call('x')}\n<tool_response>It is Lyon.</tool_response>\n<answer>Lyon</answer>"
    reading = read_turn(text)
    assert outcomes(reading) == ["x"]
    assert reading.kind is SEARCH
    assert reading.answer is None
    assert reading.events == ("invented_result", "answer_beside_call")
    assert not reading.format_ok
    assert read_turn(f"<answer>Rome</answer>{text}").answer == "Rome"


def test_t19_an_invented_result_without_a_call_breaks_only_the_format():
    reading = read_turn("<tool_response>It is Lyon.</tool_response><answer>Lyon</answer>")
    assert reading.kind is ANSWER
    assert reading.answer == "Lyon"
    assert not reading.format_ok


def test_a_turn_with_a_call_and_an_answer_is_a_search_that_keeps_its_answer():
    reading = read_turn(f"<answer>Paris</answer>{call('x')}")
    assert reading.kind is SEARCH
    assert reading.answer == "Paris"
    assert not reading.format_ok


@pytest.mark.parametrize("tail", ["<|im_end|>", "<|im_end|>\n", "<|endoftext|><|im_end|>", "<|eot_id|>", "</s>"])
def test_e31_end_tokens_change_nothing(tail):
    text = "<think>a</think><answer>4</answer>"
    assert read_turn(text + tail) == read_turn(text)
    assert read_turn(call("x") + tail) == read_turn(call("x"))


def test_t27_thinking_and_content_are_stripped():
    reading = read_turn("<think>\n\n</think>\n\n12")
    assert reading.reasoning is None
    assert reading.kind is ANSWER
    assert outcomes(read_turn(f"\n{call('x')}")) == ["x"]
    assert parsing.split_thinking("<think>\n\n</think>\n\n12").content == "12"


@pytest.mark.parametrize(
    ("text", "opened", "balanced"),
    [
        ("<think>a</think>b", False, True),
        ("b", False, True),
        ("<think>a</think>b<think>c</think>", False, True),
        ("<think>a", False, False),
        ("a</think>b", False, False),
        ("<think><think>a</think></think>", False, False),
        ("<think><think>a</think>", False, False),
        ("a</think>b", True, True),
        ("<think>a</think>b", True, True),
        ("\n<think>a</think>b", True, True),
        ("<think><think>a</think>b", True, False),
        ("x<think>a</think>b", True, False),
        ("a", True, False),
    ],
)
def test_t25_thinking_is_balanced_with_or_without_an_opening_by_the_prompt(text, opened, balanced):
    assert parsing.split_thinking(text, opened=opened).balanced is balanced


def test_t25_a_completion_in_a_prompt_that_opens_thinking_keeps_the_format():
    tail = "</think>\n<answer>4</answer>"
    assert read_turn(f"Two and two.\n{tail}", opened_think=True).format_ok
    assert read_turn(f"<think>\nTwo and two.\n{tail}").format_ok
    assert not read_turn(f"<think><think>Two and two.\n{tail}").format_ok


def test_e19_the_last_answer_counts_and_two_answers_break_the_format():
    text = "<think>a</think><answer>x</answer><think>b</think><answer>Paris</answer>"
    reading = read_turn(text)
    assert reading.answer == "Paris"
    assert not reading.format_ok


@pytest.mark.parametrize(
    ("text", "answer", "ok"),
    [
        ("<answer> Paris </answer>", "Paris", True),
        ("<answer></answer>", "", True),
        ("Paris", None, False),
        ("<answer>Paris", None, False),
        ("Paris</answer>", None, False),
        ("</answer>Paris<answer>", None, False),
        ("<answer>a<answer>b</answer>", "a<answer>b", False),
        ("<answer>a</answer>b</answer>", "a", False),
        ("<Answer>a</Answer>", None, False),
    ],
)
def test_answers_and_their_format(text, answer, ok):
    reading = read_turn(text)
    assert (reading.kind, reading.answer, reading.format_ok) == (ANSWER, answer, ok)


def test_e21_the_last_turn_alone_is_scored_and_never_an_observation():
    search = replace(search_turn("Paris"), text=call("capital"), observation="<answer>Paris</answer>")
    assert rollout_answer([search]) is None
    assert rollout_answer([replace(search, text=f"<answer>Paris</answer>{call('x')}"), search]) is None
    assert rollout_answer([search, answer_turn("Lyon")]) == "Lyon"
    assert rollout_answer([]) is None


@pytest.mark.parametrize(
    ("turns", "ok"),
    [
        ([answer_turn("a")], True),
        ([search_turn("p"), answer_turn("a")], True),
        ([search_turn("p"), search_turn("p")], False),
        ([malformed_turn(), answer_turn("a")], False),
        ([answer_turn("a"), answer_turn("a")], False),
        ([search_turn("p"), replace(answer_turn("a"), finish=FinishReason.LENGTH)], False),
        ([], False),
    ],
)
def test_a_rollout_keeps_the_format_when_every_turn_does_its_part(turns, ok):
    assert rollout_format_ok(turns) is ok


def test_an_unknown_format_is_refused():
    with pytest.raises(ConfigurationError, match=r"`tool_format` must be one of .*: got 'xml'"):
        read_turn("x", format="xml")
    assert {name: tool_format(name) for name in TOOL_FORMATS} == TOOL_FORMATS


HOSTILE = [
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>["</tool_call>",',
    '<tool_call>{"a":"</tool_call>',
    "<tool_call></tool_call>",
    "<think>",
    "</think>",
    "<think></think>",
    "<answer>",
    "</answer>",
    "\\boxed{",
    "}",
    "<search>",
    "<search></search>",
    "<function=search><parameter=query>",
    "<tool_call><function=search><parameter=query>a</parameter>",
    "<|im_end|>",
    "<tool_call>" + "[" * 50,
    '{"name":',
]


@pytest.mark.parametrize("format", sorted(TOOL_FORMATS))
def test_hostile_repetition_takes_linear_time(format):
    for unit in HOSTILE:
        for text in (unit * (100_000 // len(unit)), unit * (50_000 // len(unit)) + "</tool_call></search></think>"):
            start = time.process_time()
            read_turn(text, format=format)
            read_turn(text, format=format, complete=False, opened_think=True)
            assert time.process_time() - start < 1.0, unit


def test_examples_of_the_documentation_hold():
    import doctest

    assert doctest.testmod(parsing).failed == 0
