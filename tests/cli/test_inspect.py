"""`grounded-rl inspect` as a user meets it: filters, exports, and one line for every mistake."""

import argparse

import pytest

from grounded_rl.cli import inspect
from grounded_rl.cli._parser import CommandParser
from grounded_rl.errors import ConfigurationError, GroundedRLError, MissingDependencyError, RolloutError
from grounded_rl.rollouts import save_rollouts
from tests.builders import TYPE_SCRIPTS, make_passage, make_rollout, search_turn


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    rollouts = [
        make_rollout(script, question_id=f"q{letter}", question=f"Question {letter}?", question_kind=kind)
        for (letter, script), kind in zip(TYPE_SCRIPTS.items(), ["single", "multi", "single", "multi"], strict=True)
    ]
    save_rollouts(path, rollouts)
    return path


def run(*words):
    parser = CommandParser(prog="grounded-rl")
    inspect.add_parser(parser.add_subparsers())
    arguments = parser.parse_args(["inspect", *map(str, words)])
    return arguments.run(arguments)


def shown(capsys):
    text = capsys.readouterr().out
    return [letter for letter in "ABCD" if f"Question {letter}?" in text]


def test_all_rollouts_are_shown_by_default(file, capsys):
    assert run(file) == 0
    out = capsys.readouterr().out
    assert "4 shown, 4 match, 4 in the file" in out
    assert "evidence found, answer wrong" in out


@pytest.mark.parametrize(
    ("options", "letters"),
    [
        (["--type", "B"], "B"),
        (["--type", "a", "--type", "D"], "AD"),
        (["--kind", "multi"], "BD"),
        (["--kind", "multi", "--type", "D"], "D"),
        (["--id", "qC"], "C"),
        (["--limit", "2"], "AB"),
        (["--kind", "multi", "--limit", "1"], "B"),
        (["--kind", "multi", "--type", "A"], ""),
    ],
)
def test_filters_keep_what_passes_all_of_them(file, capsys, options, letters):
    assert run(file, *options) == 0
    assert shown(capsys) == list(letters)


def test_the_default_limit_says_that_there_is_more(tmp_path, capsys):
    save_rollouts(tmp_path / "rollouts.jsonl", [make_rollout(question_id=f"q{number}") for number in range(15)])
    assert run(tmp_path / "rollouts.jsonl") == 0
    assert "10 shown, 15 match, 15 in the file (raise `--limit` to see more)" in capsys.readouterr().out


def test_a_folder_stands_for_its_rollouts(file, capsys):
    assert run(file.parent) == 0
    assert shown(capsys) == list("ABCD")


def test_the_summary_covers_the_filtered_rollouts(file, capsys):
    assert run(file, "--summary", "--type", "A", "--type", "B") == 0
    out = capsys.readouterr().out
    em = next(line for line in out.splitlines() if line.split()[:1] == ["EM"])
    # one right of two; multi holds B, single holds A
    assert em.split() == ["EM", "50.0", "%", "0.0", "%", "100.0", "%"]


def test_the_page_holds_the_filtered_rollouts(file, tmp_path, capsys):
    out = tmp_path / "pages" / "page.html"
    assert run(file, "--html", out, "--kind", "multi") == 0
    page = out.read_text(encoding="utf-8")
    assert "Question B?" in page
    assert "Question A?" not in page
    assert capsys.readouterr().out == f"wrote 2 rollouts to {out}\n"


def test_credit_is_shaded_on_demand(tmp_path, capsys):
    turn = search_turn("Paris", advantages=[0.5, 0.5, 0.6])
    save_rollouts(tmp_path / "r.jsonl", [make_rollout([turn, "right"])])
    assert run(tmp_path / "r.jsonl", "--residual") == 0
    assert "advantage minus +0.5000" in capsys.readouterr().out
    assert run(tmp_path / "r.jsonl") == 0
    assert "advantage" not in capsys.readouterr().out


