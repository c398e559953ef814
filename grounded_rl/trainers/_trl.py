"""
The only module that touches TRL's private methods.

Every override calls `super()` and none repeats a body. What each relies on is pinned by a test of the upstream
contract:

- `rollout_func` receives every row's prompt and may return extra lists, which reach the reward functions;
- `_tool_call_loop` is called with the result of `rollout_func` when tools are present and returns seven values;
- `_generate_single_turn` takes ragged token contexts and returns ids, ended by the end token, and log-probs or `None`;
- `_calculate_rewards` returns the matrix gathered over processes;
- `_generate_and_score_completions` returns the buffered dictionary, which may carry extra `(B, …)` tensors;
- `_get_per_token_logps_and_entropies` returns three values, walks the batch in order, runs the backbone, and is called
  before the loss reads `inputs["old_per_token_logps"]`;
- `_compute_loss` accepts advantages of shape `(B, T)` and takes the token ratio against `old_per_token_logps`;
- `_get_train_sampler` makes the sampler of a run, which shuffles anew whenever it is iterated over;
- `_save_checkpoint` writes everything a run is resumed from, at the step of `state.global_step`, on every process;
- `eos_token_ids` and `generation_config` decide where `_generate_single_turn` ends a turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from grounded_rl.credit import equivalent_old_logps
from grounded_rl.environments.tools import search
from grounded_rl.grounding import Diagnosis
from grounded_rl.rollouts.types import CallStatus, FinishReason, Rollout, StopReason
from grounded_rl.sampling.engine import Completion
from grounded_rl.trainers.metrics import quotients
from grounded_rl.trainers.passes import padded, passes_of_like_length
from grounded_rl.trainers.probe import SalienceProbe

SEGMENT_LEVELS = ("turn", "sequence_token")


@dataclass
class GenerationBatch:
    """What credit assignment may read of one generation batch of this process; groups are whole and consecutive."""

    rollouts: list[Rollout]
    rewards: torch.Tensor
    """Weighted sum of the reward functions, `(B,)`; NaN for rollouts that could not be scored."""
    group_ids: torch.Tensor
    """Group of every rollout, `(B,)`."""
    valid: torch.Tensor
    """False for failed and unscored rollouts, `(B,)`; they are in neither the statistics nor the loss."""
    sampled_mask: torch.Tensor
    """True at tokens the policy sampled, `(B, T)`."""
    turn_ids: torch.Tensor
    """Turn of every sampled token, -1 elsewhere, `(B, T)`."""
    diagnoses: list[Diagnosis] = field(default_factory=list)
    """Set by credit assignment; what each rollout did."""
    rollout_advantages: torch.Tensor | None = None
    """Advantage of every rollout before any token-level credit, `(B,)`."""
    advantages: torch.Tensor | None = None
    """Set by credit assignment, `(B, T)`."""
    masked: torch.Tensor | None = None
    """Set by credit assignment: rollouts that leave the loss but not the statistics, `(B,)`."""
    margins: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Set by credit assignment; averaged over processes, NaN left out."""


def conversation(rollout: Rollout) -> list[dict[str, Any]]:
    """Messages of a rollout for reward functions and logs: plain text, whatever the policy wrote."""
    messages: list[dict[str, Any]] = []
    for turn in rollout.turns:
        messages.append({"role": "assistant", "content": turn.text})
        if turn.observation:
            messages.append({"role": "tool", "name": search.__name__, "content": turn.observation})
    return messages


