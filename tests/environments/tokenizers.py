"""Small byte-level BPE tokenizers, trained in memory, with the control tokens of real model families."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Paris is the capital of France, and Lima is the capital of Peru.",
    "The search engine returns the best passages; the answer is short.",
    'Who founded the city? {"name": "search", "arguments": {"query": "capital of"}}',
    "Doc 1 (Title: Lima)\nLima lies on the coast. Doc 2 (Title: Peru)\nPeru borders Ecuador.",
    "<answer> Lisbon </answer> <search> query </search> <information> text </information>",
] * 4

QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
LLAMA_SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]


def build_tokenizer(special: list[str], added: list[str], eos: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=special[0])
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens(added, special_tokens=False)
    return tokenizer


def trl_template(name: str) -> str:
    import trl

    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def qwen_tokenizer(template: str = "qwen3_training") -> PreTrainedTokenizerFast:
    """Control tokens of Qwen 3; tags of calls and thinking are added tokens, `<answer>` is not."""
    built = build_tokenizer(QWEN_SPECIAL, QWEN_ADDED, "<|im_end|>")
    built.chat_template = trl_template(template)
    return built


def llama_tokenizer(template: str = "llama3_1") -> PreTrainedTokenizerFast:
    """Control tokens of Llama 3."""
    built = build_tokenizer(LLAMA_SPECIAL, [], "<|eot_id|>")
    built.bos_token = "<|begin_of_text|>"
    built.chat_template = trl_template(template)
    return built
