"""JSON Lines of rollouts: round trips, atomic replacement, and bad files by line."""

from __future__ import annotations

import copy
import json
import os
import stat
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.errors import RolloutError
from grounded_rl.rollouts import (
    Call,
    CallStatus,
    FinishReason,
    Rollout,
    ShownPassage,
    StopReason,
    Turn,
    TurnKind,
    iterate_rollouts,
    load_rollouts,
    save_rollouts,
)
from grounded_rl.rollouts.io import SCHEMA_VERSION, rollout_from_record, rollout_to_record
from tests.builders import make_rollout

FULL = Rollout(
    question_id="q7",
    question="Où est né Kōbō Abe?",
    answers=("Tokyo", "東京"),
    prompt_ids=(5, 6),
    turns=(
        Turn(
            ids=(1, 2),
            text="<tool_call>…</tool_call>\n",
            kind=TurnKind.SEARCH,
            calls=(
                Call("abe", CallStatus.OK, (ShownPassage("p1", "Abe", "né à Tokyo", 3.5, 4, 9),), cached=True),
                Call(None, CallStatus.REJECTED, error="invalid_json"),
            ),
            logps=(-0.125, -2.5),
            observation_ids=(90,),
            observation="né à Tokyo\u2028\x00",
            advantages=(0.0, -1.0),
        ),
        Turn(ids=(3,), text="cut", kind=TurnKind.UNLABELLED, finish=FinishReason.LENGTH),
    ),
    stop=StopReason.LENGTH,
    answer=None,
    rewards={"exact_match": 0.0, "format": None},
    question_kind="birthplace",
    sample=3,
    extras={"step": 12, "index": "abc"},
)

text = st.text(max_size=20)
ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=5).map(tuple)


@st.composite
def turns(draw) -> Turn:
    tokens = draw(ids)
    per_token = st.none() | st.tuples(*(st.floats(-50, 50) for _ in tokens))
    passages = st.builds(ShownPassage, text, text, text, st.none() | st.floats(-9, 9), st.none() | st.integers(0, 99))
    calls = st.builds(
        Call,
        st.none() | text,
        st.sampled_from(CallStatus),
        st.lists(passages, max_size=2).map(tuple),
        st.none() | text,
    )
    return Turn(
        ids=tokens,
        text=draw(text),
        kind=draw(st.sampled_from(TurnKind)),
        finish=draw(st.sampled_from(FinishReason)),
        calls=tuple(draw(st.lists(calls, max_size=2))),
        logps=draw(per_token),
        observation_ids=draw(st.just(()) | ids),
        observation=draw(text),
        advantages=draw(per_token),
    )


@st.composite
def rollouts(draw) -> Rollout:
    stop = draw(st.sampled_from(StopReason))
    return Rollout(
        question_id=draw(text),
        question=draw(text),
        answers=tuple(draw(st.lists(text, max_size=3))),
        prompt_ids=draw(ids),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        stop=stop,
        answer=draw(st.none() | text),
        rewards=draw(st.dictionaries(text, st.none() | st.floats(-1, 1), max_size=2)),
        question_kind=draw(st.none() | text),
        sample=draw(st.integers(0, 99)),
        error="down" if stop is StopReason.FAILED else None,
        extras=draw(st.dictionaries(text, text | st.integers() | st.none(), max_size=2)),
    )


@settings(max_examples=60, deadline=None)
@given(rollouts())
def test_a_record_read_back_is_the_rollout(rollout):
    line = json.dumps(rollout_to_record(rollout), ensure_ascii=False)
    assert rollout_from_record(json.loads(line)) == rollout


def test_a_file_read_back_is_the_list(tmp_path):
    expected = [FULL, make_rollout("hit right"), make_rollout("miss", error="the server is down")]
    path = tmp_path / "new" / "folder" / "rollouts.jsonl"
    assert save_rollouts(path, iter(expected)) == 3
    assert load_rollouts(path) == expected
    assert len(path.read_text(encoding="utf-8").split("\n")) == 4


def test_text_is_written_readable_and_line_separators_inside_it_do_not_split_records(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [FULL])
    assert "Où est né Kōbō Abe?" in path.read_text(encoding="utf-8")
    assert load_rollouts(path)[0].turns[0].observation == "né à Tokyo\u2028\x00"


def test_every_line_states_the_schema_version(tmp_path):
    save_rollouts(tmp_path / "r.jsonl", [FULL, FULL])
    lines = (tmp_path / "r.jsonl").read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["schema"] for line in lines[:-1]] == [SCHEMA_VERSION] * 2


def test_append_adds_and_the_default_replaces(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [FULL])
    assert save_rollouts(path, [make_rollout()], append=True) == 1
    assert load_rollouts(path) == [FULL, make_rollout()]
    save_rollouts(path, [])
    assert load_rollouts(path) == []


