"""Diagnosis, segments, retrievability and the audit of aliases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grounded_rl.grounding import (
    ORACLE_TEMPLATES,
    AliasIssue,
    Diagnosis,
    Retrievability,
    RolloutType,
    Segment,
    audit_aliases,
    diagnose,
    oracle_queries,
    segments,
)
from grounded_rl.rollouts import Call, CallStatus, ShownPassage, Turn, TurnKind
from tests.builders import make_group, make_passage, make_rollout, malformed_turn, search_turn

V, R, ANSWER, NONE = Segment.V_SEARCH, Segment.R_SEARCH, Segment.ANSWER, Segment.NONE


@pytest.mark.parametrize(
    ("script", "kind", "first_hit", "first_hit_turn", "expected"),
    [
        # Section 2.3's example: valid, malformed, hit, valid, answer.
        ("miss malformed hit miss right", "A", 1, 2, (V, R, V, R, ANSWER)),
        ("hit wrong", "B", 0, 0, (V, ANSWER)),
        ("miss wrong", "C", None, None, (R, ANSWER)),
        ("right", "D", None, None, (ANSWER,)),
        ("wrong", "C", None, None, (ANSWER,)),
        ("miss miss right", "D", None, None, (R, R, ANSWER)),
        ("malformed hit right", "A", 0, 1, (R, V, ANSWER)),
        ("empty hit right", "A", 1, 1, (V, V, ANSWER)),
        ("empty empty wrong", "C", None, None, (R, R, ANSWER)),
        ("hit hit hit right", "A", 0, 0, (V, R, R, ANSWER)),
        ("miss hit limit", "B", 1, 1, (V, V, R)),
        ("miss limit", "C", None, None, (R, R)),
        ("hit cut", "B", 0, 0, (V, NONE)),
        ("cut", "C", None, None, (NONE,)),
        ("hit malformed", "B", 0, 0, (V, R)),
    ],
)
def test_type_first_hit_and_segments_of_a_script(script, kind, first_hit, first_hit_turn, expected):
    rollout = make_rollout(script)
    diagnosis = diagnose(rollout)
    assert (diagnosis.type, diagnosis.first_hit, diagnosis.first_hit_turn) == (kind, first_hit, first_hit_turn)
    assert segments(rollout, diagnosis) == expected
    assert segments(rollout) == expected


def test_the_four_types_are_the_table_of_hit_and_correct():
    table = {(True, True): "A", (True, False): "B", (False, False): "C", (False, True): "D"}
    for (hit, correct), kind in table.items():
        assert Diagnosis(hit, 0 if hit else None, 0 if hit else None, correct).type is RolloutType(kind)


def test_several_calls_of_one_turn_are_one_search_and_the_index_counts_responses():
    two = Turn(
        ids=(1,),
        text="two calls",
        kind=TurnKind.SEARCH,
        calls=(
            Call("a", CallStatus.OK, (make_passage("nothing"),)),
            Call("b", CallStatus.OK, (make_passage("Paris it is"),)),
        ),
    )
    rollout = make_rollout(["miss", two, "right"])
    diagnosis = diagnose(rollout)
    assert (diagnosis.first_hit, diagnosis.first_hit_turn) == (2, 1)
    assert segments(rollout) == (V, V, ANSWER)


def test_a_rejected_call_beside_a_good_one_is_no_response():
    mixed = Turn(
        ids=(1,),
        text="mixed",
        kind=TurnKind.SEARCH,
        calls=(
            Call(None, CallStatus.REJECTED, error="invalid_json"),
            Call("b", CallStatus.OK, (make_passage("Paris it is"),)),
        ),
    )
    assert diagnose(make_rollout([mixed, "right"])).first_hit == 0


def test_only_delivered_passages_are_evidence():
    leaky = replace(
        make_rollout(
            [
                search_turn("nothing", query="Paris"),
                replace(malformed_turn(text="<tool_call>Paris"), observation="Error: Paris is no tool."),
                "wrong",
            ]
        ),
        question="Is Paris the capital?",
    )
    assert not diagnose(leaky).hit


def test_a_match_does_not_run_across_passages_but_from_title_to_text():
    answers = ["New York"]
    across = make_rollout([search_turn(make_passage("New"), make_passage("York")), "wrong"], answers=answers)
    within = make_rollout([search_turn(make_passage("York is big", title="New")), "wrong"], answers=answers)
    assert not diagnose(across).hit
    assert diagnose(within).hit


def test_r12_title_and_text_are_reported_separately():
    passage = make_passage("Peru is in South America", title="Lima")
    rollout = make_rollout([search_turn(passage), "wrong"], answers=["Lima"])
    assert diagnose(rollout).hit
    assert not diagnose(rollout, titles=False).hit


def test_matcher_and_folding_are_switches_of_the_hit_alone():
    rollout = make_rollout([search_turn("house music of Sao Tome"), "right"], answers=["US"])
    assert diagnose(rollout).type is RolloutType.A
    assert diagnose(rollout, matcher="word_boundary").type is RolloutType.D
    accent = make_rollout([search_turn("house music of Sao Tome"), "right"], answers=["São Tomé"])
    assert diagnose(accent).type is RolloutType.D
    assert diagnose(accent, fold_unicode=True).type is RolloutType.A
    folded_answer = make_rollout(["miss"], answers=["São Tomé"], answer="Sao Tome")
    assert not diagnose(folded_answer, fold_unicode=True).correct


def test_accented_aliases_hit_unescaped_text():
    assert diagnose(make_rollout([search_turn("in Besançon today"), "wrong"], answers=["Besançon"])).hit


def test_an_alias_cut_away_by_truncation_is_no_hit():
    cut = ShownPassage("p", "t", "the capital is Par", num_tokens=4, num_tokens_full=9)
    assert not diagnose(make_rollout([search_turn(cut), "wrong"])).hit


@pytest.mark.parametrize("answers", [["The"], ["!!!"], ["The", "..."], []])
def test_aliases_that_normalise_to_nothing_never_hit(answers):
    assert not diagnose(make_rollout([search_turn("the !!! ..."), "wrong"], answers=answers)).hit


def test_yes_and_no_are_lexical():
    assert diagnose(make_rollout([search_turn("nothing is known"), "right"], answers=["no"])).hit
    assert not diagnose(make_rollout([search_turn("it is so"), "right"], answers=["yes"])).hit


WORDS = st.sampled_from(["hit", "miss", "empty", "malformed"])
LAST = st.sampled_from(["right", "wrong", "cut", "limit"])


@settings(deadline=None)
@given(st.lists(WORDS, max_size=6), LAST)
def test_segments_follow_the_rules_for_every_script(middle, last):
    rollout = make_rollout([*middle, last])
    diagnosis, found = diagnose(rollout), segments(rollout)
    first = diagnosis.first_hit_turn
    assert diagnosis.hit == ("hit" in middle)
    assert first == (middle.index("hit") if "hit" in middle else None)
    assert diagnosis.correct == (last == "right")
    assert len(found) == len(rollout.turns)
    for number, (word, segment) in enumerate(zip([*middle, last], found, strict=True)):
        if word in ("right", "wrong"):
            assert segment is ANSWER
        elif word == "cut":
            assert segment is NONE
        elif word == "malformed":
            assert segment is R
        else:
            assert segment is (V if first is not None and number <= first else R)


def test_oracle_queries_are_the_templates_over_the_first_three_real_aliases():
    assert oracle_queries("q?", ["the", "a1", "a2", "a3", "a4"]) == (
        *("q?", "a1", "a2", "a3"),
        *("q? a1", "q? a2", "q? a3"),
    )
    assert oracle_queries("q?", ["x {question}"], ["{alias}"]) == ("x {question}",)
    assert oracle_queries("q?", ["a"], ["{question}"]) == ("q?",)
    assert oracle_queries("b", ["b"]) == ("b", "b b")
    assert oracle_queries("q?", ["the"]) == ("q?",)


class RecordingRetriever:
    """Finds the passage of every query that it holds text for, and remembers what it was asked."""

    def __init__(self, texts):
        self.texts, self.asked = texts, []

    def search(self, queries, k):
        self.asked.append((list(queries), k))
        return [[self.texts[query]] if query in self.texts else [] for query in queries]


def show(hits):
    return [make_passage(text) for text in hits]


def oracle(texts, **options):
    retriever = RecordingRetriever(texts)
    return retriever, Retrievability(retriever, show, **options)


QUESTION = "What is the capital of France?"


def test_the_oracle_is_asked_only_for_right_answers_in_groups_without_a_hit():
    retriever, retrievable = oracle({})
    groups = [make_group("hit right", "right"), make_group("miss wrong", "wrong"), make_group("hit wrong", "right")]
    assert retrievable(groups) == [True, True, True]
    assert retriever.asked == []


def test_all_questions_of_a_step_are_asked_in_one_search_and_once_per_question():
    retriever, retrievable = oracle({QUESTION: "Paris is the capital"})
    groups = [make_group("right", "wrong", question_id="q0"), make_group("right", question_id="q1", question="Other?")]
    assert retrievable(groups) == [True, False]
    [(queries, k)] = retriever.asked
    assert queries == [QUESTION, "Paris", f"{QUESTION} Paris", "Other?", "Paris", "Other? Paris"]
    assert k == 3
    assert retrievable(groups) == [True, False]
    assert len(retriever.asked) == 1
    assert retrievable.cache == {"q0": True, "q1": False}


def test_templates_and_matcher_decide_what_is_retrievable():
    texts = {"Paris": "about Paris", QUESTION: "nothing"}
    assert oracle(texts)[1]([make_group("right")]) == [True]
    assert oracle(texts, templates=["{question}"])[1]([make_group("right")]) == [False]
    glued = {QUESTION: "Parisian"}
    assert oracle(glued)[1]([make_group("right")]) == [True]
    assert oracle(glued, matcher="word_boundary")[1]([make_group("right")]) == [False]


def test_retrievability_judges_what_the_policy_would_see():
    retriever = RecordingRetriever({QUESTION: "a long way to Paris"})
    cut = Retrievability(retriever, lambda hits: [make_passage(text[:10]) for text in hits])
    assert cut([make_group("right")]) == [False]


def test_given_diagnoses_are_used():
    retriever, retrievable = oracle({})
    group = make_group("right")
    assert retrievable([group], [[Diagnosis(True, 0, 0, True)]]) == [True]
    assert retriever.asked == []
    assert ORACLE_TEMPLATES[0] == "{question}"


def test_the_audit_names_every_doubtful_alias():
    answers = ["David Niven", "Bring On The Empty Horses", "the", "5", "no", "Niven"]
    assert audit_aliases(answers) == (
        AliasIssue("Bring On The Empty Horses", "unrelated"),
        AliasIssue("the", "empty"),
        AliasIssue("5", "short"),
        AliasIssue("5", "unrelated"),
        AliasIssue("no", "short"),
        AliasIssue("no", "yes_no"),
        AliasIssue("no", "unrelated"),
    )
    assert audit_aliases([]) == ()
    assert audit_aliases(["Paris", "City of Paris"]) == ()
