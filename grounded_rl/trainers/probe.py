"""Margins and entropies of a policy's next-token distributions, read off the backbone without materialising logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import is_peft_model
from transformers import PreTrainedModel

from grounded_rl.credit import entropy_from_topk, margin_from_topk
from grounded_rl.errors import ConfigurationError

# Transforms some models apply between the head and the softmax; the tiles below would miss them.
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale")


class SalienceProbe:
    """
    While active, every forward pass of the backbone leaves the statistics of its last positions behind.

    The hook sits on the backbone because TRL's fused language-model head reads the head's weight and never calls the module.
    Hidden states are projected in tiles of tokens and vocabulary, of which only the largest logits are kept, so that memory
    does not grow with the vocabulary.

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
                f"`model` must not transform its logits after the head: got {', '.join(f'`{t}`' for t in transforms)} in "
                "its configuration. Use a model without logit scaling or soft-capping."
            )
        self._temperature = temperature
        self._margin = margin
        self._num_competitors = num_competitors
        self._top_m = top_m
        self._token_tile = token_tile
        self._vocabulary_tile = vocabulary_tile

    @contextmanager
    def watch(self, token_ids: torch.Tensor) -> Iterator[None]:
        """
        Record the forward passes of the backbone inside the context.

        Args:
            token_ids (`torch.Tensor` of shape `(B, T)`):
                The tokens at the last `T` positions. The passes must walk the batch in order, in slices of rows.
        """
        self._token_ids = token_ids
        self._next_row = 0
        self._parts: list[torch.Tensor] = []
        handle = self._model.base_model.register_forward_hook(self._record)
        try:
            yield
        finally:
            handle.remove()

    @property
    def has_result(self) -> bool:
        """Whether the recorded passes covered the whole batch."""
        return hasattr(self, "_parts") and self._next_row == len(self._token_ids)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Statistics of the recorded passes.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Margins and normalised entropies, both `(B, T)` in float32. Values at
            padding are those of whatever the model saw there.
        """
        margins, entropies = torch.cat(self._parts).unbind(-1)
        return margins, entropies

    @torch.no_grad()
    def _record(self, module, args, output) -> None:
        length = self._token_ids.size(1)
        hidden = output.last_hidden_state[:, -(length + 1) : -1].detach()
        rows = len(hidden)
        token_ids = self._token_ids[self._next_row : self._next_row + rows].reshape(-1)
        self._next_row += rows
        flat = hidden.reshape(-1, hidden.size(-1))
        parts = [
            self._statistics(flat[start : start + self._token_tile], token_ids[start : start + self._token_tile])
            for start in range(0, len(flat), self._token_tile)
        ]
        self._parts.append(torch.cat(parts).view(rows, length, 2))

    def _statistics(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Margin and entropy of every token of a tile, `(N, 2)`."""
        head = self._model.get_output_embeddings()
        top_values, top_ids = self._largest_logits(hidden, head)
        token_logits = (hidden.float() * head.weight[token_ids].float()).sum(-1)
        if head.bias is not None:
            token_logits = token_logits + head.bias[token_ids].float()
        top_values, token_logits = top_values / self._temperature, token_logits / self._temperature
        margins = margin_from_topk(
            token_logits,
            top_values,
            top_ids,
            token_ids,
            num_competitors=self._num_competitors,
            margin=self._margin,  # type: ignore[arg-type]
        )
        return torch.stack([margins, entropy_from_topk(top_values)], dim=-1)

    def _largest_logits(self, hidden: torch.Tensor, head: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
        values = ids = None
        for start in range(0, head.weight.size(0), self._vocabulary_tile):
            weight = head.weight[start : start + self._vocabulary_tile]
            bias = None if head.bias is None else head.bias[start : start + self._vocabulary_tile].to(hidden.dtype)
            tile = torch.nn.functional.linear(hidden, weight.to(hidden.dtype), bias).float()
            tile_values, tile_ids = tile.topk(min(self._top_m, tile.size(-1)), dim=-1)
            tile_ids += start
            if values is not None:
                tile_values = torch.cat([values, tile_values], dim=-1)
                tile_ids = torch.cat([ids, tile_ids], dim=-1)
                tile_values, order = tile_values.topk(min(self._top_m, tile_values.size(-1)), dim=-1)
                tile_ids = tile_ids.gather(-1, order)
            values, ids = tile_values, tile_ids
        return values, ids
