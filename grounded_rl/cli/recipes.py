"""
Recipes: one flat YAML file that fills the dataclasses of a run; `--key value` on the command line wins over it.

Parsing is strict. A key no dataclass knows, a key given twice, a mapping where a plain value belongs or a value of the
wrong type is one clear line, never a silent default. Keys of the launcher (`num_processes`, `mixed_precision`, …) live
in `recipes/accelerate/`.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from grounded_rl.cli._convert import ConversionError, convert, describe, holds_list, is_boolean
from grounded_rl.cli._parser import nearest
from grounded_rl.errors import ConfigurationError, GroundedRLError
from grounded_rl.methods import METHODS

__all__ = ["RECIPE_TYPES", "parse_recipe", "read_recipe", "recipe_dataclasses"]

RECIPE_TYPES: dict[str, tuple[str, ...]] = {
    name: ("grounded_rl.cli.train:TrainArguments", f"grounded_rl.trainers:{method.config}", "trl:ModelConfig")
    for name, method in METHODS.items()
}
"""
Dataclasses of every value of the key `method`, as `"module:Name"`, imported when a recipe asks for them. One of them
must declare the field `method`.
"""

LAUNCHER_KEYS = frozenset(
    {
        "compute_environment",
        "deepspeed_config",
        "distributed_type",
        "downcast_bf16",
        "dynamo_config",
        "enable_cpu_affinity",
        "env",
        "gpu_ids",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "main_training_function",
        "mixed_precision",
        "num_machines",
        "num_processes",
        "rdzv_backend",
        "same_network",
        "use_cpu",
    }
)
"""Keys of `accelerate launch` that people put into recipes by habit; a dataclass that declares one keeps it."""


def read_recipe(path: str | os.PathLike) -> dict[str, Any]:
    """
    The keys and values of a recipe file, untouched.

    Args:
        path (`str` or `PathLike`):
            YAML file with one mapping from keys to values.

    Returns:
        `dict[str, Any]`: Values by key, as YAML reads them.

    Raises:
        `ConfigurationError`: If the file is empty, is not YAML, repeats a key, or holds something else than a mapping.
        `FileNotFoundError`: If the file does not exist.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        values = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigurationError(
            f"{path}{line}: the recipe must be YAML of the form `key: value`: got {error.problem}. Correct that line."
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(
            f"{path}: the recipe must be YAML text: got {' '.join(str(error).split())}. Correct the file."
        ) from error
    if values is None:
        raise ConfigurationError(f"{path}: the recipe must hold at least one `key: value`: got none. Fill the file.")
    if not isinstance(values, dict):
        raise ConfigurationError(
            f"{path}: the recipe must be a mapping of keys to values: got a {type(values).__name__}. "
            "Write one `key: value` a line."
        )
    for key in values:
        if not isinstance(key, str):
            raise ConfigurationError(f"{path}: a key must be text: got {key!r}. Put it in quotes if it is a name.")
    return values


def parse_recipe(
    path: str | os.PathLike | None, overrides: Sequence[str], dataclass_types: tuple[type, ...]
) -> tuple[Any, ...]:
    """
    Dataclass instances from a recipe file and command-line overrides.

    Args:
        path (`str` or `PathLike`, *optional*):
            Recipe file. `None` uses the overrides and the defaults of the dataclasses alone.
        overrides (`Sequence[str]`):
            Words such as `["--learning_rate", "1e-6", "--bf16", "--beta=0.04"]`. They win over the file, the last of a
            repeated key wins. A list is written `--key a b` or `--key '[a, b]'`, a missing value `--key null`. Dashes
            in a key may stand for underscores.
        dataclass_types (`tuple[type, ...]`):
            Dataclasses to fill, for instance our arguments and a subclass of [`~trl.GRPOConfig`]. Field names must be
            unique across them.

    Returns:
        `tuple`: One instance per dataclass type, in order.

    Raises:
        `ConfigurationError`: For any key or value that does not fit; the message names the key and, for an unknown
        key, the nearest valid one.

    Example:

    ```python
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Arguments:
    ...     learning_rate: float = 1e-6
    >>> parse_recipe(None, ["--learning-rate", "5e-5"], (Arguments,))
    (Arguments(learning_rate=5e-05),)

    ```
    """
    owners = _owners(dataclass_types)
    annotations = {name: hint for owner in dataclass_types for name, hint in typing.get_type_hints(owner).items()}
    values: dict[str, Any] = {}
    if path is not None:
        for key, value in read_recipe(path).items():
            _check_key(key, owners, f"{path}: `{key}`")
            values[key] = _typed_value(key, value, annotations[key], f"{path}: ")
    for key, words in _split_overrides(overrides):
        _check_key(key, owners, f"`--{key}`")
        values[key] = _override_value(key, words, annotations[key])
    return tuple(_build(owner, values, owners) for owner in dataclass_types)


def recipe_dataclasses(path: str | os.PathLike | None, overrides: Sequence[str] = ()) -> tuple[type, ...]:
    """
    The dataclasses a recipe fills, chosen by its key `method`.

    Args:
        path (`str` or `PathLike`, *optional*):
            Recipe file.
        overrides (`Sequence[str]`, *optional*):
            Command-line words; `--method NAME` wins over the file.

    Returns:
        `tuple[type, ...]`: Dataclasses for [`parse_recipe`].

    Raises:
        `ConfigurationError`: If no method is given, or one that is not in `RECIPE_TYPES`.
    """
    where = "" if path is None else f"{path}: "
    method = None if path is None else read_recipe(path).get("method")
    for key, words in _split_overrides(overrides):
        if key == "method":
            method = " ".join(words)
    if method not in RECIPE_TYPES:
        match = nearest(str(method), list(RECIPE_TYPES)) if method is not None else None
        hint = f"Did you mean `{match}`?" if match else "Add the line `method: NAME` or pass `--method NAME`."
        raise ConfigurationError(f"{where}`method` must be one of {', '.join(RECIPE_TYPES)}: got {method!r}. {hint}")
    return tuple(_import_type(reference) for reference in RECIPE_TYPES[method])


class _UniqueKeyLoader(yaml.SafeLoader):
    """Safe loader that refuses a key given twice, which YAML would silently resolve to the last one."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key `{key_node.value}` a second time", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep=deep)


def _import_type(reference: str) -> type:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def _owners(dataclass_types: tuple[type, ...]) -> dict[str, type]:
    owners: dict[str, type] = {}
    for owner in dataclass_types:
        for field in dataclasses.fields(owner):
            if not field.init:
                continue
            if field.name in owners:
                raise ConfigurationError(
                    f"`{field.name}` must belong to one dataclass: got {owners[field.name].__name__} and "
                    f"{owner.__name__}. Rename one of the fields."
                )
            owners[field.name] = owner
    return owners


def _check_key(key: str, owners: Mapping[str, type], shown: str) -> None:
    if key in owners:
        return
    if key in LAUNCHER_KEYS:
        raise ConfigurationError(
            f"{shown} must not stand in a recipe: it belongs to the launcher. "
            "Use `accelerate launch --config_file` with a file of recipes/accelerate/, or set it in the shell."
        )
    match = nearest(key, list(owners))
    hint = f"Did you mean `{match}`?" if match else "See recipes/README.md for the keys of each method."
    raise ConfigurationError(f"{shown} must be a known key: got one that no dataclass of this run has. {hint}")


def _split_overrides(overrides: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Keys of the command line with the words that follow each; `--key=value` is one word."""
    pairs: list[tuple[str, list[str]]] = []
    for word in overrides:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            pairs.append((key.replace("-", "_"), [value] if equals else []))
        elif not pairs:
            raise ConfigurationError(f"`{word}` must follow a key: got it first. Write `--key {word}`.")
        else:
            pairs[-1][1].append(word)
    return pairs


def _typed_value(key: str, value: Any, annotation: object, where: str) -> object:
    try:
        return convert(value, annotation, typed=True)
    except ConversionError as error:
        got = "a mapping" if isinstance(value, dict) else repr(value)
        advice = (
            "Recipes are flat: write its keys at the top level" if isinstance(value, dict) else "Correct the value"
        )
        raise ConfigurationError(f"{where}`{key}` must be {error}: got {got}. {advice}.") from error


def _override_value(key: str, words: list[str], annotation: object) -> object:
    if not words and is_boolean(annotation):
        return True
    if not words or (len(words) > 1 and not holds_list(annotation)):
        got = "none" if not words else f"{len(words)} ({' '.join(words)})"
        raise ConfigurationError(f"`--{key}` must have one value: got {got}. Write `--{key} VALUE`, quoted if needed.")
    value: object = words[0] if len(words) == 1 else words
    try:
        return convert(value, annotation, typed=False)
    except ConversionError as error:
        if len(words) == 1 and holds_list(annotation):
            value = [words[0]]
            try:
                return convert(value, annotation, typed=False)
            except ConversionError:
                pass
        raise ConfigurationError(
            f"`--{key}` must be {describe(annotation)}: got {' '.join(words)!r}. Correct the value."
        ) from error


def _build(owner: type, values: Mapping[str, Any], owners: Mapping[str, type]) -> Any:
    mine = {key: value for key, value in values.items() if owners[key] is owner}
    missing = [
        field.name
        for field in dataclasses.fields(owner)
        if field.init
        and field.name not in mine
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        raise ConfigurationError(f"{names} must be given: got no value. Add `{missing[0]}: VALUE` to the recipe.")
    try:
        return owner(**mine)
    except GroundedRLError:
        raise
    except (ValueError, TypeError, ImportError) as error:
        raise ConfigurationError(f"{owner.__name__}: {' '.join(str(error).split())}") from error
