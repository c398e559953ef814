"""Dataset rows: questions with gold answers, read strictly from JSON Lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from grounded_rl.errors import ConfigurationError

_REQUIRED = ("id", "question", "answers")


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a dataset."""

    id: str
    question: str
    answers: tuple[str, ...]
    """Gold answers; any of them is right."""
    evidence: tuple[str, ...] = ()
    """Ids of the passages the answer follows from, in the order they are needed; empty when unknown."""
    hops: int | None = None
    kind: str | None = None


def question_from_record(record: object) -> Question:
    """
    Question of a JSON object with the columns `id, question, answers[, evidence, hops, kind]`.

    `golden_answers` (the name FlashRAG and Search-R1 use) is read as `answers`; other columns are ignored.

    Raises:
        `ConfigurationError`: If a column is missing or has another type.
    """
    if not isinstance(record, dict):
        raise ConfigurationError(
            f"a question row must be a JSON object: got {type(record).__name__}. Write every row as one object."
        )
    if "answers" not in record and "golden_answers" in record:
        record = {**record, "answers": record["golden_answers"]}
    missing = [name for name in _REQUIRED if name not in record]
    if missing:
        raise ConfigurationError(
            f"a question row must have the columns {', '.join(f'`{name}`' for name in _REQUIRED)}: got "
            f"{', '.join(f'`{name}`' for name in record) or 'none'}. Add {', '.join(f'`{name}`' for name in missing)}."
        )
    answers = record["answers"]
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise ConfigurationError(
            f"`answers` must be a non-empty list of strings: got {answers!r}. Give every accepted form of the answer."
        )
    if not isinstance(record["question"], str) or not record["question"].strip():
        raise ConfigurationError(
            f"`question` must be a non-blank string: got {record['question']!r}. Drop the row or write the question."
        )
    if not isinstance(record["id"], str | int) or record["id"] == "":
        raise ConfigurationError(f"`id` must be a text or a number: got {record['id']!r}. Number the rows.")
    evidence = record.get("evidence") or []
    if not isinstance(evidence, list | tuple):
        raise ConfigurationError(f"`evidence` must be a list of passage ids: got {evidence!r}. Write it as a list.")
    return Question(
        id=str(record["id"]),
        question=record["question"],
        answers=tuple(answers),
        evidence=tuple(str(passage) for passage in evidence),
        hops=record.get("hops"),
        kind=record.get("kind"),
    )


def load_questions(path: str | os.PathLike, *, limit: int | None = None) -> list[Question]:
    """
    Read questions from JSON Lines.

    Args:
        path (`str` or `PathLike`):
            File with one JSON object a line.
        limit (`int`, *optional*):
            Keep only the first rows.

    Returns:
        `list[Question]`: The questions in file order.

    Raises:
        `ConfigurationError`: If the file is missing, empty, or a line breaks a rule; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigurationError(f"`{path}` must be a file of questions: no such file. Check the path.")
    if limit is not None and limit < 1:
        raise ConfigurationError(f"`limit` must be at least 1: got {limit}. Leave it out to read every question.")
    try:
        questions = _read(path, limit)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"`{path}` must be UTF-8 text: {error}. Unpack or convert the file.") from None
    if not questions:
        raise ConfigurationError(f"`{path}` must hold at least one question: got an empty file. Check the path.")
    return questions


def _read(path: Path, limit: int | None) -> list[Question]:
    questions: list[Question] = []
    seen: dict[str, int] = {}
    with path.open(encoding="utf-8-sig") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                question = question_from_record(json.loads(line))
            except json.JSONDecodeError as error:
                raise ConfigurationError(
                    f"{path}, line {number}: a line must hold one JSON object: {error}. Correct the line."
                ) from None
            except ConfigurationError as error:
                raise ConfigurationError(f"{path}, line {number}: {error}") from None
            if question.id in seen:
                raise ConfigurationError(
                    f"{path}, line {number}: `id` must be unique: got {question.id!r}, also on line "
                    f"{seen[question.id]}. Rename or drop one row."
                )
            seen[question.id] = number
            questions.append(question)
            if len(questions) == limit:
                break
    return questions


def write_json_lines(path: str | os.PathLike, records: Iterable[dict]) -> int:
    """Write records as JSON Lines, atomically and with unescaped Unicode; returns their number."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            for record in records:
                stream.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def save_questions(path: str | os.PathLike, questions: Iterable[Question]) -> int:
    """Write questions as JSON Lines, atomically; returns their number."""
    return write_json_lines(path, (asdict(question) for question in questions))
