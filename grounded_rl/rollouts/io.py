"""Rollouts as JSON Lines: one record a line, each with its schema version."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from grounded_rl.errors import RolloutError
from grounded_rl.rollouts.types import (
    Call,
    CallStatus,
    FinishReason,
    Rollout,
    ShownPassage,
    StopReason,
    Turn,
    TurnKind,
)

SCHEMA_VERSION = 1


def rollout_to_record(rollout: Rollout) -> dict:
    """JSON-serialisable record of a rollout; `rollout_from_record` inverts it."""
    return {"schema": SCHEMA_VERSION, **asdict(rollout)}


def _tuple_field(record: dict, name: str) -> tuple:
    """Value of a list field; text would silently become a tuple of letters."""
    value = record[name]
    if not isinstance(value, list | tuple):
        raise RolloutError(f"`{name}` must be a list: got {value!r}. Write it as a JSON array.")
    return tuple(value)


def _call_from_record(record: dict) -> Call:
    passages = tuple(ShownPassage(**passage) for passage in record.get("passages", ()))
    return Call(**{**record, "status": CallStatus(record["status"]), "passages": passages})


def _turn_from_record(record: dict) -> Turn:
    fields = {name: value for name, value in record.items() if value is not None}
    fields["kind"] = TurnKind(fields["kind"])
    fields["finish"] = FinishReason(fields.get("finish", "stop"))
    fields["calls"] = tuple(_call_from_record(call) for call in fields.get("calls", ()))
    for name in {"ids", "logps", "observation_ids", "advantages"} & (fields.keys() | {"ids"}):
        fields[name] = _tuple_field(fields, name)
    return Turn(**fields)


def rollout_from_record(record: dict) -> Rollout:
    """
    Rollout of a record written by `rollout_to_record`.

    Raises:
        `RolloutError`: If the schema version is unknown, a field is missing, or an invariant is broken.
    """
    version = record.get("schema")
    if version != SCHEMA_VERSION:
        raise RolloutError(
            f"`schema` must be {SCHEMA_VERSION}: got {version!r}. Convert the file with the release that wrote it."
        )
    fields = {name: value for name, value in record.items() if name != "schema"}
    try:
        fields["answers"] = _tuple_field(fields, "answers")
        fields["prompt_ids"] = _tuple_field(fields, "prompt_ids")
        fields["turns"] = tuple(_turn_from_record(turn) for turn in _tuple_field(fields, "turns"))
        fields["stop"] = StopReason(fields["stop"])
        return Rollout(**fields)
    except RolloutError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"a rollout record must have the fields of `Rollout`: got {error!r}. "
            "Check the line against the documented schema."
        ) from error


def save_rollouts(path: str | os.PathLike, rollouts: Iterable[Rollout], *, append: bool = False) -> int:
    """
    Write rollouts as JSON Lines.

    Args:
        path (`str` or `PathLike`):
            Target file. Parent folders are created.
        rollouts (`Iterable[Rollout]`):
            Records to write.
        append (`bool`, *optional*, defaults to `False`):
            Add to the file instead of replacing it. Without it the file is replaced atomically.

    Returns:
        `int`: Number of rollouts written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(rollout_to_record(rollout), ensure_ascii=False) + "\n" for rollout in rollouts]
    if append:
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(lines)
        return len(lines)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.writelines(lines)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return len(lines)


def iterate_rollouts(path: str | os.PathLike) -> Iterator[Rollout]:
    """Rollouts of a JSON Lines file, one at a time; see `load_rollouts`."""
    with Path(path).open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise RolloutError(f"a line must hold one JSON object: got {type(record).__name__}.")
                yield rollout_from_record(record)
            except ValueError as error:
                raise RolloutError(f"{path}, line {number}: {error}") from error


def load_rollouts(path: str | os.PathLike) -> list[Rollout]:
    """
    Read rollouts written by `save_rollouts`.

    Args:
        path (`str` or `PathLike`):
            JSON Lines file.

    Returns:
        `list[Rollout]`: The rollouts in file order. Blank lines are skipped.

    Raises:
        `RolloutError`: If a line is not a rollout record; the message names file and line.
        `FileNotFoundError`: If the file does not exist.
    """
    return list(iterate_rollouts(path))
