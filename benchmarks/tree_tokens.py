"""
How many tokens trees of rollouts sample, against as many linear rollouts.

    python benchmarks/tree_tokens.py --questions data/atlas/dev.jsonl --index indexes/atlas --limit 12

For every hop count of the questions: tokens sampled by trees of 22 leaves (AT²PO's and SIPO's shape), tokens along all
their paths (linear rollouts of the same lengths), and tokens of 22 linear rollouts that were really sampled.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grounded_rl.cli.models import resolve_model
from grounded_rl.data.rows import Question, load_questions
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.retrieval import build_retriever
from grounded_rl.sampling import BranchRule, RolloutRequest, RolloutSampler, TreeSampler, TreeShape
from grounded_rl.sampling.transformers_engine import TransformersEngine

METHODS = {
    "at2po": (TreeShape(10, 2, 6, 1), BranchRule(standardize=False)),
    "sipo": (TreeShape(10, 2, 3, 2), BranchRule()),
}


class Scorer:
    """Log-probabilities of completions, one sequence at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every completion token."""
        rows = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = torch.tensor([[*prompt, *completion]])
            logps = self._model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            rows.append(logps.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist())
        return rows


def by_hops(questions: Sequence[Question], limit: int) -> dict[int, list[Question]]:
    """The first questions of every hop count."""
    groups: dict[int, list[Question]] = defaultdict(list)
    for question in questions:
        if len(groups[question.hops or 0]) < limit:
            groups[question.hops or 0].append(question)
    return dict(sorted(groups.items()))


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description="Tokens sampled by trees and by linear rollouts.")
    parser.add_argument("--questions", type=Path, required=True, help="JSON Lines file of questions")
    parser.add_argument("--index", required=True, help="folder of the index")
    parser.add_argument("--model", default="atlas-policy", help="policy (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=12, help="questions per hop count (default: %(default)s)")
    arguments = parser.parse_args()
    path = resolve_model(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    environment = SearchEnvironment(tokenizer, prompt_style="plain", max_turns=5)
    sampler = RolloutSampler(environment, build_retriever(arguments.index), max_completion_tokens=1024)
    engine = TransformersEngine(
        model, environment.end_token_ids, tokenizer.pad_token_id, max_turn_tokens=64, temperature=1.0
    )
    print("| hops | method | trees | sampled | along paths | share | 22 linear rollouts | share |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|")
    for hops, questions in by_hops(load_questions(arguments.questions), arguments.limit).items():
        requests = [RolloutRequest(each, tuple(environment.prompt_ids(each.question))) for each in questions]
        rollouts = sampler.sample(engine, [request for request in requests for _ in range(22)])
        linear = sum(rollout.num_sampled_tokens for rollout in rollouts)
        for name, (shape, rule) in METHODS.items():
            trees = TreeSampler(sampler, shape, rule, Scorer(model)).sample(engine, requests)
            sampled = sum(tree.num_sampled_tokens for tree in trees)
            paths = sum(tree.num_path_tokens for tree in trees)
            row = [hops, name, len(trees), f"{sampled:,}", f"{paths:,}", f"{sampled / paths:.3f}", f"{linear:,}"]
            print(f"| {' | '.join(map(str, row))} | {sampled / linear:.3f} |", flush=True)


if __name__ == "__main__":
    main()