def test_a_fault_while_writing_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [FULL])

    def broken():
        yield make_rollout()
        raise RuntimeError("the engine stopped")

    with pytest.raises(RuntimeError, match="the engine stopped"):
        save_rollouts(path, broken())
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_rollouts(path, [make_rollout(extras={"step": object()})])
    assert load_rollouts(path) == [FULL]
    assert os.listdir(tmp_path) == ["rollouts.jsonl"]


def test_a_written_file_has_the_permissions_of_any_other_file(tmp_path):
    (tmp_path / "plain").write_text("")
    save_rollouts(tmp_path / "rollouts.jsonl", [FULL])
    modes = {name: stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "rollouts.jsonl")}
    assert modes["rollouts.jsonl"] == modes["plain"]


def test_reading_is_lazy_and_skips_blank_lines(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [FULL])
    path.write_text("\n" + path.read_text(encoding="utf-8") + "  \n{broken\n", encoding="utf-8")
    stream = iterate_rollouts(path)
    assert next(stream) == FULL
    with pytest.raises(RolloutError, match="line 4: "):
        next(stream)


def damaged(*path: str | int, value: object = ..., rename: str | None = None) -> dict:
    """The full record with one entry replaced, renamed, or (without a value) removed."""
    record = copy.deepcopy(json.loads(json.dumps(rollout_to_record(FULL))))
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    old = inner.pop(path[-1]) if not isinstance(inner, list) else inner[path[-1]]
    if rename is not None:
        inner[rename] = old
    elif value is not ...:
        inner[path[-1]] = value
    return record


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (damaged("schema"), "`schema` must be 1: got None. Convert the file"),
        (damaged("schema", value=2), "`schema` must be 1: got 2"),
        (damaged("schema", value="1"), "`schema` must be 1: got '1'"),
        (damaged("question"), "must have the fields of `Rollout`: got .*question"),
        (damaged("turns"), "must have the fields of `Rollout`: got KeyError"),
        (damaged("turns", value=None), "`turns` must be a list: got None"),
        (damaged("turns", value=[3]), "must have the fields of `Rollout`"),
        (damaged("answers", value="Tokyo"), "`answers` must be a list: got 'Tokyo'"),
        (damaged("prompt_ids", value="56"), "`prompt_ids` must be a list: got '56'"),
        (damaged("answer", rename="final_answer"), "got .*final_answer"),
        (damaged("stop", value="bored"), "got .*'bored' is not a valid StopReason"),
        (damaged("stop", value="failed"), "`error` must be given exactly when"),
        (damaged("turns", 0, "ids"), "got KeyError"),
        (damaged("turns", 0, "ids", value=[]), "`ids` must hold at least one sampled token"),
        (damaged("turns", 0, "ids", value="12"), "`ids` must be a list: got '12'"),
        (damaged("turns", 0, "logps", value=[0.5]), r"`logps` must have one entry per sampled token \(2\): got 1"),
        (damaged("turns", 0, "logps", rename="logprobs"), "got .*logprobs"),
        (damaged("turns", 0, "kind", value="think"), "got .*'think' is not a valid TurnKind"),
        (damaged("turns", 0, "calls", 0, "status", value="lost"), "got .*'lost' is not a valid CallStatus"),
        (damaged("turns", 0, "calls", 0, "query"), "got .*query"),
        (damaged("turns", 0, "calls", 0, "passages", 0, "title"), "got .*title"),
        (damaged("turns", 0, "calls", 0, "passages", 0, "text", rename="body"), "got .*body"),
    ],
)
def test_a_damaged_record_names_file_line_and_cause(tmp_path, record, message):
    path = tmp_path / "rollouts.jsonl"
    save_rollouts(path, [FULL])
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(record) + "\n")
    with pytest.raises(RolloutError, match=rf"rollouts\.jsonl, line 2: .*{message}"):
        load_rollouts(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: Expecting"),
        ("[1, 2]", "line 1: a line must hold one JSON object: got list"),
        ("null", "line 1: a line must hold one JSON object: got NoneType"),
        ("{}", "line 1: `schema` must be 1: got None"),
        ('{"schema": 1}', "line 1: a rollout record must have the fields"),
    ],
)
def test_a_line_that_is_no_record_is_refused(tmp_path, line, message):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(RolloutError, match=message):
        load_rollouts(path)


def test_a_missing_file_and_a_file_of_another_encoding_keep_their_standard_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_rollouts(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "Caf\xe9"}\n')
    with pytest.raises(UnicodeDecodeError):
        load_rollouts(tmp_path / "latin.jsonl")


def test_half_a_surrogate_pair_in_a_query_is_written_and_read_back(tmp_path):
    rollout = make_rollout("hit right")
    turn = replace(rollout.turns[0], text="\ud83d", calls=(replace(rollout.turns[0].calls[0], query="\ud83d"),))
    rollout = replace(rollout, turns=(turn, *rollout.turns[1:]))
    save_rollouts(tmp_path / "rollouts.jsonl", [rollout])
    assert load_rollouts(tmp_path / "rollouts.jsonl") == [rollout]
