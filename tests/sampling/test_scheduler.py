"""The rollout loop on scripted turns: order, batching, budgets, failures, and what it never does."""

from __future__ import annotations

import pytest

from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.errors import (
    BackendUnavailableError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
    RolloutError,
)
from grounded_rl.rollouts import CallStatus, FinishReason, StopReason, TurnKind
from grounded_rl.sampling import Completion, Engine, RolloutRequest, RolloutSampler, ScriptedEngine
from tests.sampling.world import (
    CAPITALS,
    MALFORMED,
    NOTHING,
    SCRIPTS,
    TinyRetriever,
    answer,
    call,
    encode,
    question,
)


class Recorder:
    """Engine that plays scripts and keeps what it was asked."""

    def __init__(self, tokenizer, scripts, *, logps=False):
        turns = [
            [turn if isinstance(turn, list) else encode(tokenizer, turn) for turn in script] for script in scripts
        ]
        self._engine = ScriptedEngine(turns, [tokenizer.eos_token_id])
        self._logps = logps
        self.rounds = []

    def generate(self, contexts, rollouts):
        self.rounds.append(([list(context) for context in contexts], list(rollouts)))
        completions = self._engine.generate(contexts, rollouts)
        if not self._logps:
            return completions
        return [Completion(one.ids, one.finish, [-0.5 * i for i in range(len(one.ids))]) for one in completions]


@pytest.fixture
def play(tokenizer, environment):
    """Rollouts of scripts, one question each, with the engine and the retriever that served them."""

    def run(*scripts, countries=(), environment=environment, retriever=None, logps=False, **options):
        countries = countries or list(CAPITALS)[: len(scripts)]
        retriever = retriever or TinyRetriever()
        sampler = RolloutSampler(environment, retriever, **options)
        engine = Recorder(tokenizer, scripts, logps=logps)
        rollouts = sampler.sample(engine, sampler.requests([question(country) for country in countries]))
        return rollouts, engine, retriever

    return run


def statuses(rollout):
    return [(one.status, one.error) for turn in rollout.turns for one in turn.calls]


# --- order and batching


def test_rollouts_come_back_in_the_order_of_their_requests(play):
    rollouts, _, _ = play(SCRIPTS["A_late"]("Peru"), SCRIPTS["D"]("Chile"), SCRIPTS["A"]("Norway"))
    assert [rollout.question_id for rollout in rollouts] == ["q-Peru", "q-Chile", "q-Norway"]
    assert [rollout.answer for rollout in rollouts] == ["Lima", "Santiago", "Oslo"]
    assert [len(rollout.turns) for rollout in rollouts] == [4, 1, 2]
    assert {rollout.stop for rollout in rollouts} == {StopReason.ANSWER}


def test_a_round_of_turns_costs_one_search_with_distinct_queries(play):
    same = [call("capital of Peru"), answer("Lima")]
    other = [call("capital of Cuba"), call("Havana"), answer("Havana")]
    _, engine, retriever = play(same, same, other)
    assert retriever.batches == [["capital of Peru", "capital of Cuba"], ["Havana"]]
    # Finished rollouts are not sampled again, and numbers stay those of the requests.
    assert [rollouts for _, rollouts in engine.rounds] == [[0, 1, 2], [0, 1, 2], [2]]


def test_a_round_without_calls_asks_the_retriever_nothing(play):
    _, _, retriever = play(SCRIPTS["D"]("Peru"), SCRIPTS["none"]("Chile"))
    assert retriever.batches == []


def test_no_requests_give_no_rollouts_and_no_generation(environment, tokenizer):
    engine = Recorder(tokenizer, [])
    assert RolloutSampler(environment, TinyRetriever()).sample(engine, []) == []
    assert engine.rounds == []


def test_requests_render_each_question_once_per_sample(environment):
    sampler = RolloutSampler(environment, TinyRetriever())
    requests = sampler.requests([question("Peru"), question("Chile")], samples=2)
    assert [(one.question.id, one.sample) for one in requests] == [
        ("q-Peru", 0),
        ("q-Peru", 1),
        ("q-Chile", 0),
        ("q-Chile", 1),
    ]
    assert requests[2].prompt_ids == tuple(environment.prompt_ids("What is the capital of Chile?"))


