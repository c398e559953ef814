"""Questions of the atlas: eight kinds of one, two and three hops, each answerable from its evidence passages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grounded_rl.data.atlas.facts import City, Country, Facts, entity_split, fold, with_plain_form
from grounded_rl.data.atlas.passages import city_passage, country_passage
from grounded_rl.data.rows import Question
from grounded_rl.text import contains_alias

# Shorter answers match inside unrelated words under substring matching and would make a hit meaningless.
MIN_ANSWER_CHARS = 4
# A comparison is asked only where the larger city is clearly larger.
MIN_POPULATION_RATIO = 1.3


def city_phrase(city: City, facts: Facts) -> str:
    """How a question names a city: by name, with its population where several cities share the name."""
    return f"{city.name} ({city.population:,} inhabitants)" if facts.is_ambiguous(city) else city.name


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before it has an id and has been checked."""

    text: str
    answers: tuple[str, ...]
    evidence: tuple[City | Country, ...]
    """Entities whose passages are needed, in the order they are needed."""


Maker = Callable[[City, "World"], "Draft | None"]


@dataclass(frozen=True)
class World:
    """What a question maker may draw on: the facts, a generator, and the entities of its split."""

    facts: Facts
    rng: random.Random
    cities: tuple[City, ...]
    """Cities of the split that can be named without ambiguity."""
    cities_by_country: dict[str, tuple[City, ...]]

    def country_of(self, city: City) -> Country:
        """Country a city lies in."""
        return self.facts.countries[city.country]

    def phrase(self, *templates: str, **values: str) -> str:
        """One of the templates, filled."""
        return self.rng.choice(templates).format(**values)


def _country_of_city(city: City, world: World) -> Draft:
    text = world.phrase(
        "In which country is {city}?", "Which country is {city} in?", city=city_phrase(city, world.facts)
    )
    return Draft(text, world.country_of(city).answers, (city,))


def _capital_from_city(city: City, world: World) -> Draft | None:
    country = world.country_of(city)
    if country.capital is None:
        return None
    text = world.phrase(
        "What is the capital of the country where {city} is?",
        "Which city is the capital of the country of {city}?",
        city=city_phrase(city, world.facts),
    )
    return Draft(text, with_plain_form(country.capital), (city, country))


def _currency_from_city(city: City, world: World) -> Draft | None:
    country = world.country_of(city)
    if country.currency is None:
        return None
    text = world.phrase(
        "What is the currency of the country where {city} is?",
        "Which currency is used in {city}?",
        city=city_phrase(city, world.facts),
    )
    return Draft(text, with_plain_form(country.currency), (city, country))


def _continent_from_city(city: City, world: World) -> Draft:
    country = world.country_of(city)
    text = world.phrase(
        "On which continent is {city}?", "Which continent is {city} on?", city=city_phrase(city, world.facts)
    )
    return Draft(text, (country.continent,), (city, country))


def _capital_of_country(city: City, world: World) -> Draft | None:
    country = world.country_of(city)
    if country.capital is None:
        return None
    text = world.phrase(
        "What is the capital of {country}?", "Which city is the capital of {country}?", country=country.in_text
    )
    return Draft(text, with_plain_form(country.capital), (country,))


def _only_neighbour(country: Country, world: World) -> Country | None:
    if len(country.neighbours) != 1:
        return None
    return world.facts.countries.get(country.neighbours[0])


def _capital_of_neighbour(city: City, world: World) -> Draft | None:
    country = world.country_of(city)
    neighbour = _only_neighbour(country, world)
    if neighbour is None or neighbour.capital is None:
        return None
    text = world.phrase(
        "What is the capital of the only neighbour of the country where {city} is?",
        "Which city is the capital of the only country that borders the country of {city}?",
        city=city_phrase(city, world.facts),
    )
    return Draft(text, with_plain_form(neighbour.capital), (city, country, neighbour))


def _larger_city(city: City, world: World) -> Draft | None:
    other = world.rng.choice(world.cities)
    larger, smaller = sorted((city, other), key=lambda entity: -entity.population)
    if fold(city.name) == fold(other.name) or larger.population < MIN_POPULATION_RATIO * max(smaller.population, 1):
        return None
    text = world.phrase(
        "Which city has more inhabitants, {first} or {second}?",
        "Which city is larger, {first} or {second}?",
        first=city.name,
        second=other.name,
    )
    # Their populations would give the answer away, so only cities whose bare name is unambiguous are compared.
    if world.facts.is_ambiguous(city) or world.facts.is_ambiguous(other):
        return None
    return Draft(text, larger.answers, (city, other))


def _same_country(city: City, world: World) -> Draft | None:
    is_same = world.rng.random() < 0.5
    other = world.rng.choice(world.cities_by_country[city.country] if is_same else world.cities)
    if fold(other.name) == fold(city.name) or (other.country == city.country) != is_same:
        return None
    text = world.phrase(
        "Are {first} and {second} in the same country?",
        "Do {first} and {second} belong to one country?",
        first=city_phrase(city, world.facts),
        second=city_phrase(other, world.facts),
    )
    return Draft(text, ("yes",) if is_same else ("no",), (city, other))


