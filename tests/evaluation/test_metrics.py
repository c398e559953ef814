import math

import pytest

from grounded_rl.evaluation.metrics import (
    METRIC_LABELS,
    compute_metrics,
    metrics_by_kind,
    question_table,
    table_metrics,
)
from grounded_rl.grounding import diagnose
from tests.builders import TYPE_SCRIPTS, make_group, make_rollout, search_turn

# H = (1,1,1,0,0,1,0,0), C = (1,1,0,1,0,0,0,1)
EXAMPLE = ["hit right", "hit right", "hit wrong", "right", "miss wrong", "hit wrong", "miss wrong", "right"]


def rollouts_of(scripts, **fields):
    return [make_rollout(script, question_id=f"q{number}", **fields) for number, script in enumerate(scripts)]


def test_the_worked_example_gives_its_published_numbers():
    metrics = compute_metrics(rollouts_of(EXAMPLE))
    # 4 of 8 right, 4 of 8 hit, 2 of 8 both; 2/4 and 2/4; 2 of 8 hit but wrong
    expected = {
        "em": 0.5,
        "tool_hit": 0.5,
        "sup_cor": 0.25,
        "hit_acc": 0.5,
        "grounded_share": 0.5,
        "hit_but_wrong": 0.25,
    }
    assert {name: metrics[name] for name in expected} == expected
    assert [metrics[f"type_{letter}"] for letter in "abcd"] == [0.25, 0.25, 0.25, 0.25]
    assert metrics["num_questions"] == 8


def test_bamboogle_support_of_the_paper_is_reproduced():
    # 35 of 125 right, 15 of them supported: EM 28.0 %, grounded share 42.9 %
    scripts = ["hit right"] * 15 + ["right"] * 20 + ["miss wrong"] * 90
    metrics = compute_metrics(rollouts_of(scripts))
    assert metrics["em"] == pytest.approx(0.28, abs=1e-12)
    assert metrics["grounded_share"] == pytest.approx(15 / 35, abs=1e-12)


@pytest.mark.parametrize("letter", "ABCD")
def test_every_type_is_counted_in_its_own_share_only(letter):
    metrics = compute_metrics([make_rollout(TYPE_SCRIPTS[letter])])
    assert {name[-1].upper(): metrics[name] for name in metrics if name.startswith("type_")} == {
        other: float(other == letter) for other in "ABCD"
    }


def test_undefined_ratios_are_nan_and_never_zero():
    no_hit_no_right = compute_metrics(rollouts_of(["miss wrong", "miss wrong"]))
    assert math.isnan(no_hit_no_right["hit_acc"])
    assert math.isnan(no_hit_no_right["grounded_share"])
    assert no_hit_no_right["em"] == 0.0
    hits_without_right = compute_metrics(rollouts_of(["hit wrong"]))
    assert hits_without_right["hit_acc"] == 0.0
    assert math.isnan(hits_without_right["grounded_share"])


def test_no_rollouts_give_nan_everywhere_and_zero_counts():
    metrics = compute_metrics([])
    assert all(math.isnan(metrics[name]) for name in METRIC_LABELS)
    assert (metrics["num_questions"], metrics["num_rollouts"], metrics["num_failed"]) == (0, 0, 0)


def test_samples_of_a_question_are_averaged_before_questions():
    # q0: three samples, all right; q1: one sample, wrong. Mean of means 0.5, not 0.75.
    rollouts = [
        *make_group("hit right", "hit right", "hit right", question_id="q0").rollouts,
        make_rollout("miss wrong", question_id="q1"),
    ]
    metrics = compute_metrics(rollouts)
    assert (metrics["em"], metrics["num_questions"], metrics["num_rollouts"]) == (0.5, 2, 4)


def test_ratios_are_quotients_of_question_means():
    rollouts = [
        *make_group("hit right", "hit wrong", question_id="q0").rollouts,  # H mean 1, HC mean 1/2
        *make_group("miss wrong", "hit right", question_id="q1").rollouts,  # H mean 1/2, HC mean 1/2
    ]
    # SupCor 1/2, ToolHit 3/4
    assert compute_metrics(rollouts)["hit_acc"] == pytest.approx(2 / 3, abs=1e-12)


def test_the_order_of_rollouts_changes_nothing():
    rollouts = rollouts_of(EXAMPLE)
    assert compute_metrics(rollouts[::-1]) == compute_metrics(rollouts)


def test_failed_rollouts_are_counted_and_left_out():
    rollouts = [*rollouts_of(["hit right", "miss wrong"]), make_rollout("right", question_id="q9", error="index gone")]
    metrics = compute_metrics(rollouts)
    assert (metrics["em"], metrics["num_failed"], metrics["num_questions"]) == (0.5, 1, 2)


def test_shares_of_malformed_truncated_and_answered_rollouts():
    metrics = compute_metrics(rollouts_of(["malformed malformed right", "hit cut", "hit right", "hit limit"]))
    assert metrics["malformed_share"] == 0.25
    assert metrics["truncated_share"] == 0.25
    assert metrics["answered_share"] == 0.5


def test_only_searches_that_ran_are_counted():
    # hit and empty ran; malformed and limit did not: (2 + 1) / 2
    metrics = compute_metrics(rollouts_of(["hit empty malformed right", "hit limit"]))
    assert metrics["num_searches"] == 1.5
    assert metrics["num_turns"] == 3.0


def test_sampled_tokens_leave_observations_out():
    metrics = compute_metrics([make_rollout([search_turn("Paris", ids=(1, 2, 3, 4)), "right"])])
    assert metrics["num_sampled_tokens"] == 6


def test_f1_gives_partial_credit_where_em_gives_none():
    # "New York City" against "New York": precision 2/3, recall 1
    metrics = compute_metrics([make_rollout(["hit"], answers=["New York"], answer="New York City")])
    assert (metrics["em"], metrics["f1"]) == (0.0, pytest.approx(0.8, abs=1e-12))


def test_kinds_are_reported_apart_and_agree_with_their_own_rollouts():
    single = rollouts_of(EXAMPLE[:4], question_kind="single")
    multi = [make_rollout(script, question_id=f"m{i}", question_kind="multi") for i, script in enumerate(EXAMPLE[4:])]
    other = [make_rollout("hit right", question_id="x")]
    by_kind = metrics_by_kind([*single, *multi, *other])
    assert list(by_kind) == ["multi", "single", "unknown"]
    assert by_kind["multi"] == compute_metrics(multi)
    assert by_kind["single"]["em"] == 0.75


def test_another_matcher_can_be_chosen():
    rollout = make_rollout([search_turn("Housework is dull."), "right"], answers=["us"])
    assert compute_metrics([rollout])["tool_hit"] == 1.0
    strict = compute_metrics([rollout], diagnose=lambda r: diagnose(r, matcher="word_boundary"))
    assert strict["tool_hit"] == 0.0


def test_a_table_can_be_narrowed_to_some_questions_and_takes_its_counts_along():
    rollouts = [
        *make_group("hit right", "hit wrong", question_id="q0").rollouts,
        make_rollout("hit right", question_id="q0", sample=2, error="index gone"),
        make_rollout("miss wrong", question_id="q1"),
        make_rollout("hit right", question_id="q2", error="index gone"),
    ]
    table = question_table(rollouts)
    whole, part = table_metrics(table), table_metrics(table.take([0]))
    assert (whole["num_rollouts"], whole["num_failed"], whole["em"]) == (3, 2, 0.25)
    assert (part["num_rollouts"], part["num_failed"], part["em"]) == (2, 1, 0.5)
