"""
Step time of GRPO and GCA against TRL's own tool loop, on the same model, prompts, generations and index.

    python benchmarks/bench_step_time.py --out benchmarks/results/step_time.md

Three trainers take turns: `GRPOTrainer` with `tools=[search]`, `SearchAgentTrainer` and `GCATrainer`. A step is one
generation batch (4 questions x 8 rollouts over BM25 on the atlas) and the two updates it serves, so that TRL computes
old log-probabilities itself. Generations are scripted demonstrations: every trainer reads, searches and trains on the
same tokens. What they cost to sample is the same for all and reported apart.
"""

from __future__ import annotations

import argparse
import copy
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import datasets
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template, qwen3_training_chat_template

from grounded_rl.data.atlas.demonstrations import Demonstrator, MistakeRates
from grounded_rl.data.atlas.facts import load_facts
from grounded_rl.data.atlas.passages import corpus_record, iterate_passages
from grounded_rl.data.atlas.questions import make_questions
from grounded_rl.data.rows import Question, write_json_lines
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.environments.tools import search as announced
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.trainers import GCAConfig, GCATrainer, SearchAgentConfig, SearchAgentTrainer

QUESTIONS, ROLLOUTS, MAX_TURNS, OBSERVATION_TOKENS = 4, 8, 5, 1024
NAMES = ("TRL, tools", "grpo", "gca")
TARGETS = {"grpo": ("TRL, tools", 1.05), "gca": ("grpo", 1.03)}


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 2,048 entries with Qwen 3's control tokens and chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=2030, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tags = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    tokenizer.add_tokens(tags, special_tokens=False)
    tokenizer.chat_template = qwen3_training_chat_template
    return tokenizer


