"""AT²PO, SIPO and GCA on trees as trainers: rows, credit, the slope and its checkpoints, and what they reduce to."""

from __future__ import annotations

import pytest
import torch

from grounded_rl.credit import SlopeSums, group_advantages
from grounded_rl.rollouts import load_rollouts, load_trees
from grounded_rl.trainers import SearchAgentTrainer
from tests.sampling.world import CAPITALS
from tests.trainers.runs import generation_batch
from tests.trees import tree_runs
from tests.trees.tree_runs import TextPolicy, make_tree_trainer

COUNTRIES = list(CAPITALS)[:2]


def batch_of(trainer):
    """Buffered dictionary of one generation batch, and the trees it was made of."""
    kept = []
    finish = trainer.finish_batch

    def keep(batch):
        kept.append((batch, list(trainer._trees)))
        finish(batch)

    trainer.finish_batch = keep
    output = generation_batch(trainer, *COUNTRIES)
    (batch, trees) = kept[0]
    return output, batch, trees


def weights(trainer):
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def shared_tokens(trees):
    """Row and column of every copy of every shared token, by tree, node and position in the turn."""
    copies = {}
    first = 0
    for tree in trees:
        for leaf in range(len(tree.leaves)):
            column = 0
            for node in tree.leaf_path(leaf):
                turn = tree.nodes[node].turn
                for place in range(len(turn.ids)):
                    copies.setdefault((tree.number, node, place), []).append((first + leaf, column + place))
                column += len(turn.ids) + len(turn.observation_ids)
        first += len(tree.leaves)
    return copies


def test_rows_are_leaves_and_a_shared_token_has_one_advantage(tmp_path):
    output, _, trees = batch_of(make_tree_trainer("sipo", tmp_path))
    assert [len(tree.leaves) for tree in trees] == [8, 8]
    lengths = output["completion_mask"].sum(dim=1).tolist()
    rollouts = [rollout for tree in trees for rollout in tree.rollouts()]
    for row, rollout in enumerate(rollouts):
        assert output["completion_ids"][row, : lengths[row]].tolist() == rollout.completion_ids
        assert output["tool_mask"][row, : lengths[row]].tolist() == rollout.sampled_mask
    advantages = output["advantages"]
    assert advantages.shape == output["completion_ids"].shape
    assert (advantages[output["completion_mask"] * output["tool_mask"] == 0] == 0).all()
    copies = shared_tokens(trees)
    assert max(len(places) for places in copies.values()) > 1
    for (number, node, _), places in copies.items():
        values = {advantages[place].item() for place in places}
        assert len(values) == 1
        assert values.pop() == pytest.approx(trees[number].nodes[node].advantage, abs=2e-6)


def test_the_rollout_file_holds_the_trees_with_their_credit(tmp_path):
    trainer = make_tree_trainer("sipo", tmp_path)
    _, batch, trees = batch_of(trainer)
    assert load_trees(tmp_path / "rollouts.jsonl") == trees
    rollouts = load_rollouts(tmp_path / "rollouts.jsonl")
    assert [rollout.rewards for rollout in rollouts] == [rollout.rewards for rollout in batch.rollouts]
    for tree in trees:
        values = torch.tensor([leaf.value for leaf in tree.leaves])
        rewards = torch.tensor([next(iter(leaf.rewards.values())) for leaf in tree.leaves])
        expected = group_advantages(rewards, torch.zeros(8).long(), ddof=0)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)
        assert tree.extras == {"slope": None, "osc_weight": 1.0, "child_weights": "softmax"}
        assert all(node.surprisal > 0 for node in tree.nodes[1:])


def test_surprisals_of_an_engine_without_log_probabilities_are_those_of_the_policy(tmp_path):
    trainer = make_tree_trainer("sipo", tmp_path)
    _, _, trees = batch_of(trainer)
    trainer.model.eval()
    tree = trees[0]
    rollout = tree.rollout(5)
    ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
    with torch.no_grad():
        logps = trainer.model(ids).logits.log_softmax(-1)
    start, node = len(rollout.prompt_ids), tree.nodes[tree.leaf_path(5)[0]]
    own = [logps[0, start + place - 1, token].item() for place, token in enumerate(node.turn.ids)]
    assert node.surprisal == pytest.approx(-sum(own) / len(own), rel=1e-4)


