"""Every file under recipes/ parses strictly: launcher files with accelerate's loader, recipes with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from grounded_rl.cli.recipes import LAUNCHER_KEYS, parse_recipe, read_recipe, recipe_dataclasses

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
LAUNCHERS = sorted((RECIPES / "accelerate").rglob("*.yaml"))
TRAINING = sorted(path for path in RECIPES.rglob("*.yaml") if path not in LAUNCHERS)


def name(path: Path) -> str:
    return str(path.relative_to(RECIPES))


def test_there_are_recipes_and_none_hides_under_another_suffix():
    assert len(LAUNCHERS) >= 5
    assert not [path for path in RECIPES.rglob("*") if path.suffix in {".yml", ".json", ".toml"}]


@pytest.mark.parametrize("path", LAUNCHERS, ids=name)
def test_a_launcher_file_is_one_that_accelerate_loads(path):
    config_args = pytest.importorskip(
        "accelerate.commands.config.config_args", reason="the extra `train` is not installed"
    )
    config = config_args.load_config_from_file(str(path))
    assert config.mixed_precision == "bf16"
    assert path.stem.startswith(f"{config.num_processes}gpu")
    assert config.num_machines == 1


@pytest.mark.parametrize(
    ("stem", "kind", "section", "entry"),
    [
        ("4gpu", "MULTI_GPU", None, None),
        ("8gpu", "MULTI_GPU", None, None),
        ("4gpu_zero2", "DEEPSPEED", "deepspeed_config", ("zero_stage", 2)),
        ("8gpu_zero3", "DEEPSPEED", "deepspeed_config", ("zero_stage", 3)),
        ("8gpu_fsdp2", "FSDP", "fsdp_config", ("fsdp_version", 2)),
    ],
)
def test_a_launcher_file_shards_as_its_name_says(stem, kind, section, entry):
    values = read_recipe(RECIPES / "accelerate" / f"{stem}.yaml")
    assert values["distributed_type"] == kind
    if section is not None:
        key, expected = entry
        assert values[section][key] == expected


@pytest.mark.parametrize("path", LAUNCHERS, ids=name)
def test_the_launcher_keys_we_refuse_in_recipes_are_those_of_launcher_files(path):
    assert set(read_recipe(path)) - {"debug", "fsdp_config"} <= LAUNCHER_KEYS


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing")
@pytest.mark.parametrize("path", TRAINING, ids=name)
def test_a_recipe_parses_strictly(path, tmp_path):
    torch = pytest.importorskip("torch")
    # transformers refuses `bf16: true` on a machine without an accelerator unless the CPU is asked for.
    overrides = ["--output_dir", str(tmp_path)] + ([] if torch.cuda.is_available() else ["--use_cpu", "true"])
    parsed = parse_recipe(path, overrides, recipe_dataclasses(path))
    assert len(parsed) == len(recipe_dataclasses(path))


@pytest.mark.parametrize("path", LAUNCHERS + TRAINING, ids=name)
def test_a_recipe_opens_with_the_command_that_runs_it(path):
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    comments = [line for line in header.splitlines() if line.startswith("#")]
    assert any("grounded-rl " in line or "-m grounded_rl " in line for line in comments), (
        f"{name(path)} must begin with a comment holding its command"
    )


@pytest.mark.parametrize("path", LAUNCHERS + TRAINING, ids=name)
def test_the_table_of_recipes_lists_every_file(path):
    assert f"`{name(path)}`" in (RECIPES / "README.md").read_text(encoding="utf-8")
