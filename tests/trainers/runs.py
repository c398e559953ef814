"""Tiny models, configurations and trainers that are ready to run on scripted generations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.trainers import GCAConfig, GCATrainer, SearchAgentConfig, SearchAgentTrainer
from tests.environments.tokenizers import QWEN_ADDED, qwen_tokenizer, trl_template
from tests.sampling.world import CAPITALS, PASSAGES, SCRIPTS, Player, TinyRetriever, plan_of, question


def trained_tokenizer(template: str = "qwen3_training") -> PreTrainedTokenizerFast:
    """Qwen's tokenizer of the environments' tests with merges for this world, so that rows stay short."""
    tokenizer = qwen_tokenizer()
    environment = SearchEnvironment(tokenizer, prompt_style="plain")
    texts = [environment.chat.prompt_text(environment.messages(question(country).question)) for country in CAPITALS]
    texts += [turn for script in SCRIPTS.values() for country in CAPITALS for turn in script(country)]
    texts += [f"Doc 1 (Title: {passage.title})\n{passage.text}" for passage in PASSAGES]
    trained = tokenizer.train_new_from_iterator(texts, vocab_size=1000, show_progress=False)
    trained.add_tokens(QWEN_ADDED, special_tokens=False)
    trained.chat_template = trl_template(template)
    return trained


TOKENIZER = trained_tokenizer()
ALL_TYPES = ("A_late", "B", "C", "D")
"""Scripts of a group that holds every diagnosis and in which the rewards differ."""

CONFIGS = {SearchAgentTrainer: SearchAgentConfig, GCATrainer: GCAConfig}


def tiny_model(seed: int = 0, **config: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 model of two layers; larger initial weights than usual, so that its distributions differ."""
    torch.manual_seed(seed)
    options = {
        "vocab_size": len(TOKENIZER),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
        "eos_token_id": TOKENIZER.eos_token_id,
        "pad_token_id": TOKENIZER.pad_token_id,
        "bos_token_id": None,
    }
    return Qwen3ForCausalLM(Qwen3Config(**{**options, **config}))


def base_options(folder: Path, **options: Any) -> dict[str, Any]:
    """Options of `GRPOConfig`: four rollouts of two questions, in two micro-batches with an update each."""
    return {
        "output_dir": str(folder),
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "max_completion_length": 512,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 0,
        **options,
    }


def agent_options(folder: Path, **options: Any) -> dict[str, Any]:
    """The same with what our configurations add."""
    return base_options(
        folder, **{"prompt_style": "plain", "rollout_max_turn_tokens": 64, "reward_format": "none", **options}
    )


def rows(*countries: str) -> Dataset:
    """Dataset of questions."""
    asked = [question(country) for country in countries or CAPITALS]
    return Dataset.from_list([{"id": one.id, "question": one.question, "answers": list(one.answers)} for one in asked])


def make_trainer(
    trainer_class: type[SearchAgentTrainer],
    folder: Path,
    *,
    plan: Callable[[str, int], Sequence[Any]] | None = None,
    model: Any = None,
    dataset: Dataset | None = None,
    retriever: TinyRetriever | None = None,
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> SearchAgentTrainer:
    """
    A trainer whose generations follow `plan` (one rollout of every type per group by default).

    `trainer_options` go to the trainer, `options` to its configuration.
    """
    trainer = trainer_class(
        model or tiny_model(),
        retriever or TinyRetriever(),
        args=CONFIGS[trainer_class](**agent_options(folder, **options)),
        train_dataset=dataset or rows(),
        processing_class=TOKENIZER,
        **(trainer_options or {}),
    )
    trainer._generate_single_turn = Player(TOKENIZER, plan or plan_of(*ALL_TYPES))
    return trainer


def generation_batch(trainer: SearchAgentTrainer, *countries: str) -> dict[str, Any]:
    """The buffered dictionary of one generation batch with a group for every country."""
    trainer.model.train()
    index = {row["question"]: row for row in trainer.train_dataset}
    chosen = [index[question(country).question] for country in countries]
    inputs = [dict(row) for row in chosen for _ in range(trainer.num_generations)]
    return trainer._generate_and_score_completions(inputs)


def losses(trainer) -> list[float]:
    """Logged losses of a run."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
