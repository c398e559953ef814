"""Trainers of tree methods on a tiny random model, with generations of a seeded text policy."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from grounded_rl.trainers import (
    AT2POConfig,
    GCASIPOConfig,
    GCASIPOTrainer,
    SearchAgentConfig,
    SearchAgentTrainer,
    SIPOConfig,
    SIPOTrainer,
)
from tests.sampling.world import CAPITALS, NOTHING, TinyRetriever, answer, call, encode
from tests.trainers.runs import TOKENIZER, agent_options, rows, tiny_model

METHODS = {
    "sipo": (SIPOTrainer, SIPOConfig),
    "at2po": (SIPOTrainer, AT2POConfig),
    "gca_sipo": (GCASIPOTrainer, GCASIPOConfig),
    "linear": (SearchAgentTrainer, SearchAgentConfig),
}
SMALL_TREE = {"sipo_num_initial": 4, "sipo_num_rounds": 2, "sipo_num_incumbents": 1, "sipo_num_fresh": 2}
"""Eight leaves."""


class TextPolicy:
    """
    Stands in for `GRPOTrainer._generate_single_turn`: a random search or answer per context.

    What it says depends on the context and the seed alone, except that equal contexts get different turns.
    """

    def __init__(self, seed: int = 0, *, search_share: float = 0.6) -> None:
        self._random = random.Random(seed)
        self._search_share = search_share
        self.contexts: list[list[int]] = []

    def __call__(self, prompt_ids, images=None, multimodal_fields=None, num_generations=1, has_tool_images=False):
        self.contexts += [list(ids) for ids in prompt_ids]
        return [encode(TOKENIZER, self._turn(TOKENIZER.decode(ids))) for ids in prompt_ids], None

    def _turn(self, text: str) -> str:
        country = re.search(r"capital of (\w+)\?", text).group(1)
        if self._random.random() < self._search_share:
            query = self._random.choice([f"capital of {country}", f"{country} city", NOTHING])
            return call(query)
        return answer(CAPITALS[country] if self._random.random() < 0.5 else "Nowhere")


def make_tree_trainer(
    method: str,
    folder: Path,
    *,
    policy: TextPolicy | None = None,
    model: Any = None,
    callbacks: Any = None,
    **options: Any,
) -> SearchAgentTrainer:
    """A trainer of a method: two questions a step, eight rows each, two updates per generation."""
    trainer_class, config_class = METHODS[method]
    shape = {} if method == "linear" else SMALL_TREE
    merged = {
        "num_generations": 8 if method == "linear" else None,
        "per_device_train_batch_size": 8,
        "steps_per_generation": 2,
        "reward_format": "em",
        "rollout_max_turns": 4,
        **shape,
        **options,
    }
    trainer = trainer_class(
        tiny_model(),
        TinyRetriever(),
        args=config_class(**agent_options(folder, **merged)),
        train_dataset=rows(*list(CAPITALS)[:8]),
        processing_class=TOKENIZER,
    )
    trainer._generate_single_turn = policy or TextPolicy()
    return trainer