def test_both_token_counts_are_logged_every_step(tmp_path):
    trainer = make_tree_trainer("at2po", tmp_path, max_steps=2)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "rollout/tree_tokens" in entry]
    assert len(entries) == 1  # two updates per generation batch
    trees = load_trees(tmp_path / "rollouts.jsonl")
    assert entries[0]["rollout/tree_tokens"] == sum(tree.num_sampled_tokens for tree in trees)
    assert entries[0]["rollout/linear_tokens"] == sum(tree.num_path_tokens for tree in trees)
    assert entries[0]["rollout/tree_token_share"] < 1.0


class PopulationTrainer(SearchAgentTrainer):
    """The linear path with the standard deviation trees use."""

    def rollout_advantages(self, batch):
        super().rollout_advantages(batch)
        return group_advantages(batch.rewards, batch.group_ids, ddof=0, valid=batch.valid)


def test_everything_off_and_no_rounds_is_the_linear_path_with_the_turn_ratio(tmp_path, monkeypatch):
    monkeypatch.setitem(tree_runs.METHODS, "linear", (PopulationTrainer, tree_runs.METHODS["linear"][1]))
    tree = make_tree_trainer(
        "at2po", tmp_path / "tree", sipo_num_initial=8, sipo_num_rounds=0, max_steps=2, policy=TextPolicy(4)
    )
    before = weights(tree).clone()
    # A trainer is seeded when it is made, so one is trained before the other is made.
    tree.train()
    linear = make_tree_trainer(
        "linear",
        tmp_path / "linear",
        importance_sampling_level="turn",
        epsilon=3e-3,
        epsilon_high=4e-3,
        loss_type="grpo",
        max_steps=2,
        policy=TextPolicy(4),
    )
    linear.train()
    assert tree._generate_single_turn.contexts == linear._generate_single_turn.contexts
    assert not torch.equal(weights(tree), before)
    torch.testing.assert_close(weights(tree), weights(linear), rtol=1e-5, atol=1e-7)


def test_the_slope_corrects_the_next_batch_and_not_its_own(tmp_path):
    trainer = make_tree_trainer("sipo", tmp_path, sipo_min_slope_candidates=1, max_steps=4)
    trainer.train()
    trees = load_trees(tmp_path / "rollouts.jsonl")
    first, second = [tree for tree in trees if tree.step == 0], [tree for tree in trees if tree.step == 2]
    assert all(leaf.corrected == leaf.value for tree in first for leaf in tree.leaves)
    slopes = {tree.extras["slope"] for tree in second}
    assert len(slopes) == 1
    assert slopes.pop() is not None
    assert any(leaf.corrected != leaf.value for tree in second for leaf in tree.leaves)
    assert trainer.slope not in (None, second[0].extras["slope"])


def test_the_slope_is_pooled_over_processes_unless_each_keeps_its_own(tmp_path, monkeypatch):
    mine = SlopeSums(numerator=-1.0, denominator=4.0, count=30.0)
    other = SlopeSums(numerator=3.0, denominator=4.0, count=30.0)
    found = {}
    for scope in ("batch", "worker"):
        trainer = make_tree_trainer("sipo", tmp_path / scope, sipo_slope_scope=scope)
        # What a sum over two processes returns.
        monkeypatch.setattr(trainer.accelerator, "reduce", lambda sums, reduction: sums + other.as_tensor())
        trainer._remember(mine)
        found[scope] = trainer.slope
    # Pooled: (-1 + 3) / (4 + 4) from 60 candidates; alone 30 candidates are too few for an estimate.
    assert found == {"batch": 0.25, "worker": None}


def test_evaluation_plays_linear_rollouts_and_leaves_the_slope_alone(tmp_path):
    trainer = make_tree_trainer("sipo", tmp_path, num_generations_eval=2)
    trainer.slope_memory.slopes = [0.5]
    trainer.model.eval()
    inputs = [dict(trainer.train_dataset[row]) for row in (0, 0, 1, 1)]
    output = trainer._generate_and_score_completions(inputs)
    assert len(output["completion_ids"]) == 4
    assert trainer.slope == 0.5
    assert not (tmp_path / "rollouts.jsonl").exists()


