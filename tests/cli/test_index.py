from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from grounded_rl.cli import main
from grounded_rl.retrieval import Passage
from tests.retrieval import contract


@pytest.fixture
def corpus(tmp_path) -> Path:
    return contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)


@pytest.fixture
def index(corpus, capsys) -> Path:
    folder = corpus.parent / "index"
    assert main(["index", "build", "--corpus", str(corpus), "--out", str(folder)]) == 0
    capsys.readouterr()
    return folder


def assert_refused(capsys, arguments: list[object], message: str) -> None:
    """The command exits with 2, prints one line on the error stream and nothing else."""
    assert main([str(argument) for argument in arguments]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert message in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_build_says_what_it_made_and_where(corpus, capsys):
    folder = corpus.parent / "index"
    assert main(["index", "build", "--corpus", str(corpus), "--out", str(folder)]) == 0
    output, errors = capsys.readouterr()
    assert output.startswith(f"Indexed {len(contract.PASSAGES)} passages in ")
    assert str(folder) in output
    assert output.count("\n") == 1
    assert errors == ""
    assert json.loads((folder / "manifest.json").read_text())["num_passages"] == len(contract.PASSAGES)


def test_build_replaces_an_index_only_if_asked(index, corpus, capsys):
    build = ["index", "build", "--corpus", corpus, "--out", index]
    assert_refused(capsys, build, "replace it with `--overwrite`")
    assert main([str(argument) for argument in [*build, "--overwrite", "--threads", 2]]) == 0


def test_build_refuses_what_it_cannot_index(corpus, capsys):
    folder = corpus.parent / "index"
    build = ["index", "build", "--out", folder, "--corpus"]
    assert_refused(capsys, [*build, corpus, "--backend", "lucene"], "`backend` must be one of `bm25`")
    assert_refused(capsys, [*build, corpus, "--threads", 0], "`num_threads` must be at least 1: got 0")
    assert_refused(capsys, [*build, "absent.jsonl"], "No such file or directory")
    bad = corpus.with_name("bad.jsonl")
    bad.write_text('{"id": 1, "text": "x"}\n{"id": 1, "text": "x"}\n')
    assert_refused(capsys, [*build, bad], "line 2: `id` must be unique: got '1', used on line 1")
    bad.write_text("")
    assert_refused(capsys, [*build, bad], "must hold at least one passage")
    assert not folder.exists()


def test_case_r17_build_refuses_a_question_file(tmp_path, capsys):
    questions = tmp_path / "train.jsonl"
    questions.write_text('{"id": 1, "question": "Capital of Peru?", "golden_answers": ["Lima"]}\n')
    arguments = ["index", "build", "--corpus", questions, "--out", tmp_path / "index"]
    assert_refused(capsys, arguments, "must not carry answer fields: got `golden_answers`, `question`")


def test_info_prints_the_manifest_as_json(index, capsys):
    assert main(["index", "info", str(index)]) == 0
    shown = json.loads(capsys.readouterr().out)
    written = json.loads((index / "manifest.json").read_text())
    files = written.pop("files")
    assert shown.pop("num_bytes") == sum((index / name).stat().st_size for name in files)
    assert shown == written


def test_info_and_verify_refuse_a_folder_that_is_no_index(tmp_path, capsys):
    for action in ("info", "verify"):
        assert_refused(capsys, ["index", action, tmp_path], "must be the folder of an index")


def test_verify_passes_an_intact_index_of_the_corpus(index, corpus, capsys):
    assert main(["index", "verify", str(index), "--corpus", str(corpus)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["files", "passages", "known", "corpus"]
    assert all(" ok: " in line for line in lines)


def test_verify_refuses_another_corpus(index, corpus, capsys):
    contract.write_corpus(corpus, contract.PASSAGES[::-1])
    assert main(["index", "verify", str(index), "--corpus", str(corpus)]) == 2
    output, errors = capsys.readouterr()
    assert "corpus" not in output
    assert f"must hold the passages `{index}` was built from" in errors
    assert errors.count("\n") == 1


def test_verify_finds_a_changed_byte(index, capsys):
    path = max((index / "tantivy").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert_refused(capsys, ["index", "verify", index], "must have sha256")


def test_case_r03_verify_refuses_an_index_that_cannot_tell_passages_apart(tmp_path, capsys):
    # Every passage opens alike, so its own words find others: the self-test must notice.
    passages = [Passage(str(row), "Page", f"{'the same start ' * 5} {row}") for row in range(50)]
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", passages)
    assert main(["index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "index")]) == 0
    assert main(["index", "verify", str(tmp_path / "index")]) == 2
    assert "must find at least 90% of sampled passages by their own words: got 6% of 50" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["build", "info", "verify"])
def test_help_shows_an_example(action, capsys):
    assert main(["index", action, "--help"]) == 0
    assert f"grounded-rl index {action} " in capsys.readouterr().out.partition("example")[2]


def test_help_loads_no_backend():
    script = (
        "import sys\n"
        "from grounded_rl.cli import main\n"
        "main(['index', 'build', '--help'])\n"
        "assert not {'tantivy', 'torch', 'tqdm', 'rich', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, cwd=Path(__file__).parents[2])
