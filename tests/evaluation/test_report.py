import json
import os

import pytest

from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.bootstrap import Interval
from grounded_rl.evaluation.comparison import compare, compare_runs
from grounded_rl.evaluation.markdown import format_difference, format_value, markdown_cell, markdown_table
from grounded_rl.evaluation.report import report_markdown, runs_markdown, write_report
from tests.builders import TYPE_SCRIPTS, make_rollout


def evaluation(types, kinds=("alpha", "beta")):
    return [
        make_rollout(TYPE_SCRIPTS[letter], question_id=f"q{number}", question_kind=kinds[number % len(kinds)])
        for number, letter in enumerate(types)
    ]


BEFORE, AFTER = evaluation("CCBADC"), evaluation("ACAADA")


def cells(text, label):
    """Cells of the first table row whose first cell contains `label`."""
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|")
    return next(row for row in rows if label in row[0])


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "runs" / "report.md"
    write_report(
        path,
        before=BEFORE,
        after=AFTER,
        run={"policy": "tiny_atlas", "recipe": "recipes/atlas/gca.yaml", "seed": 7},
        files={"Rollouts after training": "rollouts.jsonl"},
        log_history=[{"step": step, "reward": 0.1 * step} for step in range(5)],
    )
    return path


def test_the_report_states_values_difference_interval_and_n(report):
    text = report.read_text(encoding="utf-8")
    # Right before: q3, q4 of 6. After: q0, q2, q3, q4, q5 of 6.
    assert cells(text, "EM")[1:3] == ["33.3 %", "83.3 %"]
    assert cells(text, "EM")[3].startswith("+50.0 [")
    assert "n = 6 questions" in text
    assert "difference [95 % interval]" in text


def test_the_report_says_what_was_run_and_where_the_files_are(report):
    text = report.read_text(encoding="utf-8")
    assert cells(text, "policy")[1] == "tiny_atlas"
    assert cells(text, "seed")[1] == "7"
    assert cells(text, "torch")[1][0].isdigit()
    assert "Rollouts after training: rollouts.jsonl" in text
    assert "report.json" in text


def test_the_report_has_the_transition_matrix_and_the_kinds(report):
    text = report.read_text(encoding="utf-8")
    assert cells(text, "before C") == ["**before C**", "2", "0", "1", "0"]
    # alpha: q0, q2, q4; right before q4, after all three
    assert cells(text, "alpha")[:4] == ["alpha", "3", "33.3 %", "100.0 %"]


def test_every_figure_it_shows_is_a_png_beside_it(report):
    text = report.read_text(encoding="utf-8")
    for name in ("report_metrics.png", "report_types.png", "report_training.png"):
        assert f"]({name})" in text
        assert (report.parent / name).read_bytes().startswith(b"\x89PNG")


def test_the_json_holds_the_numbers_of_the_page(report):
    record = json.loads(report.with_suffix(".json").read_text(encoding="utf-8"))
    comparison = compare(BEFORE, AFTER)
    assert record["schema"] == 1
    assert record["before"]["em"] == comparison.before["em"]
    assert record["intervals"]["em"]["low"] == comparison.intervals["em"].low
    assert record["kinds"]["alpha"]["after"]["em"] == 1.0
    assert record["transitions"] == [list(row) for row in comparison.transitions]
    assert record["run"]["recipe"] == "recipes/atlas/gca.yaml"


def test_undefined_numbers_are_a_dash_on_the_page_and_null_in_the_json(tmp_path):
    path = tmp_path / "report.md"
    write_report(path, before=evaluation("CC"), after=evaluation("AA"))
    assert cells(path.read_text(encoding="utf-8"), "HitAcc")[1:] == ["–", "100.0 %", "–"]
    text = path.with_suffix(".json").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert json.loads(text)["before"]["hit_acc"] is None


def test_nothing_is_left_beside_the_report_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "report.md"
    path.write_text("the old report", encoding="utf-8")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(path, before=BEFORE, after=AFTER)
    assert [item.name for item in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text(encoding="utf-8") == "the old report"


def test_only_intervals_without_zero_are_bold():
    text = report_markdown(compare(evaluation("CCCCCCCC"), evaluation("AAAAAAAC"), num_resamples=300))
    assert cells(text, "EM")[0] == "**EM**"
    assert cells(text, "Cut by the token budget")[0] == "Cut by the token budget"


def test_one_kind_of_question_has_no_table_of_kinds():
    comparison = compare(evaluation("AB", ["alpha"]), evaluation("AA", ["alpha"]), num_resamples=20)
    assert "## By kind" not in report_markdown(comparison)


def test_a_report_must_be_markdown(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`path` must end in `.md`: got .*report.txt"):
        write_report(tmp_path / "report.txt", before=BEFORE, after=AFTER)


def test_questions_left_out_are_admitted():
    after = [*AFTER[:-1], make_rollout("right", question_id="q5", question_kind="beta", error="index gone")]
    assert "1 questions were left out" in report_markdown(compare(BEFORE, after, num_resamples=20))


def test_values_read_as_people_read_them():
    assert format_value("em", 0.4567) == "45.7 %"
    assert format_value("num_turns", 2.345) == "2.35"
    assert format_value("hit_acc", float("nan")) == "–"
    assert format_difference("em", Interval(0.1, -0.0004, 0.2, 9)) == "+10.0 [+0.0, +20.0]"
    assert format_difference("num_turns", Interval(-0.5, -1.0, 0.25, 9)) == "-0.50 [-1.00, +0.25]"


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a|b", r"a\|b"),
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("two\nlines", "two lines"),
        ("tiny_atlas_2", "tiny_atlas_2"),
        ("_slanted_ **bold** `code`", r"\_slanted\_ \*\*bold\*\* \`code\`"),
        ("[link](javascript:x)", r"\[link\](javascript:x)"),
        ("R&D", "R&amp;D"),
        ("\x1b[31mred", "␛\\[31mred"),
    ],
)
def test_cells_cannot_break_out_of_their_table(text, cell):
    assert markdown_cell(text) == cell


def test_table_sources_are_aligned():
    assert markdown_table(["name", "n"], [["a", "1"], ["longer", "1000"]]).splitlines() == [
        "| name   |    n |",
        "| ------ | ---: |",
        "| a      |    1 |",
        "| longer | 1000 |",
    ]


def test_runs_side_by_side_give_differences_only_where_questions_agree():
    runs = {"grpo": BEFORE, "gca": AFTER, "elsewhere": evaluation("AA")}
    text = runs_markdown(compare_runs(runs, num_resamples=200))
    header, *_ = (line for line in text.splitlines() if line.startswith("| metric"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["metric", "grpo", "gca", "elsewhere"]
    assert cells(text, "EM")[2].startswith("83.3 % [")
    assert cells(text, "Questions")[1:] == ["6", "6", "2"]
    assert "## Difference to grpo" in text
    assert "No difference for elsewhere" in text
    difference = text[text.index("## Difference") :]
    assert cells(difference, "EM")[1].startswith("+50.0 [")
