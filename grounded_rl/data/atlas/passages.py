"""Passages of the atlas: one per city and country, in the project's own sentences."""

from __future__ import annotations

from collections.abc import Iterator

from grounded_rl.data.atlas.facts import City, Country, Facts
from grounded_rl.retrieval.base import Passage


def city_passage(city: City, facts: Facts) -> Passage:
    """Passage of a city: its country and its number of inhabitants."""
    country = facts.countries[city.country].in_text
    text = f"{city.name} is a city in {country}. It has {city.population:,} inhabitants."
    return Passage(id=city.passage_id, title=city.name, text=text)


def country_passage(country: Country, facts: Facts) -> Passage:
    """Passage of a country: continent, capital, currency, neighbours."""
    sentences = [f"{country.in_text[0].upper()}{country.in_text[1:]} is a country in {country.continent}."]
    if country.capital:
        sentences.append(f"The capital of {country.in_text} is {country.capital}.")
    if country.currency:
        sentences.append(f"Its currency is the {country.currency}.")
    names = [facts.countries[code].in_text for code in country.neighbours if code in facts.countries]
    if len(names) == 1:
        sentences.append(f"It borders only {names[0]}.")
    elif names:
        sentences.append(f"It borders {', '.join(names[:-1])} and {names[-1]}.")
    else:
        sentences.append("It borders no other country.")
    return Passage(id=country.passage_id, title=country.name, text=" ".join(sentences))


def iterate_passages(facts: Facts) -> Iterator[Passage]:
    """Every passage: countries by code, then cities by id."""
    for country in facts.countries.values():
        yield country_passage(country, facts)
    for city in facts.cities:
        yield city_passage(city, facts)


def corpus_record(passage: Passage) -> dict:
    """Corpus row of a passage in the form Search-R1 uses: quoted title on the first line of `contents`."""
    return {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}