def test_progress_counts_finished_rollouts_after_every_round(environment, tokenizer):
    sampler = RolloutSampler(environment, TinyRetriever())
    engine = Recorder(tokenizer, [SCRIPTS["A"]("Peru"), SCRIPTS["D"]("Chile")])
    seen = []
    sampler.sample(
        engine,
        sampler.requests([question("Peru"), question("Chile")]),
        on_turn=lambda finished, total: seen.append((finished, total)),
    )
    assert seen == [(1, 2), (2, 2)]


def test_every_process_goes_on_generating_while_another_is_active(environment, tokenizer):
    votes = iter([True, True, True, True, False])
    states = []

    def is_anyone_active(is_active):
        states.append(is_active)
        return next(votes)

    sampler = RolloutSampler(environment, TinyRetriever(), is_anyone_active=is_anyone_active)
    engine = Recorder(tokenizer, [SCRIPTS["A"]("Peru")])
    (rollout,) = sampler.sample(engine, sampler.requests([question("Peru")]))
    assert rollout.stop is StopReason.ANSWER
    assert states == [True, True, False, False, False]
    assert [rollouts for _, rollouts in engine.rounds] == [[0], [0], [], []]


# --- token ids


def test_the_context_is_prompt_turns_and_observations(play):
    rollouts, engine, _ = play(SCRIPTS["A_late"]("Peru"), SCRIPTS["B"]("Chile"))
    for number, rollout in enumerate(rollouts):
        contexts = [contexts[active.index(number)] for contexts, active in engine.rounds if number in active]
        assert len(contexts) == len(rollout.turns)
        expected = list(rollout.prompt_ids)
        for context, turn in zip(contexts, rollout.turns, strict=True):
            assert context == expected
            expected += [*turn.ids, *turn.observation_ids]
        assert expected[len(rollout.prompt_ids) :] == rollout.completion_ids
        assert rollout.turns[-1].observation_ids == ()


def test_sampled_ids_are_never_encoded_again(play, tokenizer):
    canonical = encode(tokenizer, answer("Lima"))
    # The same text, one token per byte: no encoder would write it like this.
    spelled = [tokenizer.convert_tokens_to_ids(piece) for piece in "<answer>ĠLimaĠ</answer>"]
    ids = [*spelled, tokenizer.eos_token_id]
    assert ids != canonical
    assert tokenizer.decode(ids) == tokenizer.decode(canonical)
    (rollout,), _, _ = play([ids])
    assert rollout.turns[0].ids == tuple(ids)
    assert rollout.answer == "Lima"


def test_log_probs_follow_the_sampled_tokens(play):
    (rollout,), _, _ = play(SCRIPTS["A"]("Peru"), logps=True)
    first = rollout.turns[0]
    assert first.logps == tuple(-0.5 * i for i in range(len(first.ids)))
    assert rollout.logps[len(first.ids) : len(first.ids) + len(first.observation_ids)] == [0.0] * len(
        first.observation_ids
    )
    assert len(rollout.logps) == len(rollout.completion_ids) == len(rollout.sampled_mask)


# --- calls


def test_a_repeated_query_is_served_from_the_rollout_and_marked(play):
    script = [call("capital of Peru"), call("capital of Peru"), answer("Lima")]
    (rollout,), _, retriever = play(script)
    assert retriever.batches == [["capital of Peru"]]
    first, second = (turn.calls[0] for turn in rollout.turns[:2])
    assert (first.cached, second.cached) == (False, True)
    assert first.passages == second.passages
    assert rollout.turns[0].observation == rollout.turns[1].observation


def test_the_cache_belongs_to_one_rollout(play):
    late = [call(NOTHING), call("capital of Peru"), answer("Lima")]
    (_, second), _, retriever = play([call("capital of Peru"), answer("Lima")], late)
    assert retriever.batches == [["capital of Peru", NOTHING], ["capital of Peru"]]
    assert second.turns[1].calls[0].cached is False


def test_two_identical_calls_of_one_turn_are_one_search(play):
    both = f"{call('capital of Peru')}\n{call('capital of Peru')}"
    (rollout,), _, retriever = play([both, answer("Lima")])
    assert retriever.batches == [["capital of Peru"]]
    assert [one.cached for one in rollout.turns[0].calls] == [False, True]


