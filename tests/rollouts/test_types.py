"""Rollouts as data: what the records refuse, and how token streams line up."""

from __future__ import annotations

import dataclasses

import pytest

from grounded_rl.errors import RolloutError
from grounded_rl.rollouts import FinishReason, Group, Rollout, StopReason, Turn, TurnKind
from tests.builders import answer_turn, cut_turn, make_group, make_rollout, search_turn

# prompt: 1 2 | turn 0: <3 4 5> observation 90 91 | turn 1: <6 7>            (< > sampled by the policy)
DRAWN = Rollout(
    question_id="q",
    question="Where?",
    answers=("Paris",),
    prompt_ids=(1, 2),
    turns=(
        Turn(ids=(3, 4, 5), text="…", kind=TurnKind.SEARCH, observation_ids=(90, 91), logps=(-0.3, -0.4, -0.5)),
        Turn(ids=(6, 7), text="…", kind=TurnKind.ANSWER, logps=(-0.6, -0.7)),
    ),
    stop=StopReason.ANSWER,
)


def test_the_stream_is_what_the_model_saw_after_the_prompt():
    assert DRAWN.completion_ids == [3, 4, 5, 90, 91, 6, 7]


def test_masks_turns_and_logps_line_up_with_the_stream():
    assert DRAWN.sampled_mask == [1, 1, 1, 0, 0, 1, 1]
    assert DRAWN.turn_ids == [0, 0, 0, -1, -1, 1, 1]
    assert DRAWN.logps == [-0.3, -0.4, -0.5, 0.0, 0.0, -0.6, -0.7]
    assert DRAWN.num_sampled_tokens == 5


def test_masks_come_from_where_ids_were_appended_and_not_from_their_values():
    same = Turn(ids=(0, 0), text="", kind=TurnKind.SEARCH, observation_ids=(0, 0, 0))
    rollout = dataclasses.replace(DRAWN, turns=(same, same))
    assert rollout.completion_ids == [0] * 10
    assert rollout.sampled_mask == [1, 1, 0, 0, 0, 1, 1, 0, 0, 0]


def test_one_turn_without_logps_leaves_the_rollout_without_any():
    silent = dataclasses.replace(DRAWN.turns[1], logps=None)
    assert dataclasses.replace(DRAWN, turns=(DRAWN.turns[0], silent)).logps is None


def test_a_rollout_without_turns_is_empty_and_has_no_logps():
    failed = dataclasses.replace(DRAWN, turns=(), stop=StopReason.FAILED, error="the server is down")
    assert (failed.completion_ids, failed.sampled_mask, failed.turn_ids) == ([], [], [])
    assert failed.logps is None
    assert failed.num_sampled_tokens == 0


def test_never_scored_and_scored_without_signal_are_different():
    assert answer_turn("Paris").advantages is None
    assert answer_turn("Paris", advantages=(0.0, 0.0)).advantages == (0.0, 0.0)


def test_a_turn_without_sampled_tokens_is_refused():
    with pytest.raises(RolloutError, match="`ids` must hold at least one sampled token: got none. Drop the turn"):
        Turn(ids=(), text="", kind=TurnKind.ANSWER)


@pytest.mark.parametrize("field", ["logps", "advantages"])
@pytest.mark.parametrize("values", [(), (0.1,), (0.1, 0.2, 0.3)])
def test_values_of_a_turn_need_one_entry_per_sampled_token(field, values):
    message = rf"`{field}` must have one entry per sampled token \(2\): got {len(values)}. Pass `None`"
    with pytest.raises(RolloutError, match=message):
        Turn(ids=(1, 2), text="", kind=TurnKind.ANSWER, observation_ids=(3,), **{field: values})


@pytest.mark.parametrize(("stop", "error"), [(StopReason.FAILED, None), (StopReason.ANSWER, "the server is down")])
def test_a_rollout_has_an_error_exactly_when_it_failed(stop, error):
    with pytest.raises(RolloutError, match="`error` must be given exactly when `stop` is `failed`: got stop="):
        dataclasses.replace(DRAWN, stop=stop, error=error)


def test_a_group_answers_one_question():
    group = make_group("hit right", "miss wrong")
    assert group.question_id == "q0"
    assert [rollout.sample for rollout in group.rollouts] == [0, 1]
    with pytest.raises(RolloutError, match=r"must answer one question: got question ids \['q0', 'q1'\]. Build one"):
        Group((make_rollout(question_id="q0"), make_rollout(question_id="q1")))
    with pytest.raises(RolloutError, match=r"got question ids \[\]"):
        Group(())


@pytest.mark.parametrize("record", [DRAWN, DRAWN.turns[0], search_turn("text").calls[0], make_group("right")])
def test_records_cannot_be_changed_in_place(record):
    field = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, None)


def test_reasons_are_the_words_of_the_file_format():
    assert [reason.value for reason in StopReason] == ["answer", "turn_limit", "length", "failed"]
    assert [kind.value for kind in TurnKind] == ["search", "malformed", "answer", "unlabelled"]
    assert f"{cut_turn().finish}" == FinishReason.LENGTH == "length"
