"""Rewards: the format terms, and the hosts' own functions on recorded responses."""

from __future__ import annotations

import json

import pytest

from grounded_rl.environments import hosts
from grounded_rl.environments.rewards import REWARD_SCHEMES, em_format_penalty, reward, reward_value, score
from grounded_rl.errors import ConfigurationError
from tests.builders import answer_turn, make_rollout, malformed_turn, search_turn

GOLD = ["Paris"]


def cases(shared_dir, name):
    return json.loads((shared_dir / "oracles" / f"{name}.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.parametrize(
    ("answer", "format_ok", "value"),
    [
        ("Paris", True, 1.0),
        ("Paris", False, 0.8),
        ("Lyon", True, 0.2),
        ("Lyon", False, 0.1),
        ("", True, 0.2),
        (None, False, 0.0),
        (None, True, 0.0),
    ],
)
def test_the_table_of_the_format_term(answer, format_ok, value):
    assert reward(answer, GOLD, format_ok, scheme="search_r1_v03") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("answer", "format_ok", "value"),
    [("Paris", True, 1.0), ("Lyon", True, 0.0), ("Paris", False, -1.0), (None, True, -1.0), ("", True, 0.0)],
)
def test_the_penalty_of_the_boxed_format(answer, format_ok, value):
    assert em_format_penalty(answer, GOLD, format_ok) == value


@pytest.mark.parametrize("scheme", ["em", "none"])
def test_without_a_format_term_the_reward_is_exact_match(scheme):
    for format_ok in (True, False):
        assert [reward(a, GOLD, format_ok, scheme=scheme) for a in ("paris.", "Lyon", "", None)] == [
            1.0,
            0.0,
            0.0,
            0.0,
        ]


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ConfigurationError, match=r"`reward_scheme` must be one of .*: got 'f1'"):
        reward("x", GOLD, True, scheme="f1")
    assert set(REWARD_SCHEMES) == {"search_r1_v03", "em", "em_format_penalty"}


def test_scores_keep_the_folded_match_apart_from_the_reward():
    scores = score("Sao Tome", ["São Tomé"], True, scheme="em")
    assert (scores.reward, scores.em, scores.em_folded, scores.f1) == (0.0, 0.0, 1.0, 0.0)
    assert scores.has_answer
    assert not score(None, GOLD, False).has_answer


def test_rewards_of_recorded_rollouts():
    assert reward_value(make_rollout("hit right")) == 1.0
    assert reward_value(make_rollout("hit wrong")) == 0.2
    assert reward_value(make_rollout([search_turn("x"), malformed_turn(), "right"])) == 0.8
    assert reward_value(make_rollout("hit malformed wrong")) == 0.1
    assert reward_value(make_rollout("hit limit")) == 0.0
    assert reward_value(make_rollout("hit malformed wrong"), scheme="em") == 0.0
    assert reward_value(make_rollout("hit limit"), scheme="em_format_penalty") == -1.0


def test_d13_a_failed_rollout_has_no_reward_rather_than_zero():
    assert reward_value(make_rollout("hit", error="503 after three tries")) is None


def test_e02_the_contract_is_one_turn_so_no_counting_of_examples_is_needed():
    assert reward_value(make_rollout([answer_turn("Paris")], answer="Paris")) == 1.0
    response, prompt = "<answer>Paris</answer>", "For example, <answer> Beijing </answer>."
    # The hosts' two thresholds: one misses a real answer, the other pays for the example in the prompt.
    assert hosts.search_r1_answer(response) is None
    assert hosts.search_r1_answer(response, min_spans=1) == "Paris"
    assert hosts.search_r1_answer(prompt, min_spans=1) == "Beijing"


def test_e21_a_rollout_that_ends_on_a_search_earns_nothing():
    assert reward_value(make_rollout("hit limit"), scheme="em") == 0.0


def test_e22_one_reward_per_rollout_in_order():
    scripts = ["right", "cut", "right", "limit", "right"]
    rewards = [reward_value(make_rollout(script), scheme="em") for script in scripts]
    assert rewards == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_search_r1_rewards_equal_the_hosts(shared_dir):
    recorded = cases(shared_dir, "search_r1")
    assert len(recorded["score"]) > 100
    for case in recorded["extract"]:
        assert hosts.search_r1_answer(case["text"]) == case["extracted"], case
    for case in recorded["score"]:
        text, golden = case["text"], case["golden"]
        assert hosts.search_r1_format_ok(text) == case["valid"], case
        assert hosts.search_r1_reward(text, golden) == pytest.approx(case["v03"], abs=1e-12), case
        assert hosts.search_r1_reward(text, golden, retrieval=0.1) == pytest.approx(case["v03_retr"], abs=1e-12), case


def test_at2po_rewards_equal_the_hosts(shared_dir):
    recorded = cases(shared_dir, "at2po_reward")
    assert len(recorded) > 100
    for case in recorded:
        text, golden = case["text"], case["golden"]
        assert hosts.at2po_format_ok(text) == case["valid"], case
        assert hosts.at2po_reward(text, golden) == pytest.approx(case["score"], abs=1e-9), case
        unchecked = hosts.at2po_reward(text, golden, check_format=False)
        assert unchecked == pytest.approx(case["val_score"], abs=1e-9), case
        if case["valid"]:
            assert hosts.at2po_answer(text) == case["answer"], case


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ("<think>a</think><answer>\\boxed{x}</answer>", True),
        ("<think>a</think><search>q</search><result>r</result><answer>\\boxed{x}</answer>", True),
        ("<think>a</think><search>q</search><answer>\\boxed{x}</answer>", False),
        ("<answer>\\boxed{x}</answer>", False),
        ("<think>a</think><answer>x</answer>", False),
        ("<think>a</think></answer><answer>\\boxed{x}", False),
        ("<think>a<answer>\\boxed{x}</answer>", False),
    ],
)
def test_the_boxed_format_on_known_responses(text, ok):
    assert hosts.at2po_format_ok(text) is ok


@pytest.mark.parametrize(
    ("response", "ok"),
    [
        ("<think>t</think><answer>a</answer>", True),
        ("<think>t</think><search>q</search>\n<information>i</information>\n<think>t</think><answer>a</answer>", True),
        ("<think>t</think>stray<answer>a</answer>", False),
        ("<think>t</think><answer>a</answer><|im_end|>", False),
        ("<answer>a</answer>", False),
        ("<think>t</think>", False),
    ],
)
def test_the_search_r1_format_on_known_responses(response, ok):
    assert hosts.search_r1_format_ok(f"<|im_start|>assistant\n{response}") is ok
    assert not hosts.search_r1_format_ok(response)
