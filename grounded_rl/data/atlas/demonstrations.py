"""
Scripted, deliberately imperfect demonstrations on the atlas, for the warm start of a tiny policy.

A policy that only ever saw perfect searches would leave reinforcement learning nothing to improve. The demonstrator
therefore makes, at known rates, the mistakes real search agents make: it answers without searching, searches with a
weak query, stops one hop early, or ignores the evidence it found.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from grounded_rl.data.atlas.facts import City, Country, Facts, fold
from grounded_rl.data.rows import Question


@dataclass(frozen=True, slots=True)
class MistakeRates:
    """Probability of every deliberate mistake; each is drawn once per opportunity."""

    no_search: float = 0.15
    """Answer from memory without any search."""
    weak_query: float = 0.2
    """First query that names what is asked for instead of the entity asked about."""
    stop_early: float = 0.55
    """Answer with a guess although another hop is needed; drawn before every hop after the first."""
    ignore_evidence: float = 0.1
    """Search correctly, then answer something else."""
    malformed_call: float = 0.02
    """Write a call that cannot be parsed."""
    lucky_memory: float = 0.35
    """How often an answer from memory is right."""


def call_text(query: str) -> str:
    """A search call in the Qwen chat format."""
    arguments = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
    return f"<tool_call>\n{arguments}\n</tool_call>"


def answer_text(answer: str) -> str:
    """A final turn."""
    return f"<answer> {answer} </answer>"


def _thought(text: str) -> str:
    return f"<think> {text}</think>\n"


@dataclass
class Demonstrator:
    """Writes the assistant turns of one rollout, knowing the facts and the questions' evidence."""

    facts: Facts
    rates: MistakeRates
    rng: random.Random

    def __post_init__(self):
        self._cities = {city.passage_id: city for city in self.facts.cities}
        self._countries = {country.passage_id: country for country in self.facts.countries.values()}
        self._capitals = sorted({c.capital for c in self._countries.values() if c.capital})
        self._currencies = sorted({c.currency for c in self._countries.values() if c.currency})
        self._continents = sorted({c.continent for c in self._countries.values()})

    def turns(self, question: Question) -> list[str]:
        """
        Texts of the assistant turns of one demonstration.

        Args:
            question (`Question`):
                An atlas question; its `evidence` says which entities to look up, in which order.

        Returns:
            `list[str]`: At least one turn; every turn but the last is a call.
        """
        entities = [self._cities.get(name) or self._countries[name] for name in question.evidence]
        if self._happens(self.rates.no_search):
            return [answer_text(self._from_memory(question, entities))]
        turns: list[str] = []
        if self._happens(self.rates.malformed_call):
            turns.append(call_text(self._query(question, entities, 0))[:-14] + "\n</tool_call>")
        if self._happens(self.rates.weak_query):
            turns.append(call_text(self._weak_query(question)))
            if self._happens(0.5):
                return [*turns, answer_text(self._from_memory(question, entities))]
        for hop in range(len(entities)):
            if hop and self._happens(self.rates.stop_early):
                return [
                    *turns,
                    self._learned(question, entities, hop) + answer_text(self._guess(question, entities[:hop])),
                ]
            turns.append(self._learned(question, entities, hop) + call_text(self._query(question, entities, hop)))
        wrong = self._happens(self.rates.ignore_evidence)
        answer = self._guess(question, entities) if wrong else question.answers[0]
        return [*turns, self._learned(question, entities, len(entities)) + answer_text(answer)]

    def _happens(self, rate: float) -> bool:
        return self.rng.random() < rate

    def _query(self, question: Question, entities: list[City | Country], hop: int) -> str:
        entity = entities[hop]
        if isinstance(entity, City):
            is_marked = question.kind != "larger_city" and self.facts.is_ambiguous(entity)
            return f"city {entity.name} {entity.population:,}" if is_marked else f"city {entity.name}"
        relation = {"city_currency": "currency", "city_continent": "continent"}.get(question.kind or "", "capital")
        return f"{relation} of {entity.in_text}"

    def _weak_query(self, question: Question) -> str:
        weak = {
            "city_country": ("country of the city", "which country"),
            "country_capital": ("capital city", "capital of the country"),
            "city_capital": ("capital of the country", "capital city"),
            "city_currency": ("currency of the country", "which currency"),
            "city_continent": ("continent of the city", "which continent"),
            "neighbour_capital": ("capital of the neighbour", "borders only"),
            "larger_city": ("largest city", "city inhabitants"),
            "same_country": ("same country", "cities of the country"),
        }
        return self.rng.choice(weak[question.kind or "city_country"])

    def _learned(self, question: Question, entities: list[City | Country], hop: int) -> str:
        """What the searches so far have shown, as a thought; empty before the first."""
        if hop == 0:
            return ""
        entity = entities[hop - 1]
        if isinstance(entity, City):
            if question.kind == "larger_city":
                return _thought(f"{entity.name} has {entity.population:,} inhabitants.")
            return _thought(f"{entity.name} is in {self.facts.countries[entity.country].in_text}.")
        if question.kind == "neighbour_capital" and hop == 2:
            return _thought(f"It borders only {self.facts.countries[entity.neighbours[0]].in_text}.")
        if question.kind == "city_currency":
            return _thought(f"Its currency is the {entity.currency}.")
        if question.kind == "city_continent":
            return _thought(f"{entity.name} is a country in {entity.continent}.")
        return _thought(f"The capital of {entity.in_text} is {entity.capital}.")

    def _from_memory(self, question: Question, entities: list[City | Country]) -> str:
        return question.answers[0] if self._happens(self.rates.lucky_memory) else self._guess(question, entities)

    def _guess(self, question: Question, entities: list[City | Country]) -> str:
        """A plausible answer that need not be right."""
        kind = question.kind
        if kind == "same_country":
            return self.rng.choice(("yes", "no"))
        if kind == "larger_city":
            return self.rng.choice([entity.name for entity in entities])
        if kind == "city_country":
            return self.rng.choice(list(self.facts.countries.values())).name
        if kind == "city_currency":
            return self.rng.choice(self._currencies)
        if kind == "city_continent":
            return self.rng.choice(self._continents)
        # The usual slip for a capital: the name of something just read.
        names = [entity.name for entity in entities]
        pool = [*names, self.rng.choice(self._capitals)]
        return self.rng.choice([name for name in pool if fold(name) != fold(question.answers[0])] or pool)
