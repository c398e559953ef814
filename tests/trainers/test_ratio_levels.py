"""The loss at every ratio level against one written by hand."""

from __future__ import annotations

import pytest
import torch

from grounded_rl.errors import ConfigurationError
from grounded_rl.trainers import GCAConfig, GCATrainer, GSPOTokenConfig, SearchAgentTrainer
from tests.sampling.world import plan_of
from tests.trainers.runs import TOKENIZER, agent_options, generation_batch, make_trainer, tiny_model

COUNTRIES = ("Peru", "Chile")
PLAN = plan_of("A_late", "B", "C", "D_search")
CLIP = 0.2
KL_WEIGHT = 0.1


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A model on disk, from which TRL can load its reference model."""
    path = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


@pytest.fixture
def prepare(tmp_path, saved_model):
    """A trainer whose policy has moved since it generated, and the inputs of a loss with random token advantages."""

    def build(level, **options):
        trainer = make_trainer(
            SearchAgentTrainer,
            tmp_path,
            plan=PLAN,
            model=saved_model,
            importance_sampling_level=level,
            model_init_kwargs={"dtype": "float32"},
            **options,
        )
        inputs = generation_batch(trainer, *COUNTRIES)
        generator = torch.Generator().manual_seed(4)
        inputs["advantages"] = torch.randn(inputs["advantages"].shape, generator=generator)
        with torch.no_grad():
            for parameter in trainer.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        trainer.current_gradient_accumulation_steps = 1
        return trainer, inputs

    return build


def full_logps(model, inputs):
    """Log-probabilities of the completion tokens from whole logits, without TRL's fused head."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    length = inputs["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"].unsqueeze(-1)).squeeze(-1)


def shared_log_ratio(log_ratio, inputs, mask, level):
    """Mean log-ratio of the turn or rollout of every token, in plain loops."""
    shared = torch.zeros_like(log_ratio)
    for row in range(len(log_ratio)):
        groups = {}
        for position in range(log_ratio.size(1)):
            if mask[row, position]:
                key = int(inputs["turn_ids"][row, position]) if level == "turn" else 0
                groups.setdefault(key, []).append(position)
        for positions in groups.values():
            shared[row, positions] = log_ratio[row, positions].mean()
    return shared


def loss_by_hand(trainer, inputs, level, *, loss_type="dapo", beta=0.0, off_policy_threshold=None):
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    logps = full_logps(trainer.model, inputs)
    log_ratio = logps - inputs["old_per_token_logps"]
    if level != "token":
        own = log_ratio.detach()
        log_ratio = log_ratio - own + shared_log_ratio(own, inputs, mask, level)
    ratio = log_ratio.exp()
    advantages = inputs["advantages"]
    token_loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    if off_policy_threshold is not None:
        gap = torch.where(mask, inputs["old_per_token_logps"] - logps.detach(), 0.0).sum(1) / mask.sum(1)
        token_loss = token_loss * ((advantages >= 0) | (gap <= off_policy_threshold).unsqueeze(1))
    if beta:
        with torch.no_grad():
            reference = full_logps(trainer.ref_model, inputs)
        divergence = (reference - logps).exp() - (reference - logps) - 1
        token_loss = token_loss + beta * divergence * ratio
    token_loss = torch.where(mask, token_loss, 0.0)
    if loss_type == "grpo":
        return (token_loss.sum(1) / mask.sum(1)).mean()
    # One of the two micro-batches of a generation batch: TRL scales the normaliser to an accumulation window.
    return token_loss.sum() / (mask.sum() / trainer.args.steps_per_generation)


def gradients(trainer, loss):
    trainer.model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize("level", ["token", "turn", "sequence_token"])
@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        pytest.param({}, {}, id="dapo"),
        pytest.param({"loss_type": "grpo"}, {"loss_type": "grpo"}, id="grpo"),
        pytest.param({"beta": KL_WEIGHT}, {"beta": KL_WEIGHT}, id="kl"),
        pytest.param({"off_policy_mask_threshold": 0.05}, {"off_policy_threshold": 0.05}, id="off-policy mask"),
    ],
)
def test_the_loss_equals_one_written_by_hand(prepare, level, options, by_hand):
    trainer, inputs = prepare(level, **options)
    kept = {key: value.clone() for key, value in inputs.items()}
    loss = trainer.compute_loss(trainer.model, inputs)
    # The buffered batch serves later updates too.
    assert inputs.keys() == kept.keys()
    assert all(torch.equal(inputs[key], kept[key]) for key in kept)
    expected = loss_by_hand(trainer, inputs, level, **by_hand)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6, rel=1e-6)
    mine, other = gradients(trainer, loss), gradients(trainer, expected)
    assert float((mine - other).abs().max()) < 1e-5 * float(other.abs().max())


def test_the_levels_differ_and_some_ratios_are_clipped(prepare):
    values = {}
    for level in ("token", "turn", "sequence_token"):
        trainer, inputs = prepare(level)
        values[level] = trainer.compute_loss(trainer.model, inputs).item()
        if level == "token":
            mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
            with torch.no_grad():
                ratio = (full_logps(trainer.model, inputs) - inputs["old_per_token_logps"]).exp()[mask]
            assert bool((ratio > 1 + CLIP).any())
            assert bool((ratio < 1 - CLIP).any())
    assert len({round(value, 4) for value in values.values()}) == 3


def test_sequence_token_equals_trls_sequence_level_for_one_advantage_per_rollout(prepare):
    results = []
    for level in ("sequence", "sequence_token"):
        trainer, inputs = prepare(level, loss_type="grpo")
        inputs["advantages"] = inputs["advantages"][:, :1].expand(inputs["advantages"].shape).clone()
        loss = trainer.compute_loss(trainer.model, inputs)
        results.append((loss.item(), gradients(trainer, loss)))
    (first, mine), (second, other) = results
    assert first == pytest.approx(second, abs=1e-6)
    assert float((mine - other).abs().max()) < 1e-5 * float(other.abs().max())


def test_the_turn_level_without_an_old_policy_pass_is_on_policy(tmp_path):
    trainer = make_trainer(
        SearchAgentTrainer,
        tmp_path,
        plan=PLAN,
        importance_sampling_level="turn",
        steps_per_generation=1,
        per_device_train_batch_size=8,
    )
    inputs = generation_batch(trainer, *COUNTRIES)
    assert "old_per_token_logps" not in inputs
    trainer.current_gradient_accumulation_steps = 1
    mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()
    loss = trainer.compute_loss(trainer.model, inputs)
    # All ratios are one, so the loss is minus the mean advantage.
    assert loss.item() == pytest.approx(-float(inputs["advantages"][mask].mean()), abs=1e-6)


def test_the_sequence_level_is_refused_where_advantages_differ_within_a_rollout(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`importance_sampling_level` must be another level than 'sequence'"):
        GCAConfig(**agent_options(tmp_path, importance_sampling_level="sequence"))


def test_gspo_token_is_a_level_and_a_clip_range(tmp_path):
    config = GSPOTokenConfig(**agent_options(tmp_path))
    assert (config.importance_sampling_level, config.epsilon, config.epsilon_high) == ("sequence_token", 3e-3, 4e-3)
    trainer = make_trainer(
        GCATrainer, tmp_path, plan=PLAN, importance_sampling_level="sequence_token", epsilon=3e-3, epsilon_high=4e-3
    )
    trainer.train()
    assert trainer.state.global_step == 2
