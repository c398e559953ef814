"""Which sampled tokens are structure (tags, turn markers) rather than content, by character span."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

STRUCTURAL_LITERALS = (
    "<answer>",
    "</answer>",
    "<tool_call>",
    "</tool_call>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
)
"""Literals whose tokens receive no residual credit."""

_STRUCTURE = re.compile("|".join(map(re.escape, STRUCTURAL_LITERALS)).encode())
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Inverse of the printable alphabet in which byte-level vocabularies spell bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


class TokenBytes(dict):
    """
    Bytes of every token id, computed on first use.

    Concatenated bytes are exact where decoded pieces are not: a byte-level token may be part of a character.
    """

    def __init__(self, tokenizer):
        super().__init__()
        # A copy of the vocabulary: keeping the tokenizer itself would keep it alive in the table of tables below.
        self._tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._added = {index: str(token) for index, token in tokenizer.added_tokens_decoder.items()}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._alphabet = _byte_alphabet() if "ByteLevel" in repr(getattr(backend, "decoder", None)) else None

    def __missing__(self, index: int) -> bytes:
        value = self[index] = self._read(index)
        return value

    def _read(self, index: int) -> bytes:
        if index in self._added:
            return self._added[index].encode()
        token = (self._tokens[index] if 0 <= index < len(self._tokens) else None) or ""
        if self._alphabet is not None:
            try:
                return bytes([self._alphabet[character] for character in token])
            except KeyError:
                return token.encode()
        fallback = _BYTE_FALLBACK.fullmatch(token)
        return bytes([int(fallback.group(1), 16)]) if fallback else token.replace("▁", " ").encode()


_TOKEN_BYTES: WeakKeyDictionary = WeakKeyDictionary()


def token_bytes(tokenizer) -> TokenBytes:
    """The table of a tokenizer, shared by all callers."""
    if tokenizer not in _TOKEN_BYTES:
        _TOKEN_BYTES[tokenizer] = TokenBytes(tokenizer)
    return _TOKEN_BYTES[tokenizer]


def structural_mask(tokenizer, ids: Sequence[int]) -> list[bool]:
    """
    Whether each token overlaps one of the `STRUCTURAL_LITERALS`.

    Decided by position in the text, not by id: `<answer>` is no token of its own in most vocabularies, and silencing
    the ids of its pieces would silence ordinary text. A token that spans a tag and text next to it is structural.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        ids (`Sequence[int]`):
            Sampled ids of one turn. A literal that begins in one turn and ends in another is not found.

    Returns:
        `list[bool]`: One entry per id.
    """
    table = token_bytes(tokenizer)
    pieces = [table[index] for index in ids]
    mask = [False] * len(pieces)
    text = b"".join(pieces)
    if b"<" not in text:
        return mask
    ends = list(accumulate(map(len, pieces)))
    for match in _STRUCTURE.finditer(text):
        first = bisect_right(ends, match.start())
        last = bisect_right(ends, match.end() - 1)
        mask[first : last + 1] = [True] * (last + 1 - first)
    return mask
