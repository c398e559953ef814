"""A deterministic encoder without a model: words are hashed to directions. Passages that share words are close."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from grounded_rl.retrieval.encoders import EncoderSettings

SETTINGS = EncoderSettings(
    model="words", query_prefix="", passage_prefix="", pooling="mean", normalize=True, max_length=256
)


class WordEncoder:
    """
    Sum of one random direction per word, scaled to length 1.

    `seed` stands for the weights of a model: another one gives other vectors under equal settings.
    """

    def __init__(self, num_dims: int = 256, *, settings: EncoderSettings = SETTINGS, seed: int = 0):
        self.settings = settings
        self.num_dims = num_dims
        self.num_encoded = 0
        self._seed = seed
        self._directions: dict[str, np.ndarray] = {}

    def encode_queries(self, queries: Sequence[str]) -> np.ndarray:
        return self._encode(self.settings.query_prefix, queries)

    def encode_passages(self, texts: Sequence[str]) -> np.ndarray:
        self.num_encoded += len(texts)
        return self._encode(self.settings.passage_prefix, texts)

    def _encode(self, prefix: str, texts: Sequence[str]) -> np.ndarray:
        rows = np.zeros((len(texts), self.num_dims), dtype=np.float32)
        for row, text in enumerate(texts):
            for word in re.findall(r"\w+", (prefix + text).lower())[: self.settings.max_length]:
                rows[row] += self._direction(word)
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        return rows / np.where(norms > 0, norms, 1)

    def _direction(self, word: str) -> np.ndarray:
        if word not in self._directions:
            rng = np.random.default_rng([self._seed, zlib.crc32(word.encode("utf-8", "replace"))])
            self._directions[word] = rng.normal(size=self.num_dims).astype(np.float32)
        return self._directions[word]