def test_full_shows_what_is_cut_otherwise(tmp_path, capsys):
    save_rollouts(tmp_path / "r.jsonl", [make_rollout([search_turn("word " * 2000 + "end."), "right"])])
    assert run(tmp_path / "r.jsonl") == 0
    assert "end." not in capsys.readouterr().out
    assert run(tmp_path / "r.jsonl", "--full") == 0
    assert "end." in capsys.readouterr().out


def test_hostile_rollouts_leave_the_terminal_alone(tmp_path, capsys):
    hostile = "[red]x[/nope] \x1b[2J\x1b]0;owned\x07 " + "y" * 100_000
    rollout = make_rollout([search_turn(hostile, query=hostile, text=hostile)], question=hostile, answer=hostile)
    save_rollouts(tmp_path / "r.jsonl", [rollout])
    assert run(tmp_path / "r.jsonl") == 0
    out = capsys.readouterr().out
    assert "[red]x[/nope]" in out
    assert "\x1b" not in out
    assert "\x07" not in out
    assert len(out) < 20_000


def message(error, *words):
    with pytest.raises(error) as caught:
        run(*words)
    text = " ".join(str(caught.value).split())
    assert "Traceback" not in text
    return text


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        run(tmp_path / "nowhere.jsonl")


def test_a_folder_without_rollouts_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"rollouts\.jsonl"):
        run(tmp_path)


def test_a_bad_line_is_named_with_its_number(file):
    file.write_text(file.read_text(encoding="utf-8") + "{not json}\n", encoding="utf-8")
    assert "rollouts.jsonl, line 5" in message(RolloutError, file)


@pytest.mark.parametrize("line", ["[]", "{}", '{"schema": 99}', "[" * 100_000])
def test_lines_that_are_no_rollout_are_refused(file, line):
    file.write_text(line + "\n", encoding="utf-8")
    assert "rollouts.jsonl" in message(GroundedRLError, file)


def test_numbers_in_place_of_texts_are_refused(tmp_path):
    rollout = make_rollout([search_turn(make_passage("Paris", passage_id=550)), "right"])
    save_rollouts(tmp_path / "r.jsonl", [make_rollout(), rollout])
    assert "must be strings: got 550 in rollout 2" in message(RolloutError, tmp_path / "r.jsonl")


def test_an_empty_file_is_refused(file):
    file.write_text("\n", encoding="utf-8")
    assert "must hold at least one rollout: got none" in message(ConfigurationError, file)


def test_an_unknown_kind_or_id_is_refused_with_what_there_is(file):
    assert "one of ['multi', 'single']: got 'mutli'" in message(ConfigurationError, file, "--kind", "mutli")
    assert "got 'q99'. The first one is 'qA'" in message(ConfigurationError, file, "--id", "q99")


def test_an_unknown_type_or_limit_is_refused(file):
    assert "--type" in message(ConfigurationError, file, "--type", "E")
    assert "`--limit` must be at least 1: got 0" in message(ConfigurationError, file, "--limit", "0")


def test_a_tokenizer_that_is_none_is_refused(file, tmp_path):
    pytest.importorskip("transformers", reason="needs the extra `train`")
    assert "`--tokenizer` must be" in message(ConfigurationError, file, "--credit", "--tokenizer", tmp_path)


def test_a_tokenizer_needs_its_extra(file, monkeypatch):
    def missing(package, extra, *, needed_by):
        raise MissingDependencyError(f"`{needed_by}` needs `{package}`: run `pip install 'grounded-rl[{extra}]'`.")

    monkeypatch.setattr("grounded_rl.import_utils.require", missing)
    assert "grounded-rl[train]" in message(MissingDependencyError, file, "--tokenizer", "x")


def test_help_has_an_example():
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    inspect.add_parser(subparsers)
    assert "grounded-rl inspect runs/gca/rollouts.jsonl --type B" in subparsers.choices["inspect"].format_help()
