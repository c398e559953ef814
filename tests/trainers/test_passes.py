"""Passes over rows of like length give what one padded pass gives, with less padding."""

from __future__ import annotations

import pytest
import torch

from grounded_rl.trainers import GCATrainer, SearchAgentTrainer
from grounded_rl.trainers.passes import passes_of_like_length
from tests.sampling.world import plan_of
from tests.trainers.runs import generation_batch, make_trainer

PROMPTS = [2, 5, 1, 3, 4]
COMPLETIONS = [7, 1, 0, 4, 9]


@pytest.fixture
def batch():
    left, right = max(PROMPTS), max(COMPLETIONS)
    columns = torch.arange(left + right)
    prompts, completions = torch.tensor(PROMPTS).unsqueeze(1), torch.tensor(COMPLETIONS).unsqueeze(1)
    mask = (columns >= left - prompts) & (columns < left + completions)
    ids = torch.randint(1, 50, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    return ids, mask.long(), right


class Recorder:
    """A forward pass whose values say which token of which row they belong to."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.scale = torch.ones(ids.size(0), requires_grad=True)
        self.shapes: list[tuple[int, int]] = []
        self.rows: list[int] = []

    def __call__(self, ids, mask, length, rows):
        self.shapes.append(tuple(ids.shape))
        self.rows += rows.tolist()
        values = (ids * mask)[:, -length:] * self.scale[rows].unsqueeze(1)
        return values, 2 * values, values.new_tensor(float(len(self.shapes)))


@pytest.mark.parametrize("rows_per_pass", [1, 2, 3, 5, 9])
def test_values_land_at_their_own_tokens_for_every_size_of_pass(batch, rows_per_pass):
    ids, mask, length = batch
    forward = Recorder(ids)
    first, second, mean = passes_of_like_length(forward, ids, mask, length, rows_per_pass=rows_per_pass)
    expected = (ids * mask)[:, -length:].float()
    assert torch.equal(first, expected)
    assert torch.equal(second, 2 * expected)
    count = -(-len(ids) // rows_per_pass)
    assert mean.item() == (count + 1) / 2
    assert sorted(forward.rows) == list(range(len(ids)))
    first.sum().backward()
    assert torch.equal(forward.scale.grad, expected.sum(dim=1))


def test_a_pass_is_as_long_as_its_longest_prompt_and_completion(batch):
    ids, mask, length = batch
    forward = Recorder(ids)
    passes_of_like_length(forward, ids, mask, length, rows_per_pass=2)
    # Lengths 1, 6 | 7, 9 | 13: prompts of 1 and 5, of 3 and 2, of 4; completions of 0 and 1, of 4 and 7, of 9.
    assert forward.shapes == [(2, 6), (2, 10), (1, 13)]


def test_values_that_a_pass_does_not_return_stay_absent(batch):
    ids, mask, length = batch
    _, second, mean = passes_of_like_length(
        lambda ids, mask, length, rows: (ids[:, -length:], None, None), ids, mask, length, rows_per_pass=2
    )
    assert second is None
    assert mean is None


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("trainer_class", [SearchAgentTrainer, GCATrainer])
def test_loss_gradient_and_salience_do_not_depend_on_the_size_of_a_pass(tmp_path, trainer_class, rows):
    found = []
    for number, forward_rows in enumerate((None, rows)):
        trainer = make_trainer(
            trainer_class,
            tmp_path / str(number),
            plan=plan_of("A_late", "B", "C", "D_search"),
            forward_rows=forward_rows,
        )
        inputs = generation_batch(trainer, "Peru", "Chile")
        trainer.current_gradient_accumulation_steps = 1
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in trainer.model.parameters()])
        found.append((inputs, loss.detach(), gradient))
    (padded, padded_loss, padded_gradient), (short, short_loss, short_gradient) = found
    assert torch.equal(padded["completion_ids"], short["completion_ids"])
    torch.testing.assert_close(short["advantages"], padded["advantages"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(short_loss, padded_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(short_gradient, padded_gradient, rtol=1e-3, atol=1e-6)
    assert bool((padded_gradient != 0).any())