def test_a_malformed_call_gets_an_error_observation_and_the_episode_goes_on(play):
    (rollout,), _, retriever = play(SCRIPTS["A_malformed"]("Peru"))
    malformed = rollout.turns[0]
    assert malformed.kind is TurnKind.MALFORMED
    assert statuses(rollout)[0] == (CallStatus.REJECTED, "invalid_json")
    assert malformed.observation.startswith("Error: the tool call is not one valid JSON object")
    assert retriever.batches == [["capital of Peru"]]
    assert (rollout.stop, rollout.answer) == (StopReason.ANSWER, "Lima")


def test_a_search_that_finds_nothing_is_an_observation_and_no_failure(play):
    (rollout,), _, _ = play(SCRIPTS["C"]("Peru"))
    assert statuses(rollout) == [(CallStatus.EMPTY, None)]
    assert rollout.turns[0].observation
    assert rollout.stop is StopReason.ANSWER


def test_the_last_allowed_turn_executes_no_call(play, tokenizer):
    environment = SearchEnvironment(tokenizer, prompt_style="plain", max_turns=2)
    script = [call("capital of Peru"), call("Lima")]
    (rollout,), _, retriever = play(script, environment=environment)
    assert retriever.batches == [["capital of Peru"]]
    assert rollout.stop is StopReason.TURN_LIMIT
    assert [status for status, _ in statuses(rollout)] == [CallStatus.OK, CallStatus.NOT_EXECUTED]
    assert rollout.turns[1].observation_ids == ()
    assert rollout.answer is None


def test_a_malformed_call_in_the_last_turn_ends_the_rollout(play, tokenizer):
    environment = SearchEnvironment(tokenizer, prompt_style="plain", max_turns=1)
    (rollout,), _, _ = play([MALFORMED], environment=environment)
    assert rollout.stop is StopReason.TURN_LIMIT
    assert [status for status, _ in statuses(rollout)] == [CallStatus.NOT_EXECUTED]


# --- budgets


def test_a_call_cut_off_by_the_turn_budget_is_never_executed(play, tokenizer):
    cut = encode(tokenizer, call("capital of Peru"), end=False)
    (rollout,), _, retriever = play([cut])
    assert retriever.batches == []
    assert rollout.stop is StopReason.LENGTH
    assert rollout.turns[0].finish is FinishReason.LENGTH
    assert [status for status, _ in statuses(rollout)] == [CallStatus.NOT_EXECUTED]


def test_a_turn_beyond_the_completion_budget_is_cut_and_ends_the_rollout(play, tokenizer):
    ids = encode(tokenizer, call("capital of Peru"))
    (rollout,), _, retriever = play([ids], max_completion_tokens=len(ids) - 1, logps=True)
    assert rollout.turns[0].ids == tuple(ids[:-1])
    assert len(rollout.turns[0].logps) == len(ids) - 1
    assert (rollout.stop, rollout.turns[0].finish) == (StopReason.LENGTH, FinishReason.LENGTH)
    assert retriever.batches == []


def test_a_turn_that_fits_exactly_is_whole(play, tokenizer):
    ids = encode(tokenizer, answer("Lima"))
    (rollout,), _, _ = play([ids], max_completion_tokens=len(ids))
    assert (rollout.stop, rollout.answer) == (StopReason.ANSWER, "Lima")


def test_without_room_for_an_observation_and_a_token_the_rollout_ends_on_its_call(play):
    (whole,), _, _ = play(SCRIPTS["A"]("Peru"))
    used = len(whole.turns[0].ids) + len(whole.turns[0].observation_ids)
    (enough,), _, _ = play(SCRIPTS["A"]("Peru"), max_completion_tokens=used + 1)
    (short,), _, _ = play(SCRIPTS["A"]("Peru"), max_completion_tokens=used)
    # One token of the answer still fits in the first, none in the second.
    assert [len(turn.ids) for turn in enough.turns] == [len(whole.turns[0].ids), 1]
    assert enough.turns[0].observation_ids == whole.turns[0].observation_ids
    assert len(short.turns) == 1
    assert short.turns[0].observation_ids == ()
    assert [status for status, _ in statuses(short)] == [CallStatus.NOT_EXECUTED]
    assert {enough.stop, short.stop} == {StopReason.LENGTH}


def test_no_completion_is_ever_longer_than_its_budget(play):
    for budget in range(1, 120, 7):
        (rollout,), _, _ = play(SCRIPTS["A_late"]("Peru"), max_completion_tokens=budget)
        assert 1 <= len(rollout.completion_ids) <= budget
        assert rollout.stop is StopReason.LENGTH


