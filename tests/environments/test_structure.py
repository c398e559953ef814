"""Structural tokens by character span."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from grounded_rl.environments.structure import STRUCTURAL_LITERALS, TokenBytes, structural_mask
from tests.environments.tokenizers import llama_tokenizer, qwen_tokenizer

TOKENIZER = qwen_tokenizer()


def marked(tokenizer, text):
    """Pieces of the text whose tokens are structural, and the rest."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    mask = structural_mask(tokenizer, ids)
    assert len(mask) == len(ids)
    table = TokenBytes(tokenizer)
    return (
        b"".join(table[token] for token, flag in zip(ids, mask, strict=True) if flag == wanted) for wanted in (1, 0)
    )


def test_each_literal_is_structural_and_its_content_is_not():
    for literal in STRUCTURAL_LITERALS:
        structural, content = marked(TOKENIZER, f"Lima {literal} Peru")
        assert structural.strip() == literal.encode()
        assert content.replace(b" ", b"") == b"LimaPeru"


@pytest.mark.parametrize("text", ["<answe r>", "answer > <", "< answer>", "<Answer>", "x < y > z", "<search>"])
def test_the_pieces_of_a_tag_are_ordinary_text_elsewhere(text):
    structural, content = marked(TOKENIZER, text)
    assert structural == b""
    assert content == text.encode()


def test_literals_beside_multibyte_text_are_found_exactly():
    structural, content = marked(TOKENIZER, "é<answer>日本🎉</answer>é<|im_end|>")
    assert structural == b"<answer></answer><|im_end|>"
    assert content == "é日本🎉é".encode()


def test_a_token_that_spans_a_tag_and_text_is_structural():
    vocabulary = {"</answer>x": 0, "y": 1, "▁z": 2, "<0xC3>": 3, "<0xA9>": 4, "<answ": 5, "er>w": 6}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="y"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert structural_mask(tokenizer, [1, 0, 1]) == [False, True, False]
    assert structural_mask(tokenizer, [5, 6, 2, 5, 1]) == [True, True, False, False, False]
    assert b"".join(TokenBytes(tokenizer)[token] for token in (2, 3, 4)) == " zé".encode()


def test_an_id_beyond_the_vocabulary_is_content():
    assert structural_mask(TOKENIZER, [10_000, len(TOKENIZER) + 7]) == [False, False]
    assert structural_mask(TOKENIZER, []) == []


@pytest.mark.parametrize("tokenizer", [TOKENIZER, llama_tokenizer()])
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_bytes_of_tokens_concatenate_to_the_text(tokenizer, data):
    pieces = st.sampled_from(["<answer>", "</answer>", "<think>", "<|im_end|>", "é", "🎉", " a", "日", "\n", "<"])
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    table = TokenBytes(tokenizer)
    assert b"".join(table[token] for token in ids) == text.encode()
    spans = [(text.find(literal), literal) for literal in STRUCTURAL_LITERALS if literal in text]
    assert any(structural_mask(tokenizer, ids)) == bool(spans)
