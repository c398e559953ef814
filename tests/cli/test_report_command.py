"""`grounded-rl report` as a user meets it."""

from pathlib import Path

import pytest

from grounded_rl.cli import report
from grounded_rl.cli._parser import CommandParser
from grounded_rl.errors import ConfigurationError, RolloutError
from grounded_rl.rollouts import save_rollouts
from tests.builders import TYPE_SCRIPTS, make_rollout


def evaluation(folder, types, name="rollouts.jsonl"):
    save_rollouts(
        folder / name,
        [make_rollout(TYPE_SCRIPTS[letter], question_id=f"q{number}") for number, letter in enumerate(types)],
    )
    return folder


def run(*words):
    parser = CommandParser(prog="grounded-rl")
    report.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["report", "--num-resamples", "200", *map(str, words)])
    return arguments.run(arguments)


def row(text, label):
    line = next(line for line in text.splitlines() if line.startswith(f"| {label} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_runs_stand_side_by_side_with_differences_to_the_first(tmp_path, capsys):
    first, second = evaluation(tmp_path / "grpo", "CCBA"), evaluation(tmp_path / "gca", "ACAA")
    assert run(first, second) == 0
    out = capsys.readouterr().out
    assert row(out, "metric") == ["grpo", "gca"]
    assert [cell.split(" [")[0] for cell in row(out, "EM")] == ["25.0 %", "75.0 %"]
    assert row(out[out.index("## Difference to grpo") :], "EM")[0].startswith("+50.0 [")


def test_one_run_is_a_table_without_differences(tmp_path, capsys):
    assert run(evaluation(tmp_path / "gca", "AB")) == 0
    out = capsys.readouterr().out
    assert row(out, "Questions") == ["2"]
    assert "Difference" not in out


def test_files_and_other_names_can_be_read(tmp_path, capsys):
    evaluation(tmp_path / "run", "CC", name="before.jsonl")
    evaluation(tmp_path / "run", "AA", name="after.jsonl")
    assert run(tmp_path / "run" / "before.jsonl", tmp_path / "run" / "after.jsonl") == 0
    assert row(capsys.readouterr().out, "metric") == ["before.jsonl", "after.jsonl"]
    assert run(tmp_path / "run", "--file", "after.jsonl") == 0
    assert row(capsys.readouterr().out, "EM")[0].startswith("100.0 %")


def test_the_table_can_be_written_to_a_file(tmp_path, capsys):
    out = tmp_path / "new" / "table.md"
    assert run(evaluation(tmp_path / "gca", "AB"), "--out", out) == 0
    printed = capsys.readouterr().out
    assert printed == out.read_text(encoding="utf-8") + f"\nwrote {out}\n"


def test_names_are_as_long_as_they_must_be():
    names = report.run_names([Path("/r/grpo/eval"), Path("/r/gca/eval"), Path("/r/base")])
    assert names == ["grpo/eval", "gca/eval", "r/base"]
    assert report.run_names([Path("/r/a"), Path("/r/b")]) == ["a", "b"]


def test_a_run_named_twice_is_refused(tmp_path):
    folder = evaluation(tmp_path / "gca", "AB")
    with pytest.raises(ConfigurationError, match="`RUN` must name different runs"):
        run(folder, folder)


def test_a_folder_without_rollouts_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"`RUN` must hold `rollouts\.jsonl`: got .*empty"):
        run(tmp_path / "empty")


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run(tmp_path / "nowhere")


def test_a_bad_line_is_named(tmp_path):
    folder = evaluation(tmp_path / "gca", "A")
    (folder / "rollouts.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(RolloutError, match=r"rollouts\.jsonl, line 1"):
        run(folder)


def test_impossible_resamples_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="`num_resamples` must be at least 1: got 0"):
        run(evaluation(tmp_path / "gca", "A"), "--num-resamples", "0")
