"""Tokenizers and an environment, built once."""

from __future__ import annotations

import pytest

from grounded_rl.environments.search import SearchEnvironment
from tests.environments.tokenizers import llama_tokenizer, qwen_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return qwen_tokenizer()


@pytest.fixture(scope="session")
def llama():
    return llama_tokenizer()


@pytest.fixture(scope="session")
def environment(tokenizer):
    return SearchEnvironment(tokenizer)
