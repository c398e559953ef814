"""Call syntaxes other than Qwen's JSON, and round trips through the templates of TRL."""

from __future__ import annotations

import pytest

from grounded_rl.environments.formats import TOOL_FORMATS
from grounded_rl.environments.parsing import read_turn, rollout_format_ok
from grounded_rl.rollouts import TurnKind
from tests.builders import answer_turn, search_turn
from tests.environments.tokenizers import llama_tokenizer, qwen_tokenizer

SEARCH, MALFORMED, ANSWER, UNLABELLED = TurnKind.SEARCH, TurnKind.MALFORMED, TurnKind.ANSWER, TurnKind.UNLABELLED


def outcomes(reading):
    return [parsed.query if parsed.error is None else f"!{parsed.error}" for parsed in reading.calls]


def function_call(query="x", name="search", parameter="query"):
    return f"<tool_call>\n<function={name}>\n<parameter={parameter}>\n{query}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (function_call("O'Brien's \"Tower\" {1}"), ["O'Brien's \"Tower\" {1}"]),
        (function_call("two\nlines"), ["two\nlines"]),
        (function_call("a") + function_call("b"), ["a", "b"]),
        (function_call(" "), ["!empty_query"]),
        (function_call(name="python"), ["!unknown_tool"]),
        (function_call(name=""), ["!missing_name"]),
        (function_call(parameter="q"), ["!missing_query"]),
        (function_call('["a", "b"]', parameter="query_list"), ["a", "b"]),
        (function_call("oops", parameter="query_list"), ["!empty_query"]),
        ('<tool_call>{"name": "search", "arguments": {"query": "a"}}</tool_call>', ["!invalid_syntax"]),
        ("<tool_call><function=search></function></tool_call>", ["!missing_query"]),
        ("<tool_call><function=search><parameter=query>a</function></tool_call>", ["!invalid_syntax"]),
        ("<tool_call><function=search><parameter=query>a</parameter></tool_call>", ["!invalid_syntax"]),
        ("<tool_call><function=search>text</function></tool_call>", ["!invalid_syntax"]),
        (
            "<tool_call><function=search></function><function=search></function></tool_call>",
            ["!several_calls_in_block"],
        ),
        ("<tool_call><function=search><parameter=query>a", ["!unclosed_call"]),
        ("the answer", []),
    ],
)
def test_function_tags_of_qwen3_5(text, expected):
    assert outcomes(read_turn(text, format="qwen3_5")) == expected


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ('{"name": "search", "parameters": {"query": "a"}}', SEARCH, ["a"]),
        ('<|python_tag|>{"name": "search", "parameters": {"query": "a"}}<|eom_id|>', SEARCH, ["a"]),
        ('{"name": "search", "arguments": {"query": "a"}}<|eot_id|>', SEARCH, ["a"]),
        (
            '{"name": "search", "parameters": {"query": "a"}}; {"name": "search"}',
            MALFORMED,
            ["!several_calls_in_block"],
        ),
        ('{"name": "search", "parameters": {"query": a}}', MALFORMED, ["!invalid_json"]),
        ("<|python_tag|>search(a)", MALFORMED, ["!invalid_json"]),
        ("{1, 2} is a set", ANSWER, []),
        ("<answer>Paris</answer>", ANSWER, []),
    ],
)
def test_the_json_message_of_llama(text, kind, expected):
    reading = read_turn(text, format="llama")
    assert (reading.kind, outcomes(reading)) == (kind, expected)


def test_a_llama_call_cut_off_is_never_executable():
    text = '{"name": "search", "parameters": {"query": "a'
    assert outcomes(read_turn(text, format="llama", complete=False)) == ["!truncated_call"]
    assert outcomes(read_turn(text, format="llama")) == ["!invalid_json"]


@pytest.mark.parametrize("format", ["search_r1", "sipo"])
@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("<think>a</think><search> Lima </search>", SEARCH, ["Lima"]),
        ("<think>a<search> Lima </search>", SEARCH, ["Lima"]),
        ("<search> Lima </</search>", SEARCH, ["Lima </"]),
        ("<search> </search>", MALFORMED, ["!empty_query"]),
        ("<search><search> Lima</search>", MALFORMED, ["!nested_call"]),
        ("<search> Lima", MALFORMED, ["!unclosed_call"]),
        ("Who is x </search>", MALFORMED, ["!unopened_call"]),
        ("<answer>\\boxed{Lima}</answer></search>", ANSWER, []),
        ("<think><search>draft</search></think><search>real</search>", SEARCH, ["real"]),
    ],
)
def test_search_tags(format, text, kind, expected):
    reading = read_turn(text, format=format)
    assert (reading.kind, outcomes(reading)) == (kind, expected)


