"""GRPO for search agents: multi-turn rollouts over a retriever, one advantage per rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grounded_rl.credit import group_advantages, has_reward_variance
from grounded_rl.data.rows import Question, question_from_record
from grounded_rl.environments.rewards import reward_value
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.retrieval.base import Retriever
from grounded_rl.rollouts.io import save_rollouts
from grounded_rl.rollouts.types import Rollout, StopReason
from grounded_rl.sampling.scheduler import RolloutRequest, RolloutSampler
from grounded_rl.trainers._trl import GenerationBatch, RolloutGRPOTrainer, TrainerEngine
from grounded_rl.trainers.metrics import rollout_metrics
from grounded_rl.trainers.search_agent_config import SearchAgentConfig

RewardFunction = Callable[..., list[float | None]]


def environment_reward(scheme: str, tool_format: str) -> RewardFunction:
    """Reward function in TRL's form: exact match plus the format term, `None` for a failed rollout."""

    def search_reward(rollout: Sequence[Rollout], **_: Any) -> list[float | None]:
        return [reward_value(each, scheme=scheme, tool_format=tool_format) for each in rollout]

    return search_reward


def with_prompts(dataset: Dataset, environment: SearchEnvironment, name: str) -> Dataset:
    """
    The dataset with a `prompt` column of messages.

    Raises:
        `ConfigurationError`: If a row lacks `question` or `answers` or has them in another form.
    """

    def add_prompt(row: dict[str, Any], index: int) -> dict[str, Any]:
        try:
            question = question_from_record({"id": index, **row})
        except ConfigurationError as error:
            raise ConfigurationError(f"`{name}`, row {index}: {error}") from None
        return {
            "prompt": environment.messages(question.question),
            "id": question.id,
            "answers": list(question.answers),
        }

    return dataset.map(add_prompt, with_indices=True, desc=f"Writing prompts ({name})")


