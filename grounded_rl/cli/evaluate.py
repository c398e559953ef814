"""`grounded-rl evaluate`: roll out a policy on questions and report the metrics."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grounded_rl.errors import ConfigurationError

if TYPE_CHECKING:
    from grounded_rl.retrieval import Retriever
    from grounded_rl.rollouts import Rollout

_EPILOG = """\
example:
  grounded-rl evaluate --model runs/atlas-gca --questions data/atlas/test.jsonl \\
      --index indexes/atlas --out runs/atlas-gca/test --prompt-style plain --limit 300
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "evaluate",
        help="roll out a policy on questions and report the metrics",
        description=(
            "Roll out a policy on questions and report the metrics. Interrupted, it goes on where it stopped."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="folder, name on the Hub, or `atlas-policy`")
    parser.add_argument("--questions", type=Path, required=True, metavar="FILE", help="JSON Lines file of questions")
    parser.add_argument(
        "--index", required=True, metavar="WHERE", help="index to search: its folder, or the URL of a server"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for rollouts.jsonl")
    parser.add_argument("--limit", type=int, metavar="N", help="use only the first questions")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="rollouts per question (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy decoding (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default: 0)")
    parser.add_argument(
        "--batch-size", type=int, default=64, metavar="N", help="contexts per generation (default: 64)"
    )
    parser.add_argument("--dtype", default="auto", help="dtype of the weights (default: auto)")
    parser.add_argument("--prompt-style", default="gca", help="prompt the question is put in (default: gca)")
    parser.add_argument("--tool-format", default="qwen", help="how the policy writes calls (default: qwen)")
    parser.add_argument("--max-turns", type=int, default=5, metavar="N", help="assistant turns (default: 5)")
    parser.add_argument("--max-turn-tokens", type=int, default=512, metavar="N", help="tokens per turn (default: 512)")
    parser.add_argument(
        "--max-completion-tokens", type=int, default=7168, metavar="N", help="tokens per rollout (default: 7168)"
    )
    parser.add_argument("--top-k", type=int, default=3, metavar="N", help="passages per search (default: 3)")
    parser.add_argument(
        "--observation-tokens", type=int, default=1024, metavar="N", help="tokens per observation (default: 1024)"
    )
    parser.add_argument(
        "--retrieval-patience", type=float, default=600.0, metavar="S", help="wait for a lost backend (default: 600)"
    )
    parser.add_argument(
        "--retrieval-attempts", type=int, default=4, metavar="N", help="tries of a request (default: 4)"
    )
    parser.add_argument(
        "--retrieval-timeout", type=float, default=120.0, metavar="S", help="no new try after this (default: 120)"
    )
    parser.add_argument(
        "--retrieval-max-in-flight", type=int, default=256, metavar="N", help="queries sent at once (default: 256)"
    )
    parser.add_argument(
        "--retrieval-cache", default="memory", metavar="WHERE", help="`off`, `memory` or a file (default: memory)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from grounded_rl.data.rows import load_questions
    from grounded_rl.evaluation.terminal import render_summary

    questions = load_questions(arguments.questions, limit=arguments.limit)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "rollouts.jsonl"
    options = {name: value for name, value in vars(arguments).items() if name in ROLLOUT_OPTIONS}
    rollouts = evaluate_model(arguments.model, questions, arguments.index, path, **options)
    Console().print(render_summary(rollouts, title=f"{arguments.model} on {arguments.questions.name}"))
    print(f"wrote {len(rollouts):,} rollouts to {path}")
    return 0


ROLLOUT_OPTIONS: dict[str, Any] = {
    "samples": 1,
    "temperature": 0.0,
    "seed": 0,
    "batch_size": 64,
    "dtype": "auto",
    "prompt_style": "gca",
    "tool_format": "qwen",
    "max_turns": 5,
    "max_turn_tokens": 512,
    "max_completion_tokens": 7168,
    "top_k": 3,
    "observation_tokens": 1024,
    "retrieval_patience": 600.0,
    "retrieval_attempts": 4,
    "retrieval_timeout": 120.0,
    "retrieval_max_in_flight": 256,
    "retrieval_cache": "memory",
}
"""Options of an evaluation and their defaults."""


def evaluate_model(model: str, questions: list, index: str | Path, path: Path, **options: Any) -> list[Rollout]:
    """
    Roll out a model on questions with a progress bar.

    Args:
        model (`str`):
            As for [`~cli.models.resolve_model`].
        questions (`list[Question]`):
            Questions to answer.
        index (`str` or `Path`):
            Index to search: its folder, or the URL of a retrieval server.
        path (`Path`):
            File the rollouts are written to.
        **options:
            Any of [`ROLLOUT_OPTIONS`].

    Returns:
        `list[Rollout]`: The rollouts, in the order of the questions.

    Raises:
        `ConfigurationError`: If the model, the index or an option cannot be used.
        `RetrievalError`: If a search failed for good. What was finished before is in the file, and the next call goes
            on from there.
    """
    import torch
    from tqdm.auto import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from grounded_rl.cli.models import resolve_model
    from grounded_rl.environments.search import SearchEnvironment
    from grounded_rl.evaluation.evaluator import evaluate_policy
    from grounded_rl.retrieval.base import close_retriever
    from grounded_rl.sampling import RolloutSampler
    from grounded_rl.sampling.transformers_engine import TransformersEngine

    chosen = {**ROLLOUT_OPTIONS, **options}
    name = resolve_model(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        policy = AutoModelForCausalLM.from_pretrained(name, dtype=chosen["dtype"])
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"`model` must be loadable: got {model!r}. {reason}") from error
    policy.to("cuda" if torch.cuda.is_available() else "cpu")
    environment = SearchEnvironment(
        tokenizer,
        prompt_style=chosen["prompt_style"],
        tool_format=chosen["tool_format"],
        max_turns=chosen["max_turns"],
        top_k=chosen["top_k"],
        observation_tokens=chosen["observation_tokens"],
    )
    engine = TransformersEngine(
        policy,
        [tokenizer.eos_token_id],
        tokenizer.pad_token_id,
        max_turn_tokens=chosen["max_turn_tokens"],
        temperature=chosen["temperature"],
        batch_size=chosen["batch_size"],
        seed=chosen["seed"],
    )
    retriever = _retriever(index, chosen)
    sampler = RolloutSampler(environment, retriever, max_completion_tokens=chosen["max_completion_tokens"])
    try:
        with tqdm(total=len(questions), unit="question", desc=f"Evaluating {Path(model).name}") as bar:
            return evaluate_policy(
                engine, sampler, questions, samples=chosen["samples"], path=path, on_progress=bar.update
            )
    finally:
        close_retriever(retriever)


def _retriever(index: str | Path, chosen: Mapping[str, Any]) -> Retriever:
    """The index with what the options put around it."""
    from grounded_rl.retrieval import build_retriever
    from grounded_rl.retrieval.compose import RetrievalSettings, compose_retriever

    names = ("attempts", "timeout", "max_in_flight", "cache", "patience")
    settings = RetrievalSettings(**{name: chosen[f"retrieval_{name}"] for name in names})
    return compose_retriever(build_retriever(index), settings)
