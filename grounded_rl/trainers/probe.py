"""Margins and entropies of a policy's next-token distributions, read off the backbone without materialising logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import is_peft_model
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from trl.trainer.utils import maybe_gather_lm_head_ctx

from grounded_rl.credit import entropy_from_topk, margin_from_topk
from grounded_rl.errors import ConfigurationError

# Transforms some models apply between the head and the softmax; the tiles below would miss them.
_LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "output_multiplier",
    "lm_head_multiplier",
)


class SalienceProbe:
    """
    While active, every forward pass of the backbone leaves the statistics of its last positions behind.

    The hook sits on the backbone because TRL's fused language-model head reads the head's weight and never calls the
    module. Only the hidden states of sampled tokens are projected, in tiles of tokens and vocabulary of which the
    largest logits are kept, so that memory does not grow with the vocabulary.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The unwrapped policy, or a PEFT model around it.
        temperature (`float`):
            Sampling temperature; logits are divided by it.
        margin (`str`, *optional*, defaults to `"lse"`):
            How competitors are pooled, as in [`~credit.token_margin`].
        num_competitors (`int`, *optional*, defaults to `3`):
            Competitors of the margin.
        top_m (`int`, *optional*, defaults to `32`):
            Tokens the entropy is taken over.
        token_tile (`int`, *optional*, defaults to `2048`):
            Tokens per tile.
        vocabulary_tile (`int`, *optional*, defaults to `32768`):
            Vocabulary entries per tile.

    Raises:
        `ConfigurationError`: If the model transforms its logits after the head (soft-capping, scaling).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        margin: str = "lse",
        num_competitors: int = 3,
        top_m: int = 32,
        token_tile: int = 2048,
        vocabulary_tile: int = 32768,
    ) -> None:
        self._model = model.get_base_model() if is_peft_model(model) else model
        config = self._model.config.get_text_config()
        transforms = [name for name in _LOGIT_TRANSFORMS if getattr(config, name, None) not in (None, 1, 1.0)]
        if transforms:
            raise ConfigurationError(
                f"`model` must not transform its logits after the head: got {', '.join(f'`{t}`' for t in transforms)} "
                "in its configuration. Use a model without logit scaling or soft-capping."
            )
        self._temperature = temperature
        self._margin = margin
        self._num_competitors = num_competitors
        self._top_m = top_m
        self._token_tile = token_tile
        self._vocabulary_tile = vocabulary_tile

    @contextmanager
    def watch(self, token_ids: torch.Tensor, sampled: torch.Tensor) -> Iterator[None]:
        """
        Record the forward passes of the backbone inside the context.

        Args:
            token_ids (`torch.Tensor` of shape `(B, T)`):
                The tokens at the last `T` positions. The passes walk the batch in order, in slices of rows, unless
                `announce` says which rows come next.
            sampled (`torch.Tensor` of shape `(B, T)`, bool):
                Positions to measure.
        """
        self._token_ids = token_ids
        self._sampled = sampled
        self._next_row = 0
        self._announced: tuple[torch.Tensor, int] | None = None
        self._statistics = torch.zeros(*token_ids.shape, 2, device=token_ids.device)
        handle = self._model.base_model.register_forward_hook(self._record)
        try:
            yield
        finally:
            handle.remove()

    def announce(self, rows: torch.Tensor, length: int) -> None:
        """
        Say what the next pass holds.

        Args:
            rows (`torch.Tensor` of shape `(b,)`):
                Rows of the batch, every one of them in one pass only.
            length (`int`):
                The pass ends with their first `length` tokens.
        """
        self._announced = rows, length

    @property
    def has_result(self) -> bool:
        """Whether the recorded passes covered the whole batch."""
        return hasattr(self, "_statistics") and self._next_row == len(self._token_ids)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Statistics of the recorded passes.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Margins and normalised entropies, both `(B, T)` in float32, `0.0`
            where no token was sampled.
        """
        margins, entropies = self._statistics.unbind(-1)
        return margins, entropies

    @torch.no_grad()
    def _record(self, module, args, output) -> None:
        count = len(output.last_hidden_state)
        in_order = torch.arange(self._next_row, self._next_row + count, device=self._token_ids.device)
        rows, length = self._announced or (in_order, self._token_ids.size(1))
        self._announced = None
        self._next_row += count
        sampled = self._sampled[rows, :length]
        hidden = output.last_hidden_state[:, -(length + 1) : -1][sampled]
        token_ids = self._token_ids[rows, :length][sampled]
        head = self._model.get_output_embeddings()
        weight, bias = (part.full_tensor() if isinstance(part, DTensor) else part for part in (head.weight, head.bias))
        with maybe_gather_lm_head_ctx(weight, bias):
            tiles = [
                self._measure(
                    hidden[start : start + self._token_tile], token_ids[start : start + self._token_tile], weight, bias
                )
                for start in range(0, len(hidden), self._token_tile)
            ]
        if tiles:
            block = self._statistics[rows, :length]
            block[sampled] = torch.cat(tiles)
            self._statistics[rows, :length] = block

    def _measure(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Margin and entropy of every token of a tile, `(N, 2)`."""
        token_logits = torch.zeros(len(hidden), device=hidden.device)
        top_values = token_logits.new_empty(len(hidden), 0)
        top_ids = token_ids.new_empty(len(hidden), 0)
        for start in range(0, weight.size(0), self._vocabulary_tile):
            stop = min(start + self._vocabulary_tile, weight.size(0))
            tile_bias = None if bias is None else bias[start:stop].to(hidden.dtype)
            logits = torch.nn.functional.linear(hidden, weight[start:stop].to(hidden.dtype), tile_bias).float()
            inside = (token_ids >= start) & (token_ids < stop)
            own = logits.gather(1, (token_ids - start).clamp(0, stop - start - 1).unsqueeze(1)).squeeze(1)
            token_logits = torch.where(inside, own, token_logits)
            values, ids = logits.topk(min(self._top_m, stop - start), dim=1)
            top_values, top_ids = torch.cat([top_values, values], dim=1), torch.cat([top_ids, ids + start], dim=1)
            top_values, order = top_values.topk(min(self._top_m, top_values.size(1)), dim=1)
            top_ids = top_ids.gather(1, order)
        margins = margin_from_topk(
            token_logits / self._temperature,
            top_values / self._temperature,
            top_ids,
            token_ids,
            num_competitors=self._num_competitors,
            margin=self._margin,  # type: ignore[arg-type]
        )
        return torch.stack([margins, entropy_from_topk(top_values / self._temperature)], dim=1)
