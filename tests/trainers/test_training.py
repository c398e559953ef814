"""Short runs: parameters move, the log is complete, rollouts are written as they were trained on."""

from __future__ import annotations

import json
import math

import pandas
import pytest
import torch
from transformers import Qwen3ForCausalLM

from grounded_rl.methods import METHODS
from grounded_rl.rollouts import CallStatus, load_rollouts
from grounded_rl.trainers import GCATrainer, SearchAgentTrainer
from tests.sampling.world import SCRIPTS, UNKNOWN_COUNTRY, TinyRetriever, answer, plan_of
from tests.trainers.runs import CONFIGS, TOKENIZER, agent_options, generation_batch, make_trainer, rows, tiny_model

ROLLOUT_METRICS = {
    f"rollout/{name}"
    for name in [
        "em",
        "tool_hit",
        "sup_cor",
        "hit_acc",
        "grounded_share",
        "hit_but_wrong",
        "type_a",
        "type_b",
        "type_c",
        "type_d",
        "malformed_share",
        "truncated_share",
        "num_searches",
        "failed",
    ]
}
CREDIT_METRICS = {
    f"credit/{name}"
    for name in [
        "gated_share",
        "conflict_share",
        "c_plus",
        "c_minus",
        "masked_share",
        "retrievable_share",
        "undiagnosed_share",
        "margin_negative_share",
        "top_entropy",
    ]
}


@pytest.mark.parametrize("trainer_class", [SearchAgentTrainer, GCATrainer])
def test_two_steps_move_every_trainable_parameter(tmp_path, trainer_class):
    trainer = make_trainer(trainer_class, tmp_path)
    start = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert trainer.state.global_step == 2
    for name, parameter in trainer.model.named_parameters():
        assert not torch.equal(parameter, start[name]), name


def test_only_the_adapter_of_a_low_rank_policy_moves(tmp_path):
    peft = pytest.importorskip("peft", reason="needs the optional package peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    # With a reference the adapter is also switched off once per batch; the probe must not measure that pass.
    trainer = make_trainer(
        GCATrainer,
        tmp_path,
        trainer_options={"peft_config": config},
        beta=0.01,
        steps_per_generation=1,
        per_device_train_batch_size=8,
    )
    start = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, start[name]) != ("lora_" in name), name


def test_the_log_holds_every_metric(tmp_path):
    trainer = make_trainer(GCATrainer, tmp_path, plan=plan_of("A_late", "B", "C", "D_search"))
    trainer.train()
    entry = trainer.state.log_history[0]
    missing = (ROLLOUT_METRICS | CREDIT_METRICS | {"credit/zero_variance_groups", "entropy", "reward"}) - entry.keys()
    assert not missing
    assert [entry[f"rollout/type_{kind}"] for kind in "abcd"] == [0.25] * 4
    # EM 2/4, hits 2/4, both 1/4.
    assert (entry["rollout/em"], entry["rollout/tool_hit"], entry["rollout/sup_cor"]) == (0.5, 0.5, 0.25)
    assert (entry["rollout/hit_acc"], entry["rollout/grounded_share"]) == (0.5, 0.5)
    assert 0 < entry["credit/c_plus"] <= 0.5
    assert 0 < entry["credit/c_minus"] <= 0.5
    assert 0 <= entry["credit/top_entropy"] <= 1
    # Conflict cells of these rollouts: late searches and answers against the sign of the outcome.
    assert 0 < entry["credit/conflict_share"] < 1


def test_the_host_logs_what_the_rollouts_did(tmp_path):
    trainer = make_trainer(SearchAgentTrainer, tmp_path, plan=plan_of("A_malformed", "C", "C_short", "D"))
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry.keys() >= ROLLOUT_METRICS
    assert not CREDIT_METRICS & entry.keys()
    assert entry["rollout/malformed_share"] == 0.25
    # One of the two calls was rejected; C searches once.
    assert entry["tools/failure_frequency"] == pytest.approx(1 / 3)


def test_undefined_ratios_are_absent_and_never_zero(tmp_path):
    trainer = make_trainer(SearchAgentTrainer, tmp_path, plan=plan_of("C", "C_short"), max_steps=1)
    trainer.train()
    entry = trainer.state.log_history[0]
    assert entry["rollout/em"] == entry["rollout/tool_hit"] == 0.0
    assert entry["rollout/hit_acc"] is None
    assert entry["rollout/grounded_share"] is None


