"""Recipes: strict keys, strict types, overrides that win, one clear line for everything else."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any, Literal

import pytest

from grounded_rl.cli import recipes
from grounded_rl.cli.recipes import parse_recipe, read_recipe, recipe_dataclasses
from grounded_rl.errors import ConfigurationError, MissingDependencyError


class Schedule(enum.Enum):
    CONSTANT = "constant"
    COSINE = "cosine"


@dataclasses.dataclass
class RunArguments:
    method: Literal["grpo", "gca"] = "grpo"
    model: str | None = None
    index_path: Path | None = None
    turns: tuple[int, ...] = ()
    freeform: Any = None


@dataclasses.dataclass
class TrainConfig:
    learning_rate: float = 1e-6
    max_steps: int = -1
    bf16: bool = False
    tf32: bool | None = None
    beta: float | None = None
    schedule: Schedule = Schedule.CONSTANT
    schedule_or_text: Schedule | str = Schedule.CONSTANT
    report_to: str | list[str] | None = None
    reward_weights: list[float] | None = None
    model_kwargs: dict[str, int] | str | None = None
    pad_to: int | str | None = None
    derived: int = dataclasses.field(default=0, init=False)

    def __post_init__(self):
        if self.learning_rate < 0:
            raise ValueError("learning_rate must not be negative,\n   sorry")
        if self.pad_to == "fused":
            raise ImportError("the fused kernel is not installed")
        if self.pad_to == "dense":
            raise MissingDependencyError("`pad_to: dense` needs the package `dense`.")


@pytest.fixture
def write(tmp_path):
    def write_recipe(text: str) -> Path:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_recipe


def parse(path, *overrides):
    return parse_recipe(path, list(overrides), (RunArguments, TrainConfig))


def test_every_key_reaches_the_dataclass_that_declares_it(write):
    run, train = parse(write("method: gca\nmodel: tiny\nlearning_rate: 0.5\nbf16: true\nmax_steps: 7\n"))
    assert run == RunArguments(method="gca", model="tiny")
    assert train == TrainConfig(learning_rate=0.5, bf16=True, max_steps=7)


def test_without_a_file_overrides_and_defaults_fill_the_dataclasses():
    run, train = parse(None, "--model", "tiny")
    assert (run, train) == (RunArguments(model="tiny"), TrainConfig())


def test_overrides_win_over_the_file_and_the_last_of_a_repeated_key_wins(write):
    _, train = parse(write("learning_rate: 0.5\nmax_steps: 3\n"), "--learning-rate=1", "--learning_rate", "2e-5")
    assert (train.learning_rate, train.max_steps) == (2e-5, 3)


def test_an_override_repairs_a_key_that_the_file_leaves_valid_but_not_one_it_breaks(write):
    with pytest.raises(ConfigurationError, match="`max_steps` must be a whole number: got 'many'"):
        parse(write("max_steps: many\n"), "--max_steps", "3")


@pytest.mark.parametrize(
    ("line", "field", "expected"),
    [
        ("learning_rate: 1e-6", "learning_rate", 1e-6),
        ("learning_rate: 3", "learning_rate", 3.0),
        ("beta: 1e-3", "beta", 1e-3),
        ("beta: null", "beta", None),
        ("beta:", "beta", None),
        ("max_steps: 1.0e+3", "max_steps", 1000),
        ("tf32: no", "tf32", False),
        ("schedule: cosine", "schedule", Schedule.COSINE),
        ("schedule_or_text: cosine", "schedule_or_text", Schedule.COSINE),
        ("schedule_or_text: linear", "schedule_or_text", "linear"),
        ("report_to: none", "report_to", "none"),
        ("report_to: [wandb, tensorboard]", "report_to", ["wandb", "tensorboard"]),
        ("reward_weights: [1, 5e-1]", "reward_weights", [1.0, 0.5]),
        ("model_kwargs: {layers: 2}", "model_kwargs", {"layers": 2}),
        ("model_kwargs: kwargs.json", "model_kwargs", "kwargs.json"),
        ("pad_to: 8", "pad_to", 8),
        ("pad_to: '8'", "pad_to", "8"),
    ],
)
def test_a_value_of_the_file_becomes_the_type_of_its_field(write, line, field, expected):
    _, train = parse(write(line + "\n"))
    assert getattr(train, field) == expected
    assert type(getattr(train, field)) is type(expected)


@pytest.mark.parametrize(
    ("words", "field", "expected"),
    [
        (["--bf16"], "bf16", True),
        (["--bf16", "off"], "bf16", False),
        (["--bf16", "False"], "bf16", False),
        (["--tf32", "none"], "tf32", None),
        (["--beta", "null"], "beta", None),
        (["--beta", "-0.5"], "beta", -0.5),
        (["--schedule", "cosine"], "schedule", Schedule.COSINE),
        (["--report_to", "none"], "report_to", "none"),
        (["--report_to", "null"], "report_to", None),
        (["--report_to", "wandb", "tensorboard"], "report_to", ["wandb", "tensorboard"]),
        (["--reward_weights", "1", "0.5"], "reward_weights", [1.0, 0.5]),
        (["--reward_weights", "[1, 0.5]"], "reward_weights", [1.0, 0.5]),
        (["--reward_weights", "2"], "reward_weights", [2.0]),
        (["--model_kwargs", "{layers: 2}"], "model_kwargs", {"layers": 2}),
        (["--pad_to", "8"], "pad_to", 8),
        (["--pad_to=longest"], "pad_to", "longest"),
    ],
)
def test_a_value_of_the_command_line_becomes_the_type_of_its_field(words, field, expected):
    _, train = parse(None, *words)
    assert getattr(train, field) == expected
    assert type(getattr(train, field)) is type(expected)


def test_paths_tuples_and_free_values_keep_their_kind(write):
    run, _ = parse(write("index_path: a/b\nturns: [1, 2]\nfreeform: {deep: [1]}\n"))
    assert run == RunArguments(index_path=Path("a/b"), turns=(1, 2), freeform={"deep": [1]})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1\n", r"recipe.yaml: `learning_rte` must be a known key: .* Did you mean `learning_rate`\?"),
        ("zzz: 1\n", r"`zzz` must be a known key: .* See recipes/README.md"),
        ("derived: 1\n", "`derived` must be a known key"),
        ("learning_rate: abc\n", "`learning_rate` must be a number: got 'abc'"),
        ("learning_rate: .nan\n", "`learning_rate` must be a number: got nan"),
        ("learning_rate: true\n", "`learning_rate` must be a number: got True"),
        ("learning_rate:\n", "`learning_rate` must be a number: got None"),
        ("learning_rate: [1]\n", r"`learning_rate` must be a number: got \[1\]"),
        ("max_steps: 1.5\n", "`max_steps` must be a whole number: got 1.5"),
        ("max_steps: .inf\n", "`max_steps` must be a whole number: got inf"),
        ("bf16: 1\n", "`bf16` must be one of `true`, `false`: got 1"),
        ("bf16: 'true'\n", "`bf16` must be one of `true`, `false`: got 'true'"),
        ("model: 3\n", "`model` must be one of text, `null`: got 3"),
        ("method: ppo\n", "`method` must be one of `grpo`, `gca`: got 'ppo'"),
        ("schedule: sine\n", "`schedule` must be one of `constant`, `cosine`: got 'sine'"),
        ("reward_weights: 1\n", r"`reward_weights` must be one of a list \(each item a number\), `null`: got 1"),
        ("reward_weights: [a]\n", "`reward_weights` must be one of a list"),
        ("max_steps:\n  value: 3\n", "`max_steps` must be a whole number: got a mapping. Recipes are flat"),
        ("train:\n  learning_rate: 1\n", "`train` must be a known key"),
        ("max_steps: 1\nmax_steps: 2\n", "line 2: .* got the key `max_steps` a second time"),
        ("model_kwargs: {a: 1, a: 2}\n", "line 1: .* got the key `a` a second time"),
        ("- a\n- b\n", "must be a mapping of keys to values: got a list"),
        ("just text\n", "must be a mapping of keys to values: got a str"),
        ("", "must hold at least one `key: value`: got none"),
        ("# only a comment\n", "must hold at least one `key: value`: got none"),
        ("a: [1\n", "the recipe must be YAML of the form `key: value`"),
        ("\tmax_steps: 1\n", "the recipe must be YAML"),
        ("max_steps: \x01\n", "the recipe must be YAML text"),
        ("yes: 1\n", "a key must be text: got True"),
        ("num_processes: 8\n", "`num_processes` must not stand in a recipe: it belongs to the launcher"),
        ("env:\n  A: b\n", "`env` must not stand in a recipe: .* recipes/accelerate/"),
        ("learning_rate: -1\n", "TrainConfig: learning_rate must not be negative, sorry"),
        ("pad_to: fused\n", "TrainConfig: the fused kernel is not installed"),
    ],
)
def test_a_broken_recipe_is_one_clear_line(write, text, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse(write(text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rat", "1"], r"`--learning_rat` must be a known key: .* Did you mean `learning_rate`\?"),
        (["--mixed_precision", "bf16"], "`--mixed_precision` must not stand in a recipe"),
        (["--learning_rate"], "`--learning_rate` must have one value: got none"),
        (["--learning_rate", "1", "2"], r"`--learning_rate` must have one value: got 2 \(1 2\)"),
        (["--learning_rate", "abc"], "`--learning_rate` must be a number: got 'abc'"),
        (["--bf16", "maybe"], "`--bf16` must be one of `true`, `false`: got 'maybe'"),
        (["--reward_weights", "a", "b"], "`--reward_weights` must be one of a list"),
        (["--model_kwargs", "{a: b}", "--reward_weights", "{a"], "`--reward_weights` must be one of a list"),
        (["stray", "--bf16"], "`stray` must follow a key"),
    ],
)
def test_a_broken_override_is_one_clear_line(words, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse(None, *words)
    assert "\n" not in str(caught.value)


def test_errors_of_the_package_pass_through_unwrapped(write):
    with pytest.raises(MissingDependencyError, match="^`pad_to: dense` needs"):
        parse(write("pad_to: dense\n"))


def test_a_required_field_without_a_value_is_named():
    required = dataclasses.make_dataclass("Required", [("question", str), ("answer", str)])
    with pytest.raises(ConfigurationError, match="`question`, `answer` must be given: .* Add `question: VALUE`"):
        parse_recipe(None, [], (required,))


def test_a_field_of_two_dataclasses_is_refused():
    twin = dataclasses.make_dataclass("Twin", [("bf16", bool, False)])
    with pytest.raises(ConfigurationError, match="`bf16` must belong to one dataclass: got TrainConfig and Twin"):
        parse_recipe(None, [], (TrainConfig, twin))


def test_a_launcher_key_that_a_dataclass_declares_is_its_own():
    own = dataclasses.make_dataclass("Own", [("use_cpu", bool, False)])
    assert parse_recipe(None, ["--use_cpu"], (own,))[0].use_cpu is True


def test_yaml_anchors_and_merges_still_work_without_repeated_keys(write):
    values = read_recipe(write("base: &base {a: 1}\nmerged: {<<: *base, b: 2}\n"))
    assert values["merged"] == {"a": 1, "b": 2}


def test_a_missing_recipe_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        parse(tmp_path / "absent.yaml")


def test_the_method_chooses_the_dataclasses_and_an_override_wins(write, monkeypatch):
    monkeypatch.setattr(recipes, "RECIPE_TYPES", {"grpo": ("dataclasses:Field",), "gca": ("enum:Enum", "enum:Flag")})
    path = write("method: grpo\n")
    assert recipe_dataclasses(path) == (dataclasses.Field,)
    assert recipe_dataclasses(path, ["--method", "gca"]) == (enum.Enum, enum.Flag)
    assert recipe_dataclasses(None, ["--method=grpo"]) == (dataclasses.Field,)
    with pytest.raises(ConfigurationError, match=r"`method` must be one of grpo, gca: got 'gcaa'. Did you mean `gca`"):
        recipe_dataclasses(path, ["--method", "gcaa"])
    with pytest.raises(ConfigurationError, match="got None. Add the line `method: NAME`"):
        recipe_dataclasses(write("beta: 1\n"))


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
def test_a_config_of_trl_takes_all_kinds_of_recipe_values(write, tmp_path):
    trl = pytest.importorskip("trl", reason="the extra `train` is not installed")
    path = write(
        "learning_rate: 1e-6\nuse_cpu: true\nbf16: true\nreport_to: none\nlr_scheduler_type: cosine\n"
        "gradient_checkpointing_kwargs:\n  use_reentrant: false\nreward_weights: [1, 0.5]\nnum_generations: 4\n"
    )
    run, config = parse_recipe(
        path, ["--output-dir", str(tmp_path), "--model", "tiny", "--max_steps=5"], (RunArguments, trl.GRPOConfig)
    )
    assert run.model == "tiny"
    assert config.learning_rate == 1e-6
    assert config.lr_scheduler_type == "cosine"
    assert config.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert (config.reward_weights, config.max_steps) == ([1.0, 0.5], 5)
    with pytest.raises(ConfigurationError, match=r"Did you mean `num_generations`\?"):
        parse_recipe(None, ["--num_generation", "4"], (RunArguments, trl.GRPOConfig))
    with pytest.raises(
        ConfigurationError, match="GRPOConfig: .*'bad' is not a valid IntervalStrategy|GRPOConfig: bad"
    ):
        parse_recipe(None, ["--logging_strategy", "bad"], (trl.GRPOConfig,))
