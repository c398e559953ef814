"""What a search looks for, and the checks of what it is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from grounded_rl.errors import ConfigurationError, IndexMismatchError, RetrievalError
from grounded_rl.retrieval.elasticsearch.identity import OpenIndex
from grounded_rl.retrieval.elasticsearch.queries import MAX_HITS

if TYPE_CHECKING:
    from grounded_rl.retrieval.encoders import Encoder

MODES: Final = ("lexical", "dense", "hybrid")
FUSIONS: Final = ("rrf", "weighted")
DEFAULT_WINDOW: Final = 50
"""Hits of each ranking that are fused."""


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """
    What is searched for a query, and how two rankings become one.

    Args:
        mode (`str`, *optional*):
            `"lexical"`, `"dense"` or `"hybrid"`. Hybrid for an index with vectors, else lexical.
        fusion (`str`, *optional*, defaults to `"rrf"`):
            `"rrf"` by ranks, `"weighted"` by scaled scores; for hybrid only.
        weights (`tuple[float, float]`, *optional*, defaults to `(1.0, 1.0)`):
            Weights of the ranking by words and of the one by vectors.
        window (`int`, *optional*, defaults to 50):
            Hits of each ranking that are fused, or `k` if that is larger.
        num_candidates (`int`, *optional*):
            Candidates of a search by vector; ten per hit and at least 100 if left out.
    """

    mode: str | None = None
    fusion: str = "rrf"
    weights: tuple[float, float] = (1.0, 1.0)
    window: int = DEFAULT_WINDOW
    num_candidates: int | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (("mode", self.mode, (None, *MODES)), ("fusion", self.fusion, FUSIONS)):
            if value not in allowed:
                listed = ", ".join(f"`{choice}`" for choice in allowed if choice)
                raise ConfigurationError(f"`{name}` must be one of {listed}: got {value!r}. Choose one of these.")
        for name, count in (("window", self.window), ("num_candidates", self.num_candidates)):
            if name == "num_candidates" and count is None:
                continue
            if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_HITS:
                raise ConfigurationError(f"`{name}` must lie in [1, {MAX_HITS}]: got {count!r}. Leave it out.")
        if len(self.weights) != 2 or not all(weight > 0 for weight in self.weights):
            raise ConfigurationError(f"`weights` must be two numbers above 0: got {self.weights!r}. Leave it out.")


def check_encoder(index: OpenIndex, mode: str, encoder: Encoder | None) -> None:
    """Raise unless the encoder is the one the vectors of the index came from."""
    if mode == "lexical":
        return
    if not index.spec.has_vectors:
        raise ConfigurationError(
            f"`mode` must be `lexical` for the index `{index.name}`, which has no vectors: got {mode!r}."
        )
    if encoder is None:
        raise ConfigurationError(
            f"`encoder` must be given for `mode` {mode!r}: got none. Pass the encoder the index was built with."
        )
    recorded = dict(index.spec.encoder or {})
    given = encoder.settings.as_dict()
    differing = [name for name in recorded if name != "model" and recorded[name] != given.get(name)]
    if differing or encoder.num_dims != index.spec.dims:
        shown = [f"`{name}` {given.get(name)!r}, not {recorded[name]!r}" for name in differing]
        if encoder.num_dims != index.spec.dims:
            shown.append(f"{encoder.num_dims} dimensions, not {index.spec.dims}")
        raise IndexMismatchError(
            f"`encoder` must be the one the index `{index.name}` was built with, `{recorded.get('model')}`: "
            f"got {'; '.join(shown)}. Load the same model with the same settings."
        )


def check_vectors(vectors: Any, count: int, dims: int) -> None:
    """Raise unless there is one finite vector of length 1 per query."""
    if vectors.shape != (count, dims) or not np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-3):
        raise RetrievalError(
            f"`encoder` must give {count} vectors of {dims} dimensions and length 1: got shape {vectors.shape}. "
            "Use an encoder that normalises."
        )
