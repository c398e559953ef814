"""Determinism and silence for the trainers' tests."""

from __future__ import annotations

import datasets
import pytest
import transformers


@pytest.fixture(autouse=True, scope="session")
def _quiet():
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    yield
    datasets.enable_progress_bars()