def _mean(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN without any."""
    numbers = [value for value in values if not math.isnan(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


class TrainerEngine:
    """Engine that samples with whatever generation backend the trainer was configured with."""

    def __init__(self, trainer: RolloutGRPOTrainer) -> None:
        self._trainer = trainer

    def generate(self, contexts: Sequence[Sequence[int]], rollouts: Sequence[int]) -> list[Completion]:
        """One turn per context; see `Engine.generate`."""
        del rollouts
        trainer = self._trainer
        contexts = [list(context) for context in contexts]
        count = len(contexts)
        if trainer.is_generation_collective:
            # Collective backends slice by the local number of prompts: every process passes equally many.
            most = int(trainer.accelerator.gather(torch.tensor([count], device=trainer.accelerator.device)).max())
            contexts += [[trainer.eos_token_ids[0]]] * (most - count)
        if not contexts:
            return []
        ids, logps = trainer._generate_single_turn(contexts, None, {}, 1)
        ends = set(trainer.eos_token_ids)
        return [
            Completion(
                ids=list(ids[row]),
                finish=FinishReason.STOP if ids[row][-1] in ends else FinishReason.LENGTH,
                logps=None if logps is None else list(logps[row]),
            )
            for row in range(count)
        ]


class RolloutGRPOTrainer(GRPOTrainer):
    """GRPO whose rollouts, credit and ratio level come from three methods: `sample`, `assign_credit`, `make_probe`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The environment renders prompts and observations itself, so TRL's own checks of the chat template, which only
        # know templates by their exact bytes, are not needed: tools are announced after they ran.
        self.tools = [search]
        self.rollout_func = self._rollout
        # TRL's loss knows the levels "token" and "sequence"; the others are carried by the reference log-probs.
        self._ratio_level = self.importance_sampling_level
        if self._ratio_level in SEGMENT_LEVELS:
            self.importance_sampling_level = "token"
        self._rows: list[dict[str, Any]] = []
        self._rollouts: list[Rollout] = []
        self._rewards_per_func: torch.Tensor | None = None
        self._armed_probe: SalienceProbe | None = None
        self._loss_inputs: dict[str, Any] | None = None

    # --- what subclasses provide

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> list[Rollout]:
        """One rollout per dataset row."""
        raise NotImplementedError

    def assign_credit(self, batch: GenerationBatch) -> None:
        """Set `batch.advantages` and, where needed, `batch.masked` and `batch.metrics`."""
        raise NotImplementedError

    def make_probe(self) -> SalienceProbe | None:
        """Probe of the old policy for this batch, or `None` if credit needs no token statistics."""
        return None

    def finish_batch(self, batch: GenerationBatch) -> None:
        """Called once per generation batch after credit assignment."""

    # --- rollouts

    def end_turns_at(self, token_ids: Sequence[int]) -> None:
        """End turns at these tokens too: base models declare an end of text that their chat template does not use."""
        self.eos_token_ids = list(dict.fromkeys([*self.eos_token_ids, *token_ids]))
        if self.use_vllm:
            self.vllm_generation.generation_kwargs["stop_token_ids"] = self.eos_token_ids
        else:
            self.generation_config.eos_token_id = self.eos_token_ids

    @property
    def is_generation_collective(self) -> bool:
        """Whether every process must take part in every generation call."""
        if self.accelerator.num_processes == 1:
            return False
        is_sharded = self.is_deepspeed_enabled or self.is_fsdp_enabled
        is_shared_vllm = self.use_vllm and (self.vllm_mode == "server" or self.vllm_tensor_parallel_size > 1)
        return is_sharded or is_shared_vllm

    def is_anyone_active(self, is_active: bool) -> bool:
        """Whether any process still has rollouts to sample, where generation needs all of them at once."""
        if not self.is_generation_collective:
            return is_active
        return bool(self.accelerator.gather(torch.tensor([is_active], device=self.accelerator.device)).any())

    def _rollout(self, prompts: list, trainer: GRPOTrainer) -> dict[str, Any]:
        del prompts, trainer
        self._rollouts = self.sample(self._rows)
        logps = [rollout.logps for rollout in self._rollouts]
        return {
            "prompt_ids": [list(rollout.prompt_ids) for rollout in self._rollouts],
            "completion_ids": [rollout.completion_ids for rollout in self._rollouts],
            "logprobs": None if any(row is None for row in logps) else logps,
            "rollout": list(self._rollouts),
        }

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, *args: Any):
        calls = [call for rollout in self._rollouts for turn in rollout.turns for call in turn.calls]
        return (
            [rollout.sampled_mask for rollout in self._rollouts],
            [conversation(rollout) for rollout in self._rollouts],
            completion_ids,
            logprobs,
            len(calls),
            sum(call.status is CallStatus.REJECTED for call in calls),
            [[] for _ in self._rollouts],
        )

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._rewards_per_func = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler:
        self._train_sampler = super()._get_train_sampler(*args, **kwargs)
        return self._train_sampler

    def skip_epochs(self, count: int) -> None:
        """Draw the orders of epochs a resumed run has behind it; without, it would repeat that of the first."""
        for _ in range(count):
            next(iter(self._train_sampler), None)

    def save_checkpoint(self) -> Path:
        """Write a checkpoint of the last finished step that a run can be resumed from; a collective call."""
        is_partial, self.args.save_only_model = self.args.save_only_model, False
        try:
            self._save_checkpoint(self.model, trial=None)
        finally:
            self.args.save_only_model = is_partial
        return Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"

    # --- credit

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = inputs
        probe = self._armed_probe = self.make_probe()
        output = super()._generate_and_score_completions(inputs)
        # Without an old-policy pass of TRL's own the probe may have seen another one (a disabled adapter).
        if probe is not None and ("old_per_token_logps" not in output or not probe.has_result):
            self._armed_probe = probe
            self._run_old_policy(output)
        self._armed_probe = None
        batch = self._batch(output, probe)
        self.assign_credit(batch)
        self._write_credit(output, batch)
        self.finish_batch(batch)
        self._rows, self._rollouts, self._rewards_per_func = [], [], None
        return output

    @torch.no_grad()
    def _run_old_policy(self, output: dict[str, Any]) -> None:
        """
        Old-policy pass for batches on which TRL needs none itself.

        It only feeds the probe: the loss goes on taking its own log-probs as the old ones, so that measuring changes
        nothing. In evaluation mode it draws no random numbers either.
        """
        was_training = self.model.training
        self.model.eval()
        try:
            with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                    torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                    output["completion_ids"].size(1),
                    batch_size=self.args.per_device_train_batch_size,
                )
        finally:
            self.model.train(was_training)

    @torch.no_grad()
    def score(self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of every completion token under the policy as it is, in nats; draws no random numbers."""
        device, length = self.accelerator.device, max(map(len, completions))
        widest = max(map(len, prompts))
        pad = self._tokenizer.pad_token_id
        rows = [
            [*([pad] * (widest - len(prompt))), *prompt, *completion]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        mask = [
            [0] * (widest - len(prompt)) + [1] * (len(prompt) + len(completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        was_training = self.model.training
        self.model.eval()
        try:
            with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
                # Not through the override below: an armed probe waits for the old-policy pass, which this is not.
                logps = super()._get_per_token_logps_and_entropies(
                    self.model,
                    padded(rows, widest + length, pad, device),
                    padded(mask, widest + length, 0, device),
                    length,
                    batch_size=self.args.per_device_train_batch_size,
                )[0]
        finally:
            self.model.train(was_training)
        return [row[: len(each)] for row, each in zip(logps.tolist(), completions, strict=True)]

    def _batch(self, output: dict[str, Any], probe: SalienceProbe | None) -> GenerationBatch:
        device, count = self.accelerator.device, len(self._rollouts)
        start = self.accelerator.process_index * count
        per_func = self._rewards_per_func[start : start + count]
        rewards = (per_func * self.reward_weights.to(device)).nansum(dim=1)
        rewards[per_func.isnan().all(dim=1)] = torch.nan
        self._rollouts = [
            replace(
                rollout,
                rewards={
                    name: None if math.isnan(value) else value
                    for name, value in zip(self.reward_func_names, values, strict=True)
                },
            )
            for rollout, values in zip(self._rollouts, per_func.tolist(), strict=True)
        ]
        is_failed = torch.tensor([rollout.stop is StopReason.FAILED for rollout in self._rollouts], device=device)
        group_size = self.num_generations if self.model.training else self.num_generations_eval
        length = output["completion_ids"].size(1)
        margins, entropies = (None, None) if probe is None else probe.result()
        return GenerationBatch(
            rollouts=self._rollouts,
            rewards=rewards,
            group_ids=torch.arange(count, device=device) // group_size,
            valid=~is_failed & ~rewards.isnan(),
            sampled_mask=(output["completion_mask"] * output["tool_mask"]).bool(),
            turn_ids=padded([rollout.turn_ids for rollout in self._rollouts], length, -1, device),
            margins=margins,
            entropies=entropies,
        )

    def _write_credit(self, output: dict[str, Any], batch: GenerationBatch) -> None:
        leaves_loss = ~batch.valid if batch.masked is None else ~batch.valid | batch.masked
        output["advantages"] = batch.advantages
        output["turn_ids"] = batch.turn_ids
        output["tool_mask"] = output["tool_mask"] * (~leaves_loss).unsqueeze(1)
        # TRL counted the loss tokens before any rollout left the loss.
        loss_mask = output["completion_mask"] * output["tool_mask"]
        output["num_items_in_batch"] = self.accelerator.gather(loss_mask.sum()).sum().clamp(min=1)
        self.log_means(batch.metrics)

    def log_means(self, metrics: Mapping[str, float]) -> None:
        """Log values averaged over the processes, NaN left out. Every process must pass the same names."""
        mode = "train" if self.model.training else "eval"
        gathered = gather_object([dict(metrics)])
        means = {name: _mean([part[name] for part in gathered]) for name in metrics}
        for name, value in (means | quotients(means)).items():
            self._metrics[mode][name].append(value)

    # --- loss

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs: Any
    ):
        forward = super()._get_per_token_logps_and_entropies
        probe = self._armed_probe if model is self.model else None

        def run(ids, mask, length, rows):
            if probe is not None:
                probe.announce(rows, length)
            return forward(model, ids, mask, length, **kwargs)

        with self._watched(probe, input_ids[:, -logits_to_keep:]):
            if self.args.forward_rows is None:
                output = forward(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
            else:
                output = passes_of_like_length(
                    run, input_ids, attention_mask, logits_to_keep, rows_per_pass=self.args.forward_rows
                )
        if self._loss_inputs is not None:
            self._replace_reference(self._loss_inputs, output[0].detach())
        return output

    def _watched(self, probe: SalienceProbe | None, token_ids: torch.Tensor):
        if probe is None:
            return nullcontext()
        # Only the first pass of the policy is the old-policy pass; a later one may be a disabled adapter.
        self._armed_probe = None
        rows = [rollout.sampled_mask for rollout in self._rollouts]
        return probe.watch(token_ids, padded(rows, token_ids.size(1), 0, token_ids.device).bool())

    def _replace_reference(self, inputs: dict[str, Any], logps: torch.Tensor) -> None:
        """Choose old log-probs under which TRL's token ratio is the ratio of the configured level."""
        old_logps = inputs.get("old_per_token_logps")
        old_logps = logps if old_logps is None else old_logps
        # The off-policy mask must go on comparing with the true old policy.
        inputs.setdefault("sampling_per_token_logps", old_logps)
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
        inputs["old_per_token_logps"] = equivalent_old_logps(
            logps, old_logps, mask=mask, turn_ids=inputs["turn_ids"], level=self._ratio_level
        )

    def _compute_loss(self, model, inputs):
        if self._ratio_level not in SEGMENT_LEVELS:
            return super()._compute_loss(model, inputs)
        # A shallow copy: the buffered batch serves the next iteration too.
        self._loss_inputs = dict(inputs)
        try:
            return super()._compute_loss(model, self._loss_inputs)
        finally:
            self._loss_inputs = None
