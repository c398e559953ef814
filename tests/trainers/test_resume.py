"""A run resumed from a checkpoint equals one that was never interrupted."""

from __future__ import annotations

import torch

from grounded_rl.rollouts import load_rollouts
from grounded_rl.rollouts.io import rollout_to_record
from grounded_rl.trainers import GCATrainer
from tests.trainers.runs import losses, make_trainer


def diversity(completion_ids, **_):
    """Differs between sampled completions, which a random model never gets right."""
    return [len(set(ids)) / 10 for ids in completion_ids]


def sampling_trainer(folder, **options):
    trainer = make_trainer(
        GCATrainer,
        folder,
        trainer_options={"reward_funcs": diversity},
        rollout_max_turn_tokens=6,
        rollout_log_groups=-1,
        save_strategy="steps",
        save_steps=2,
        **options,
    )
    del trainer._generate_single_turn  # sample for real, so that random states matter
    return trainer


def records(folder):
    return [rollout_to_record(rollout) for rollout in load_rollouts(folder / "rollouts.jsonl")]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    whole = sampling_trainer(tmp_path / "whole", max_steps=6)
    whole.train()
    # The first attempt gets further than its last checkpoint of interest: steps 2 and 3 are trained twice.
    sampling_trainer(tmp_path / "parts", max_steps=4).train()
    resumed = sampling_trainer(tmp_path / "parts", max_steps=6)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    for (name, mine), other in zip(resumed.model.named_parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other), name
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert [record["extras"]["step"] for record in records(tmp_path / "parts")] == [0] * 8 + [2] * 8 + [4] * 8
