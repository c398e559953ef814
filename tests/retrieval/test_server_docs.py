"""The page on retrieval: its commands exist, its Python runs, its keys and metrics are those of the code."""

from __future__ import annotations

import dataclasses
import doctest
import re
import shlex
from pathlib import Path

import pytest
import yaml

from grounded_rl.cli import build_parser
from grounded_rl.cli.index.check import run_plan
from grounded_rl.retrieval.bm25 import build_bm25_index
from grounded_rl.retrieval.stats import SearchWindow
from tests.retrieval import contract

PAGE = Path(__file__).resolve().parents[2] / "docs" / "retrieval.md"
TEXT = PAGE.read_text(encoding="utf-8")


def _blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def _commands():
    lines = [line for block in _blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    found = [line[line.index("grounded-rl") :] for line in lines if "grounded-rl " in line]
    assert len(found) >= 10
    return found


@pytest.mark.parametrize("command", _commands())
def test_a_command_of_the_page_is_understood(command):
    arguments, rest = build_parser().parse_known_args(shlex.split(command)[1:])
    assert rest == []
    assert callable(arguments.run)


def test_the_python_of_the_page_gives_what_it_shows(tmp_path, monkeypatch):
    build_bm25_index(contract.write_corpus(tmp_path / "c.jsonl", contract.PASSAGES), tmp_path / "indexes" / "atlas")
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("httpx", reason="needs the extra `serve`")
    result = doctest.testfile(str(PAGE), module_relative=False, globs={})
    assert (result.failed, result.attempted) == (0, 5)


def test_the_keys_of_the_page_are_those_of_a_recipe():
    config = pytest.importorskip("grounded_rl.trainers.search_agent_config", reason="needs the extra `train`")
    (block,) = _blocks("yaml")
    keys = yaml.safe_load(block)
    known = {field.name: field for field in dataclasses.fields(config.SearchAgentConfig)}
    for key in keys.keys() - {"retrieval_index"}:
        assert keys[key] == known[key].default


def test_the_metrics_of_the_page_are_those_of_the_log():
    listed = set(re.findall(r"`(search/\w+)`", TEXT))
    assert set(SearchWindow().metrics()) <= listed
    assert listed - set(SearchWindow().metrics()) == {"search/masked_rollouts", "search/truncated_tokens"}


def test_the_table_of_sizes_is_what_the_command_prints(capsys):
    arguments = build_parser().parse_args(["index", "plan", "--passages", "21015324", "--dims", "768"])
    assert run_plan(arguments) == 0
    assert capsys.readouterr().out.strip() in TEXT
