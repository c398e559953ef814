"""`grounded-rl train`: train a search agent from a recipe."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from grounded_rl.errors import ConfigurationError, RetrievalError

if TYPE_CHECKING:
    from grounded_rl.trainers import SearchAgentConfig, SearchAgentTrainer

_EPILOG = """\
examples:
  grounded-rl train --config recipes/atlas/gca.yaml
  grounded-rl train --config recipes/atlas/gca.yaml --learning_rate 5e-5 --max_steps 10
  accelerate launch --config_file recipes/accelerate/8gpu.yaml \\
      -m grounded_rl train --config recipes/gca/qwen2.5-3b-instruct.yaml

Every key of a recipe can be given as `--key value`; the command line wins. An unknown key is an error.
"""


@dataclass
class TrainArguments:
    """
    What a recipe says beside the trainer's configuration.

    Parameters:
        method (`str`):
            Method to train with; see `grounded_rl.methods`.
        train_file (`str`):
            JSON Lines file with `question` and `answers` (or `golden_answers`).
        retrieval_index (`str`):
            Index to search: its folder, or the URL of a retrieval server (several, separated by commas).
        train_limit (`int`, *optional*):
            Use only the first questions of the file.
    """

    method: str = field(metadata={"help": "Method to train with."})
    train_file: str = field(metadata={"help": "JSON Lines file of questions."})
    retrieval_index: str = field(metadata={"help": "Folder of the index to search, or URL of a retrieval server."})
    train_limit: int | None = field(default=None, metadata={"help": "Use only the first questions of the file."})


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Declare the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a search agent from a recipe",
        description="Train a search agent from a recipe.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="RECIPE", help="YAML file")
    parser.set_defaults(run=_run, takes_overrides=True)


def _run(arguments: argparse.Namespace) -> int:
    from grounded_rl.cli import EXIT_USER_ERROR
    from grounded_rl.cli.recipes import parse_recipe, recipe_dataclasses
    from grounded_rl.retrieval.base import close_retriever

    types = recipe_dataclasses(arguments.config, arguments.overrides)
    train_arguments, config, model_config = parse_recipe(arguments.config, arguments.overrides, types)
    trainer = build_trainer(train_arguments, config, model_config)
    try:
        train(trainer)
    except RetrievalError:
        # All processes stop together; one of them says why.
        if trainer.accelerator.is_main_process:
            raise
        return EXIT_USER_ERROR
    finally:
        close_retriever(trainer.retriever)
    if trainer.accelerator.is_main_process:
        print(f"wrote the policy and its log to {config.output_dir}")
    return 0


def build_trainer(
    arguments: TrainArguments, config: SearchAgentConfig, model_config: Any, **kwargs: Any
) -> SearchAgentTrainer:
    """
    Trainer of a parsed recipe.

    Args:
        arguments (`TrainArguments`):
            Method, questions and index.
        config ([`~trainers.SearchAgentConfig`]):
            The trainer's configuration.
        model_config ([`~trl.ModelConfig`]):
            Model, its dtype and adapters.
        **kwargs:
            Passed on to the trainer.

    Returns:
        [`~trainers.SearchAgentTrainer`]: Ready to train.

    Raises:
        `ConfigurationError`: If a file is missing or holds something else.
    """
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import get_peft_config, get_quantization_config

    from grounded_rl.cli.models import resolve_model
    from grounded_rl.data.rows import load_questions
    from grounded_rl.methods import METHODS
    from grounded_rl.retrieval import build_retriever

    if model_config.model_name_or_path is None:
        raise ConfigurationError("`model_name_or_path` must be given: got no value. Add it to the recipe.")
    questions = load_questions(arguments.train_file, limit=arguments.train_limit)
    retriever = build_retriever(arguments.retrieval_index)
    model = resolve_model(model_config.model_name_or_path)
    config.model_init_kwargs = {
        "dtype": model_config.dtype or "float32",
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "quantization_config": get_quantization_config(model_config),
        **(config.model_init_kwargs or {}),
    }
    columns = ("id", "question", "answers", "kind")
    dataset = Dataset.from_list([{name: getattr(row, name) for name in columns} for row in questions])
    return METHODS[arguments.method].load_trainer()(
        model,
        retriever,
        args=config,
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(model, revision=model_config.model_revision),
        peft_config=get_peft_config(model_config),
        **kwargs,
    )


def train(trainer: SearchAgentTrainer) -> None:
    """Train to the end, save the policy, and push it where the configuration asks for it."""
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(trainer.args.output_dir)
    trainer.save_state()
    if trainer.args.push_to_hub:
        trainer.push_to_hub()
