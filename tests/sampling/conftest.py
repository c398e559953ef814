"""One tokenizer and environment for the rollout loop's tests."""

from __future__ import annotations

import pytest

from grounded_rl.environments.search import SearchEnvironment
from tests.environments.tokenizers import qwen_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return qwen_tokenizer()


@pytest.fixture(scope="session")
def environment(tokenizer):
    return SearchEnvironment(tokenizer, prompt_style="plain", max_turns=5)
