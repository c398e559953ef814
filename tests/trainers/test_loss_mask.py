"""What the loss may depend on: sampled tokens, and nothing else."""

from __future__ import annotations

import pytest
import torch
from trl import GRPOTrainer

from grounded_rl.trainers import GCATrainer, SearchAgentTrainer
from tests.sampling.world import plan_of
from tests.trainers.runs import generation_batch, make_trainer

TRAINERS = [
    pytest.param(SearchAgentTrainer, {}, id="grpo"),
    pytest.param(SearchAgentTrainer, {"importance_sampling_level": "sequence_token"}, id="gspo_token"),
    pytest.param(SearchAgentTrainer, {"importance_sampling_level": "turn"}, id="turn"),
    pytest.param(GCATrainer, {}, id="gca"),
    pytest.param(GCATrainer, {"importance_sampling_level": "sequence_token", "loss_type": "grpo"}, id="gca_gspo"),
]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Trainer, inputs, and a way to add something to the log-probabilities the loss is computed from."""

    def build(trainer_class, options):
        trainer = make_trainer(trainer_class, tmp_path, plan=plan_of("A_late", "B", "C", "D_search"), **options)
        inputs = generation_batch(trainer, "Peru", "Chile")
        trainer.current_gradient_accumulation_steps = 1
        original = GRPOTrainer._get_per_token_logps_and_entropies

        def loss_with(extra):
            def shifted(self, *args, **kwargs):
                logps, *rest = original(self, *args, **kwargs)
                return (logps + extra, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", shifted)
                return trainer.compute_loss(trainer.model, inputs)

        return trainer, inputs, loss_with

    return build


@pytest.mark.parametrize(("trainer_class", "options"), TRAINERS)
def test_log_probs_of_observations_and_padding_change_nothing(prepared, trainer_class, options):
    _, inputs, loss_with = prepared(trainer_class, options)
    sampled = inputs["turn_ids"] >= 0
    noise = torch.randn(sampled.shape, generator=torch.Generator().manual_seed(0))
    plain = loss_with(torch.zeros(sampled.shape))
    assert torch.equal(loss_with(torch.where(sampled, 0.0, 3.0 * noise)), plain)
    assert not torch.equal(loss_with(torch.where(sampled, 0.01 * noise, 0.0)), plain)


@pytest.mark.parametrize(("trainer_class", "options"), TRAINERS)
def test_exactly_the_sampled_tokens_receive_gradient(prepared, trainer_class, options):
    _, inputs, loss_with = prepared(trainer_class, options)
    extra = torch.zeros(inputs["turn_ids"].shape, requires_grad=True)
    loss_with(extra).backward()
    sampled = inputs["turn_ids"] >= 0
    # Rewards differ within both groups, so every advantage is non-zero; nothing is clipped at the old policy.
    assert bool((inputs["advantages"][sampled] != 0).all())
    assert torch.equal(extra.grad != 0, sampled)
    # Ascent on the objective raises a token exactly when its advantage is positive.
    assert torch.equal(extra.grad[sampled].sign(), -inputs["advantages"][sampled].sign())


def test_every_sampled_token_is_trained_end_of_turn_included(prepared):
    trainer, inputs, _ = prepared(SearchAgentTrainer, {})
    mask = inputs["completion_mask"] * inputs["tool_mask"]
    ends = (inputs["completion_ids"] == trainer.eos_token_ids[0]) & (inputs["turn_ids"] >= 0)
    assert bool(mask[ends].all())
    # One end per turn: 4 + 3 + 2 + 2 in each of the two groups.
    assert int(ends.sum()) == 22
    assert torch.equal(mask.bool(), inputs["turn_ids"] >= 0)
