"""Optional imports: present ones load, absent ones name the extra, broken ones say what really broke."""

from __future__ import annotations

import json
import sys

import pytest

from grounded_rl.errors import MissingDependencyError
from grounded_rl.import_utils import require


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a throw-away package into the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, source: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source, encoding="utf-8")
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("throwaway_")]:
        del sys.modules[name]


def test_a_present_package_is_returned_itself():
    assert require("json", "dense", needed_by="retrieval_backend: dense") is json


def test_an_absent_package_names_what_asked_for_it_and_the_extra_that_brings_it():
    with pytest.raises(MissingDependencyError) as caught:
        require("throwaway_absent", "dense", needed_by="retrieval_backend: dense")
    assert str(caught.value) == (
        "`retrieval_backend: dense` needs the package `throwaway_absent`: run `pip install 'grounded-rl[dense]'`."
    )


def test_an_absent_submodule_of_an_absent_package_is_the_same_message():
    with pytest.raises(MissingDependencyError, match="needs the package `throwaway_absent.sub`"):
        require("throwaway_absent.sub", "dense", needed_by="dense")


def test_a_present_package_with_an_absent_dependency_of_its_own_is_not_called_missing(package):
    name = package("throwaway_broken", "import throwaway_dependency_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="throwaway_dependency_that_is_not_there") as caught:
        require(name, "dense", needed_by="dense")
    assert not isinstance(caught.value, MissingDependencyError)


def test_a_package_that_fails_while_it_loads_shows_its_own_error(package):
    name = package("throwaway_failing", "raise RuntimeError('needs a driver')")
    with pytest.raises(RuntimeError, match="needs a driver"):
        require(name, "vllm", needed_by="engine: vllm")