class SearchAgentTrainer(RolloutGRPOTrainer):
    """
    GRPO over multi-turn search rollouts.

    Generation is replaced by one rollout loop over a search environment, shared with evaluation; everything else is
    [`~trl.GRPOTrainer`]. With the default configuration this is the method of Search-R1
    ([paper](https://huggingface.co/papers/2503.09516)) in the GRPO variant.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`]):
            Policy, or its name or path.
        retriever ([`~retrieval.Retriever`]):
            Index the policy searches.
        args ([`SearchAgentConfig`], *optional*):
            Configuration.
        train_dataset ([`~datasets.Dataset`]):
            Rows with `question` and `answers` (or `golden_answers`), optionally `id`, `kind` and `evidence`.
        eval_dataset ([`~datasets.Dataset`], *optional*):
            The same, for TRL's own evaluation loop. `grounded-rl evaluate` is usually what you want.
        processing_class ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Tokenizer; loaded with the model when it is given by name.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Replace the built-in reward (exact match plus format term). They are called as TRL calls them; the keyword
            `rollout` holds the list of [`~rollouts.Rollout`] objects.
        **kwargs:
            Passed on to [`~trl.GRPOTrainer`] (`callbacks`, `optimizers`, `peft_config`, …).

    Raises:
        `ConfigurationError`: If the dataset lacks a column or is smaller than one generation batch, or if the tokenizer's
            chat template cannot render tools.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "grounded-rl"]
    _name = "Search agent GRPO"
    config_class: ClassVar[type[SearchAgentConfig]] = SearchAgentConfig

    def __init__(
        self,
        model: str | PreTrainedModel,
        retriever: Retriever,
        *,
        args: SearchAgentConfig | None = None,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        reward_funcs: RewardFunction | list[RewardFunction] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or self.config_class(output_dir="search-agent")
        tokenizer = processing_class or _load_tokenizer(model)
        self.environment = SearchEnvironment(
            tokenizer,
            prompt_style=args.prompt_style,
            tool_format=args.tool_format,
            max_turns=args.rollout_max_turns,
            top_k=args.retrieval_top_k,
            observation_tokens=args.rollout_observation_tokens,
            max_calls_per_turn=args.rollout_max_calls_per_turn,
        )
        _check_size(train_dataset, args)
        super().__init__(
            model,
            reward_funcs=reward_funcs or environment_reward(args.reward_format, args.tool_format),
            args=args,
            train_dataset=with_prompts(train_dataset, self.environment, "train_dataset"),
            eval_dataset=None
            if eval_dataset is None
            else with_prompts(eval_dataset, self.environment, "eval_dataset"),
            processing_class=tokenizer,
            **kwargs,
        )
        self.retriever = retriever
        self.sampler = RolloutSampler(
            self.environment,
            retriever,
            max_completion_tokens=args.max_completion_length,
            on_search_failure=args.retrieval_on_failure,
            is_anyone_active=self.is_anyone_active,
        )

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> list[Rollout]:
        """One rollout per row, by the configured generation backend."""
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        prompts: dict[str, tuple[int, ...]] = {}
        requests = []
        for number, row in enumerate(rows):
            question = Question(row["id"], row["question"], tuple(row["answers"]), kind=row.get("kind"))
            if question.question not in prompts:
                prompts[question.question] = tuple(self.environment.prompt_ids(question.question))
            requests.append(RolloutRequest(question, prompts[question.question], sample=number % group_size))
        rollouts = self.sampler.sample(TrainerEngine(self), requests)
        self._check_failures(rollouts)
        return rollouts

    def _check_failures(self, rollouts: list[Rollout]) -> None:
        failed = [rollout for rollout in rollouts if rollout.stop is StopReason.FAILED]
        if len(failed) > self.args.rollout_max_failed_share * len(rollouts):
            raise RetrievalError(
                f"{len(failed)} of {len(rollouts)} rollouts failed, more than `rollout_max_failed_share` "
                f"({self.args.rollout_max_failed_share}) allows; the first: {failed[0].error}. Check the search backend."
            )

    def assign_credit(self, batch: GenerationBatch) -> None:
        """One advantage per rollout, the same at all its tokens."""
        advantages = self.rollout_advantages(batch)
        batch.advantages = advantages.unsqueeze(1).expand(batch.turn_ids.shape).clone()

    def rollout_advantages(self, batch: GenerationBatch) -> torch.Tensor:
        """Group-relative advantage of every rollout, `(B,)`; logs the metrics every method shares."""
        batch.metrics |= rollout_metrics(batch.rollouts)
        has_variance = has_reward_variance(batch.rewards, batch.group_ids, batch.valid)
        batch.metrics["credit/zero_variance_groups"] = 1.0 - has_variance.float().mean().item()
        return group_advantages(
            batch.rewards,
            batch.group_ids,
            scale="none" if self.scale_rewards == "none" else "std",
            singleton=self.args.credit_singleton,
            epsilon=self.args.credit_epsilon,
            valid=batch.valid,
        )

    def finish_batch(self, batch: GenerationBatch) -> None:
        """Write rollouts with their token advantages."""
        groups = self.args.rollout_log_groups
        if groups == 0 or not self.is_world_process_zero() or not self.model.training:
            return
        last = len(batch.rollouts) if groups < 0 else groups * self.num_generations
        scored = [
            _with_advantages(rollout, advantages, self.state.global_step)
            for rollout, advantages in zip(batch.rollouts[:last], batch.advantages[:last].tolist(), strict=True)
        ]
        save_rollouts(Path(self.args.output_dir) / "rollouts.jsonl", scored, append=True)


def _with_advantages(rollout: Rollout, advantages: list[float], step: int) -> Rollout:
    turns, position = [], 0
    for turn in rollout.turns:
        values = tuple(round(value, 6) for value in advantages[position : position + len(turn.ids)])
        turns.append(replace(turn, advantages=values))
        position += len(turn.ids) + len(turn.observation_ids)
    return replace(rollout, turns=tuple(turns), extras={**rollout.extras, "step": step})


def _load_tokenizer(model: str | PreTrainedModel) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    name = model if isinstance(model, str) else model.config._name_or_path
    if not name:
        raise ConfigurationError(
            "`processing_class` must be given for a model that was not loaded from a name or path: got `None`. "
            "Pass the tokenizer."
        )
    return AutoTokenizer.from_pretrained(name)


def _check_size(dataset: Dataset, args: SearchAgentConfig) -> None:
    """TRL drops an incomplete generation batch, so a smaller dataset would train no step and say nothing."""
    needed = args.generation_batch_size // args.num_generations
    if len(dataset) < needed:
        raise ConfigurationError(
            f"`train_dataset` must hold at least the {needed} questions of one generation batch "
            f"(`generation_batch_size` {args.generation_batch_size} / `num_generations` {args.num_generations}): got "
            f"{len(dataset)}. Add questions or lower the batch size."
        )
