"""GCA as a trainer: what its residual may do, what it leaves alone, and what leaves the loss."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from grounded_rl.trainers import GCAConfig, GCATrainer, SearchAgentTrainer
from tests.sampling.world import UNKNOWN_COUNTRY, TinyRetriever, plan_of
from tests.trainers.runs import TOKENIZER, agent_options, generation_batch, losses, make_trainer, rows, tiny_model

SCALE = 0.2 * 1.0 * 0.5
"""Largest relative change: eta times the largest magnitude times c_max."""


def run(trainer_class, folder, *, attention_dropout=0.0, countries=(), plan=None, **options):
    trainer = make_trainer(
        trainer_class,
        folder,
        plan=plan,
        model=tiny_model(attention_dropout=attention_dropout),
        dataset=rows(*countries),
        max_steps=4,
        **options,
    )
    trainer.train()
    return trainer


# Every second group asks for what the corpus lacks: right answers there are masked by GCA and not by its host.
HALF_UNKNOWN = ("Peru", "Chile", UNKNOWN_COUNTRY)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"steps_per_generation": 2}, id="two updates per generation"),
        pytest.param({"steps_per_generation": 1, "per_device_train_batch_size": 8}, id="one update per generation"),
        pytest.param({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, id="accumulation"),
        pytest.param({"importance_sampling_level": "turn"}, id="turn level"),
        pytest.param(
            {"steps_per_generation": 1, "per_device_train_batch_size": 8, "attention_dropout": 0.2}, id="dropout"
        ),
    ],
)
def test_without_residual_the_run_is_that_of_the_host_bit_for_bit(tmp_path, options):
    host = run(SearchAgentTrainer, tmp_path / "host", countries=HALF_UNKNOWN, **options)
    gca = run(GCATrainer, tmp_path / "gca", countries=HALF_UNKNOWN, gca_eta=0.0, **options)
    assert losses(gca) == losses(host)
    for (name, mine), other in zip(gca.model.named_parameters(), host.model.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_sampled_runs_without_residual_are_those_of_the_host_bit_for_bit(tmp_path):
    def diversity(completion_ids, **_):
        return [len(set(ids)) / 10 for ids in completion_ids]

    finals = []
    for trainer_class, options in ((SearchAgentTrainer, {}), (GCATrainer, {"gca_eta": 0.0})):
        trainer = make_trainer(
            trainer_class,
            tmp_path / trainer_class.__name__,
            trainer_options={"reward_funcs": diversity},
            rollout_max_turn_tokens=6,
            max_steps=3,
            **options,
        )
        del trainer._generate_single_turn  # sample for real
        trainer.train()
        finals.append((losses(trainer), [parameter.clone() for parameter in trainer.model.parameters()]))
    (first, host), (second, gca) = finals
    assert first == second
    assert all(torch.equal(mine, other) for mine, other in zip(host, gca, strict=True))


def test_with_residual_the_run_differs_from_the_host(tmp_path):
    host = run(SearchAgentTrainer, tmp_path / "host")
    gca = run(GCATrainer, tmp_path / "gca")
    assert losses(gca) != losses(host)


def advantages_of(folder, plan, *countries, **options):
    """Buffered dictionaries of host and GCA for the same rollouts, and the GCA trainer."""
    host = make_trainer(SearchAgentTrainer, folder / "host", plan=plan, dataset=rows(*countries))
    gca = make_trainer(GCATrainer, folder / "gca", plan=plan, dataset=rows(*countries), **options)
    return generation_batch(host, *countries), generation_batch(gca, *countries), gca


def test_the_residual_keeps_signs_and_stays_within_its_bound(tmp_path):
    plan = plan_of("A_late", "B", "C", "D_search")
    host, gca, _ = advantages_of(tmp_path, plan, "Peru", "Chile")
    base, moved = host["advantages"], gca["advantages"]
    trained = (gca["completion_mask"] * gca["tool_mask"]).bool()
    change = (moved / base - 1)[trained]
    assert torch.equal(moved.sign(), base.sign())
    assert float(change.abs().max()) <= SCALE + 1e-6
    # The bound is reached, so the test above is not empty.
    assert float(change.abs().max()) > 0.9 * SCALE
    assert torch.equal(host["tool_mask"], gca["tool_mask"])
    assert GCAConfig(**agent_options(tmp_path)).routing().bound == pytest.approx(SCALE)


def test_the_residual_goes_where_the_diagnosis_says(tmp_path):
    plan = plan_of("A_late", "B", "C", "D_search")
    host, gca, _ = advantages_of(tmp_path, plan, "Peru", "Chile")
    # Direction of the residual by turn: searches up to the first hit +, other searches -, answers by use of evidence.
    expected = [[+1, +1, -1, +1], [+1, -1, -1], [0, 0], [-1, -1]]
    trained = (gca["completion_mask"] * gca["tool_mask"]).bool()
    residual = torch.where(trained, gca["advantages"] - host["advantages"], 0.0)
    for row, turns in enumerate(expected):
        for turn, sign in enumerate(turns):
            values = residual[row][gca["turn_ids"][row] == turn]
            if sign == 0:
                assert not values.any(), (row, turn)
            else:
                assert bool((values * sign >= 0).all()), (row, turn)
                assert bool((values * sign > 0).any()), (row, turn)


def test_structural_tokens_keep_the_plain_advantage(tmp_path):
    host, gca, _ = advantages_of(tmp_path, plan_of("A_late", "B", "C", "D_search"), "Peru", "Chile")
    names = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>"]
    tags = torch.tensor(TOKENIZER.convert_tokens_to_ids(names))
    is_tag = torch.isin(gca["completion_ids"], tags) & (gca["turn_ids"] >= 0)
    assert all((gca["completion_ids"] == tag).any() for tag in tags)
    assert torch.equal(gca["advantages"][is_tag], host["advantages"][is_tag])
    # `<answer>` is no token of its own here; its pieces are found by where they stand.
    pieces = TOKENIZER("<answer>", add_special_tokens=False)["input_ids"]
    for row, ids in enumerate(gca["completion_ids"].tolist()):
        starts = [i for i in range(len(ids)) if ids[i : i + len(pieces)] == pieces]
        assert len(starts) == 1
        span = slice(starts[0], starts[0] + len(pieces))
        assert torch.equal(gca["advantages"][row, span], host["advantages"][row, span])
    # Tags stay in the loss.
    assert bool((gca["tool_mask"] * gca["completion_mask"])[is_tag].all())


def test_observations_and_padding_are_not_trained_and_carry_no_residual(tmp_path):
    host, gca, _ = advantages_of(tmp_path, plan_of("A_late", "B", "C", "D_search"), "Peru", "Chile")
    foreign = gca["turn_ids"] < 0
    assert bool(foreign.any())
    assert not bool((gca["completion_mask"] * gca["tool_mask"])[foreign].any())
    assert torch.equal(gca["advantages"][foreign], host["advantages"][foreign])


def test_a_group_without_reward_variance_gets_no_credit(tmp_path):
    _, gca, _ = advantages_of(tmp_path, plan_of("A", "A_late", "D", "A_malformed"), "Peru", "Chile")
    assert not gca["advantages"].any()


def test_right_answers_the_corpus_cannot_deliver_leave_the_loss_and_not_the_statistics(tmp_path):
    plan = plan_of("D_search", "C", "D", "C_short")
    host, gca, trainer = advantages_of(tmp_path, plan, UNKNOWN_COUNTRY, "Peru")
    mask = gca["completion_mask"] * gca["tool_mask"]
    rows_with_loss = mask.any(dim=1).tolist()
    # Nothing was hit in either group; the oracle finds Lima and not Poseidonis.
    assert rows_with_loss == [False, True, False, True, True, True, True, True]
    assert int(gca["num_items_in_batch"]) == int(mask.sum())
    assert int(host["num_items_in_batch"]) > int(mask.sum())
    # Rewards 1, 0, 1, 0: mean 1/2, sample deviation sqrt(1/3); without the masked rollouts it would be zero.
    assert gca["advantages"][1, 0] == pytest.approx(-0.5 / (3**-0.5 + 1e-6), rel=1e-6)
    assert trainer._metrics["train"]["credit/masked_share"] == [0.25]
    assert trainer._metrics["train"]["credit/retrievable_share"] == [0.5]


def test_masked_rollouts_do_not_reach_the_gradient(tmp_path):
    plan = plan_of("D_search", "C", "D", "C_short")
    _, gca, trainer = advantages_of(tmp_path, plan, UNKNOWN_COUNTRY, "Peru")
    trainer.current_gradient_accumulation_steps = 1
    trainer.compute_loss(trainer.model, gca).backward()
    expected = [parameter.grad.clone() for parameter in trainer.model.parameters()]
    trainer.model.zero_grad()
    gca["advantages"][[0, 2]] = 1e6
    trainer.compute_loss(trainer.model, gca).backward()
    grads = [parameter.grad for parameter in trainer.model.parameters()]
    assert all(torch.equal(mine, other) for mine, other in zip(grads, expected, strict=True))
    assert any(grad.any() for grad in grads)


def test_oracle_queries_are_asked_once_per_question(tmp_path):
    retriever = TinyRetriever()
    trainer = make_trainer(
        GCATrainer,
        tmp_path,
        plan=plan_of("D", "C_short", "D", "C_short"),
        dataset=rows("Peru", UNKNOWN_COUNTRY),
        retriever=retriever,
    )
    generation_batch(trainer, "Peru", UNKNOWN_COUNTRY)
    asked = list(retriever.batches)
    assert len(asked) == 1
    assert "What is the capital of Peru?" in asked[0]
    generation_batch(trainer, "Peru", UNKNOWN_COUNTRY)
    assert retriever.batches == asked


def test_the_configured_matcher_decides_credit_and_log(tmp_path):
    # The answer "eru" stands inside "Peru": evidence for the substring matcher, none at word boundaries.
    dataset = Dataset.from_list([{"id": "q", "question": "What is the capital of Peru?", "answers": ["eru"]}])
    plan = plan_of("A", "C", "C", "C")
    shares = {}
    for matcher in ("substring", "word_boundary"):
        trainer = make_trainer(
            GCATrainer,
            tmp_path / matcher,
            plan=plan,
            dataset=dataset,
            gca_matcher=matcher,
            steps_per_generation=1,
        )
        trainer._generate_and_score_completions([dict(trainer.train_dataset[0]) for _ in range(4)])
        shares[matcher] = trainer._metrics["train"]["rollout/type_b"]
    assert shares == {"substring": [0.25], "word_boundary": [0.0]}
