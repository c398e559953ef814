"""Every mistake of a user gets one clear line."""

from __future__ import annotations

import pytest
from datasets import Dataset

from grounded_rl.errors import ConfigurationError
from grounded_rl.trainers import GCAConfig, GCATrainer, SearchAgentConfig, SearchAgentTrainer
from tests.environments.tokenizers import qwen_tokenizer
from tests.sampling.world import TinyRetriever
from tests.trainers.runs import TOKENIZER, agent_options, make_trainer, rows, tiny_model


def refused(match, config_class=SearchAgentConfig, **options):
    with pytest.raises(ConfigurationError, match=match) as caught:
        config_class(**agent_options("unused", **options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rollout_max_turns": 0}, "`rollout_max_turns` must be at least 1: got 0"),
        ({"rollout_max_turn_tokens": 0}, "`rollout_max_turn_tokens` must be at least 1: got 0"),
        ({"retrieval_top_k": 0}, "`retrieval_top_k` must be at least 1: got 0"),
        ({"rollout_observation_tokens": 0}, "`rollout_observation_tokens` must be at least 1: got 0"),
        ({"rollout_max_calls_per_turn": 0}, "`rollout_max_calls_per_turn` must be at least 1: got 0"),
        ({"rollout_max_failed_share": 1.5}, r"`rollout_max_failed_share` must be in \[0, 1\]: got 1.5"),
        ({"rollout_log_groups": -2}, "`rollout_log_groups` must be -1 or more: got -2"),
        ({"credit_epsilon": -1.0}, "`credit_epsilon` must be at least 0: got -1.0"),
        ({"credit_singleton": "one"}, r"`credit_singleton` must be one of \('zero', 'raw'\): got 'one'"),
        ({"retrieval_on_failure": "skip"}, "`retrieval_on_failure` must be one of .*: got 'skip'"),
        ({"reward_format": "f1"}, "`reward_format` must be one of .*'search_r1_v03'.*: got 'f1'"),
        ({"prompt_style": "poem"}, "`prompt_style` must be one of .*'gca'.*: got 'poem'"),
        ({"tool_format": "morse"}, "`tool_format` must be one of .*'qwen'.*: got 'morse'"),
        ({"tool_format": "search_r1"}, "`tool_format` must be one of .*: got 'search_r1'"),
        ({"importance_sampling_level": "word"}, "`importance_sampling_level` must be one of .*: got 'word'"),
        ({"scale_rewards": "batch"}, "`scale_rewards` must be one of .*'group'.*: got 'batch'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "`multi_objective_aggregation` must be one of"),
        ({"num_generations": 1}, "`num_generations` must be at least 2: got 1"),
    ],
)
def test_values_out_of_range_are_named(options, match):
    refused(match, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"gca_eta": -0.1}, "`gca_eta` must be at least 0 and, times .*, below 1: got -0.1"),
        ({"gca_eta": 2.5}, "`gca_eta` must be .* below 1: got 2.5"),
        ({"gca_lambda_table": "steep"}, "`gca_lambda_table` must be one of .*'default'.*: got 'steep'"),
        ({"gca_lambda_scale": -1.0}, "`gca_lambda_scale` must be at least 0: got -1.0"),
        ({"gca_margin": "median"}, "`gca_margin` must be one of .*'lse'.*: got 'median'"),
        ({"gca_matcher": "fuzzy"}, "`gca_matcher` must be one of .*'substring'.*: got 'fuzzy'"),
        ({"gca_num_competitors": 0}, "`gca_num_competitors` must be at least 1: got 0"),
        ({"gca_entropy_top_m": 3}, "`gca_entropy_top_m` must be larger than `gca_num_competitors`: got 3"),
        ({"gca_tau": 0.0}, "`gca_tau` must be positive: got 0.0"),
        ({"gca_c_max": 0.0}, "`gca_c_max` must be positive: got 0.0"),
        ({"gca_alpha": -1.0}, "`gca_alpha` must be at least 0: got -1.0"),
    ],
)
def test_values_of_gca_out_of_range_are_named(options, match):
    refused(match, GCAConfig, **options)


def test_all_violations_stand_in_one_message():
    refused("`rollout_max_turns` .*`retrieval_top_k`", rollout_max_turns=0, retrieval_top_k=-1)


def test_a_group_that_does_not_fit_a_process_is_refused():
    refused(
        r"`num_generations` \(5\) must divide `per_device_train_batch_size \* steps_per_generation` \(8\)",
        num_generations=5,
        generation_batch_size=None,
    )


def test_an_evaluation_batch_must_hold_whole_groups():
    refused(
        r"`per_device_eval_batch_size` must be a multiple of the rollouts per question in evaluation \(4\): got 6",
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=6,
    )