def test_zero_variance_groups_are_counted(tmp_path):
    trainer = make_trainer(
        SearchAgentTrainer,
        tmp_path,
        plan=lambda country, sample: (
            SCRIPTS["A"](country) if country == "Peru" or sample % 2 else SCRIPTS["C"](country)
        ),
    )
    generation_batch(trainer, "Peru", "Chile")
    assert trainer._metrics["train"]["credit/zero_variance_groups"] == [0.5]


# --- rollouts.jsonl


def test_rollouts_are_written_with_the_advantages_they_were_trained_with(tmp_path):
    trainer = make_trainer(GCATrainer, tmp_path, rollout_log_groups=-1, plan=plan_of("A_late", "B", "C", "D_search"))
    output = generation_batch(trainer, "Peru", "Chile")
    rollouts = load_rollouts(tmp_path / "rollouts.jsonl")
    assert [(one.question_id, one.sample) for one in rollouts] == [
        (f"q-{country}", sample) for country in ("Peru", "Chile") for sample in range(4)
    ]
    for row, rollout in enumerate(rollouts):
        length = len(rollout.completion_ids)
        assert output["completion_ids"][row, :length].tolist() == rollout.completion_ids
        for number, turn in enumerate(rollout.turns):
            expected = output["advantages"][row][output["turn_ids"][row] == number]
            assert list(turn.advantages) == pytest.approx(expected.tolist(), abs=1e-6)
    assert rollouts[0].rewards == {"search_reward": 1.0}
    assert rollouts[0].extras["step"] == 0
    for rollout in rollouts:
        own = rollout.extras["advantage"]
        changes = [value / own - 1 for turn in rollout.turns for value in turn.advantages] if own else []
        assert all(abs(change) <= 0.1 + 1e-4 for change in changes)
    assert rollouts[0].extras["advantage"] > 0 > rollouts[1].extras["advantage"]


def test_rollouts_that_left_the_loss_are_marked(tmp_path):
    trainer = make_trainer(
        GCATrainer,
        tmp_path,
        rollout_log_groups=1,
        plan=plan_of("D", "C", "C", "C"),
        dataset=rows(UNKNOWN_COUNTRY, "Peru"),
    )
    generation_batch(trainer, UNKNOWN_COUNTRY, "Peru")
    rollouts = load_rollouts(tmp_path / "rollouts.jsonl")
    assert len(rollouts) == 4
    assert rollouts[0].extras == {"step": 0, "masked": True, "advantage": 0.0}
    assert set(rollouts[0].turns[0].advantages) == {0.0}
    assert rollouts[1].turns[0].advantages[0] < 0


def test_the_log_of_rollouts_can_be_switched_off(tmp_path):
    trainer = make_trainer(SearchAgentTrainer, tmp_path, rollout_log_groups=0)
    generation_batch(trainer, "Peru", "Chile")
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_a_new_run_in_the_same_folder_starts_its_log_anew(tmp_path):
    for _ in range(2):
        make_trainer(SearchAgentTrainer, tmp_path, rollout_log_groups=-1, max_steps=4).train()
    steps = [rollout.extras["step"] for rollout in load_rollouts(tmp_path / "rollouts.jsonl")]
    assert steps == [0] * 8 + [2] * 8


# --- evaluation, completions, odd output


def test_evaluation_scores_without_training_or_writing(tmp_path):
    trainer = make_trainer(
        GCATrainer,
        tmp_path,
        trainer_options={"eval_dataset": rows("Japan", "Egypt")},
        per_device_eval_batch_size=4,
        rollout_log_groups=-1,
    )
    start = [parameter.clone() for parameter in trainer.model.parameters()]
    metrics = trainer.evaluate()
    entry = trainer.state.log_history[-1]
    assert entry["eval_rollout/em"] == 0.5
    assert math.isfinite(metrics["eval_loss"])
    assert all(torch.equal(mine, other) for mine, other in zip(trainer.model.parameters(), start, strict=True))
    assert not (tmp_path / "rollouts.jsonl").exists()


