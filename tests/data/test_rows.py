"""Question files: what is read, and every way in which a row is refused."""

from __future__ import annotations

import json

import pytest

from grounded_rl.data import Question, load_questions, save_questions
from grounded_rl.data.rows import question_from_record, write_json_lines
from grounded_rl.errors import ConfigurationError

GOOD = {"id": "a", "question": "Who?", "answers": ["x", "y"]}


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return path


def test_a_row_keeps_its_optional_columns_and_ignores_others():
    record = {**GOOD, "evidence": ["p1", 2], "hops": 2, "kind": "bridge", "metadata": {"x": 1}}
    assert question_from_record(record) == Question("a", "Who?", ("x", "y"), ("p1", "2"), 2, "bridge")
    assert question_from_record({**GOOD, "evidence": None}) == Question("a", "Who?", ("x", "y"))


def test_golden_answers_are_answers_unless_answers_are_given():
    record = {"id": 3, "question": "Who?", "golden_answers": ["z"]}
    assert question_from_record(record) == Question("3", "Who?", ("z",))
    assert question_from_record({**record, "answers": ["x"]}).answers == ("x",)


@pytest.mark.parametrize(
    ("record", "match"),
    [
        ([GOOD], "a question row must be a JSON object: got list"),
        ("text", "a question row must be a JSON object: got str"),
        ({}, "must have the columns `id`, `question`, `answers`: got none. Add `id`, `question`, `answers`"),
        ({"id": 1, "question": "Who?"}, "got `id`, `question`. Add `answers`"),
        ({**GOOD, "answers": []}, r"`answers` must be a non-empty list of strings: got \[\]"),
        ({**GOOD, "answers": "x"}, "`answers` must be a non-empty list of strings: got 'x'"),
        ({**GOOD, "answers": ["x", 5]}, r"`answers` must be a non-empty list of strings: got \['x', 5\]"),
        ({**GOOD, "answers": None}, "`answers` must be a non-empty list of strings: got None"),
        ({**GOOD, "question": "  "}, "`question` must be a non-blank string: got '  '"),
        ({**GOOD, "question": None}, "`question` must be a non-blank string: got None"),
        ({**GOOD, "evidence": "p1"}, "`evidence` must be a list of passage ids: got 'p1'"),
        ({**GOOD, "id": None}, "`id` must be a text or a number: got None"),
        ({**GOOD, "id": ["a"]}, r"`id` must be a text or a number: got \['a'\]"),
    ],
)
def test_a_row_of_another_form_is_refused(record, match):
    with pytest.raises(ConfigurationError, match=match):
        question_from_record(record)


def test_a_file_round_trips(tmp_path):
    questions = [
        Question("a", 'Where is "São Tomé"?\n', ("são tomé", "東京"), ("p1", "p2"), 2, "city"),
        Question("b", "Why?", ("x",)),
    ]
    path = tmp_path / "deep" / "folder" / "questions.jsonl"
    assert save_questions(path, questions) == 2
    assert load_questions(path) == questions
    # Readable as text, and nothing else is left in the folder.
    assert "São Tomé" in path.read_text("utf-8")
    assert [entry.name for entry in path.parent.iterdir()] == ["questions.jsonl"]


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\ufeff" + json.dumps(GOOD) + "\n\n  \n" + json.dumps({**GOOD, "id": "b"}), "utf-8")
    assert [question.id for question in load_questions(path)] == ["a", "b"]


def test_a_limit_keeps_the_first_rows_and_reads_no_further(tmp_path):
    path = write(tmp_path / "q.jsonl", GOOD, {**GOOD, "id": "b"}, "not json")
    assert [question.id for question in load_questions(path, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        (["{oops"], r"q\.jsonl, line 1: a line must hold one JSON object"),
        ([GOOD, '"text"'], r"q\.jsonl, line 2: a question row must be a JSON object: got str"),
        ([GOOD, "", {"id": "b"}], r"q\.jsonl, line 3: a question row must have the columns"),
        ([GOOD, {**GOOD, "question": "Else?"}], r"q\.jsonl, line 2: `id` must be unique: got 'a', also on line 1"),
        ([{**GOOD, "id": 1}, {**GOOD, "id": "1"}], r"line 2: `id` must be unique: got '1'"),
        ([""], r"q\.jsonl` must hold at least one question: got an empty file"),
    ],
)
def test_errors_of_a_file_name_the_line(tmp_path, lines, match):
    with pytest.raises(ConfigurationError, match=match) as caught:
        load_questions(write(tmp_path / "q.jsonl", *lines))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b"\x1f\x8b\x08\x00\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"q\.jsonl` must be UTF-8 text"):
        load_questions(path)


def test_missing_files_and_wrong_limits_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"nowhere` must be a file of questions: no such file"):
        load_questions(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"must be a file of questions"):
        load_questions(tmp_path)
    with pytest.raises(ConfigurationError, match=r"`limit` must be at least 1: got 0"):
        load_questions(write(tmp_path / "q.jsonl", GOOD), limit=0)


def test_an_interrupted_write_leaves_the_old_file(tmp_path):
    path = write(tmp_path / "q.jsonl", GOOD)
    kept = path.read_bytes()

    def broken():
        yield {"id": "new"}
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_json_lines(path, broken())
    assert path.read_bytes() == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["q.jsonl"]


def test_written_files_have_ordinary_permissions(tmp_path):
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    save_questions(tmp_path / "q.jsonl", [Question("a", "Who?", ("x",))])
    assert (tmp_path / "q.jsonl").stat().st_mode == ordinary.stat().st_mode
