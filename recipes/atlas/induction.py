"""
A start that can copy: an induction circuit written into the first two layers of a Qwen3 model.

Learning to copy from random weights takes a small model millions of tokens. Written down, the circuit is two heads:

- layer 0, head 0 attends to the previous token and stores a random projection of it;
- layer 1, heads 0 and 1 look for positions whose stored token is the current one, and pass on what stands there.

Everything else keeps its random initialisation, and training changes all of it.
"""

from __future__ import annotations

import math

import torch
from transformers import Qwen3ForCausalLM

# Layout of the residual stream: one constant, the identity of the token, a projection of the token before it.
CONSTANT = 0
IDENTITY = slice(1, 120)
PREVIOUS = slice(120, 184)
# Frequencies above this tell neighbouring positions apart; below the other, positions of one rollout look alike.
HIGH_FREQUENCY = 0.09
LOW_FREQUENCY = 0.004


@torch.no_grad()
def write_induction_circuit(
    model: Qwen3ForCausalLM,
    *,
    neighbour_sharpness: float = 1.5,
    match_sharpness: float = 2.0,
    store_gain: float = 0.05,
    copy_gain: float = 0.25,
    seed: int = 0,
) -> None:
    """
    Write the circuit into a freshly initialised model with hidden size 192 and heads of 64.

    Args:
        model ([`~transformers.Qwen3ForCausalLM`]):
            Changed in place. Needs tied embeddings and at least two layers and two heads.
        neighbour_sharpness (`float`, *optional*, defaults to `1.5`):
            Query and key scale of layer 0.
        match_sharpness (`float`, *optional*, defaults to `2.0`):
            Query and key scale of layer 1.
        store_gain (`float`, *optional*, defaults to `0.05`):
            Size of what layer 0 stores.
        copy_gain (`float`, *optional*, defaults to `0.25`):
            Size of what layer 1 passes on; it must outweigh the token's own embedding.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the random codes.
    """
    generator = torch.Generator().manual_seed(seed)
    size, half = model.config.head_dim, model.config.head_dim // 2
    width = IDENTITY.stop - IDENTITY.start
    embeddings = model.get_input_embeddings().weight
    embeddings.zero_()
    embeddings[:, CONSTANT] = 0.1
    embeddings[:, IDENTITY] = 0.05 * torch.randn(len(embeddings), width, generator=generator)
    codes = torch.randn(size, width, generator=generator) / math.sqrt(width)
    base = model.config.rope_parameters["rope_theta"]
    frequencies = [base ** (-index / half) for index in range(half)]
    first, second = (model.model.layers[number].self_attn for number in (0, 1))

    _clear_head(first, 0, size)
    for index, frequency in enumerate(frequencies):
        if frequency > HIGH_FREQUENCY:
            # A constant query turned back by one position: largest score where the key is one position earlier.
            first.q_proj.weight[index, CONSTANT] = math.cos(frequency)
            first.q_proj.weight[index + half, CONSTANT] = -math.sin(frequency)
            first.k_proj.weight[index, CONSTANT] = 1.0
    first.v_proj.weight[:size, IDENTITY] = codes
    first.o_proj.weight[PREVIOUS, :size] = store_gain * torch.eye(size)
    first.q_norm.weight.fill_(neighbour_sharpness)
    first.k_norm.weight.fill_(neighbour_sharpness)

    slow = [index for index, frequency in enumerate(frequencies) if frequency < LOW_FREQUENCY]
    slots = [slot for index in slow for slot in (index, index + half)]
    for head, (low, high) in enumerate(((0, size), (size, width))):
        _clear_head(second, head, size)
        start = head * size
        for code, slot in enumerate(slots):
            second.q_proj.weight[start + slot, IDENTITY] = codes[code]
            second.k_proj.weight[start + slot, PREVIOUS.start + code] = 1.0
        for row in range(high - low):
            second.v_proj.weight[start + row, IDENTITY.start + low + row] = 1.0
            second.o_proj.weight[IDENTITY.start + low + row, start + row] = copy_gain
    second.q_norm.weight.fill_(match_sharpness)
    second.k_norm.weight.fill_(match_sharpness)


def _clear_head(attention: torch.nn.Module, head: int, size: int) -> None:
    rows = slice(head * size, (head + 1) * size)
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[rows] = 0
    attention.o_proj.weight[:, rows] = 0
