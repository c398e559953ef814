"""Searches that fail: what the run loses, and when it stops."""

from __future__ import annotations

import pytest
import torch

from grounded_rl.credit import group_advantages
from grounded_rl.errors import RetrievalError
from grounded_rl.rollouts import StopReason
from grounded_rl.trainers import GCATrainer, SearchAgentTrainer
from tests.sampling.world import SCRIPTS, UNKNOWN_COUNTRY, TinyRetriever, call, plan_of
from tests.trainers.runs import generation_batch, losses, make_trainer, rows

BROKEN = "broken query"
TRAINERS = [SearchAgentTrainer, GCATrainer]


def plan(country, sample):
    """The third rollout of every group needs the query that fails."""
    return [call(BROKEN)] if sample == 2 else SCRIPTS[("A_late", "C", "", "D_search")[sample]](country)


def failing_trainer(trainer_class, folder, **options):
    return make_trainer(
        trainer_class,
        folder,
        plan=plan,
        retriever=TinyRetriever(failing=[BROKEN]),
        **{"retrieval_on_failure": "mask", "rollout_max_failed_share": 0.3, "rollout_log_groups": -1, **options},
    )


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_a_failed_rollout_leaves_statistics_and_loss(tmp_path, trainer_class):
    trainer = failing_trainer(trainer_class, tmp_path)
    output = generation_batch(trainer, "Peru", "Chile")
    mask = output["completion_mask"] * output["tool_mask"]
    assert mask.any(dim=1).tolist() == [True, True, False, True] * 2
    assert int(output["num_items_in_batch"]) == int(mask.sum())
    # Rewards 1, 0, none, 1: statistics of three rollouts.
    scored = group_advantages(torch.tensor([1.0, 0.0, 1.0]))
    plain = [float(value) for value in (scored[0], scored[1], torch.tensor(0.0), scored[2])]
    # The end of a turn carries no residual, whatever the method.
    ends = [row[turns >= 0][-1] for row, turns in zip(output["advantages"], output["turn_ids"], strict=True)]
    assert [float(value) for value in ends] == pytest.approx(plain * 2, rel=1e-6)
    assert trainer._metrics["train"]["rollout/failed"] == [2.0]
    assert trainer._metrics["train"]["reward"] == [pytest.approx(2 / 3)]


@pytest.mark.parametrize("trainer_class", TRAINERS)
def test_a_run_with_failed_rollouts_goes_on_and_stays_finite(tmp_path, trainer_class):
    trainer = failing_trainer(trainer_class, tmp_path)
    trainer.train()
    assert trainer.state.global_step == 2
    assert all(torch.isfinite(torch.tensor(losses(trainer))))
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.model.parameters())


def test_a_failed_rollout_has_no_reward_rather_than_zero(tmp_path):
    trainer = failing_trainer(SearchAgentTrainer, tmp_path)
    kept = []
    finish = trainer.finish_batch
    trainer.finish_batch = lambda batch: kept.append(batch) or finish(batch)
    generation_batch(trainer, "Peru", "Chile")
    (batch,) = kept
    assert batch.rewards.isnan().tolist() == [False, False, True, False] * 2
    assert batch.valid.tolist() == [True, True, False, True] * 2
    failed = batch.rollouts[2]
    assert failed.stop is StopReason.FAILED
    assert failed.rewards == {"search_reward": None}
    assert batch.rollouts[0].rewards == {"search_reward": 1.0}


def test_a_group_of_failures_contributes_nothing(tmp_path):
    trainer = failing_trainer(GCATrainer, tmp_path, rollout_max_failed_share=0.5)
    trainer._generate_single_turn._plan = lambda country, sample: (
        [call(BROKEN)] if country == "Peru" else SCRIPTS["AC"[sample % 2]](country)
    )
    output = generation_batch(trainer, "Peru", "Chile")
    assert not (output["completion_mask"] * output["tool_mask"])[:4].any()
    assert not output["advantages"][:4].any()
    assert output["advantages"][4:].any()
    trainer.current_gradient_accumulation_steps = 1
    assert torch.isfinite(trainer.compute_loss(trainer.model, output))


def test_a_batch_without_any_loss_token_trains_nothing(tmp_path):
    trainer = failing_trainer(GCATrainer, tmp_path, rollout_max_failed_share=1.0)
    trainer._generate_single_turn._plan = lambda country, sample: [call(BROKEN)]
    output = generation_batch(trainer, "Peru", "Chile")
    assert int(output["num_items_in_batch"]) == 1
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, output).backward()
    assert not any(parameter.grad.any() for parameter in trainer.model.parameters())


def test_above_the_allowed_share_the_run_stops(tmp_path):
    trainer = failing_trainer(SearchAgentTrainer, tmp_path, rollout_max_failed_share=0.2)
    with pytest.raises(
        RetrievalError, match=r"got 2 failed of 8 rollouts where 0\.2 is allowed; the first: no connect"
    ):
        trainer.train()


def test_at_the_allowed_share_it_does_not(tmp_path):
    trainer = failing_trainer(SearchAgentTrainer, tmp_path, rollout_max_failed_share=0.25)
    generation_batch(trainer, "Peru", "Chile")
    assert trainer._metrics["train"]["rollout/failed"] == [2.0]


def test_by_default_the_first_failed_search_stops_the_run(tmp_path):
    trainer = failing_trainer(SearchAgentTrainer, tmp_path, retrieval_on_failure="abort_step")
    with pytest.raises(RetrievalError, match="no connection for 'broken query'"):
        trainer.train()


def test_a_failed_oracle_query_masks_the_answers_it_was_about(tmp_path):
    broken = TinyRetriever(failing=["What is the capital of Peru?"])
    options = {"plan": plan_of("D", "C_short", "D", "C_short"), "retriever": broken}
    trainer = make_trainer(GCATrainer, tmp_path / "mask", retrieval_on_failure="mask", **options)
    output = generation_batch(trainer, "Peru", "Chile")
    in_loss = (output["completion_mask"] * output["tool_mask"]).any(dim=1).tolist()
    assert in_loss == [False, True, False, True, True, True, True, True]
    # A failure is not remembered as an answer.
    broken.failing.clear()
    output = generation_batch(trainer, "Peru", "Chile")
    assert (output["completion_mask"] * output["tool_mask"]).any(dim=1).all()
    broken.failing.add("What is the capital of Peru?")
    trainer = make_trainer(GCATrainer, tmp_path / "raise", **options)
    with pytest.raises(RetrievalError, match="no connection"):
        generation_batch(trainer, "Peru", "Chile")


def test_a_question_the_corpus_lacks_is_no_failure(tmp_path):
    trainer = make_trainer(
        GCATrainer, tmp_path, plan=plan_of("C", "D", "C", "C_short"), dataset=rows(UNKNOWN_COUNTRY, "Peru")
    )
    generation_batch(trainer, UNKNOWN_COUNTRY, "Peru")
    assert trainer._metrics["train"]["rollout/failed"] == [0.0]
