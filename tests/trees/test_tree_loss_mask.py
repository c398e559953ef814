"""What the loss of a tree may depend on: sampled tokens, and nothing else."""

from __future__ import annotations

import pytest
import torch
from trl import GRPOTrainer

from tests.sampling.world import CAPITALS
from tests.trainers.runs import generation_batch
from tests.trees.tree_runs import make_tree_trainer

METHODS = ["at2po", "sipo", "gca_sipo"]


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Inputs of a method's trainer, and its loss with something added to the log-probabilities."""

    def build(method):
        trainer = make_tree_trainer(method, tmp_path)
        inputs = generation_batch(trainer, *list(CAPITALS)[:2])
        trainer.current_gradient_accumulation_steps = 1
        original = GRPOTrainer._get_per_token_logps_and_entropies

        def loss_with(extra):
            def shifted(self, *args, **kwargs):
                logps, *rest = original(self, *args, **kwargs)
                return (logps + extra, *rest)

            with monkeypatch.context() as patch:
                patch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", shifted)
                return trainer.compute_loss(trainer.model, inputs)

        return inputs, loss_with

    return build


@pytest.mark.parametrize("method", METHODS)
def test_log_probs_of_observations_and_padding_change_nothing(prepared, method):
    inputs, loss_with = prepared(method)
    sampled = inputs["turn_ids"] >= 0
    noise = torch.randn(sampled.shape, generator=torch.Generator().manual_seed(0))
    plain = loss_with(torch.zeros(sampled.shape))
    assert not bool(sampled.all())
    assert torch.equal(loss_with(torch.where(sampled, 0.0, 3.0 * noise)), plain)
    assert not torch.equal(loss_with(torch.where(sampled, 0.001 * noise, 0.0)), plain)


@pytest.mark.parametrize("method", METHODS)
def test_exactly_the_sampled_tokens_with_an_advantage_receive_gradient(prepared, method):
    inputs, loss_with = prepared(method)
    extra = torch.zeros(inputs["turn_ids"].shape, requires_grad=True)
    loss_with(extra).backward()
    advantages = inputs["advantages"] * (inputs["turn_ids"] >= 0)
    assert bool((advantages != 0).any())
    # The turn ratio shares its gradient evenly among the tokens of a turn, whose advantages are equal in sign.
    assert torch.equal(extra.grad.sign(), -advantages.sign())
