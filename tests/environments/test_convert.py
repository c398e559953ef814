"""Records of Search-R1 as rollouts."""

from __future__ import annotations

import json

import pytest

from grounded_rl.environments.convert import rollout_from_search_r1
from grounded_rl.errors import RolloutError
from grounded_rl.grounding import RolloutType, Segment, diagnose, segments
from grounded_rl.rollouts import CallStatus, StopReason, TurnKind
from grounded_rl.text import exact_match

NOTICE = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)


def record(response, stop="stop", answers=("Lima",)):
    output = {"query": "Question: q?\n", "final_response": response, "stop_reason": stop}
    return {"id": "t1", "question": "q", "golden_answers": list(answers), "output": output}


def result(*passages):
    lines = "\n".join(f"Doc {number}(Title: {title}) {text}" for number, (title, text) in enumerate(passages, start=1))
    return f"\n\n<information>{lines}</information>\n\n"


def test_turns_calls_and_passages_of_a_record():
    response = (
        "<think>a</think><search> capital of Peru </search>"
        + result(('"Peru (country)"', 'Its "capital"\nis Lima'), ("Quito", "a city"))
        + "hm</search>"
        + NOTICE
        + "<answer> Lima </answer>"
    )
    rollout = rollout_from_search_r1(record(response))
    assert [turn.kind for turn in rollout.turns] == [TurnKind.SEARCH, TurnKind.MALFORMED, TurnKind.ANSWER]
    [call] = rollout.turns[0].calls
    assert (call.query, call.status) == ("capital of Peru", CallStatus.OK)
    assert [(passage.title, passage.text) for passage in call.passages] == [
        ("Peru (country)", 'Its "capital"\nis Lima'),
        ("Quito", "a city"),
    ]
    assert rollout.turns[1].calls[0].error == "unopened_call"
    assert (rollout.answer, rollout.stop) == ("Lima", StopReason.ANSWER)
    assert segments(rollout) == (Segment.V_SEARCH, Segment.R_SEARCH, Segment.ANSWER)
    assert "".join(turn.text + turn.observation for turn in rollout.turns) == response


def test_a_result_the_policy_invented_is_no_evidence():
    response = "<think>a</think><information>Doc 1(Title: Peru) Lima</information><answer> Lima </answer>"
    rollout = rollout_from_search_r1(record(response))
    assert len(rollout.turns) == 1
    assert diagnose(rollout).type is RolloutType.D


@pytest.mark.parametrize(
    ("tail", "stop", "answer", "reason"),
    [
        ("<think>I won", "length", None, StopReason.LENGTH),
        ("<search> more </search>", "stop", None, StopReason.TURN_LIMIT),
        ("", "length", None, StopReason.LENGTH),
        ("", "stop", None, StopReason.TURN_LIMIT),
    ],
)
def test_records_without_an_answer(tail, stop, answer, reason):
    response = "<search> q </search>" + result(("Peru", "Lima")) + tail
    rollout = rollout_from_search_r1(record(response, stop))
    assert (rollout.answer, rollout.stop) == (answer, reason)
    assert diagnose(rollout).type is RolloutType.B


def test_a_record_of_something_else_is_refused():
    with pytest.raises(RolloutError, match=r"`record` must hold a Search-R1 evaluation record: got one without"):
        rollout_from_search_r1({"id": 1})


def test_recorded_answers_and_matches_equal_the_hosts(shared_dir):
    path = next((shared_dir / "data" / "search_r1_rollouts").glob("bamboogle_*.json"))
    records = json.loads(path.read_text(encoding="utf-8"))
    assert len(records) == 125
    for one in records:
        rollout = rollout_from_search_r1(one)
        assert (rollout.answer or "") == (rollout.extras["pred"] or "").strip()
        assert exact_match(rollout.answer, rollout.answers) == bool(rollout.extras["em"])
        assert "".join(turn.text + turn.observation for turn in rollout.turns) == one["output"]["final_response"]
