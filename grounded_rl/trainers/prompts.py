"""Datasets of questions as TRL wants them: checked, with a column of prompts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from datasets import Dataset

from grounded_rl.data.rows import question_from_record
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.errors import ConfigurationError
from grounded_rl.trainers.search_agent_config import SearchAgentConfig


def check_size(dataset: Dataset, args: SearchAgentConfig) -> None:
    """TRL drops an incomplete generation batch, so a smaller dataset would train no step and say nothing."""
    _check_type(dataset, "train_dataset")
    needed = args.generation_batch_size // args.num_generations
    if len(dataset) < needed:
        raise ConfigurationError(
            f"`train_dataset` must hold at least the {needed} questions of one generation batch "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}): got "
            f"{len(dataset)}. Add questions or lower the batch size."
        )


def _check_type(dataset: Any, name: str) -> None:
    if not isinstance(dataset, Dataset):
        raise ConfigurationError(
            f"`{name}` must be a `datasets.Dataset`: got a `{type(dataset).__name__}`. "
            "Build one with `Dataset.from_list` or `load_dataset`, without streaming."
        )


def with_prompts(dataset: Dataset, environment: SearchEnvironment, name: str) -> Dataset:
    """
    The dataset with a `prompt` column of messages.

    Raises:
        `ConfigurationError`: If a row lacks `question` or `answers` or has them in another form, or if two rows share
            an `id`.
    """

    identifiers = None
    if "id" in dataset.column_names:
        # A column that is mapped onto itself keeps its type, but ids are text whatever the file has.
        identifiers = dataset["id"][:]
        dataset = dataset.remove_columns("id")

    def add_prompt(row: dict[str, Any], index: int) -> dict[str, Any]:
        # Without ids, those of different datasets must differ: what is known about a question is remembered by its id.
        identifier = f"{name}-{index}" if identifiers is None or identifiers[index] is None else identifiers[index]
        try:
            question = question_from_record({**row, "id": identifier})
        except ConfigurationError as error:
            raise ConfigurationError(f"`{name}`, row {index}: {error}") from None
        return {
            "prompt": environment.messages(question.question),
            "id": question.id,
            "answers": list(question.answers),
        }

    rows = dataset.map(
        add_prompt,
        with_indices=True,
        # A column that stays would cast what replaces it to its own type.
        remove_columns=[column for column in ("prompt", "id", "answers") if column in dataset.column_names],
        # Prompts follow from code that the dataset's cache does not know.
        load_from_cache_file=False,
        desc=f"Writing prompts ({name})",
    )
    repeated = [identifier for identifier, count in Counter(rows["id"]).items() if count > 1]
    if repeated:
        raise ConfigurationError(
            f"`id` must be unique in `{name}`: got {repeated[0]!r} more than once. Rename the rows or drop the column."
        )
    return rows
