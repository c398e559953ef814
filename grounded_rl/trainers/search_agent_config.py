"""Configuration shared by every trainer of search agents."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from typing import ClassVar

from trl import GRPOConfig

from grounded_rl.environments.formats import TOOL_FORMATS
from grounded_rl.environments.prompts import PROMPT_STYLES
from grounded_rl.environments.rewards import REWARD_SCHEMES
from grounded_rl.errors import ConfigurationError

logger = logging.getLogger(__name__)

RATIO_LEVELS = ("token", "sequence", "sequence_token", "turn")


@dataclass
class SearchAgentConfig(GRPOConfig):
    r"""
    Configuration of [`SearchAgentTrainer`].

    Only what differs from [`~trl.GRPOConfig`] is listed. The defaults that are re-declared are those the GCA paper's
    host, Search-R1, trains with.

    Parameters:
        > Parameters that control the rollouts

        rollout_max_turns (`int`, *optional*, defaults to `5`):
            Largest number of assistant turns, the answer included.
        rollout_max_turn_tokens (`int`, *optional*, defaults to `512`):
            Largest number of tokens sampled per turn.
        rollout_max_calls_per_turn (`int`, *optional*, defaults to `3`):
            Calls executed per turn; further ones get an error observation.
        rollout_observation_tokens (`int`, *optional*, defaults to `1024`):
            Policy tokens of the passages of one observation, shared fairly among them.
        rollout_max_failed_share (`float`, *optional*, defaults to `0.2`):
            The run stops when more than this share of a generation batch failed for infrastructural reasons.
        rollout_log_groups (`int`, *optional*, defaults to `2`):
            Groups of every generation batch written to `rollouts.jsonl` in the output folder, with token advantages.
            `0` writes none, `-1` all.
        prompt_style (`str`, *optional*, defaults to `"gca"`):
            Prompt the question is put in.
        tool_format (`str`, *optional*, defaults to `"qwen"`):
            How the policy writes calls. Formats that end a turn at a string instead of a token cannot be trained here.

        > Parameters that control retrieval

        retrieval_top_k (`int`, *optional*, defaults to `3`):
            Passages per search.
        retrieval_on_failure (`str`, *optional*, defaults to `"abort_step"`):
            What a search does that still fails after all attempts. `"abort_step"` waits for the backend, keeping what
            was generated, and stops the run with a checkpoint if it does not come back; `"mask"` takes the rollout out
            of statistics and loss. Evaluation never masks.
        retrieval_patience (`float`, *optional*, defaults to `600.0`):
            Seconds a search waits for a backend that is away. `0` does not wait.
        retrieval_attempts (`int`, *optional*, defaults to `4`):
            Tries of a request, with random pauses between them, before the backend counts as away.
        retrieval_timeout (`float`, *optional*, defaults to `120.0`):
            Seconds after which a request is not tried again.
        retrieval_max_in_flight (`int`, *optional*, defaults to `256`):
            Queries a process sends at once; more are sent in parts.
        retrieval_cache (`bool` or `str`, *optional*, defaults to `"memory"`):
            Where results are remembered: `"off"`, `"memory"`, or the path of a file that runs may share. A result is
            only used again for the same index, query and number of passages.

        > Parameters that control reward and credit

        reward_format (`str`, *optional*, defaults to `"search_r1_v03"`):
            Format term of the built-in reward, `"search_r1_v03"` or `"none"`. Unused when `reward_funcs` are passed.
        credit_singleton (`str`, *optional*, defaults to `"zero"`):
            Advantage of a group with one valid rollout: `"zero"`, or `"raw"` for the reward itself as verl has it.
        credit_epsilon (`float`, *optional*, defaults to `1e-6`):
            Added to the standard deviation of a group.
        importance_sampling_level (`str`, *optional*, defaults to `"token"`):
            Level of the importance ratio: `"token"`, `"sequence"`, or, with a gradient per token, `"turn"` and
            `"sequence_token"` (GSPO-token).

        > Parameters that control speed

        forward_rows (`int`, *optional*):
            Rows of a forward pass for log-probabilities. Rows go in order of length and every pass is as long as its
            own longest row, which saves the padding of search rollouts; values are the same up to rounding. `None`
            pads all rows of a device batch to the longest, as TRL does.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = GRPOConfig._VALID_DICT_FIELDS

    rollout_max_turns: int = field(
        default=5, metadata={"help": "Largest number of assistant turns, the answer included."}
    )
    rollout_max_turn_tokens: int = field(default=512, metadata={"help": "Largest number of tokens sampled per turn."})
    rollout_max_calls_per_turn: int = field(default=3, metadata={"help": "Calls executed per turn."})
    rollout_observation_tokens: int = field(
        default=1024, metadata={"help": "Policy tokens of the passages of one observation."}
    )
    rollout_max_failed_share: float = field(
        default=0.2, metadata={"help": "Share of failed rollouts in a generation batch above which the run stops."}
    )
    rollout_log_groups: int = field(
        default=2, metadata={"help": "Groups per generation batch written to rollouts.jsonl; -1 writes all."}
    )
    prompt_style: str = field(default="gca", metadata={"help": "Prompt the question is put in."})
    tool_format: str = field(default="qwen", metadata={"help": "How the policy writes calls."})
    retrieval_top_k: int = field(default=3, metadata={"help": "Passages per search."})
    retrieval_on_failure: str = field(
        default="abort_step",
        metadata={
            "help": "What a failed search does: 'abort_step' waits for the backend and stops the run with a "
            "checkpoint if it does not come back, 'mask' drops the rollout."
        },
    )
    retrieval_patience: float = field(
        default=600.0, metadata={"help": "Seconds a search waits for a backend that is away; 0 does not wait."}
    )
    retrieval_attempts: int = field(
        default=4, metadata={"help": "Tries of a request before the backend counts as away."}
    )
    retrieval_timeout: float = field(
        default=120.0, metadata={"help": "Seconds after which a request is not tried again."}
    )
    retrieval_max_in_flight: int = field(
        default=256, metadata={"help": "Queries a process sends at once; more are sent in parts."}
    )
    retrieval_cache: bool | str = field(
        default="memory", metadata={"help": "Where results are remembered: 'off', 'memory' or the path of a file."}
    )
    reward_format: str = field(
        default="search_r1_v03", metadata={"help": "Format term of the built-in reward: 'search_r1_v03' or 'none'."}
    )
    credit_singleton: str = field(
        default="zero", metadata={"help": "Advantage of a group with one valid rollout: 'zero' or 'raw'."}
    )
    credit_epsilon: float = field(default=1e-6, metadata={"help": "Added to the standard deviation of a group."})
    num_generations: int | None = field(default=5, metadata={"help": "Rollouts per prompt."})
    max_completion_length: int | None = field(
        default=7168, metadata={"help": "Tokens of a whole completion, observations included."}
    )
    beta: float = field(default=1e-3, metadata={"help": "Coefficient of the KL term (k3 estimator)."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Initial learning rate."})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "Learning-rate schedule."})

    forward_rows: int | None = field(
        default=None, metadata={"help": "Rows of a forward pass, which is as long as its own longest row."}
    )

    def __post_init__(self) -> None:
        # YAML reads a bare `off` as false.
        if isinstance(self.retrieval_cache, bool):
            self.retrieval_cache = "memory" if self.retrieval_cache else "off"
        violations = [
            f"`{name}` must be {rule}: got {getattr(self, name)!r}."
            for name, rule, is_kept in self._rules()
            if not is_kept
        ]
        if violations:
            raise ConfigurationError(" ".join(violations) + " Correct the recipe.")
        # A cap per turn; TRL's own limit covers the whole completion.
        cap = "max_tokens" if self.use_vllm else "max_new_tokens"
        given = self.generation_kwargs or {}
        given = json.loads(given) if isinstance(given, str) else given  # as a command line writes it
        self.generation_kwargs = {cap: self.rollout_max_turn_tokens, **given}
        if self.generation_batch_size is None:
            self._check_groups(self.steps_per_generation or self.gradient_accumulation_steps)
        try:
            super().__post_init__()
        except ConfigurationError:
            raise
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self._check_groups(self.steps_per_generation)
        self._check_patience()
        self._check_checkpoints()

    def _rules(self) -> list[tuple[str, str, bool]]:
        """Name, rule and whether it is kept, for every field of this class that has one."""
        positive = [
            "rollout_max_turns",
            "rollout_max_turn_tokens",
            "rollout_max_calls_per_turn",
            "rollout_observation_tokens",
            "retrieval_top_k",
            "retrieval_attempts",
            "retrieval_max_in_flight",
        ]
        choices = {
            "prompt_style": tuple(PROMPT_STYLES),
            "tool_format": tuple(name for name, format in TOOL_FORMATS.items() if not format.stop_strings),
            "retrieval_on_failure": ("abort_step", "mask"),
            "reward_format": (*REWARD_SCHEMES, "none"),
            "credit_singleton": ("zero", "raw"),
            "importance_sampling_level": RATIO_LEVELS,
            # The other values of these two are TRL's alone: advantages are computed here.
            "scale_rewards": ("group", "none", True, False),
            "multi_objective_aggregation": ("sum_then_normalize",),
        }
        return [
            *((name, "at least 1", getattr(self, name) >= 1) for name in positive),
            *((name, f"one of {allowed}", getattr(self, name) in allowed) for name, allowed in choices.items()),
            ("num_generations", "at least 2", self.num_generations >= 2),
            ("rollout_max_failed_share", "in [0, 1]", 0 <= self.rollout_max_failed_share <= 1),
            ("rollout_log_groups", "-1 or more", self.rollout_log_groups >= -1),
            ("forward_rows", "at least 1, or left out", self.forward_rows is None or self.forward_rows >= 1),
            ("credit_epsilon", "at least 0", self.credit_epsilon >= 0),
            ("retrieval_patience", "a number of at least 0", 0 <= self.retrieval_patience < math.inf),
            ("retrieval_timeout", "a number of at least 0", 0 <= self.retrieval_timeout < math.inf),
            ("retrieval_cache", "'off', 'memory' or a path", bool(self.retrieval_cache)),
        ]

    def _check_groups(self, steps_per_generation: int) -> None:
        """A group must stay on one process: its statistics, and trees, are computed there."""
        per_process = self.per_device_train_batch_size * steps_per_generation
        if per_process % self.num_generations:
            raise ConfigurationError(
                f"`num_generations` ({self.num_generations}) must divide `per_device_train_batch_size * "
                f"steps_per_generation` ({per_process}), so that a group stays on one process: got a remainder of "
                f"{per_process % self.num_generations}. Raise `steps_per_generation` or change `num_generations`."
            )
        group_size = self.num_generations_eval or self.num_generations
        if self.eval_strategy != "no" and self.per_device_eval_batch_size % group_size:
            raise ConfigurationError(
                f"`per_device_eval_batch_size` must be a multiple of the rollouts per question in evaluation "
                f"({group_size}): got {self.per_device_eval_batch_size}. Change it or `num_generations_eval`."
            )

    def _check_patience(self) -> None:
        """While one process waits for the search backend, the others wait for it in a collective call."""
        longest = self.retrieval_timeout + self.retrieval_patience
        if self.world_size > 1 and longest >= self.ddp_timeout:
            raise ConfigurationError(
                f"`retrieval_timeout` + `retrieval_patience` must be below `ddp_timeout` ({self.ddp_timeout} s), "
                f"after which the other processes give up: got {longest:g} s. Raise `ddp_timeout` or lower the others."
            )

    def _check_checkpoints(self) -> None:
        """A run resumed in the middle of a generation batch samples the batch anew."""
        served = self.steps_per_generation * self.num_iterations
        if self.save_strategy == "steps" and (self.save_steps * self.gradient_accumulation_steps) % served:
            logger.warning(
                "`save_steps` (%s) is no multiple of the steps one generation batch serves (%s): a resumed run will "
                "differ from an uninterrupted one.",
                self.save_steps,
                -(-served // self.gradient_accumulation_steps),
            )