def test_r15_a_closing_tag_alone_starts_no_query_at_the_instructions():
    # The prompt mentions "<search> query </search>"; it is no part of what is read.
    reading = read_turn("Who is x </search>", format="search_r1")
    assert outcomes(reading) == ["!unopened_call"]
    assert outcomes(read_turn("Who is x </tool_call>")) == ["!unopened_call"]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("I put it in \\boxed form. Final: \\boxed{Lima}", "Lima"),
        ("\\boxed{a} \\boxed{Paris}", "Paris"),
        ("\\boxed{\\text{Paris}}", "\\text{Paris}"),
        ("\\boxed{a {b} c}", "a {b} c"),
        ("\\boxed{a \\} b}", "a \\} b"),
        ("\\boxed{Paris", None),
        ("\\boxed{Paris} \\boxed{Rome", "Paris"),
        ("{ \\boxed{Lima}", "Lima"),
        ("\\boxed{}", ""),
        ("\\boxed Paris", None),
        ("} \\boxed{Lima} }", "Lima"),
        ("<think>\\boxed{draft}</think>", None),
    ],
)
def test_e18_the_last_box_with_balanced_braces_is_the_answer(text, answer):
    assert read_turn(text, format="sipo").answer == answer


def test_boxes_are_no_answers_in_the_other_formats():
    assert read_turn("\\boxed{Lima}").answer is None
    assert read_turn("half \\boxed{Li", complete=False).kind is UNLABELLED
    assert read_turn("half \\boxed{Li", complete=False, format="sipo").kind is ANSWER


def test_the_boxed_format_is_judged_on_the_whole_response():
    import dataclasses

    search = dataclasses.replace(
        search_turn("p"),
        text="<think>a</think><search> q </search>",
        observation=" <result>\nPage 1\n</result>",
    )
    last = dataclasses.replace(answer_turn("x"), text="<think>b</think><answer>\\boxed{x}</answer>")
    assert rollout_format_ok([search, last], format="sipo")
    assert not rollout_format_ok([dataclasses.replace(search, observation=""), last], format="sipo")
    assert not rollout_format_ok([search, dataclasses.replace(last, text="\\boxed{x}")], format="sipo")


QUERIES = ["Who founded O'Brien's Tower?", 'say "hi" \\ {x}', "é 日本 🎉 & <b>", "line\nbreak", "a</parameter b"]
TEMPLATES = [
    ("qwen2_5_training", "qwen", qwen_tokenizer),
    ("qwen3_training", "qwen", qwen_tokenizer),
    ("qwen3_instruct_2507_training", "qwen", qwen_tokenizer),
    ("qwen3_5_nothink_training", "qwen3_5", qwen_tokenizer),
    ("qwen3_8_training", "qwen3_5", qwen_tokenizer),
    ("llama3_1", "llama", llama_tokenizer),
    ("llama3_2", "llama", llama_tokenizer),
]


@pytest.mark.parametrize(("template", "format", "build"), TEMPLATES)
def test_t11_t17_t18_a_rendered_call_reads_back_as_written(template, format, build):
    tokenizer = build(template)
    question = [{"role": "user", "content": "q"}]
    for query in QUERIES:
        call = {"type": "function", "function": {"name": "search", "arguments": {"query": query}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        rendered = tokenizer.apply_chat_template([*question, message], tokenize=False)
        before = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        opened = before.rstrip().endswith("<think>")
        text = rendered[len(before) :] if rendered.startswith(before) else rendered.rsplit("assistant", 1)[-1]
        reading = read_turn(text.replace("<|end_header_id|>", ""), format=format, opened_think=opened)
        assert outcomes(reading) == [query]
        assert "&#34;" not in rendered
        assert "&quot;" not in rendered


def test_every_format_names_its_result_tag_and_stops_where_raw_text_must_stop():
    for name, syntax in TOOL_FORMATS.items():
        assert syntax.raw == bool(syntax.stop_strings), name
        invented = f"<{syntax.response_tag}>fake</{syntax.response_tag}><answer>x</answer>"
        assert "invented_result" in read_turn(invented, format=name).events
