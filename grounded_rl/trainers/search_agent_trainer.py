"""GRPO for search agents: multi-turn rollouts over a retriever, one advantage per rollout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback

from grounded_rl.credit import group_advantages, has_reward_variance
from grounded_rl.data.rows import Question
from grounded_rl.environments.rewards import reward_value
from grounded_rl.environments.search import SearchEnvironment
from grounded_rl.errors import ConfigurationError, RetrievalError
from grounded_rl.grounding import Diagnosis, diagnose
from grounded_rl.retrieval.base import Retriever
from grounded_rl.retrieval.compose import RetrievalSettings, compose_retriever
from grounded_rl.retrieval.outage import PatientRetriever
from grounded_rl.retrieval.stats import SearchStats, merge_windows
from grounded_rl.rollouts.types import Rollout, StopReason
from grounded_rl.sampling.scheduler import RolloutRequest, RolloutSampler
from grounded_rl.trainers._trl import GenerationBatch, RolloutGRPOTrainer, TrainerEngine
from grounded_rl.trainers.metrics import SearchAlarm, SearchCounts, rollout_metrics
from grounded_rl.trainers.prompts import check_size, with_prompts
from grounded_rl.trainers.random_states import RandomStates
from grounded_rl.trainers.rollout_log import RolloutLog, with_credit
from grounded_rl.trainers.search_agent_config import SearchAgentConfig
from grounded_rl.trainers.together import raise_together

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., list[float | None]]


def environment_reward(scheme: str, environment: SearchEnvironment) -> RewardFunction:
    """Reward function in TRL's form: exact match plus the format term, `None` for a failed rollout."""
    options = {
        "scheme": scheme,
        "tool_format": environment.tool_format,
        "opened_think": environment.opened_think,
    }

    def search_reward(rollout: Sequence[Rollout], **_: Any) -> list[float | None]:
        return [reward_value(each, **options) for each in rollout]

    return search_reward


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
            Index the policy searches. The trainer adds cache, limit, repetition and waiting as configured; its
            counters are in the log under `search/`.
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
        callbacks (`list[TrainerCallback]`, *optional*):
            Further callbacks; one that keeps random states for a checkpoint in mid-step is added.
        **kwargs:
            Passed on to [`~trl.GRPOTrainer`] (`optimizers`, `peft_config`, …).

    Raises:
        `ConfigurationError`: If the dataset lacks a column or is smaller than one generation batch, if `args` is of
            another method, or if the tokenizer's chat template cannot render tools.
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
        callbacks: list[TrainerCallback] | None = None,
        **kwargs: Any,
    ) -> None:
        args = args or self.config_class(output_dir="search-agent")
        if not isinstance(args, self.config_class):
            raise ConfigurationError(
                f"`args` must be a `{self.config_class.__name__}`: got a `{type(args).__name__}`. "
                "Use the configuration of the trainer's method."
            )
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
        check_size(train_dataset, args)
        self._random_states = RandomStates(self.skip_epochs)
        super().__init__(
            model,
            reward_funcs=reward_funcs or environment_reward(args.reward_format, self.environment),
            args=args,
            train_dataset=with_prompts(train_dataset, self.environment, "train_dataset"),
            eval_dataset=None
            if eval_dataset is None
            else with_prompts(eval_dataset, self.environment, "eval_dataset"),
            processing_class=tokenizer,
            callbacks=[*(callbacks or []), self._random_states],
            **kwargs,
        )
        self.end_turns_at(self.environment.end_token_ids)
        self.log_file = RolloutLog(Path(args.output_dir) / "rollouts.jsonl")
        self._alarm = SearchAlarm()
        self.search_stats = SearchStats()
        self.retriever = self._composed(retriever)
        self.sampler = RolloutSampler(
            self.environment,
            self.retriever,
            max_completion_tokens=args.max_completion_length,
            on_search_failure="mask" if args.retrieval_on_failure == "mask" else "raise",
            is_anyone_active=self.is_anyone_active,
            share_failure=self.raise_together,
        )
        # A question whose search fails must not change what an evaluation is about.
        self.evaluation_sampler = replace(self.sampler, retriever=self._patient(), on_search_failure="raise")

    def _composed(self, retriever: Retriever) -> Retriever:
        """The retriever with what the configuration puts around it."""
        settings = RetrievalSettings(
            attempts=self.args.retrieval_attempts,
            timeout=self.args.retrieval_timeout,
            max_in_flight=self.args.retrieval_max_in_flight,
            cache=self.args.retrieval_cache,
            patience=0.0 if self.args.retrieval_on_failure == "mask" else self.args.retrieval_patience,
        )
        return compose_retriever(retriever, settings, stats=self.search_stats)

    def _patient(self) -> Retriever:
        """The composed retriever, waiting for its backend even where training does not."""
        if self.args.retrieval_on_failure != "mask":
            return self.retriever
        return PatientRetriever(self.retriever, patience=self.args.retrieval_patience, stats=self.search_stats)

    def raise_together(self, failure: RetrievalError | None) -> None:
        """Raise on every process if any of them failed; see [`~trainers.together.raise_together`]."""
        raise_together(self.accelerator, failure)

    @property
    def masks_failures(self) -> bool:
        """Whether a failed search takes its rollouts out of the batch, rather than stopping the run."""
        return self.args.retrieval_on_failure == "mask" and self.model.training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """
        Train as [`~transformers.Trainer.train`] does; a run that cannot search any more stops with a checkpoint.

        Returns:
            `TrainOutput`: As from [`~transformers.Trainer.train`].

        Raises:
            `RetrievalError`: If the search backend did not come back, or answered what cannot be trusted. The message
                names the checkpoint: of the last finished step, with the random states in which the next one began.
        """
        try:
            return super().train(*args, **kwargs)
        except RetrievalError as error:
            self._random_states.restore()
            checkpoint = self.save_checkpoint()
            raise RetrievalError(
                f"Training stopped after step {self.state.global_step}: {error} Nothing is lost: once the search "
                f"works, run again with `resume_from_checkpoint: {checkpoint}`."
            ) from error

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
        sampler = self.sampler if self.model.training else self.evaluation_sampler
        rollouts = sampler.sample(TrainerEngine(self), requests)
        self._check_failures(rollouts)
        return rollouts

    def _check_failures(self, rollouts: list[Rollout]) -> None:
        errors = [rollout.error for rollout in rollouts if rollout.stop is StopReason.FAILED]
        gathered = gather_object([(len(errors), len(rollouts), errors[:1])])
        num_failed, total = sum(part[0] for part in gathered), sum(part[1] for part in gathered)
        if num_failed > self.args.rollout_max_failed_share * total:
            first = next(error for *_, firsts in gathered for error in firsts)
            raise RetrievalError(
                f"`rollout_max_failed_share` must not be exceeded: got {num_failed} failed of {total} rollouts where "
                f"{self.args.rollout_max_failed_share} is allowed; the first: {first}. Check the search backend."
            )

    def diagnose(self, rollout: Rollout) -> Diagnosis:
        """Diagnosis of a rollout, for the log and for credit."""
        return diagnose(rollout)

    def assign_credit(self, batch: GenerationBatch) -> None:
        """One advantage per rollout, the same at all its tokens."""
        advantages = self.rollout_advantages(batch)
        batch.advantages = advantages.unsqueeze(1).expand(batch.turn_ids.shape).clone()

    def rollout_advantages(self, batch: GenerationBatch) -> torch.Tensor:
        """Group-relative advantage of every rollout, `(B,)`; diagnoses the rollouts and logs what methods share."""
        batch.diagnoses = [self.diagnose(rollout) for rollout in batch.rollouts]
        batch.metrics |= rollout_metrics(batch.rollouts, batch.diagnoses)
        has_variance = has_reward_variance(batch.rewards, batch.group_ids, batch.valid)
        batch.metrics["credit/zero_variance_groups"] = 1.0 - has_variance.float().mean().item()
        batch.rollout_advantages = group_advantages(
            batch.rewards,
            batch.group_ids,
            scale="none" if self.scale_rewards == "none" else "std",
            singleton=self.args.credit_singleton,
            epsilon=self.args.credit_epsilon,
            valid=batch.valid,
        )
        return batch.rollout_advantages

    def _write_credit(self, output: dict[str, Any], batch: GenerationBatch) -> None:
        batch.metrics |= self._search_metrics(batch.rollouts)
        super()._write_credit(output, batch)

    def _search_metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """What the searches of a batch were like, over all processes; warns where nothing was searched."""
        own = (self.search_stats.window(reset=True), SearchCounts.of(rollouts))
        windows, counts = zip(*gather_object([own]), strict=True)
        total = sum(counts, start=SearchCounts())
        if self.model.training and self.is_world_process_zero():
            self._alarm.check(total)
        return merge_windows(windows).metrics() | total.metrics()

    def num_logged_groups(self, total: int) -> int:
        """How many of the `total` groups of this process go into the rollout file."""
        if not self.is_world_process_zero() or not self.model.training:
            return 0
        return total if self.args.rollout_log_groups < 0 else min(self.args.rollout_log_groups, total)

    def finish_batch(self, batch: GenerationBatch) -> None:
        """Write rollouts with their token advantages."""
        last = self.num_logged_groups(len(batch.rollouts) // self.num_generations) * self.num_generations
        if last == 0:
            return
        leaves_loss = torch.zeros_like(batch.valid) if batch.masked is None else batch.masked
        # A method that assigns credit without a common advantage has none to record.
        shared = [None] * last if batch.rollout_advantages is None else batch.rollout_advantages[:last].tolist()
        records = [
            with_credit(rollout, (common, advantages) if is_valid else None, is_masked, self.state.global_step)
            for rollout, common, advantages, is_valid, is_masked in zip(
                batch.rollouts[:last],
                shared,
                batch.advantages[:last].tolist(),
                batch.valid[:last].tolist(),
                leaves_loss[:last].tolist(),
                strict=True,
            )
        ]
        self.log_file.append_rollouts(records, self.state.global_step)


def _load_tokenizer(model: str | PreTrainedModel) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    name = model if isinstance(model, str) else model.config._name_or_path
    if not name:
        raise ConfigurationError(
            "`processing_class` must be given for a model that was not loaded from a name or path: got `None`. "
            "Pass the tokenizer."
        )
    return AutoTokenizer.from_pretrained(name)