def test_what_trl_refuses_is_a_configuration_error_too():
    refused("can not be both configured", generation_batch_size=8, steps_per_generation=2)


def test_generation_options_may_be_text_and_win_over_the_cap_of_a_turn():
    config = SearchAgentConfig(**agent_options("unused", generation_kwargs='{"max_new_tokens": 9, "top_k": 5}'))
    assert config.generation_kwargs == {"max_new_tokens": 9, "top_k": 5}


def test_a_checkpoint_amid_a_generation_batch_is_warned_about(caplog):
    SearchAgentConfig(**agent_options("unused", save_strategy="steps", save_steps=3))
    assert "`save_steps` (3) is no multiple of the steps one generation batch serves (2)" in caplog.text
    caplog.clear()
    SearchAgentConfig(**agent_options("unused", save_strategy="steps", save_steps=4))
    assert not caplog.text


# --- datasets


def test_a_dataset_smaller_than_one_generation_batch_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"`train_dataset` must hold at least the 2 questions .*: got 1\. Add"
    ):
        make_trainer(SearchAgentTrainer, tmp_path, dataset=rows("Peru"))


@pytest.mark.parametrize(
    ("row", "match"),
    [
        ({"question": "Who?"}, "`train_dataset`, row 0: .* Add `answers`"),
        ({"answers": ["a"]}, "`train_dataset`, row 0: .* Add `question`"),
        ({"question": " ", "answers": ["a"]}, "row 0: `question` must be a non-blank string"),
        ({"question": "Who?", "answers": []}, "row 0: `answers` must be a non-empty list of strings"),
        ({"question": "Who?", "answers": "a"}, "row 0: `answers` must be a non-empty list of strings: got 'a'"),
        ({"question": "Who?", "answers": [3]}, "row 0: `answers` must be a non-empty list of strings"),
    ],
)
def test_a_row_of_another_form_is_named(tmp_path, row, match):
    with pytest.raises(ConfigurationError, match=match):
        make_trainer(SearchAgentTrainer, tmp_path, dataset=Dataset.from_list([row, row]))


def test_repeated_ids_are_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"`id` must be unique in `train_dataset`: got 'q-Peru' more than once"
    ):
        make_trainer(SearchAgentTrainer, tmp_path, dataset=rows("Peru", "Chile", "Peru"))


def test_numbers_as_ids_become_text(tmp_path):
    dataset = rows("Peru", "Chile").remove_columns("id").add_column("id", [7, 8])
    trainer = make_trainer(SearchAgentTrainer, tmp_path, dataset=dataset)
    assert list(trainer.train_dataset["id"]) == ["7", "8"]


def test_a_streamed_dataset_is_refused(tmp_path):
    with pytest.raises(
        ConfigurationError, match=r"`train_dataset` must be a `datasets.Dataset`: got a `IterableDataset`"
    ):
        make_trainer(SearchAgentTrainer, tmp_path, dataset=rows().to_iterable_dataset())


# --- tokenizers, models, configurations


def build(folder, *, model=None, tokenizer=TOKENIZER, trainer_class=SearchAgentTrainer, args=None):
    return trainer_class(
        model or tiny_model(),
        TinyRetriever(),
        args=args or SearchAgentConfig(**agent_options(folder)),
        train_dataset=rows(),
        processing_class=tokenizer,
    )


def test_a_chat_template_without_tools_is_refused(tmp_path):
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ConfigurationError, match=r"`chat_template` must present tools"):
        build(tmp_path, tokenizer=tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ConfigurationError, match=r"`chat_template` must be given for function calling"):
        build(tmp_path, tokenizer=tokenizer)


def test_a_chat_template_that_rewrites_history_is_refused(tmp_path):
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = (
        "{% if tools %}tools{% endif %}{% for m in messages %}"
        "{{ loop.index0 - messages|length }}{{ m.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(ConfigurationError, match=r"`chat_template` must keep earlier messages unchanged"):
        build(tmp_path, tokenizer=tokenizer)


def test_a_model_in_memory_needs_its_tokenizer(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`processing_class` must be given for a model that was not loaded"):
        build(tmp_path, tokenizer=None)


def test_the_configuration_must_be_that_of_the_method(tmp_path):
    with pytest.raises(ConfigurationError, match=r"`args` must be a `GCAConfig`: got a `SearchAgentConfig`"):
        build(tmp_path, trainer_class=GCATrainer)


def test_gca_refuses_a_model_it_cannot_measure(tmp_path):
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ConfigurationError, match=r"`model` must not transform its logits"):
        build(tmp_path, model=model, trainer_class=GCATrainer, args=GCAConfig(**agent_options(tmp_path)))
