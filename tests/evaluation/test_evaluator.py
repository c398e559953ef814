"""Evaluation: order, chunks, resumption, and what it refuses to mix."""

from __future__ import annotations

import pytest

from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.evaluation.evaluator import PARTIAL_SUFFIX, evaluate_policy
from grounded_rl.evaluation.metrics import compute_metrics
from grounded_rl.rollouts import load_rollouts
from grounded_rl.sampling import RolloutSampler, ScriptedEngine
from tests.environments.tokenizers import qwen_tokenizer
from tests.sampling.world import CAPITALS, SCRIPTS, TinyRetriever, encode, question

COUNTRIES = list(CAPITALS)[:6]
NAMES = ("A", "B", "C", "D", "A_late", "none")
"""Script of every question's rollouts."""

TOKENIZER = qwen_tokenizer()
ENVIRONMENT = SearchEnvironment(TOKENIZER, prompt_style="plain")


class ChunkEngine:
    """Plays the right script for every prompt, whichever chunk it comes in; can stop working after some questions."""

    def __init__(self, *, breaks_at=None):
        self._scripts = {
            tuple(ENVIRONMENT.prompt_ids(question(country).question)): [
                encode(TOKENIZER, text) for text in SCRIPTS[name](country)
            ]
            for country, name in zip(COUNTRIES, NAMES, strict=True)
        }
        self._breaks_at = breaks_at
        self._engine = None
        self.chunks = []

    def generate(self, contexts, rollouts):
        scripts = [self._scripts.get(tuple(context)) for context in contexts]
        if all(scripts):
            if self._breaks_at == len(self.chunks):
                raise KeyboardInterrupt
            self.chunks.append(len(contexts))
            self._engine = ScriptedEngine(scripts, [TOKENIZER.eos_token_id])
        return self._engine.generate(contexts, rollouts)


def run(path=None, *, engine=None, retriever=None, countries=COUNTRIES, **options):
    sampler = RolloutSampler(ENVIRONMENT, retriever or TinyRetriever())
    engine = engine or ChunkEngine()
    questions = [question(country) for country in countries]
    return evaluate_policy(engine, sampler, questions, path=path, **options), engine


def test_rollouts_stand_in_the_order_of_the_questions():
    rollouts, engine = run(chunk_size=4, samples=2)
    assert [(one.question_id, one.sample) for one in rollouts] == [
        (f"q-{country}", sample) for country in COUNTRIES for sample in range(2)
    ]
    assert engine.chunks == [8, 4]
    metrics = compute_metrics(rollouts)
    assert (metrics["em"], metrics["tool_hit"], metrics["num_questions"]) == (0.5, 0.5, 6.0)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 100])
def test_results_do_not_depend_on_the_chunk_size(chunk_size):
    assert run(chunk_size=chunk_size)[0] == run()[0]


def test_the_file_holds_what_was_returned_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "out" / "rollouts.jsonl"
    rollouts, _ = run(path, chunk_size=2, extras={"policy": "tiny"})
    assert load_rollouts(path) == rollouts
    assert {one.extras["policy"] for one in rollouts} == {"tiny"}
    assert [entry.name for entry in path.parent.iterdir()] == ["rollouts.jsonl"]


def test_an_interrupted_evaluation_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, engine=ChunkEngine(breaks_at=2), chunk_size=2, samples=2)
    partial = tmp_path / f"rollouts.jsonl{PARTIAL_SUFFIX}"
    assert len(load_rollouts(partial)) == 8
    assert not path.exists()
    progress = []
    rollouts, engine = run(path, chunk_size=2, samples=2, on_progress=progress.append)
    assert rollouts == run(samples=2)[0]
    # Only the last two questions are rolled out; the kept ones count at once.
    assert (engine.chunks, progress) == ([4], [4, 2])
    assert not partial.exists()


@pytest.mark.parametrize("damage", ["cut the last line", "cut in a character", "lose the last rollout"])
def test_a_damaged_end_is_rolled_out_again(tmp_path, damage, caplog):
    path = tmp_path / "rollouts.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(path, engine=ChunkEngine(breaks_at=2), chunk_size=2, samples=2)
    partial = tmp_path / f"rollouts.jsonl{PARTIAL_SUFFIX}"
    whole = partial.read_bytes()
    if damage == "cut the last line":
        partial.write_bytes(whole[:-20])
    elif damage == "cut in a character":
        partial.write_bytes(whole + "é".encode()[:1])
    else:
        partial.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    rollouts, _ = run(path, chunk_size=2, samples=2)
    assert rollouts == run(samples=2)[0]
    assert load_rollouts(path) == rollouts
    assert ("ends in an incomplete line" in caplog.text) == damage.startswith("cut")


@pytest.mark.parametrize(
    "options",
    [
        {"countries": COUNTRIES[::-1]},
        {"samples": 1},
        {"countries": COUNTRIES[:2]},
        {"extras": {"policy": "other"}},
    ],
)
def test_a_kept_part_of_another_evaluation_is_refused(tmp_path, options):
    path = tmp_path / "rollouts.jsonl"
    kept = {"samples": 2, "extras": {"policy": "tiny"}}
    with pytest.raises(KeyboardInterrupt):
        run(path, engine=ChunkEngine(breaks_at=2), chunk_size=2, **kept)
    with pytest.raises(ConfigurationError, match=r"must hold rollouts of the same questions, samples and policy"):
        run(path, chunk_size=2, **{**kept, **options})


def test_a_failed_search_keeps_what_was_finished(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    retriever = TinyRetriever(failing=[f"capital of {COUNTRIES[0]}"])
    with pytest.raises(RetrievalError):
        run(path, retriever=retriever, countries=[COUNTRIES[3], COUNTRIES[0]], chunk_size=1)
    partial = tmp_path / f"rollouts.jsonl{PARTIAL_SUFFIX}"
    assert [one.question_id for one in load_rollouts(partial)] == [f"q-{COUNTRIES[3]}"]


def test_no_questions_give_no_rollouts(tmp_path):
    rollouts, engine = run(tmp_path / "rollouts.jsonl", countries=[])
    assert rollouts == []
    assert engine.chunks == []
    assert load_rollouts(tmp_path / "rollouts.jsonl") == []


@pytest.mark.parametrize(("samples", "chunk_size"), [(0, 1), (1, 0)])
def test_numbers_out_of_range_are_refused(samples, chunk_size):
    with pytest.raises(ConfigurationError, match=rf"must be at least 1: got {samples} and {chunk_size}"):
        run(samples=samples, chunk_size=chunk_size)
