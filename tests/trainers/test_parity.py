"""Our rollout loop against TRL's own tool loop on the same scripted generations."""

from __future__ import annotations

import pytest
import torch
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from grounded_rl.environments.tools import SEARCH_TOOL
from grounded_rl.environments.tools import search as announced
from grounded_rl.trainers import SearchAgentTrainer
from tests.sampling.world import Player, call, plan_of
from tests.trainers.runs import base_options, losses, make_trainer, tiny_model, trained_tokenizer

PLAN = plan_of("A_late", "B", "C", "none")
MAX_TURNS = 4
ROW_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "old_per_token_logps")


def length_reward(completion_ids, **_):
    """Depends on nothing but the ids, so that both sides must agree on them to agree on it."""
    return [len(ids) % 7 / 7 for ids in completion_ids]


def trl_trainer(folder, dataset, observations, plan=PLAN, **options):
    """TRL's trainer with a tool that returns the given observations, in the order in which TRL calls it."""
    texts = iter(observations)

    def search(query: str) -> str:
        return next(texts)

    search.__doc__ = announced.__doc__
    assert get_json_schema(search) == SEARCH_TOOL
    # TRL knows chat templates by their bytes; it replaces this one by the training form the other side uses.
    tokenizer = trained_tokenizer("qwen3")
    trainer = GRPOTrainer(
        tiny_model(),
        reward_funcs=length_reward,
        args=GRPOConfig(**base_options(folder, max_tool_calling_iterations=MAX_TURNS - 1, **options)),
        train_dataset=dataset,
        processing_class=tokenizer,
        tools=[search],
    )
    trainer._generate_single_turn = Player(tokenizer, plan)
    return trainer


def our_trainer(folder, plan=PLAN, **options):
    kept = []
    trainer = make_trainer(
        SearchAgentTrainer,
        folder,
        plan=plan,
        trainer_options={"reward_funcs": length_reward},
        rollout_max_turns=MAX_TURNS,
        # TRL's own constant; ours is smaller.
        credit_epsilon=1e-4,
        **options,
    )
    sample = trainer.sample
    trainer.sample = lambda rows: kept.append(sample(rows)) or kept[-1]
    return trainer, kept


def observations_of(batches):
    """Texts of the observations in the order of TRL's loop: round by round, in each through the rollouts."""
    for rollouts in batches:
        for number in range(MAX_TURNS):
            for rollout in rollouts:
                if number < len(rollout.turns) and rollout.turns[number].observation_ids:
                    yield rollout.turns[number].observation


def first_batch(trainer):
    trainer.model.train()
    dataset = trainer.train_dataset
    return trainer._generate_and_score_completions([dict(dataset[row]) for row in (3, 3, 3, 3, 7, 7, 7, 7)])


def test_rows_masks_and_old_log_probs_equal_those_of_the_tool_loop(tmp_path):
    ours, kept = our_trainer(tmp_path / "ours")
    mine = first_batch(ours)
    theirs_trainer = trl_trainer(tmp_path / "trl", ours.train_dataset, observations_of(kept))
    theirs = first_batch(theirs_trainer)
    # The script runs through several turns, and one rollout ends on a call at the turn limit.
    assert {len(rollout.turns) for rollout in kept[0]} == {1, 2, 3, 4}
    for key in ROW_KEYS:
        assert torch.equal(mine[key], theirs[key]), key
    assert int(mine["num_items_in_batch"]) == int(theirs["num_items_in_batch"])
    assert torch.allclose(mine["advantages"], theirs["advantages"].unsqueeze(1).expand(mine["advantages"].shape))
    assert ours._generate_single_turn.contexts == theirs_trainer._generate_single_turn.contexts
    for name in (
        "completions/mean_length",
        "completions/clipped_ratio",
        "num_tokens",
        "reward",
        "tools/call_frequency",
    ):
        assert ours._metrics["train"][name] == theirs_trainer._metrics["train"][name], name


def test_a_call_at_the_turn_limit_leaves_the_same_row(tmp_path):
    def endless(country, sample):
        return [call(f"capital of {country}"), call("Oslo"), call("Lima"), call("Rome")][: MAX_TURNS - sample % 2 * 2]

    plan = lambda country, sample: [*endless(country, sample), *(["I stop."] if sample % 2 else [])]  # noqa: E731
    ours, kept = our_trainer(tmp_path / "ours", plan=plan)
    mine = first_batch(ours)
    theirs = first_batch(trl_trainer(tmp_path / "trl", ours.train_dataset, observations_of(kept), plan=plan))
    assert {rollout.stop.value for rollout in kept[0]} == {"turn_limit", "answer"}
    for key in ROW_KEYS:
        assert torch.equal(mine[key], theirs[key]), key


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_training_takes_the_same_steps_as_trl(tmp_path, loss_type):
    options = {"loss_type": loss_type, "max_steps": 4}
    ours, kept = our_trainer(tmp_path / "ours", **options)
    ours.train()
    theirs = trl_trainer(tmp_path / "trl", ours.train_dataset, observations_of(kept), **options)
    theirs.train()
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5, abs=1e-6)
    assert len(losses(ours)) == 4
    start = dict(tiny_model().named_parameters())
    for (name, mine), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        # Both moved by about the learning rate per step (Adam); they may differ by rounding only.
        assert torch.allclose(mine, other, atol=2e-6, rtol=1e-4), name
        assert not torch.equal(mine, start[name]), name
