import math

import numpy as np
import pytest

from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.bootstrap import paired_bootstrap
from grounded_rl.evaluation.comparison import compare, compare_runs
from grounded_rl.evaluation.metrics import METRIC_LABELS, compute_metrics
from tests.builders import TYPE_SCRIPTS, make_group, make_rollout


def evaluation(types, kinds=None):
    kinds = kinds or [None] * len(types)
    return [
        make_rollout(TYPE_SCRIPTS[letter], question_id=f"q{number}", question_kind=kind)
        for number, (letter, kind) in enumerate(zip(types, kinds, strict=True))
    ]


def test_both_sides_are_the_metrics_of_their_rollouts():
    before, after = evaluation("CCBA"), evaluation("ACAA")
    comparison = compare(before, after, num_resamples=100)
    assert comparison.before == compute_metrics(before)
    assert comparison.after == compute_metrics(after)
    assert comparison.num_questions == 4
    assert set(comparison.intervals) == set(METRIC_LABELS)


def test_intervals_are_those_of_the_paired_bootstrap():
    comparison = compare(evaluation("CCBA"), evaluation("ACAA"), num_resamples=500, seed=3)
    # right: before only q3; after q0, q2, q3
    expected = paired_bootstrap(
        {"q0": 0.0, "q1": 0.0, "q2": 0.0, "q3": 1.0},
        {"q0": 1.0, "q1": 0.0, "q2": 1.0, "q3": 1.0},
        num_resamples=500,
        seed=3,
    )
    assert comparison.intervals["em"] == expected
    assert expected.difference == 0.5


def test_questions_are_paired_by_id_and_not_by_position():
    before, after = evaluation("CCBA"), evaluation("ACAA")
    assert compare(before, after[::-1], num_resamples=50) == compare(before, after, num_resamples=50)


def test_transitions_count_questions_from_type_to_type():
    comparison = compare(evaluation("CCBAD"), evaluation("ACAAD"), num_resamples=10)
    # C→A, C→C, B→A, A→A, D→D; rows before, columns after, in the order A B C D
    assert comparison.transitions == ((1, 0, 0, 0), (1, 0, 0, 0), (1, 0, 1, 0), (0, 0, 0, 1))


def test_transitions_of_several_samples_sum_to_the_questions():
    before = [*make_group("hit right", "hit wrong").rollouts, make_rollout("right", question_id="q1")]
    after = [*make_group("hit right", "hit right").rollouts, make_rollout("right", question_id="q1")]
    transitions = np.array(compare(before, after, num_resamples=10).transitions)
    # q0: half A, half B before; A after. q1: D to D.
    assert transitions[0, 0] == 0.5
    assert transitions[1, 0] == 0.5
    assert transitions[3, 3] == 1.0
    assert transitions.sum() == 2


def test_kinds_are_compared_apart():
    kinds = ["one", "one", "two", "two"]
    comparison = compare(evaluation("CCBA", kinds), evaluation("ACAA", kinds), num_resamples=50)
    assert list(comparison.kinds) == ["one", "two"]
    assert comparison.kinds["one"].intervals["em"].difference == 0.5
    assert comparison.kinds["two"].before["hit_acc"] == 0.5
    assert comparison.kinds["two"].num_questions == 2
    assert comparison.kinds["two"].kinds == {}


def test_an_undefined_side_makes_the_difference_undefined():
    comparison = compare(evaluation("CC"), evaluation("AA"), num_resamples=50)
    assert math.isnan(comparison.intervals["hit_acc"].difference)
    assert comparison.intervals["em"].difference == 1.0


def test_a_question_that_failed_on_one_side_is_left_out_of_both():
    before = evaluation("AAC")
    after = [*evaluation("AA"), make_rollout("right", question_id="q2", error="index gone")]
    comparison = compare(before, after, num_resamples=50)
    assert (comparison.num_questions, comparison.num_dropped) == (2, 1)
    assert comparison.before["em"] == 1.0


def test_other_questions_are_refused():
    with pytest.raises(ConfigurationError, match=r"1 only before \['q2'\], 0 only after"):
        compare(evaluation("AAA"), evaluation("AA"))


def test_runs_are_compared_to_the_first():
    runs = {"grpo": evaluation("CCBA"), "gca": evaluation("ACAA"), "other": evaluation("AC")}
    first, second, third = compare_runs(runs, num_resamples=200)
    assert [result.name for result in (first, second, third)] == ["grpo", "gca", "other"]
    assert first.differences is None
    assert second.differences == compare(runs["grpo"], runs["gca"], num_resamples=200).intervals
    assert third.differences is None
    assert third.metrics["em"] == third.estimates["em"].value == 0.5
