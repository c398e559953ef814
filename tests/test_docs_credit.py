"""The page on credit runs as written."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "credit.md"


def test_every_number_on_the_page_is_what_the_code_prints():
    try:
        result = doctest.testfile(
            str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS, globs={}, raise_on_error=False
        )
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_printoptions(profile="default")
    assert result.failed == 0
    assert result.attempted > 40


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
def test_no_block_of_code_goes_unchecked(block: str):
    assert block.startswith(">>> ")
    assert block.endswith("\n\n")  # doctest would read the closing fence as expected output
