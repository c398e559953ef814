"""Sampling with a tiny random model: greedy equals a naive loop, draws are reproducible, nothing leaks."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from grounded_rl.errors import ConfigurationError
from grounded_rl.rollouts import FinishReason
from grounded_rl.sampling import Engine
from grounded_rl.sampling.transformers_engine import TransformersEngine

VOCABULARY, PAD, TURN_TOKENS = 40, 0, 6
CONTEXTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17], [18], [19, 20, 21, 22, 23]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config).double().eval()


@torch.no_grad()
def naive_greedy(model, context, end_ids):
    """Ids of one turn, without cache, batch or padding."""
    ids = []
    while len(ids) < TURN_TOKENS:
        logits = model(torch.tensor([[*context, *ids]])).logits[0, -1]
        ids.append(int(logits.argmax()))
        if ids[-1] in end_ids:
            break
    return ids


def engine_of(model, end_ids=(1,), **options):
    return TransformersEngine(model, end_ids, PAD, max_turn_tokens=TURN_TOKENS, **options)


def ids_of(completions):
    return [completion.ids for completion in completions]


def test_greedy_decoding_equals_a_naive_loop(model):
    plain = [naive_greedy(model, context, ()) for context in CONTEXTS]
    # The third token of the first turn ends a turn here, so that both reasons to finish occur.
    end = plain[0][2]
    expected = [naive_greedy(model, context, (end,)) for context in CONTEXTS]
    completions = engine_of(model, end_ids=(1, end)).generate(CONTEXTS, range(5))
    assert ids_of(completions) == expected
    assert [one.finish for one in completions] == [
        FinishReason.STOP if ids[-1] == end else FinishReason.LENGTH for ids in expected
    ]
    assert {one.finish for one in completions} == set(FinishReason)
    assert all(one.logps is None for one in completions)


def test_greedy_results_do_not_depend_on_batch_size_or_order(model):
    expected = ids_of(engine_of(model, batch_size=64).generate(CONTEXTS, range(5)))
    for batch_size in (1, 2, 5):
        assert ids_of(engine_of(model, batch_size=batch_size).generate(CONTEXTS, range(5))) == expected
    assert ids_of(engine_of(model).generate(CONTEXTS[::-1], range(5))) == expected[::-1]


def test_the_models_own_generation_defaults_do_not_leak_in(model):
    expected = ids_of(engine_of(model).generate(CONTEXTS, range(5)))
    drawn = ids_of(engine_of(model, temperature=1.0).generate(CONTEXTS, range(5)))
    kept = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True, repetition_penalty=9.0, temperature=0.1, top_k=1, top_p=0.1
    )
    try:
        assert ids_of(engine_of(model).generate(CONTEXTS, range(5))) == expected
        assert ids_of(engine_of(model, temperature=1.0).generate(CONTEXTS, range(5))) == drawn
    finally:
        model.generation_config = kept


def test_draws_follow_from_the_seed_alone(model):
    def draws(seed):
        engine = engine_of(model, temperature=1.0, seed=seed)
        return [ids_of(engine.generate(CONTEXTS, range(5))) for _ in range(2)]

    torch.manual_seed(11)
    first = draws(7)
    torch.manual_seed(12)
    assert draws(7) == first
    assert draws(8) != first
    # The state moves on from call to call.
    assert first[0] != first[1]


def test_the_callers_random_state_is_left_alone(model):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    engine_of(model, temperature=1.0).generate(CONTEXTS, range(5))
    assert torch.equal(torch.rand(3), expected)


def test_draws_follow_the_models_distribution(model):
    context = CONTEXTS[0]
    with torch.no_grad():
        probabilities = model(torch.tensor([context])).logits[0, -1].softmax(-1)
    engine = TransformersEngine(model, (1,), PAD, max_turn_tokens=1, temperature=1.0, batch_size=4000)
    completions = engine.generate([context] * 4000, range(4000))
    counts = torch.bincount(torch.tensor(ids_of(completions)).flatten(), minlength=VOCABULARY)
    # Chi-square with at most 39 degrees of freedom exceeds 80 with a probability below 2e-4; the seed is fixed.
    expected = probabilities * 4000
    statistic = ((counts - expected) ** 2 / expected)[expected > 1].sum()
    assert float(statistic) < 80
    nucleus = TransformersEngine(model, (1,), PAD, max_turn_tokens=1, temperature=1.0, top_p=1e-4)
    assert ids_of(nucleus.generate([context] * 20, range(20))) == [[int(probabilities.argmax())]] * 20


@pytest.mark.parametrize("is_training", [True, False])
def test_the_models_mode_is_restored_even_after_an_error(model, is_training):
    model.train(is_training)
    try:
        engine_of(model).generate(CONTEXTS[:2], range(2))
        assert model.training is is_training
        with pytest.raises(IndexError):
            engine_of(model).generate([[VOCABULARY + 5]], [0])
        assert model.training is is_training
    finally:
        model.eval()


def test_no_contexts_give_no_completions(model):
    assert engine_of(model).generate([], []) == []
    assert isinstance(engine_of(model), Engine)


@pytest.mark.parametrize(
    "options", [{"temperature": -0.1}, {"top_p": 0.0}, {"top_p": 1.1}, {"batch_size": 0}, {"max_turn_tokens": 0}]
)
def test_options_out_of_range_are_refused(model, options):
    value = next(iter(options.values()))
    with pytest.raises(ConfigurationError, match=rf"`temperature` must be >= 0, .*got .*{value}"):
        TransformersEngine(model, (1,), PAD, **options)
