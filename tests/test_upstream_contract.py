"""
What the trainers rely on in TRL, one test per fact, each with what to change when it no longer holds.

The facts are listed in `grounded_rl/trainers/_trl.py`. None of them is documented by TRL except `rollout_func`.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from types import SimpleNamespace

import datasets
import pytest
import torch
from datasets import Dataset
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import maybe_gather_lm_head_ctx, shuffle_sequence_dict, split_tensor_dict

from grounded_rl.environments.tools import SEARCH_TOOL, search
from tests.trainers.runs import TOKENIZER, base_options, tiny_model

PROMPTS = [[{"role": "user", "content": text}] for text in ("one?", "two?")]
G = 4


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def ids_of(text):
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]


@pytest.fixture
def build(tmp_path):
    """A plain `GRPOTrainer` whose rollouts are made here: rows of different lengths, with a foreign token in each."""

    def make(trainer_class=GRPOTrainer, **options):
        kept = SimpleNamespace(prompts=[], rewards_saw=[])

        def reward(completions, completion_ids, marks=None, **_):
            kept.rewards_saw.append({"completions": completions, "ids": completion_ids, "marks": marks})
            return [None if index == 3 else float(index) for index in range(len(completions))]

        def rollout(prompts, trainer):
            kept.prompts.append(prompts)
            return {
                "prompt_ids": [ids_of("prompt")] * len(prompts),
                "completion_ids": [ids_of("word " * (1 + index)) for index in range(len(prompts))],
                "logprobs": None,
                "marks": [f"row {index}" for index in range(len(prompts))],
            }

        trainer = trainer_class(
            tiny_model(),
            reward_funcs=reward,
            args=GRPOConfig(**base_options(tmp_path, **options)),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS]),
            processing_class=TOKENIZER,
        )
        trainer.rollout_func = rollout
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        return trainer, kept

    return make


def batch_of(trainer):
    return trainer._generate_and_score_completions([{"prompt": prompt} for prompt in PROMPTS for _ in range(G)])


def test_trl_is_the_minor_version_these_facts_were_read_from():
    assert version("trl").split(".")[:2] == ["1", "16"], (
        "TRL moved to another minor version: read its GRPOTrainer against the tests of this file, "
        "then widen the range in setup.cfg"
    )


def test_rollout_func_receives_the_prompt_of_every_row(build):
    trainer, kept = build()
    batch_of(trainer)
    assert kept.prompts == [[prompt for prompt in PROMPTS for _ in range(G)]], (
        "rollout_func no longer gets one prompt per row: change `RolloutGRPOTrainer._rollout`, which answers by row"
    )


def test_extra_lists_of_rollout_func_reach_the_reward_functions(build):
    trainer, kept = build()
    batch_of(trainer)
    assert kept.rewards_saw[0]["marks"] == [f"row {index}" for index in range(2 * G)], (
        "extra lists of rollout_func no longer reach reward functions: hand the rollouts over another way in "
        "`RolloutGRPOTrainer._rollout` and `environment_reward`"
    )


def test_the_tool_loop_gets_the_rollouts_and_gives_seven_values(build):
    seen = []

    class WithTools(GRPOTrainer):
        def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, *args):
            seen.append((completion_ids, logprobs, len(args)))
            masks = [[1] * (len(ids) - 1) + [0] for ids in completion_ids]
            messages = [[{"role": "assistant", "content": "replaced"}] for _ in completion_ids]
            return masks, messages, completion_ids, logprobs, 5, 2, [[] for _ in completion_ids]

    trainer, kept = build(WithTools)
    trainer.tools = [search]
    output = batch_of(trainer)
    reason = "change `RolloutGRPOTrainer._tool_call_loop`, which returns the finished rollouts in this form"
    parameters = list(inspect.signature(GRPOTrainer._tool_call_loop).parameters)
    assert parameters[:6] == ["self", "prompts", "prompt_ids", "completion_ids", "completions", "logprobs"], reason
    assert seen[0][0] == [ids_of("word " * (1 + index)) for index in range(2 * G)], reason
    assert (seen[0][1], seen[0][2]) == (None, len(parameters) - 6), reason
    assert kept.rewards_saw[0]["completions"][0][0]["content"] == "replaced", reason
    expected = [len(ids) - 1 for ids in seen[0][0]]
    assert (output["tool_mask"] * output["completion_mask"]).sum(1).tolist() == expected, reason
    assert trainer._metrics["train"]["tools/call_frequency"] == pytest.approx([5 / 8]), reason
    assert trainer._metrics["train"]["tools/failure_frequency"] == pytest.approx([2 / 5], rel=1e-6), reason


def test_tools_may_be_announced_after_the_trainer_was_built(build):
    trainer, _ = build()
    trainer.tools = [search]
    trainer._generate_single_turn = None  # nothing is generated when rollout_func is set
    output = batch_of(trainer)
    assert "tool_mask" in output, (
        "`self.tools` no longer switches the tool loop on: pass the tools to `super().__init__`"
    )
    assert get_json_schema(search) == SEARCH_TOOL, "the schema TRL would derive differs from the one in the prompt"


def test_single_turns_take_ragged_token_contexts_and_end_at_the_end_token(build):
    trainer, _ = build(generation_kwargs={"max_new_tokens": 3})
    contexts = [ids_of("a"), ids_of("a much longer context"), ids_of("b c")]
    ids, logps = trainer._generate_single_turn(contexts, None, {}, 1)
    reason = "change `TrainerEngine.generate`, which samples through `_generate_single_turn`"
    assert logps is None, reason
    assert [1 <= len(each) <= 3 for each in ids] == [True] * 3, reason
    assert "num_generations" in inspect.signature(GRPOTrainer._generate_single_turn).parameters, reason
    # Every token ends a turn: exactly one is sampled, and it is kept.
    trainer.eos_token_ids = list(range(trainer.model.config.vocab_size))
    trainer.generation_config.eos_token_id = trainer.eos_token_ids
    ids, _ = trainer._generate_single_turn(contexts, None, {}, 1)
    assert [len(each) for each in ids] == [1, 1, 1], (
        "`eos_token_ids` and `generation_config` no longer decide where a turn ends: change `end_turns_at`"
    )


def test_rewards_come_as_a_gathered_matrix_with_nan_for_none(build):
    found = []

    class Keeping(GRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            found.append(super()._calculate_rewards(*args, **kwargs))
            return found[-1]

    trainer, _ = build(Keeping)
    batch_of(trainer)
    reason = "change `RolloutGRPOTrainer._batch`, which reads the rewards of this process from the gathered matrix"
    assert found[0].shape == (2 * G, 1), reason
    assert found[0][:, 0].isnan().tolist() == [index == 3 for index in range(2 * G)], reason


def test_the_buffered_dictionary_has_the_keys_the_trainers_read(build):
    trainer, _ = build()
    trainer.tools = [search]
    trainer._tool_call_loop = lambda prompts, prompt_ids, ids, completions, logps, *args: (
        [[1] * len(row) for row in ids],
        completions,
        ids,
        logps,
        0,
        0,
        [[] for _ in ids],
    )
    output = batch_of(trainer)
    expected = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "num_items_in_batch"}
    assert expected | {"advantages", "old_per_token_logps"} == output.keys(), (
        "the buffered dictionary has other keys: check `_generate_and_score_completions` and `_write_credit`"
    )
    lengths = [len(ids_of("word " * (1 + index))) for index in range(2 * G)]
    assert output["completion_mask"].sum(1).tolist() == lengths, "completions are no longer padded on the right"
    assert int(output["num_items_in_batch"]) == sum(lengths), "`_write_credit` recounts the loss tokens another way"
    assert trainer.state.global_step == 0


def test_old_log_probs_are_computed_exactly_where_updates_and_generation_are_misaligned(build):
    with_pass, _ = build(steps_per_generation=2, gradient_accumulation_steps=1)
    without, _ = build(steps_per_generation=2, gradient_accumulation_steps=2)
    reason = "`RolloutGRPOTrainer` runs its own old-policy pass for the probe exactly where TRL runs none"
    assert "old_per_token_logps" in batch_of(with_pass), reason
    assert "old_per_token_logps" not in batch_of(without), reason


def test_extra_tensors_follow_their_rows_into_the_micro_batches():
    rows = {"completion_ids": torch.arange(8).unsqueeze(1), "turn_ids": torch.arange(8).unsqueeze(1) * 10}
    rows["num_items_in_batch"] = torch.tensor(7)
    for part in split_tensor_dict(shuffle_sequence_dict(rows), 2):
        assert torch.equal(part["turn_ids"], part["completion_ids"] * 10), (
            "TRL no longer shuffles unknown tensors along with the rows: `turn_ids` and `advantages` would be mixed up"
        )
        assert int(part["num_items_in_batch"]) == 7
        assert len(part["turn_ids"]) == 4


def test_log_probs_come_in_three_values_slices_in_order_and_one_backbone_pass_each(build):
    trainer, _ = build()
    output = batch_of(trainer)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    slices = []
    handle = trainer.model.base_model.register_forward_hook(
        lambda module, args, kwargs, result: slices.append((kwargs["input_ids"], result.last_hidden_state.shape[:2])),
        with_kwargs=True,
    )
    length = output["completion_ids"].size(1)
    found = trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, length, batch_size=3)
    handle.remove()
    reason = "change `SalienceProbe`, which reads the hidden states of the rows in the order of the passes"
    assert len(found) == 3, reason
    assert torch.equal(torch.cat([each for each, _ in slices]), ids), reason
    assert [tuple(shape) for _, shape in slices] == [(3, ids.size(1)), (3, ids.size(1)), (2, ids.size(1))], reason
    with torch.no_grad():
        logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, output["completion_ids"].unsqueeze(-1)).squeeze(-1)
    valid = output["completion_mask"].bool()
    assert torch.allclose(found[0][valid], expected[valid], atol=1e-5), reason


def test_the_loss_reads_old_log_probs_after_it_computed_the_new_ones(build):
    class Replacing(GRPOTrainer):
        inputs = None

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            if self.inputs is not None:
                self.inputs["old_per_token_logps"] = found[0].detach() - 0.1
            return found

    trainer, _ = build(Replacing)
    trainer.inputs = inputs = batch_of(trainer)
    inputs["advantages"] = torch.full(inputs["completion_ids"].shape, -1.0)
    loss = trainer.compute_loss(trainer.model, inputs)
    # Two micro-batches share the normaliser, so the mean counts twice.
    assert loss.item() == pytest.approx(2 * torch.tensor(0.1).exp().item(), rel=1e-5), (
        "the loss reads `old_per_token_logps` before the log-probs: turn and sequence_token levels need another way"
    )


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo"])
def test_the_loss_takes_one_advantage_per_token(build, loss_type):
    trainer, _ = build(loss_type=loss_type, **({"epsilon_high": 5.0} if loss_type == "cispo" else {}))
    inputs = batch_of(trainer)
    advantages = torch.linspace(-1, 1, 2 * G)
    results = []
    for values in (advantages, advantages.unsqueeze(1).expand(inputs["completion_ids"].shape).clone()):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, {**inputs, "advantages": values})
        loss.backward()
        results.append((loss.item(), trainer.model.lm_head.weight.grad.clone()))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-7), (
        "advantages of shape (B, T) are no longer accepted: the loss must be computed here"
    )
    assert torch.allclose(results[0][1], results[1][1], atol=1e-7)


def test_the_loss_counts_exactly_the_tokens_of_both_masks(build):
    trainer, _ = build()
    inputs = batch_of(trainer)
    inputs["tool_mask"] = torch.ones_like(inputs["completion_mask"])
    inputs["tool_mask"][:, 1] = 0
    inputs["advantages"] = torch.ones(inputs["completion_ids"].shape)
    inputs["num_items_in_batch"] = (inputs["completion_mask"] * inputs["tool_mask"]).sum()
    plain = trainer.compute_loss(trainer.model, inputs)
    masked = inputs["completion_mask"] * inputs["tool_mask"] == 0
    inputs["advantages"] = torch.where(masked, 1e9, inputs["advantages"])
    assert torch.equal(trainer.compute_loss(trainer.model, inputs), plain), (
        "tokens outside `completion_mask * tool_mask` reach the loss: `_write_credit` must zero their advantages"
    )
    assert plain.item() == pytest.approx(-2.0, rel=1e-5)


def test_metrics_are_lists_averaged_without_nan_when_they_are_logged(build):
    trainer, _ = build()
    trainer._metrics["train"]["credit/x"] = [1.0, float("nan"), 3.0]
    trainer._metrics["train"]["credit/y"] = [float("nan")]
    logs = {}
    trainer.log(logs)
    assert (logs["credit/x"], logs["credit/y"]) == (2.0, None), (
        "`_metrics` is logged another way: change `RolloutGRPOTrainer.log_means`"
    )


def test_a_dataset_smaller_than_a_generation_batch_trains_nothing(tmp_path):
    trainer = GRPOTrainer(
        tiny_model(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(**base_options(tmp_path)),
        train_dataset=Dataset.from_list([{"prompt": PROMPTS[0]}]),
        processing_class=TOKENIZER,
    )
    assert len(trainer.get_train_dataloader()) == 0, (
        "TRL no longer drops an incomplete generation batch: the check of the dataset's size can go"
    )


def test_the_sampler_of_a_run_comes_from_one_method_and_shuffles_anew_every_time(build):
    kept = []

    class Watched(GRPOTrainer):
        def _get_train_sampler(self, *args, **kwargs):
            kept.append(super()._get_train_sampler(*args, **kwargs))
            return kept[-1]

    trainer, _ = build(Watched, seed=3)
    trainer.train_dataset = Dataset.from_list([{"prompt": PROMPTS[0]}] * 64)
    trainer.get_train_dataloader()
    assert len(kept) == 1, (
        "the data of a run are no longer ordered by `_get_train_sampler`: change `RolloutGRPOTrainer.skip_epochs`"
    )
    first, second = list(kept[0]), list(kept[0])
    assert first != second, (
        "the sampler repeats the order of its first epoch: `RolloutGRPOTrainer.skip_epochs` must draw no order"
    )
    again = trainer._get_train_sampler()
    assert (list(again), list(again)) == (first, second), (
        "the order of an epoch no longer follows from the seed and the epochs before it: a resumed run cannot find "
        "its place with `RolloutGRPOTrainer.skip_epochs`"
    )


def test_a_checkpoint_at_any_moment_holds_what_a_run_is_resumed_from(build, tmp_path):
    trainer, _ = build(save_only_model=False)
    trainer.create_optimizer_and_scheduler(num_training_steps=4)
    trainer.state.global_step = 7
    trainer._save_checkpoint(trainer.model, trial=None)
    [folder] = tmp_path.glob("**/checkpoint-7")
    names = {path.name for path in folder.iterdir()}
    wanted = {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
    assert wanted <= names, (
        "`_save_checkpoint` writes other files than a run is resumed from: change `RolloutGRPOTrainer.save_checkpoint`"
    )


def test_a_segment_level_is_refused_by_the_loss_and_not_by_the_configuration(build):
    trainer, _ = build(importance_sampling_level="turn")
    inputs = batch_of(trainer)
    with pytest.raises(ValueError, match="Unknown importance sampling level: turn"):
        trainer.compute_loss(trainer.model, inputs)


def test_the_head_is_gathered_only_where_it_is_partitioned():
    with maybe_gather_lm_head_ctx(torch.nn.Parameter(torch.ones(2)), None) as nothing:
        assert nothing is None