def test_questions_without_ids_are_told_apart_between_datasets(tmp_path):
    train, evaluation = rows("Peru", "Chile").remove_columns("id"), rows("Japan", "Egypt").remove_columns("id")
    trainer = make_trainer(
        GCATrainer, tmp_path, dataset=train, trainer_options={"eval_dataset": evaluation}, per_device_eval_batch_size=4
    )
    assert not set(trainer.train_dataset["id"]) & set(trainer.eval_dataset["id"])


def test_golden_answers_are_read_as_answers(tmp_path):
    dataset = rows("Peru", "Chile").rename_column("answers", "golden_answers")
    trainer = make_trainer(SearchAgentTrainer, tmp_path, dataset=dataset)
    assert trainer.train_dataset[0]["answers"] == ["Lima"]


ODD = [
    '<tool_call>\n{"name": "search", "arguments": "hamlet"}\n</tool_call>',
    '<tool_call>\n{"name": "search", "arguments": {"query": {"x": 1}}}\n</tool_call>',
    '<tool_call>\n{"name": "search", "arguments": {"query": ["a", "b"]}}\n</tool_call>',
    '<tool_call>\n{"name": "delete", "arguments": {"query": "a"}}\n</tool_call>',
    '<tool_call>\n{"name": "search", "arguments": {"query": "\\ud800"}}\n</tool_call>',
    "<tool_call>[1, 2]</tool_call></tool_call><think>",
    "[/bold] <answer>[red]Lima[/red]</answer> \x00\ufffd",
    "",
]


def test_odd_output_survives_the_table_of_completions(tmp_path, capsys):
    # A byte that is no character, then the end of the turn.
    broken = [TOKENIZER.convert_tokens_to_ids("Ã"), TOKENIZER.eos_token_id]

    def plan(country, sample):
        odd = ODD[sample + (4 if country in ("Peru", "Norway") else 0)]
        return [odd, broken if sample else answer("Lima")] if "tool_call>" in odd else [odd]

    trainer = make_trainer(
        GCATrainer,
        tmp_path,
        plan=plan,
        dataset=rows("Peru", "Chile"),
        log_completions=True,
        rollout_log_groups=-1,
    )
    trainer.train()
    table = pandas.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 8
    assert table["completion"].map(lambda messages: messages[0]["role"]).unique().tolist() == ["assistant"]
    assert "Lima" in capsys.readouterr().out
    calls = [call for one in load_rollouts(tmp_path / "rollouts.jsonl") for turn in one.turns for call in turn.calls]
    assert {call.status for call in calls} >= {CallStatus.REJECTED, CallStatus.EMPTY}


def test_a_turn_ends_at_the_end_token_of_the_template_too(tmp_path):
    # A base model declares an end of text its template does not use.
    tokenizer = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<|endoftext|>")
    tokenizer.pad_token, tokenizer.chat_template = "<|endoftext|>", TOKENIZER.chat_template
    trainer = SearchAgentTrainer(
        tiny_model(eos_token_id=tokenizer.eos_token_id),
        TinyRetriever(),
        args=CONFIGS[SearchAgentTrainer](**agent_options(tmp_path)),
        train_dataset=rows(),
        processing_class=tokenizer,
    )
    ends = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert sorted(trainer.eos_token_ids) == sorted(ends)
    assert sorted(trainer.generation_config.eos_token_id) == sorted(ends)
    # A head that always prefers the template's token: one token, and the turn is over.
    with torch.no_grad():
        trainer.model.set_output_embeddings(torch.nn.Linear(64, len(tokenizer)))
        trainer.model.lm_head.weight.zero_()
        trainer.model.lm_head.bias.zero_()[ends[1]] = 100.0
    ids, _ = trainer._generate_single_turn([[5, 6, 7]], None, {}, 1)
    assert ids == [[ends[1]]]


def test_the_saved_policy_can_be_loaded(tmp_path):
    trainer = make_trainer(GCATrainer, tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "policy"))
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path / "policy")
    assert torch.equal(loaded.lm_head.weight, trainer.model.lm_head.weight)
    assert json.loads(trainer.args.to_json_string())["gca_eta"] == 0.2


def test_every_method_names_a_trainer_and_its_configuration():
    for method in METHODS.values():
        assert issubclass(method.load_trainer(), SearchAgentTrainer)
    assert METHODS["gca"].load_trainer() is GCATrainer
