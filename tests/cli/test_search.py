from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from grounded_rl.cli import main
from grounded_rl.retrieval.bm25 import build_bm25_index
from tests.retrieval import contract


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("search")
    build_bm25_index(contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES), folder / "index")
    return folder / "index"


def test_json_has_one_line_per_query_in_their_order(index, capsys):
    assert main(["search", "--index", str(index), "capital of Peru", "", "São Tomé", "--k", "2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["query"] for line in lines] == ["capital of Peru", "", "São Tomé"]
    assert [len(line["hits"]) for line in lines] == [2, 0, 1]
    best = lines[0]["hits"][0]
    assert (best["title"], best["text"]) == ("Peru", "Peru is a country. Its capital is Lima.")
    assert best["score"] > lines[0]["hits"][1]["score"] > 0
    assert {best["id"]: "Peru"} == {p.id: p.title for p in contract.PASSAGES if p.title == "Peru"}


def test_an_argument_that_is_not_utf8_is_searched_and_printed(index, capfd):
    assert main(["search", "--index", str(index), "Peru \udcff", "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["hits"][0]["title"] == "Peru"


def test_a_dash_reads_queries_from_standard_input(index, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Peru\n\n  Chile  \n"))
    assert main(["search", "--index", str(index), "Norway", "-", "--k", "1", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["query"], line["hits"][0]["title"]) for line in lines] == [
        ("Norway", "Norway"),
        ("Peru", "Peru"),
        ("Chile", "Chile"),
    ]


def test_many_queries_from_standard_input_keep_their_order(index, capsys, monkeypatch):
    queries = [f"Peru {number}" for number in range(600)]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(queries)))
    assert main(["search", "--index", str(index), "-", "--json"]) == 0
    assert [json.loads(line)["query"] for line in capsys.readouterr().out.splitlines()] == queries


def test_the_table_shows_query_scores_and_text_as_they_are(index, capsys):
    assert main(["search", "--index", str(index), "song heroes [red]", "zyzzyva", "--k", "1"]) == 0
    output = capsys.readouterr().out
    assert "song heroes [red]" in output
    assert "902" in output
    assert "[we]" in output
    assert "nothing found" in output.partition("zyzzyva")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--index", "absent", "Peru"], "must be the folder of an index: got `absent` (no such folder)"),
        (["--index", "INDEX", "Peru", "--k", "0"], "`k` must be an integer of at least 1: got 0"),
        (["--index", "INDEX"], "QUERY"),
        (["Peru"], "--index"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(index, arguments, message, capsys):
    assert main(["search", *(str(index) if argument == "INDEX" else argument for argument in arguments)]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert message in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_help_shows_examples(capsys):
    assert main(["search", "--help"]) == 0
    assert "grounded-rl search --index" in capsys.readouterr().out.partition("examples:")[2]
