"""Sampling with `transformers`' own `generate`, batched and left-padded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from grounded_rl.errors import ConfigurationError
from grounded_rl.rollouts.types import FinishReason
from grounded_rl.sampling.engine import Completion


class TransformersEngine:
    """
    Samples turns with a `transformers` model in this process.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Causal language model. Used in evaluation mode and without gradient; its mode is restored afterwards.
        end_ids (`Sequence[int]`):
            Ids that end a turn.
        pad_id (`int`):
            Id used for left padding; masked, so any valid id will do.
        max_turn_tokens (`int`, *optional*, defaults to `512`):
            Largest number of tokens sampled per turn.
        temperature (`float`, *optional*, defaults to `0.0`):
            Sampling temperature; `0.0` is greedy decoding.
        top_p (`float`, *optional*, defaults to `1.0`):
            Nucleus mass; ignored under greedy decoding.
        batch_size (`int`, *optional*, defaults to `64`):
            Contexts per `generate` call. Contexts of similar length are put together.
        seed (`int`, *optional*, defaults to `0`):
            Seed of this engine's own random state; the caller's is left untouched.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        pad_id: int,
        *,
        max_turn_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        if temperature < 0 or not 0 < top_p <= 1 or max_turn_tokens < 1 or batch_size < 1:
            raise ConfigurationError(
                "`temperature` must be >= 0, `top_p` in (0, 1], `max_turn_tokens` and `batch_size` at least 1: got "
                f"{temperature}, {top_p}, {max_turn_tokens}, {batch_size}. Correct the value out of range."
            )
        self._model = model
        self._end_ids = list(end_ids)
        self._pad_id = pad_id
        self._batch_size = batch_size
        # Whatever is left unset is taken from the model's own generation config (a repetition penalty, for instance).
        self._generation_config = GenerationConfig(
            do_sample=temperature > 0,
            temperature=temperature or 1.0,
            top_p=top_p if temperature else 1.0,
            top_k=0 if temperature else 50,
            repetition_penalty=1.0,
            max_new_tokens=max_turn_tokens,
            eos_token_id=self._end_ids,
            pad_token_id=pad_id,
            disable_compile=True,
        )
        self._random_state = torch.Generator(model.device).manual_seed(seed).get_state()

    @torch.no_grad()
    def generate(self, contexts: Sequence[Sequence[int]], rollouts: Sequence[int]) -> list[Completion]:
        """One turn per context; see `Engine.generate`."""
        del rollouts
        completions: list[Completion | None] = [None] * len(contexts)
        was_training = self._model.training
        self._model.eval()
        outside = self._swap_random_state(self._random_state)
        try:
            order = sorted(range(len(contexts)), key=lambda index: len(contexts[index]))
            for start in range(0, len(order), self._batch_size):
                chosen = order[start : start + self._batch_size]
                for index, completion in zip(chosen, self._sample([contexts[i] for i in chosen]), strict=True):
                    completions[index] = completion
        finally:
            self._random_state = self._swap_random_state(outside)
            self._model.train(was_training)
        return [completion for completion in completions if completion is not None]

    def _swap_random_state(self, state: torch.Tensor) -> torch.Tensor:
        """Install a random state on the model's device; return the one it replaces."""
        if self._model.device.type == "cuda":
            previous = torch.cuda.get_rng_state(self._model.device)
            torch.cuda.set_rng_state(state, self._model.device)
            return previous
        previous = torch.get_rng_state()
        torch.set_rng_state(state)
        return previous

    def _sample(self, contexts: list[Sequence[int]]) -> list[Completion]:
        longest = max(map(len, contexts))
        device = self._model.device
        ids = torch.full((len(contexts), longest), self._pad_id)
        mask = torch.zeros_like(ids)
        for row, context in enumerate(contexts):
            ids[row, longest - len(context) :] = torch.tensor(context)
            mask[row, longest - len(context) :] = 1
        output = self._model.generate(
            input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=self._generation_config
        )
        return [self._completion(row) for row in output[:, longest:].tolist()]

    def _completion(self, ids: list[int]) -> Completion:
        end = next((position for position, token in enumerate(ids) if token in self._end_ids), None)
        if end is None:
            return Completion(ids, FinishReason.LENGTH)
        return Completion(ids[: end + 1], FinishReason.STOP)
