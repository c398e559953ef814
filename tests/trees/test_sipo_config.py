"""Configurations of the tree methods: the paper's numbers, what follows from them, and what is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from grounded_rl.credit import SIPOOptions, sipo_options
from grounded_rl.errors import ConfigurationError
from grounded_rl.methods import METHODS
from grounded_rl.trainers import AT2POConfig, GCASIPOConfig, SIPOConfig

CPU = {"use_cpu": True, "bf16": False, "report_to": "none"}


def make(config_class=SIPOConfig, tmp="out", **options):
    return config_class(output_dir=tmp, **{**CPU, **options})


def test_the_defaults_are_the_papers():
    config = make()
    assert config.num_generations == 22
    shape, rule = config.shape(), config.rule()
    assert (shape.num_initial, shape.num_rounds, shape.num_incumbents, shape.num_fresh) == (10, 2, 3, 2)
    assert (rule.standardize, rule.penalty, rule.penalty_per_branch) == (True, 0.05, False)
    assert (config.correction_weight, config.sipo_min_slope_candidates) == (1.0, 50)
    assert config.options() == SIPOOptions()
    assert (config.learning_rate, config.beta, config.max_steps) == (1e-6, 0.0, 240)
    assert (config.epsilon, config.epsilon_high) == (0.003, 0.004)
    assert (config.importance_sampling_level, config.loss_type) == ("turn", "grpo")
    # Six calls and the answer.
    assert (config.rollout_max_turns, config.max_completion_length, config.reward_format) == (7, 6192, "em")


def test_at2po_is_the_same_with_every_part_off():
    config = make(AT2POConfig)
    shape = config.shape()
    assert (shape.num_incumbents, shape.num_fresh, shape.num_leaves) == (6, 1, 22)
    assert not config.rule().standardize
    assert config.correction_weight == 0.0
    assert config.options() == SIPOOptions()


@pytest.mark.parametrize(
    ("part", "off"), [("sipo_sfc", (False, 3, 1.0)), ("sipo_exb", (True, 6, 1.0)), ("sipo_osc", (True, 3, 0.0))]
)
def test_each_part_is_a_switch_that_keeps_the_leaves(part, off):
    config = make(**{part: False})
    assert (config.rule().standardize, config.shape().num_incumbents, config.correction_weight) == off
    assert config.shape().num_leaves == config.num_generations == 22


def test_the_number_of_leaves_follows_from_the_shape_and_is_checked():
    small = {"sipo_num_initial": 4, "sipo_num_incumbents": 1, "per_device_train_batch_size": 8}
    assert make(**small).num_generations == 8
    assert make(**small, num_generations=8).num_generations == 8
    with pytest.raises(ConfigurationError, match=r"`num_generations` must be .* = 8, or left out: got 16"):
        make(**small, num_generations=16)


def test_release_flips_all_nine_differences_and_a_given_choice_wins():
    config = make(sipo_compat="release")
    assert config.options() == sipo_options("release")
    assert config.reward_format == "em_format_penalty"
    assert (config.rule().root_candidate, config.rule().spread) == ("always", "absolute")
    config = make(sipo_compat="release", sipo_event_rule="recent", reward_format="em")
    assert config.options() == sipo_options("release", event_rule="recent", reward="em")


def test_every_option_of_the_credit_is_a_field():
    config = make()
    names = {field.name for field in fields(config)}
    missing = [field.name for field in fields(SIPOOptions) if f"sipo_{field.name}" not in names]
    # The reward has the name it has for every method.
    assert missing == ["reward"]


def test_all_violations_are_reported_at_once():
    with pytest.raises(ConfigurationError) as error:
        make(sipo_num_fresh=0, sipo_penalty=-1.0, sipo_event_rule="latest", sipo_compat="code", scale_rewards="none")
    message = str(error.value)
    for part in (
        "`sipo_num_fresh` must be at least 1: got 0.",
        "`sipo_penalty` must be at least 0: got -1.0.",
        "`sipo_event_rule` must be one of ('recent', 'deepest', 'release'): got 'latest'.",
        "`sipo_compat` must be one of ('paper', 'release'): got 'code'.",
        "`scale_rewards` must be 'group'",
    ):
        assert part in message


def test_whole_trees_must_fit_on_a_process():
    with pytest.raises(ConfigurationError, match="`num_generations` .22. must divide"):
        make(per_device_train_batch_size=11, steps_per_generation=3)


def test_gca_on_trees_has_the_fields_of_both_and_sipos_defaults():
    config = make(GCASIPOConfig, gca_eta=0.1)
    assert (config.num_generations, config.rollout_max_turns, config.importance_sampling_level) == (22, 7, "turn")
    assert config.routing().eta == 0.1
    with pytest.raises(ConfigurationError, match="`sipo_penalty` must be at least 0.*`gca_margin` must be one of"):
        make(GCASIPOConfig, gca_margin="median", sipo_penalty=-1.0)


@pytest.mark.parametrize(
    ("name", "trainer", "config"),
    [
        ("at2po", "SIPOTrainer", AT2POConfig),
        ("sipo", "SIPOTrainer", SIPOConfig),
        ("gca_sipo", "GCASIPOTrainer", GCASIPOConfig),
    ],
)
def test_the_methods_are_registered(name, trainer, config):
    method = METHODS[name]
    assert method.load_trainer().__name__ == trainer
    assert method.config == config.__name__
    assert issubclass(config, method.load_trainer().config_class)
