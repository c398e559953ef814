"""
Fuzzer of the environment: grammar-based mutations of valid turns, random text and token ids, hostile repetition.

    python -m tests.environments.fuzz --outputs 200000 --seed 0

Every output must be read without an exception, within a bound on CPU time per character, and with consistent
bookkeeping of prompt, turn and observation ids. The first broken rule ends the run and names the seed that broke it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from grounded_rl.environments.formats import CALL_ERRORS, TOOL_FORMATS, TRUNCATED_CALL
from grounded_rl.environments.parsing import TurnReading, read_turn
from grounded_rl.environments.rewards import reward_value
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.environments.structure import structural_mask
from grounded_rl.grounding import diagnose, segments
from grounded_rl.retrieval.base import Hit, Passage
from grounded_rl.rollouts import CallStatus, FinishReason, Rollout, StopReason, Turn, TurnKind
from tests.environments.tokenizers import llama_tokenizer, qwen_tokenizer

SECONDS_PER_KB = 0.05
"""Bound on the CPU time of reading one output; a base of as much again covers short outputs."""

TAGS = [
    f"{opening}{name}>"
    for name in ("tool_call", "think", "answer", "search", "information", "result", "tool_response", "function=search")
    for opening in ("<", "</")
]
PIECES = [
    *TAGS,
    *("<|im_end|>", "<|im_start|>assistant\n", "<|endoftext|>", "<|eot_id|>", "<|python_tag|>", "</s>"),
    *(
        "\\boxed{",
        "}",
        "{",
        "[",
        "]",
        '"',
        "'",
        "\\",
        ":",
        ",",
        "\n",
        " ",
        "\x00",
        "\ufffd",
        "\ud800",
        "é",
        "日本",
        "🎉",
    ),
    *(
        '"name"',
        '"search"',
        '"arguments"',
        '"query"',
        '"parameters"',
        "null",
        "NaN",
        "1e999",
        "9" * 50,
        "<parameter=query>",
    ),
    *("</parameter>", "</function>", "Paris", "<tool_", "call>", "<answ", "\u202e", "a\u0301", "the"),
]
VALID = {
    "qwen": [
        '<think>a</think>\n<tool_call>\n{"name": "search", "arguments": {"query": "Lima"}}\n</tool_call><|im_end|>',
        "<think>b</think>\n<answer> Paris </answer><|im_end|>",
    ],
    "qwen3_5": [
        "<think>a</think>\n<tool_call>\n<function=search>\n<parameter=query>\nLima\n</parameter>\n</function>\n</tool_call>",
        "<think>b</think>\n<answer> Paris </answer><|im_end|>",
    ],
    "llama": ['{"name": "search", "parameters": {"query": "Lima"}}<|eot_id|>', "<answer>Paris</answer><|eot_id|>"],
    "search_r1": ["<think>a</think><search> Lima </search>", "<think>b</think><answer> Paris </answer>"],
    "sipo": ["<think>a</think><search> Lima </search>", "<think>b</think><answer> so \\boxed{Paris} </answer>"],
}


def mutate(rng: random.Random, text: str) -> str:
    """One edit: insert, delete, repeat, swap or cut a slice."""
    start, end = sorted(rng.randint(0, len(text)) for _ in range(2))
    edit = rng.randrange(7)
    if edit == 0:
        return text[:start] + rng.choice(PIECES) + text[start:]
    if edit == 1:
        return text[:start] + text[min(end, start + 8) :]
    if edit == 2:
        return text[:start] + text[start:end] * rng.randint(2, 4) + text[end:]
    if edit == 3:
        return text[end:] + text[start:end] + text[:start]
    if edit == 4:
        return text[:end]
    if edit == 5:
        return text[:start] + chr(rng.choice([rng.randrange(128), rng.randrange(0xD800), 0x1F389])) + text[start:]
    piece = rng.choice(TAGS)
    return text.replace(piece, rng.choice(PIECES), 1) if piece in text else text + piece


def generate(rng: random.Random, format: str) -> str:
    """One output: a mutated transcript, a concatenation of pieces, random bytes, or (rarely) something very long."""
    kind = rng.random()
    if kind < 0.6:
        text = "".join(rng.choice(VALID[format]) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 6])):
            text = mutate(rng, text)
        return text[:20_000]
    if kind < 0.85:
        return "".join(rng.choice(PIECES) for _ in range(rng.randint(0, 40)))
    if kind < 0.9993:
        return rng.randbytes(rng.randint(0, 200)).decode(rng.choice(["utf-8", "latin-1"]), "replace")
    unit = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 4)))
    return unit * (rng.choice([20_000, 20_000, 200_000, 1_000_000]) // len(unit))


def check_reading(reading: TurnReading, finish: FinishReason) -> None:
    """Rules every reading obeys."""
    good = [call for call in reading.calls if call.error is None]
    assert all((call.query is None) == (call.error is not None) for call in reading.calls)
    assert all(call.error in CALL_ERRORS or call.error == TRUNCATED_CALL for call in reading.calls if call.error)
    assert all(call.query.strip() and call.query.encode() for call in good)
    assert (reading.kind is TurnKind.SEARCH) == bool(good)
    assert (reading.kind is TurnKind.MALFORMED) == bool(reading.calls and not good)
    assert reading.kind is not TurnKind.UNLABELLED or finish is FinishReason.LENGTH
    if finish is FinishReason.STOP:
        assert all(call.error != TRUNCATED_CALL for call in reading.calls)
    if reading.format_ok:
        assert reading.complete
        assert len(reading.calls) == (reading.kind is TurnKind.SEARCH)
        assert reading.kind is not TurnKind.ANSWER or reading.answer is not None


@dataclass
class Fuzzer:
    """Plays rollouts of generated turns in one environment."""

    environment: SearchEnvironment
    rng: random.Random
    counts: Counter = field(default_factory=Counter)
    slowest: float = 0.0
    """Largest reading time per kilobyte of an output of at least one kilobyte, in seconds."""

    def __post_init__(self):
        """Numbers of control tokens that observations of harmless text have."""
        if self.environment.stop_strings:
            self.allowed = {0}
        else:
            messages = range(1, 2 * self.environment.max_calls_per_turn + 2)
            texts = (self.environment.chat.observation_ids(["x"] * number) for number in messages)
            self.allowed = {self.control_tokens(ids) for ids in texts}

    def control_tokens(self, ids) -> int:
        special = set(self.environment.tokenizer.all_special_ids)
        return sum(token in special for token in ids)

    def turn(self, text: str, *, turns_left: int) -> Turn | None:
        """Sample, read and answer one turn; `None` where the tokenizer gives no ids."""
        environment = self.environment
        finish = FinishReason.LENGTH if self.rng.random() < 0.1 else FinishReason.STOP
        ids = environment.tokenizer(text.encode("utf-8", "replace").decode(), add_special_tokens=False)["input_ids"]
        if self.rng.random() < 0.1:
            ids = [self.rng.randrange(len(environment.tokenizer)) for _ in range(self.rng.randint(1, 60))]
        if not ids:
            return None
        reading = environment.read(ids, finish=finish)
        check_reading(reading, finish)
        assert len(structural_mask(environment.tokenizer, ids)) == len(ids)
        queries = environment.executable_queries(reading)
        assert len(queries) <= environment.max_calls_per_turn
        if not reading.calls or not reading.complete or turns_left == 0:
            calls = environment.unanswered_calls(reading)
            assert all(call.status is CallStatus.NOT_EXECUTED for call in calls)
            return Turn(tuple(ids), reading.text, reading.kind, finish, calls)
        observation = environment.observe(reading, [self.hits() for _ in queries], turns_left=turns_left)
        assert len(observation.calls) == len(reading.calls)
        executed = [call for call in observation.calls if call.status in (CallStatus.OK, CallStatus.EMPTY)]
        assert [call.query for call in executed] == queries
        self.check_observation(observation)
        return Turn(
            ids=tuple(ids),
            text=reading.text,
            kind=reading.kind,
            finish=finish,
            calls=observation.calls,
            observation_ids=observation.ids,
            observation=observation.text,
        )

    def hits(self) -> list[Hit]:
        """Hits with hostile titles and texts."""
        texts = ["".join(self.rng.choice(PIECES) for _ in range(self.rng.randint(0, 60))) for _ in range(6)]
        number = self.rng.randint(0, 3)
        return [Hit(Passage(f"p{rank}", texts[rank], texts[rank + 3]), 1.0 - rank) for rank in range(number)]

    def check_observation(self, observation) -> None:
        """Control tokens are the template's own, and the passages of each call fit the budget."""
        environment = self.environment
        assert observation.ids
        assert self.control_tokens(observation.ids) in self.allowed, "control tokens in retrieved text"
        budget = environment.formatter.budget
        for call in observation.calls:
            shown = sum(passage.num_tokens or 0 for passage in call.passages)
            assert shown <= budget

    def rollout(self) -> None:
        """A rollout of up to `max_turns` generated turns, with its diagnosis, segments and reward."""
        environment = self.environment
        prompt = tuple(environment.prompt_ids("Where is Lima?"))
        turns: list[Turn] = []
        for number in range(environment.max_turns):
            text = generate(self.rng, environment.tool_format)
            self.time_reading(text)
            turn = self.turn(text, turns_left=environment.max_turns - number - 1)
            if turn is None:
                break
            turns.append(turn)
            self.counts[turn.kind.value] += 1
            if not turn.observation_ids:
                break
        ids = [*prompt, *(token for turn in turns for token in (*turn.ids, *turn.observation_ids))]
        stop = StopReason.ANSWER if turns and turns[-1].kind is TurnKind.ANSWER else StopReason.TURN_LIMIT
        rollout = Rollout("q", "Where is Lima?", ("Paris",), prompt, tuple(turns), stop, environment.answer(turns))
        assert [*rollout.prompt_ids, *rollout.completion_ids] == ids
        assert sum(rollout.sampled_mask) == rollout.num_sampled_tokens
        assert len(segments(rollout)) == len(turns)
        assert not diagnose(rollout).correct or rollout.answer is not None
        value = reward_value(rollout, tool_format=environment.tool_format, opened_think=environment.opened_think)
        assert value in (0.0, 0.1, 0.2, 0.8, 1.0)

    def time_reading(self, text: str) -> None:
        """Read the raw text, lone surrogates included, against the clock."""
        start = time.process_time()
        read_turn(text, format=self.environment.tool_format, opened_think=self.rng.random() < 0.2)
        elapsed = time.process_time() - start
        kilobytes = len(text) / 1000
        assert elapsed <= SECONDS_PER_KB * (1 + kilobytes), f"{elapsed:.2f} s for {kilobytes:.1f} KB"
        if kilobytes >= 1:
            self.slowest = max(self.slowest, elapsed / kilobytes)
        self.counts["outputs"] += 1


