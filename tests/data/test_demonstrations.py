"""Demonstrations: well-formed where they are meant to be, with mistakes at the stated rates."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields, replace

import pytest

from grounded_rl.data.atlas.demonstrations import Demonstrator, MistakeRates
from grounded_rl.data.atlas.facts import load_facts
from grounded_rl.environments.parsing import read_turn
from grounded_rl.rollouts import TurnKind

PERFECT = MistakeRates(**{field.name: 0.0 for field in fields(MistakeRates)})


@pytest.fixture(scope="session")
def facts():
    return load_facts()


def readings(texts):
    return [read_turn(text, format="qwen", complete=True, opened_think=False) for text in texts]


def answer_of(text):
    return text.split("<answer>")[1].split("</answer>")[0].strip()


def test_a_perfect_demonstration_searches_every_hop_and_answers_right(atlas, facts):
    demonstrator = Demonstrator(facts, PERFECT, random.Random(0))
    for question in atlas.questions["train"][:1000]:
        texts = demonstrator.turns(question)
        kinds = [reading.kind for reading in readings(texts)]
        assert kinds == [TurnKind.SEARCH] * len(question.evidence) + [TurnKind.ANSWER], question
        assert answer_of(texts[-1]) == question.answers[0]


def test_every_turn_but_the_last_is_a_call(atlas, facts):
    demonstrator = Demonstrator(facts, MistakeRates(), random.Random(0))
    kinds = Counter()
    for question in atlas.questions["train"][:1500]:
        *calls, last = readings(demonstrator.turns(question))
        assert last.kind is TurnKind.ANSWER
        assert all(reading.kind in (TurnKind.SEARCH, TurnKind.MALFORMED) for reading in calls), question
        kinds.update(reading.kind for reading in calls)
    # One demonstration in fifty that searches at all starts with a broken call.
    assert 0 < kinds[TurnKind.MALFORMED] < 0.05 * kinds[TurnKind.SEARCH]


@pytest.mark.parametrize(
    ("rates", "is_seen"),
    [
        ({"no_search": 1.0}, lambda texts, question: len(texts) == 1),
        ({"malformed_call": 1.0}, lambda texts, question: readings(texts)[0].kind is TurnKind.MALFORMED),
        (
            {"stop_early": 1.0},
            lambda texts, question: len(texts) == min(len(question.evidence), 1) + 1,
        ),
        ({"no_search": 1.0, "lucky_memory": 1.0}, lambda texts, question: answer_of(texts[0]) == question.answers[0]),
    ],
)
def test_a_mistake_at_rate_one_is_always_made(atlas, facts, rates, is_seen):
    demonstrator = Demonstrator(facts, replace(PERFECT, **rates), random.Random(0))
    for question in atlas.questions["train"][:300]:
        assert is_seen(demonstrator.turns(question), question), question


def test_a_weak_query_does_not_name_the_entity(atlas, facts):
    demonstrator = Demonstrator(facts, replace(PERFECT, weak_query=1.0), random.Random(0))
    for question in atlas.questions["train"][:300]:
        title = atlas.passages[question.evidence[0]][0]
        first = readings(demonstrator.turns(question))[0]
        assert title not in first.calls[0].query


def test_ignored_evidence_makes_most_answers_wrong(atlas, facts):
    demonstrator = Demonstrator(facts, replace(PERFECT, ignore_evidence=1.0), random.Random(0))
    questions = atlas.questions["train"][:400]
    right = sum(answer_of(demonstrator.turns(question)[-1]) == question.answers[0] for question in questions)
    assert right / len(questions) < 0.25


def test_demonstrations_follow_from_the_generator(atlas, facts):
    def write(seed):
        demonstrator = Demonstrator(facts, MistakeRates(), random.Random(seed))
        return [demonstrator.turns(question) for question in atlas.questions["dev"][:100]]

    assert write(3) == write(3)
    assert write(3) != write(4)