# --- failures


def test_a_failed_search_stops_the_run_by_default(play):
    with pytest.raises(RetrievalError, match="no connection for 'capital of Peru'"):
        play(SCRIPTS["A"]("Peru"), retriever=TinyRetriever(failing=["capital of Peru"]))


def test_masking_loses_only_the_rollouts_whose_query_failed(play):
    retriever = TinyRetriever(failing=["capital of Peru"])
    rollouts, _, _ = play(
        SCRIPTS["A"]("Peru"),
        SCRIPTS["A"]("Chile"),
        SCRIPTS["D"]("Norway"),
        retriever=retriever,
        on_search_failure="mask",
    )
    assert [rollout.stop for rollout in rollouts] == [StopReason.FAILED, StopReason.ANSWER, StopReason.ANSWER]
    assert retriever.batches[0] == ["capital of Peru", "capital of Chile"]
    failed = rollouts[0]
    assert "no connection for 'capital of Peru'" in failed.error
    # A failure is nothing the policy could read: no observation, no answer, no further turn.
    assert len(failed.turns) == 1
    assert (failed.turns[0].observation, failed.turns[0].observation_ids) == ("", ())
    assert failed.answer is None
    assert [status for status, _ in statuses(failed)] == [CallStatus.NOT_EXECUTED]
    assert rollouts[1].turns[0].calls[0].status is CallStatus.OK


def test_a_turn_with_one_failing_call_of_two_loses_the_rollout(play):
    both = f"{call('capital of Chile')}\n{call('capital of Peru')}"
    retriever = TinyRetriever(failing=["capital of Peru"])
    (rollout,), _, _ = play([both, answer("Lima")], retriever=retriever, on_search_failure="mask")
    assert rollout.stop is StopReason.FAILED
    assert rollout.turns[0].observation == ""


def test_only_retrieval_errors_are_masked(play):
    class Broken(TinyRetriever):
        def search(self, queries, k):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(SCRIPTS["A"]("Peru"), retriever=Broken(), on_search_failure="mask")


def test_options_out_of_range_are_refused(environment):
    with pytest.raises(ConfigurationError, match=r"`on_search_failure` must be 'raise' or 'mask': got 'skip'"):
        RolloutSampler(environment, TinyRetriever(), on_search_failure="skip")
    with pytest.raises(ConfigurationError, match=r"`max_completion_tokens` must be at least 1: got 0"):
        RolloutSampler(environment, TinyRetriever(), max_completion_tokens=0)


# --- the scripted engine


def test_a_script_that_ends_early_says_which_turn_is_missing(environment, tokenizer):
    sampler = RolloutSampler(environment, TinyRetriever())
    engine = ScriptedEngine([[encode(tokenizer, call("capital of Peru"))]], [tokenizer.eos_token_id])
    with pytest.raises(RolloutError, match=r"got none for turn 1 of rollout 0"):
        sampler.sample(engine, [RolloutRequest(question("Peru"), (1, 2))])


def test_engines_satisfy_the_protocol():
    assert isinstance(ScriptedEngine([], []), Engine)


class Replaced(TinyRetriever):
    """Another index took its place: it answers, and says so when it is asked."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def ready(self, timeout=5.0):
        raise self.error


@pytest.mark.parametrize("mode", ["raise", "mask"])
def test_rollouts_that_another_index_answered_are_never_returned(play, mode):
    with pytest.raises(IndexMismatchError, match="another index"):
        play(SCRIPTS["A"]("Peru"), retriever=Replaced(IndexMismatchError("another index")), on_search_failure=mode)
    # Without a search there is nothing to doubt.
    (rollout,), _, _ = play(SCRIPTS["D"]("Peru"), retriever=Replaced(IndexMismatchError("another index")))
    assert rollout.stop is StopReason.ANSWER


def test_an_index_that_does_not_answer_at_the_end_stops_a_run_unless_failures_are_masked(play):
    away = BackendUnavailableError("connection refused")
    with pytest.raises(BackendUnavailableError):
        play(SCRIPTS["A"]("Peru"), retriever=Replaced(away))
    (rollout,), _, _ = play(SCRIPTS["A"]("Peru"), retriever=Replaced(away), on_search_failure="mask")
    assert rollout.stop is StopReason.ANSWER