def environments() -> list[SearchEnvironment]:
    """One environment per call format."""
    return [
        SearchEnvironment(qwen_tokenizer(), observation_tokens=120),
        SearchEnvironment(qwen_tokenizer("qwen3_5_think_training"), tool_format="qwen3_5", observation_tokens=120),
        SearchEnvironment(llama_tokenizer(), tool_format="llama", observation_tokens=120),
        *(
            SearchEnvironment(qwen_tokenizer(), prompt_style=name, tool_format=name, observation_tokens=120)
            for name in TOOL_FORMATS
            if TOOL_FORMATS[name].raw
        ),
    ]


def fuzz(outputs: int, seed: int) -> list[Fuzzer]:
    """
    Read at least that many outputs, evenly over the formats.

    Raises:
        `AssertionError`: If a rule is broken, with the seed of the rollout in its message.
    """
    fuzzers = [Fuzzer(environment, random.Random()) for environment in environments()]
    rollout = 0
    while sum(fuzzer.counts["outputs"] for fuzzer in fuzzers) < outputs:
        fuzzer = fuzzers[rollout % len(fuzzers)]
        fuzzer.rng.seed(f"{seed}/{rollout}")
        try:
            fuzzer.rollout()
        except Exception as error:
            raise AssertionError(
                f"format {fuzzer.environment.tool_format}, seed '{seed}/{rollout}': {type(error).__name__}: {error}"
            ) from error
        rollout += 1
    return fuzzers


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz the reading of turns and the bookkeeping of ids.")
    parser.add_argument("--outputs", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    start = time.perf_counter()
    for fuzzer in fuzz(arguments.outputs, arguments.seed):
        counts = ", ".join(f"{name} {number}" for name, number in sorted(fuzzer.counts.items()))
        slowest = f"slowest {1000 * fuzzer.slowest:.2f} ms/KB"
        sys.stdout.write(f"{fuzzer.environment.tool_format}: {counts}, {slowest}\n")
    sys.stdout.write(f"no rule broken, {time.perf_counter() - start:.0f} s\n")


if __name__ == "__main__":
    main()