def policy(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A random model of the size of the atlas policy; the same for everyone."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


class World:
    """Index, questions and one script per rollout, shared by all trainers."""

    def __init__(self, folder: Path) -> None:
        facts = load_facts()
        write_json_lines(folder / "corpus.jsonl", map(corpus_record, iterate_passages(facts)))
        build_bm25_index(folder / "corpus.jsonl", folder / "index")
        self.retriever = BM25Retriever.open(folder / "index")
        self.questions: list[Question] = make_questions(facts, "train", 200, 0)[:QUESTIONS]
        self.tokenizer = train_tokenizer([passage.text for passage in iterate_passages(facts)][:6000])
        demonstrator = Demonstrator(facts, MistakeRates(malformed_call=0.0), random.Random(0))
        self.scripts = [
            [[*self.ids(text), self.tokenizer.eos_token_id] for text in demonstrator.turns(question)]
            for question in self.questions
            for _ in range(ROLLOUTS)
        ]
        options = {"prompt_style": "plain", "max_turns": MAX_TURNS, "observation_tokens": OBSERVATION_TOKENS}
        self.environment = SearchEnvironment(self.tokenizer, **options)

    def ids(self, text: str) -> list[int]:
        """Ids of a turn without its end token."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def rows(self) -> list[dict[str, Any]]:
        """Rows of one generation batch."""
        return [
            {
                "prompt": self.environment.messages(question.question),
                "id": question.id,
                "question": question.question,
                "answers": list(question.answers),
            }
            for question in self.questions
            for _ in range(ROLLOUTS)
        ]


def player(scripts: list[list[list[int]]]) -> Callable[..., tuple[list[list[int]], None]]:
    """Stands in for generation: the next turn of every rollout that has one left."""
    waiting: list[list[list[int]]] = []

    def generate(contexts: list, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        if not waiting:
            waiting.extend(list(script) for script in scripts)
        assert len(contexts) == len(waiting)
        turns = [script.pop(0) for script in waiting]
        waiting[:] = [script for script in waiting if script]
        return turns, None

    return generate


def training_options(folder: Path, *, updates: int) -> dict[str, Any]:
    """Options all three share."""
    return {
        "output_dir": str(folder),
        "num_generations": ROLLOUTS,
        "per_device_train_batch_size": QUESTIONS * ROLLOUTS // updates,
        "steps_per_generation": updates,
        "max_completion_length": 1024,
        "learning_rate": 1e-4,
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def build_trainers(world: World, folder: Path, *, updates: int) -> dict[str, GRPOTrainer]:
    """The three trainers by name."""
    dataset = Dataset.from_list(world.rows()[::ROLLOUTS])
    options = training_options(folder, updates=updates)

    def search(query: str) -> str:
        hits = world.retriever.search([query], world.environment.top_k)[0]
        return world.environment.formatter.format(hits)[0]

    def answer_length(completions: list, **_: Any) -> list[float]:
        return [float(len(messages[-1]["content"])) for messages in completions]

    search.__doc__ = announced.__doc__
    reading = copy.deepcopy(world.tokenizer)
    # TRL knows how to read calls by the exact bytes of its own templates only.
    reading.response_template = qwen3_template
    built: dict[str, GRPOTrainer] = {
        "TRL, tools": GRPOTrainer(
            policy(world.tokenizer),
            reward_funcs=answer_length,
            args=GRPOConfig(**options, max_tool_calling_iterations=MAX_TURNS - 1),
            train_dataset=dataset,
            processing_class=reading,
            tools=[search],
        )
    }
    ours = {**options, "prompt_style": "plain", "rollout_max_turn_tokens": 256, "rollout_max_turns": MAX_TURNS}
    for name, trainer_class, config_class in (
        ("grpo", SearchAgentTrainer, SearchAgentConfig),
        ("gca", GCATrainer, GCAConfig),
    ):
        built[name] = trainer_class(
            policy(world.tokenizer),
            world.retriever,
            args=config_class(**ours),
            train_dataset=dataset,
            processing_class=world.tokenizer,
        )
    for trainer in built.values():
        trainer._generate_single_turn = player(world.scripts)
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
    return built


def take_step(trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """One generation batch and its updates; wall-clock and CPU seconds."""
    if isinstance(trainer, GCATrainer):
        trainer.retrievability.cache.clear()  # in a real run every step brings new questions
    started, cpu_started = time.perf_counter(), time.process_time()
    for _ in range(trainer.args.steps_per_generation):
        trainer.training_step(trainer.model, rows, None)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    trainer.state.global_step += trainer.args.steps_per_generation
    return time.perf_counter() - started, time.process_time() - cpu_started


def measure(world: World, folder: Path, *, updates: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Times of every step by trainer; the trainers take turns, starting with another one every time."""
    built = build_trainers(world, folder, updates=updates)
    for trainer in built.values():
        take_step(trainer, world.rows())
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for repeat in range(repeats):
        for name in (*NAMES[repeat % 3 :], *NAMES[: repeat % 3]):
            times[name].append(take_step(built[name], world.rows()))
    return times


def sampling_seconds(world: World, folder: Path) -> float:
    """CPU seconds the same turns take to sample, once: the rounds of contexts at their lengths."""
    trainer = build_trainers(world, folder, updates=2)["grpo"]
    rollouts = trainer.sample(world.rows())
    del trainer._generate_single_turn
    trainer.generation_config.eos_token_id = None
    started = time.process_time()
    for number in range(max(len(rollout.turns) for rollout in rollouts)):
        alive = [rollout for rollout in rollouts if len(rollout.turns) > number]
        contexts = [
            [*rollout.prompt_ids, *(i for turn in rollout.turns[:number] for i in (*turn.ids, *turn.observation_ids))]
            for rollout in alive
        ]
        trainer.generation_config.max_new_tokens = max(len(rollout.turns[number].ids) for rollout in alive)
        trainer._generate_single_turn(contexts, None, {}, 1)
    return time.process_time() - started


def table(times: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Rows of a Markdown table: medians, and the median of the ratios of neighbouring steps."""
    lines = ["| trainer | wall, s | CPU, s | CPU ratio | target |", "|---|---|---|---|---|"]
    for name in NAMES:
        wall, cpu = (statistics.median(each[kind] for each in times[name]) for kind in (0, 1))
        base, limit = TARGETS.get(name, (None, None))
        if base is None:
            lines.append(f"| {name} | {wall:.3f} | {cpu:.3f} | | |")
            continue
        ratios = [mine[1] / other[1] for mine, other in zip(times[name], times[base], strict=True)]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) of {base}"
        lines.append(f"| {name} | {wall:.3f} | {cpu:.3f} | {spread} | {limit} |")
    return lines


def report(args: argparse.Namespace) -> str:
    """Markdown of all measurements."""
    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = World(folder)
        two = measure(world, folder, updates=2, repeats=args.repeats)
        one = measure(world, folder, updates=1, repeats=args.repeats)
        sampling = sampling_seconds(world, folder)
    turns = [len(script) for script in world.scripts]
    return "\n".join(
        [
            "# Step time",
            "",
            f"`python benchmarks/bench_step_time.py --repeats {args.repeats} --threads {args.threads}`",
            "",
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
            f"torch {torch.__version__}, {args.threads} thread(s). Load average before and after: {load_before:.1f}, "
            f"{os.getloadavg()[0]:.1f}; on a busy machine CPU times are what to compare.",
            "",
            f"A step is {QUESTIONS} questions x {ROLLOUTS} rollouts of {statistics.mean(turns):.1f} scripted turns on "
            "average, searched in BM25 over the atlas, and the updates they serve. Sampling the same turns with "
            f"`generate` takes {sampling:.1f} CPU seconds more, the same for every trainer; the ratios leave it out.",
            "",
            "Two updates per generation: TRL computes the old log-probabilities, and the probe reads along.",
            "",
            *table(two),
            "",
            "One update per generation: TRL needs no old-policy pass, GCA makes one. With vLLM, TRL makes it too, "
            "unless `vllm_importance_sampling_correction` is off.",
            "",
            *table(one),
        ]
    )


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_time.md"))
    args = parser.parse_args()
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    text = report(args)
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
