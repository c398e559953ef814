"""The probe of the old policy against whole logits."""

from __future__ import annotations

import pytest
import torch

from grounded_rl.credit import token_margin, topk_entropy
from grounded_rl.errors import ConfigurationError
from grounded_rl.trainers import GCATrainer
from grounded_rl.trainers.probe import SalienceProbe
from tests.sampling.world import plan_of
from tests.trainers.runs import generation_batch, make_trainer, tiny_model

COUNTRIES = ("Peru", "Chile")
ROWS, LENGTH, PROMPT = 3, 11, 4


def random_batch(vocabulary):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocabulary, (ROWS, PROMPT + LENGTH), generator=generator)
    sampled = torch.rand(ROWS, LENGTH, generator=generator) < 0.6
    sampled[1] = False  # a row without sampled tokens
    return ids, sampled


def measured(model, probe, ids, sampled, slices=(slice(None),)):
    with probe.watch(ids[:, -LENGTH:], sampled), torch.no_grad():
        for rows in slices:
            model.base_model(input_ids=ids[rows])
    assert probe.has_result
    return probe.result()


def from_logits(model, ids, *, temperature=1.0, margin="lse", num_competitors=3, top_m=32):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, -LENGTH - 1 : -1].double() / temperature
    margins = token_margin(logits, ids[:, -LENGTH:], num_competitors=num_competitors, margin=margin)
    return margins, topk_entropy(logits, top_m=top_m)


def assert_equal_where_sampled(found, expected, sampled):
    for mine, other in zip(found, expected, strict=True):
        assert torch.allclose(mine[sampled], other[sampled].float(), atol=2e-5, rtol=1e-5)
        assert not mine[~sampled].any()


@pytest.mark.parametrize("tiles", [(2048, 32768), (7, 100), (1, 33), (4, 31)])
def test_margins_and_entropies_equal_those_of_whole_logits(tiles):
    model = tiny_model().eval()
    ids, sampled = random_batch(model.config.vocab_size)
    probe = SalienceProbe(model, temperature=1.0, token_tile=tiles[0], vocabulary_tile=tiles[1])
    assert_equal_where_sampled(measured(model, probe, ids, sampled), from_logits(model, ids), sampled)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"margin": "mean", "num_competitors": 5},
        {"margin": "max"},
        {"top_m": 7, "num_competitors": 1},
    ],
)
def test_its_options_are_those_of_the_statistics(options):
    model = tiny_model().eval()
    ids, sampled = random_batch(model.config.vocab_size)
    probe = SalienceProbe(model, **{"temperature": 1.0, **options}, vocabulary_tile=50)
    assert_equal_where_sampled(measured(model, probe, ids, sampled), from_logits(model, ids, **options), sampled)


def test_the_bias_of_a_head_counts():
    model = tiny_model(tie_word_embeddings=False).eval()
    head = torch.nn.Linear(64, model.config.vocab_size)
    torch.nn.init.normal_(head.bias)
    model.lm_head = head
    ids, sampled = random_batch(model.config.vocab_size)
    probe = SalienceProbe(model, temperature=1.0, vocabulary_tile=60)
    assert_equal_where_sampled(measured(model, probe, ids, sampled), from_logits(model, ids), sampled)


def test_a_batch_may_come_in_slices_of_rows():
    model = tiny_model().eval()
    ids, sampled = random_batch(model.config.vocab_size)
    probe = SalienceProbe(model, temperature=1.0)
    found = measured(model, probe, ids, sampled, slices=(slice(0, 2), slice(2, 3)))
    assert_equal_where_sampled(found, from_logits(model, ids), sampled)


def test_it_knows_whether_it_saw_the_whole_batch_and_leaves_no_hook():
    model = tiny_model().eval()
    ids, sampled = random_batch(model.config.vocab_size)
    probe = SalienceProbe(model, temperature=1.0)
    assert not probe.has_result
    with probe.watch(ids[:, -LENGTH:], sampled), torch.no_grad():
        model.base_model(input_ids=ids[:2])
    assert not probe.has_result
    assert not model.base_model._forward_hooks


def test_a_low_rank_adapter_is_part_of_the_policy():
    peft = pytest.importorskip("peft", reason="needs the optional package peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    ids, sampled = random_batch(model.config.vocab_size)
    found = measured(model.get_base_model(), SalienceProbe(model, temperature=1.0), ids, sampled)
    assert_equal_where_sampled(found, from_logits(model, ids), sampled)
    with model.disable_adapter():
        assert not torch.allclose(found[0][sampled], from_logits(model, ids)[0][sampled].float(), atol=1e-3)


@pytest.mark.parametrize("name", ["final_logit_softcapping", "logit_scale", "logits_scaling"])
def test_models_that_transform_their_logits_are_refused(name):
    model = tiny_model()
    setattr(model.config, name, 30.0)
    with pytest.raises(
        ConfigurationError, match=rf"`model` must not transform its logits after the head: got `{name}`"
    ):
        SalienceProbe(model, temperature=1.0)


# --- inside the trainer


def batch_and_statistics(folder, **options):
    trainer = make_trainer(GCATrainer, folder, plan=plan_of("A_late", "B", "C", "D_search"), **options)
    probes = []
    make_probe = trainer.make_probe
    trainer.make_probe = lambda: probes.append(make_probe()) or probes[-1]
    passes = []
    handle = trainer.model.base_model.register_forward_hook(lambda *_: passes.append(1))
    output = generation_batch(trainer, *COUNTRIES)
    handle.remove()
    return trainer, output, probes[0].result(), len(passes)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"steps_per_generation": 2}, id="TRL's own pass"),
        pytest.param({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, id="a pass of ours"),
        pytest.param(
            {"steps_per_generation": 2, "gradient_accumulation_steps": 2, "gradient_checkpointing": True},
            id="gradient checkpointing",
        ),
        pytest.param({"temperature": 0.7}, id="temperature"),
    ],
)
def test_the_trainer_measures_the_policy_that_sampled_in_one_pass(tmp_path, options):
    trainer, output, (margins, entropies), passes = batch_and_statistics(tmp_path, **options)
    sampled = (output["completion_mask"] * (output["turn_ids"] >= 0)).bool()
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    length = output["completion_ids"].size(1)
    trainer.model.eval()
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    logits = logits.double() / options.get("temperature", 1.0)
    assert torch.allclose(margins[sampled], token_margin(logits, output["completion_ids"])[sampled].float(), atol=5e-5)
    assert torch.allclose(entropies[sampled], topk_entropy(logits)[sampled].float(), atol=1e-5)
    # Eight rows in micro-batches of four: one pass over the batch, and never a second one.
    assert passes == 2
    assert ("old_per_token_logps" in output) == ("gradient_accumulation_steps" not in options)


def test_measuring_leaves_the_mode_of_the_policy(tmp_path):
    trainer, _, _, _ = batch_and_statistics(tmp_path, steps_per_generation=2, gradient_accumulation_steps=2)
    assert trainer.model.training is True