@dataclass(frozen=True, slots=True)
class QuestionKind:
    """One kind of question."""

    name: str
    hops: int
    make: Maker
    share: float
    """Part of a dataset that is of this kind."""
    answer_in_evidence: bool = True
    """Whether the answer stands in the last evidence passage and in nothing before it."""


KINDS: dict[str, QuestionKind] = {
    kind.name: kind
    for kind in (
        QuestionKind("city_country", 1, _country_of_city, 0.16),
        QuestionKind("country_capital", 1, _capital_of_country, 0.08),
        QuestionKind("city_capital", 2, _capital_from_city, 0.20),
        QuestionKind("city_currency", 2, _currency_from_city, 0.14),
        QuestionKind("city_continent", 2, _continent_from_city, 0.12),
        QuestionKind("neighbour_capital", 3, _capital_of_neighbour, 0.10),
        QuestionKind("larger_city", 2, _larger_city, 0.10, answer_in_evidence=False),
        QuestionKind("same_country", 2, _same_country, 0.10, answer_in_evidence=False),
    )
}


def evidence_passages(draft: Draft, facts: Facts):
    """Passages of the entities a draft needs, in order."""
    return [
        city_passage(entity, facts) if isinstance(entity, City) else country_passage(entity, facts)
        for entity in draft.evidence
    ]


def is_answerable(draft: Draft, kind: QuestionKind, facts: Facts) -> bool:
    """
    Whether the evidence passages, and none before the last, support the answer.

    For kinds whose answer is a fact of the last passage: an alias stands there, none stands in the question or in an
    earlier passage, and none is a fragment of a continent's name (which stands in every country's passage). For
    comparisons and yes/no questions the facts compared stand in the two passages by construction.
    """
    if not kind.answer_in_evidence:
        return True
    if min(len(answer) for answer in draft.answers) < MIN_ANSWER_CHARS:
        return False
    *earlier, last = [f"{passage.title}\n{passage.text}" for passage in evidence_passages(draft, facts)]
    if not contains_alias(last, draft.answers) or any(
        contains_alias(text, draft.answers) for text in (draft.text, *earlier)
    ):
        return False
    continents = {country.continent for country in facts.countries.values()}
    return kind.name == "city_continent" or not any(contains_alias(name, draft.answers) for name in continents)


def _split_world(facts: Facts, split: str, seed: int) -> World:
    cities = tuple(
        city
        for city in facts.cities
        if facts.can_be_named(city) and city.population > 0 and entity_split(city.passage_id, seed) == split
    )
    by_country: dict[str, list[City]] = {}
    for city in cities:
        by_country.setdefault(city.country, []).append(city)
    return World(
        facts,
        random.Random(f"{seed}:{split}"),
        cities,
        {code: tuple(members) for code, members in by_country.items()},
    )


def _heads(kind: QuestionKind, world: World, split: str, seed: int) -> Iterator[City]:
    """Cities to ask about. Kinds that ask about a country use one city of every country of the split."""
    if kind.name == "country_capital":
        countries = [code for code in world.cities_by_country if entity_split(f"country-{code}", seed) == split]
        heads = [world.cities_by_country[code][0] for code in countries]
        while heads:
            world.rng.shuffle(heads)
            yield from heads
    elif kind.name == "neighbour_capital":
        heads = [city for city in world.cities if _only_neighbour(world.country_of(city), world) is not None]
        while heads:
            yield world.rng.choice(heads)
    else:
        while True:
            yield world.rng.choice(world.cities)


def make_questions(facts: Facts, split: str, count: int, seed: int) -> list[Question]:
    """
    Distinct questions about the entities of one split.

    Args:
        facts (`Facts`):
            The world.
        split (`str`):
            `"train"`, `"dev"` or `"test"`; every city asked about belongs to it.
        count (`int`):
            Number of questions wanted. Kinds with few distinct questions may fall short; the others make up for them.
        seed (`int`):
            Decides the split and the draw.

    Returns:
        `list[Question]`: `count` questions in random order, with ids `atlas-<split>-<number>`.
    """
    world = _split_world(facts, split, seed)
    drafts: dict[str, tuple[Draft, QuestionKind]] = {}
    for kind in sorted(KINDS.values(), key=lambda kind: kind.name == "city_country"):
        wanted = round(kind.share * count) if kind.name != "city_country" else count - len(drafts)
        before = len(drafts)
        for attempts, head in enumerate(_heads(kind, world, split, seed)):
            if len(drafts) - before >= wanted or attempts > 20 * wanted + 200:
                break
            draft = kind.make(head, world)
            if draft is not None and draft.text not in drafts and is_answerable(draft, kind, facts):
                drafts[draft.text] = (draft, kind)
    ordered = list(drafts.values())
    world.rng.shuffle(ordered)
    return [
        Question(
            id=f"atlas-{split}-{number}",
            question=draft.text,
            answers=draft.answers,
            evidence=tuple(entity.passage_id for entity in draft.evidence),
            hops=kind.hops,
            kind=kind.name,
        )
        for number, (draft, kind) in enumerate(ordered)
    ]
