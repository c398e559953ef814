"""A world of twenty passages, a retriever over it, and turns of a policy as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from grounded_rl.data.rows import Question
from grounded_rl.errors import RetrievalError
from grounded_rl.retrieval.base import Hit, Passage

CAPITALS = {
    "Peru": "Lima",
    "Chile": "Santiago",
    "Norway": "Oslo",
    "Kenya": "Nairobi",
    "Japan": "Tokyo",
    "Poland": "Warsaw",
    "Egypt": "Cairo",
    "Ghana": "Accra",
    "Cuba": "Havana",
    "Nepal": "Kathmandu",
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Hungary": "Budapest",
    "Ireland": "Dublin",
    "Finland": "Helsinki",
    "Sweden": "Stockholm",
    "Canada": "Ottawa",
}
UNKNOWN_COUNTRY, UNKNOWN_CAPITAL = "Atlantis", "Poseidonis"
"""A country of which the corpus says nothing."""

PASSAGES = [
    Passage(f"p{number:02}", country, f"{country} is a country, and {capital} is its capital.")
    for number, (country, capital) in enumerate(CAPITALS.items())
]
COMMON_WORDS = frozenset(["a", "and", "capital", "country", "is", "its", "of", "the", "what"])


class TinyRetriever:
    """Ranks by the number of uncommon words in common; keeps every batch of queries and can fail on chosen ones."""

    def __init__(self, failing: Sequence[str] = ()):
        self.failing = set(failing)
        self.batches: list[list[str]] = []

    @property
    def manifest(self) -> Mapping[str, object]:
        return {"backend": "tiny", "num_passages": len(PASSAGES)}

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        broken = sorted(self.failing & set(queries))
        if broken:
            raise RetrievalError(f"no connection for {broken[0]!r}")
        return [self._best(query, k) for query in queries]

    def _best(self, query: str, k: int) -> list[Hit]:
        words = _words(query)
        scored = [(len(words & _words(f"{passage.title} {passage.text}")), passage) for passage in PASSAGES]
        ranked = sorted((pair for pair in scored if pair[0]), key=lambda pair: (-pair[0], pair[1].id))
        return [Hit(passage, float(score)) for score, passage in ranked[:k]]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - COMMON_WORDS


def capital(country: str) -> str:
    """Capital of a country, the unknown one's included."""
    return CAPITALS.get(country, UNKNOWN_CAPITAL)


def question(country: str) -> Question:
    """Question for the capital of a country."""
    return Question(f"q-{country}", f"What is the capital of {country}?", (capital(country),))


def call(query: str) -> str:
    """A search call."""
    return f'<tool_call>\n{{"name": "search", "arguments": {{"query": "{query}"}}}}\n</tool_call>'


def answer(text: str) -> str:
    """A final turn."""
    return f"<answer> {text} </answer>"


MALFORMED = "<tool_call>\n{oops\n</tool_call>"
NOTHING = "weather tomorrow"
"""A query that finds no passage."""

SCRIPTS: dict[str, Callable[[str], list[str]]] = {
    "A": lambda country: [call(f"capital of {country}"), answer(capital(country))],
    "A_late": lambda country: [
        call(NOTHING),
        f"<think> again </think>\n{call(f'{country} capital')}",
        call(f"{country} city"),
        answer(capital(country)),
    ],
    "A_malformed": lambda country: [MALFORMED, call(f"capital of {country}"), answer(capital(country))],
    "B": lambda country: [call(f"capital of {country}"), call("Oslo or Cairo"), answer("Nowhere")],
    "C": lambda country: [call(NOTHING), answer("Nowhere")],
    "C_short": lambda country: [answer("Nowhere")],
    "D": lambda country: [answer(capital(country))],
    "D_search": lambda country: [call(NOTHING), answer(capital(country))],
    "none": lambda country: ["I do not know."],
}
"""Turns of a rollout by what it does; the first letter is its diagnosis for a country of the corpus."""


def encode(tokenizer, text: str, *, end: bool = True) -> list[int]:
    """Ids of a sampled turn, with the token that ends it."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids, tokenizer.eos_token_id] if end else ids


class Player:
    """
    Stands in for `GRPOTrainer._generate_single_turn`: plays the turns of a plan.

    `plan(country, sample)` gives the turns of the rollout with that number in its group; a turn is a text, which gets
    the end token, or a list of ids. Which rollouts go on after a round is known from the turns that are left.
    """

    def __init__(self, tokenizer, plan: Callable[[str, int], Sequence[str | list[int]]]):
        self._tokenizer = tokenizer
        self._plan = plan
        self._waiting: list[list[str | list[int]]] = []
        self.contexts: list[list[list[int]]] = []
        """Contexts of every round."""

    def __call__(self, prompt_ids, images=None, multimodal_fields=None, num_generations=1, has_tool_images=False):
        if not self._waiting:
            self._waiting = self._new_batch(prompt_ids)
        assert len(prompt_ids) == len(self._waiting), "the loop dropped or kept a rollout the plan does not"
        self.contexts.append([list(ids) for ids in prompt_ids])
        turns = [turns.pop(0) for turns in self._waiting]
        self._waiting = [turns for turns in self._waiting if turns]
        return [turn if isinstance(turn, list) else encode(self._tokenizer, turn) for turn in turns], None

    def _new_batch(self, prompt_ids):
        numbers: dict[str, count] = {}
        batch = []
        for ids in prompt_ids:
            country = re.search(r"capital of (\w+)\?", self._tokenizer.decode(ids)).group(1)
            batch.append(list(self._plan(country, next(numbers.setdefault(country, count())))))
        return batch


def plan_of(*names: str) -> Callable[[str, int], list[str]]:
    """Plan in which the rollouts of every group follow the named scripts, in turn."""
    return lambda country, sample: SCRIPTS[names[sample % len(names)]](country)
