"""Prompt and observation ids against direct rendering and against TRL."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grounded_rl.environments.chat import ChatEncoder
from grounded_rl.environments.tools import SEARCH_TOOL
from grounded_rl.errors import ConfigurationError
from tests.environments.tokenizers import llama_tokenizer, qwen_tokenizer, trl_template

TEXTS = ["Doc 1 (Title: Lima)\ncoast é 日本 🎉", 'Error: "x" <b>', "<|im_end|>"]
QUESTION = [{"role": "user", "content": "Where is Lima?"}]
TRAINING_TEMPLATES = ["qwen2_5_training", "qwen3_training", "qwen3_5_nothink_training", "qwen3_instruct_2507_training"]


@pytest.mark.parametrize("template", [*TRAINING_TEMPLATES, "qwen3_5_think_training"])
def test_observation_ids_equal_those_of_trl(template):
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = qwen_tokenizer(template)
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, _is_vlm=False, chat_template=None, chat_template_kwargs={}
    )
    chat = ChatEncoder(tokenizer, tools=[SEARCH_TOOL])
    for number in (1, 2, 3):
        messages = [{"role": "tool", "name": "search", "content": text} for text in TEXTS[:number]]
        expected = GRPOTrainer._get_tool_suffix_ids(trainer, messages)
        assert chat.observation_ids(TEXTS[:number]) == expected


@pytest.mark.parametrize("template", TRAINING_TEMPLATES)
def test_t21_sampled_and_observation_ids_concatenate_to_the_rendered_conversation(template):
    tokenizer = qwen_tokenizer(template)
    chat = ChatEncoder(tokenizer, tools=[SEARCH_TOOL])
    call = {"type": "function", "function": {"name": "search", "arguments": {"query": "x"}}}
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"role": "tool", "name": "search", "content": text} for text in TEXTS[:2]]
    whole = tokenizer.apply_chat_template(
        [*QUESTION, assistant, *tools],
        tools=[SEARCH_TOOL],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    prompt, observation = chat.prompt_ids(QUESTION), chat.observation_ids(TEXTS[:2])
    sampled = whole[len(prompt) : len(whole) - len(observation)]
    assert [*prompt, *sampled, *observation] == whole
    assert sampled[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(observation).startswith("\n<|im_start|>user\n<tool_response>\n")


def test_the_line_break_is_found_where_the_end_of_text_is_not_the_end_of_a_turn():
    tokenizer = qwen_tokenizer()
    expected = ChatEncoder(tokenizer).observation_ids(["x"])
    ends = ChatEncoder(tokenizer).end_token_ids
    tokenizer.eos_token = "<|endoftext|>"
    base = ChatEncoder(tokenizer)
    assert base.observation_ids(["x"]) == expected
    assert base.end_token_ids == (tokenizer.convert_tokens_to_ids("<|endoftext|>"), *ends)


def test_templates_that_escape_or_trim_results_are_rendered_in_full():
    tokenizer = llama_tokenizer()
    text = tokenizer.decode(ChatEncoder(tokenizer, tools=[SEARCH_TOOL]).observation_ids(['é\n"x"']))
    assert text == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"é\\n\\"x\\""<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_an_observation_costs_one_encoding_and_no_rendering():
    tokenizer = qwen_tokenizer()
    chat = ChatEncoder(tokenizer, tools=[SEARCH_TOOL])
    chat.observation_ids(["warm"])
    calls = []
    original = tokenizer.apply_chat_template
    tokenizer.apply_chat_template = lambda *args, **kwargs: calls.append(args) or original(*args, **kwargs)
    chat.observation_ids(["again"])
    assert calls == []


def test_prompt_ids_equal_direct_rendering():
    tokenizer = qwen_tokenizer()
    direct = tokenizer.apply_chat_template(
        QUESTION, tools=[SEARCH_TOOL], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ChatEncoder(tokenizer, tools=[SEARCH_TOOL]).prompt_ids(QUESTION) == direct


@pytest.mark.parametrize("build", [qwen_tokenizer, llama_tokenizer])
def test_t12_no_tools_and_an_empty_list_of_tools_are_one_prompt(build):
    tokenizer = build()
    assert ChatEncoder(tokenizer, tools=[]).prompt_ids(QUESTION) == ChatEncoder(tokenizer).prompt_ids(QUESTION)
    assert "ipython" not in ChatEncoder(tokenizer, tools=[]).prompt_text(QUESTION)


def test_t20_the_prompt_is_the_rendered_prefix_whatever_the_length_of_the_generation_prompt():
    tokenizer = qwen_tokenizer("deepseek_r1_distill_training")
    tokenizer.bos_token = "<|endoftext|>"
    chat = ChatEncoder(tokenizer)
    text = chat.prompt_text(QUESTION)
    assert text.endswith("<think>\n")
    assert chat.opens_thinking
    assert tokenizer.decode(chat.prompt_ids(QUESTION)) == text


@pytest.mark.parametrize(
    ("template", "options", "opens"),
    [
        ("qwen3_training", {}, False),
        ("qwen3_training", {"enable_thinking": False}, False),
        ("qwen3_5_think_training", {}, True),
        ("qwen3_5_think_training", {"enable_thinking": False}, False),
        ("qwen2_5_training", {}, False),
    ],
)
def test_whether_the_prompt_opens_thinking_is_measured(template, options, opens):
    assert ChatEncoder(qwen_tokenizer(template), template_kwargs=options).opens_thinking is opens


def test_an_explicit_template_replaces_the_tokenizers_own():
    tokenizer = qwen_tokenizer("qwen2_5_training")
    chat = ChatEncoder(tokenizer, chat_template=trl_template("qwen3_training"))
    assert chat.observation_ids(["x"]) == ChatEncoder(qwen_tokenizer()).observation_ids(["x"])
    assert "created by Alibaba" not in chat.prompt_text(QUESTION)


def test_templates_that_cannot_carry_the_conversation_are_refused_in_one_line():
    tokenizer = qwen_tokenizer()
    with pytest.raises(ConfigurationError, match=r"`chat_template` must present tools"):
        ChatEncoder(tokenizer, tools=[SEARCH_TOOL], chat_template="{{ messages[0].content }}")
    with pytest.raises(ConfigurationError, match=r"`chat_template` must keep earlier messages unchanged"):
        ChatEncoder(qwen_tokenizer("qwen3")).observation_ids(["x"])
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match=r"`chat_template` must be given for function calling"):
        ChatEncoder(tokenizer, tools=[SEARCH_TOOL])
    assert ChatEncoder(tokenizer).prompt_text([*QUESTION, *QUESTION]) == "Where is Lima?\n\nWhere is Lima?"