@pytest.mark.slow
def test_a_resumed_run_has_the_slope_and_the_weights_of_an_uninterrupted_one(tmp_path):
    options = {"sipo_min_slope_candidates": 1, "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    whole = make_tree_trainer("sipo", tmp_path, policy=TextPolicy(1), **options)
    # Every generation batch plays the same stream, so that a resumed run can rejoin it.
    streams = {step: TextPolicy(step) for step in (0, 2, 4)}

    def generate(*args, **kwargs):
        return streams[trainer.state.global_step](*args, **kwargs)

    trainer = whole
    whole._generate_single_turn = generate
    whole.train()
    streams = {step: TextPolicy(step) for step in (0, 2, 4)}
    resumed = trainer = make_tree_trainer("sipo", tmp_path, **options)
    resumed._generate_single_turn = generate
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.slope == whole.slope
    assert resumed.slope is not None
    torch.testing.assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_a_resumed_run_takes_the_slope_from_its_checkpoint(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_tree_trainer("sipo", tmp_path, max_steps=2, sipo_min_slope_candidates=1, **options)
    trainer.train()
    kept = trainer.slope
    assert kept is not None
    # No new estimate is possible, so the slope after the resumed step is the one before it.
    resumed = make_tree_trainer("sipo", tmp_path, max_steps=4, sipo_min_slope_candidates=10_000, **options)
    assert resumed.slope is None
    resumed.train(resume_from_checkpoint=True)
    assert resumed.slope == kept
    assert {tree.extras["slope"] for tree in load_trees(tmp_path / "rollouts.jsonl") if tree.step == 2} == {kept}


def test_a_new_run_in_the_same_folder_starts_its_log_anew(tmp_path):
    for _ in range(2):
        make_tree_trainer("at2po", tmp_path, max_steps=2).train()
    assert [tree.step for tree in load_trees(tmp_path / "rollouts.jsonl")] == [0, 0]


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    make_tree_trainer("sipo", tmp_path, max_steps=4, **options).train()
    resumed = make_tree_trainer("sipo", tmp_path, max_steps=6, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [tree.step for tree in load_trees(tmp_path / "rollouts.jsonl")] == [0, 0, 2, 2, 4, 4]


def test_gca_on_trees_keeps_sign_bound_and_one_advantage_per_token(tmp_path):
    # The scripts of the policy hold every diagnosis.
    _, plain, _ = batch_of(make_tree_trainer("sipo", tmp_path / "sipo", policy=TextPolicy(2)))
    output, batch, trees = batch_of(make_tree_trainer("gca_sipo", tmp_path / "gca", policy=TextPolicy(2)))
    moved = output["advantages"] - plain.advantages
    trained = (output["completion_mask"] * output["tool_mask"]).bool()
    assert (moved[trained].abs() <= 0.1 * plain.advantages[trained].abs() + 1e-6).all()
    assert (output["advantages"][trained].sign() == plain.advantages[trained].sign()).all()
    assert (moved[trained].abs() > 1e-4).sum() > 50
    for places in shared_tokens(trees).values():
        kept = {output["advantages"][row, column].item() for row, column in places if trained[row, column]}
        assert len(kept) <= 1
    # What the file says about a token is what was trained.
    rollouts = [rollout for tree in trees for rollout in tree.rollouts()]
    for row, rollout in enumerate(rollouts):
        if not batch.masked[row]:
            written = [
                value for turn in rollout.turns for value in (*turn.advantages, *[0.0] * len(turn.observation_ids))
            ]
            assert written == pytest.approx(output["advantages"][row, : len(written)].tolist(), abs=3e-6)


def test_gca_on_trees_without_a_residual_is_sipo(tmp_path):
    plain, _, _ = batch_of(make_tree_trainer("sipo", tmp_path / "sipo", policy=TextPolicy(2)))
    output, _, _ = batch_of(make_tree_trainer("gca_sipo", tmp_path / "gca", policy=TextPolicy(2), gca_eta=0.0))
    torch.testing.assert_close(output["advantages"], plain["advantages"], rtol=0, atol=0)
    torch.testing.assert_close(output["tool_mask"], plain["tool_mask"], rtol=0, atol=0)
