"""Rollouts and trees of them as JSON Lines: one record a line, each with its schema version."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TextIO

from grounded_rl.errors import RolloutError
from grounded_rl.rollouts.tree import Candidate, Leaf, Node, RolloutTree, Selection
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
TREE_SCHEMA = "tree/1"
"""Schema of a line that holds a whole tree."""


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


def tree_to_record(tree: RolloutTree) -> dict:
    """JSON-serialisable record of a tree; `tree_from_record` inverts it. A candidate set is written once per round."""
    record = {"schema": TREE_SCHEMA, **asdict(tree)}
    record["candidates"] = {str(choice["round"]): choice.pop("candidates") for choice in record["selections"]}
    return record


def _node_from_record(record: dict) -> Node:
    turn = record["turn"]
    return Node(**{**record, "turn": None if turn is None else _turn_from_record(turn)})


def _selection_from_record(record: dict, candidates: dict[str, tuple[Candidate, ...]]) -> Selection:
    return Selection(
        **{**record, "candidates": candidates[str(record["round"])], "fresh": _tuple_field(record, "fresh")}
    )


def tree_from_record(record: dict) -> RolloutTree:
    """
    Tree of a record written by `tree_to_record`.

    Raises:
        `RolloutError`: If the schema is another one, a field is missing, or an invariant is broken.
    """
    if record.get("schema") != TREE_SCHEMA:
        raise RolloutError(
            f"`schema` must be {TREE_SCHEMA!r}: got {record.get('schema')!r}. Read the file with `load_rollouts`."
        )
    values = {name: value for name, value in record.items() if name not in ("schema", "candidates")}
    try:
        candidates = {
            number: tuple(Candidate(**{**entry, "leaves": _tuple_field(entry, "leaves")}) for entry in entries)
            for number, entries in record["candidates"].items()
        }
        for name in ("answers", "prompt_ids"):
            values[name] = _tuple_field(values, name)
        values["nodes"] = tuple(_node_from_record(node) for node in _tuple_field(values, "nodes"))
        values["leaves"] = tuple(
            Leaf(**{**leaf, "stop": StopReason(leaf["stop"])}) for leaf in _tuple_field(values, "leaves")
        )
        selections = _tuple_field(values, "selections")
        values["selections"] = tuple(_selection_from_record(choice, candidates) for choice in selections)
        return RolloutTree(**values)
    except RolloutError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RolloutError(
            f"a tree record must have the fields of `RolloutTree` ({', '.join(f.name for f in fields(RolloutTree))}) "
            f"and `candidates`: got {error!r}. Check the line against the documented schema."
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
    return _write_records(path, (rollout_to_record(rollout) for rollout in rollouts), append=append)


def save_trees(path: str | os.PathLike, trees: Iterable[RolloutTree], *, append: bool = False) -> int:
    """
    Write trees as JSON Lines, one tree a line; `load_rollouts` reads their leaves, `load_trees` the trees.

    Args:
        path (`str` or `PathLike`):
            Target file. Parent folders are created.
        trees (`Iterable[RolloutTree]`):
            Records to write.
        append (`bool`, *optional*, defaults to `False`):
            Add to the file instead of replacing it. Without it the file is replaced atomically.

    Returns:
        `int`: Number of trees written.
    """
    return _write_records(path, (tree_to_record(tree) for tree in trees), append=append)


def _line(record: dict) -> str:
    """One line of JSON, readable where it can be; policies write half surrogate pairs, which UTF-8 cannot hold."""
    text = json.dumps(record, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(record)
    return text + "\n"


def _write_records(path: str | os.PathLike, records: Iterable[dict], *, append: bool) -> int:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [_line(record) for record in records]
    if append:
        with path.open("a", encoding="utf-8") as stream:
            stream.writelines(lines)
        return len(lines)
    with _replaced(path) as stream:
        stream.writelines(lines)
    return len(lines)


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    """A stream whose text takes the place of the file when the block ends; if it raises, the file stays as it was."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            yield stream
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def drop_records_from(path: str | os.PathLike, step: int) -> None:
    """
    Keep the records of a run's earlier steps, of rollouts and of trees, and nothing else.

    Args:
        path (`str` or `PathLike`):
            File of a run. An incomplete last line, which a killed run leaves, is dropped too.
        step (`int`):
            First step that is dropped.
    """
    path = Path(path)
    with path.open(encoding="utf-8") as stream, _replaced(path) as kept:
        for line in stream:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("step", record.get("extras", {}).get("step", step)) < step:
                kept.write(line)


def _iterate_records(path: str | os.PathLike) -> Iterator[tuple[int, dict]]:
    """Records of a file with the numbers of their lines; blank lines are skipped."""
    with Path(path).open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise RolloutError(f"{path}, line {number}: {error}") from error
            if not isinstance(record, dict):
                raise RolloutError(
                    f"{path}, line {number}: a line must hold one JSON object: got {type(record).__name__}."
                )
            yield number, record


def iterate_rollouts(path: str | os.PathLike) -> Iterator[Rollout]:
    """Rollouts of a JSON Lines file, one at a time; see `load_rollouts`."""
    for number, record in _iterate_records(path):
        try:
            found = (
                tree_from_record(record).rollouts()
                if record.get("schema") == TREE_SCHEMA
                else [rollout_from_record(record)]
            )
        except ValueError as error:
            raise RolloutError(f"{path}, line {number}: {error}") from error
        yield from found


def load_rollouts(path: str | os.PathLike) -> list[Rollout]:
    """
    Read rollouts written by `save_rollouts`, or the leaves of trees written by `save_trees`.

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


def load_trees(path: str | os.PathLike) -> list[RolloutTree]:
    """
    Read trees written by `save_trees`, with their selection records.

    Args:
        path (`str` or `PathLike`):
            JSON Lines file.

    Returns:
        `list[RolloutTree]`: The trees in file order. Lines that hold single rollouts are passed over.

    Raises:
        `RolloutError`: If a tree record breaks an invariant; the message names file and line.
        `FileNotFoundError`: If the file does not exist.
    """
    trees = []
    for number, record in _iterate_records(path):
        if record.get("schema") != TREE_SCHEMA:
            continue
        try:
            trees.append(tree_from_record(record))
        except ValueError as error:
            raise RolloutError(f"{path}, line {number}: {error}") from error
    return trees
