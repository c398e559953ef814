"""Conversion of recipe values to the types of dataclass fields, without guessing."""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Sequence
from pathlib import Path

import yaml

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_PLAIN = {int: "a whole number", float: "a number", str: "text", Path: "a path"}


class ConversionError(ValueError):
    """A value does not fit an annotation; the message is what it must be."""


def is_boolean(annotation: object) -> bool:
    """Whether `--key` without a value may mean `true`."""
    return bool in _members(annotation)


def holds_list(annotation: object) -> bool:
    """Whether `--key a b c` may mean a list."""
    return any(_container(member) in (list, tuple) for member in _members(annotation))


def convert(value: object, annotation: object, *, typed: bool) -> object:
    """
    Value of a recipe as the type of its field.

    Args:
        value (`object`):
            What YAML or the command line gave.
        annotation (`object`):
            Resolved type of the field: plain types, `Literal`, enumerations, `list`, `tuple`, `dict` and unions of
            them. Anything else accepts every value, and the dataclass itself has to check it.
        typed (`bool`):
            Whether the value comes from YAML, where `true` and `3` have types and quoting is possible. On the command
            line everything is text.

    Returns:
        `object`: The converted value.

    Raises:
        `ConversionError`: If the value does not fit; the message completes "must be …".
    """
    members = _members(annotation)
    if value is None or (not typed and type(None) in members and _is_null(value, members)):
        if type(None) in members or typing.Any in members:
            return None
        raise ConversionError(describe(annotation))
    if typed and isinstance(value, str) and str in members and not _is_exponent(value, members):
        # A string stays one where it is allowed, except that an enumeration's own spelling wins over plain text.
        members = [member for member in members if _is_enum(member)] + [str]
    for member in sorted(members, key=_rank):
        try:
            return _convert_one(value, member, typed=typed)
        except ConversionError:
            continue
    raise ConversionError(describe(annotation))


def describe(annotation: object) -> str:
    """What a value of this annotation must be, in words."""
    words = []
    for member in sorted(_members(annotation), key=_rank):
        if member is type(None):
            words.append("`null`")
        elif member is bool:
            words += ["`true`", "`false`"]
        elif typing.get_origin(member) is typing.Literal:
            words += [f"`{choice}`" for choice in typing.get_args(member)]
        elif _is_enum(member):
            words += [f"`{choice.value}`" for choice in member]
        elif _container(member) is dict:
            words.append("a mapping")
        elif _container(member) in (list, tuple):
            inner = typing.get_args(member)
            words.append(f"a list (each item {describe(inner[0])})" if inner else "a list")
        else:
            words.append(_PLAIN.get(member, str(member)))
    if any(_is_enum(member) for member in _members(annotation)) and len(words) > 1:
        words = [word for word in words if word != _PLAIN[str]]
    unique = list(dict.fromkeys(words))
    return unique[0] if len(unique) == 1 else f"one of {', '.join(unique)}"


def _members(annotation: object) -> list:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [leaf for member in typing.get_args(annotation) for leaf in _members(member)]
    return [type(None) if annotation is None else annotation]


def _is_enum(member: object) -> bool:
    return isinstance(member, type) and issubclass(member, enum.Enum)


def _container(member: object) -> object:
    return typing.get_origin(member) or member


def _rank(member: object) -> int:
    """Order in which the members of a union are tried: the pickiest first, free text last."""
    if typing.get_origin(member) is typing.Literal or _is_enum(member):
        return 0
    order = [bool, int, float, dict, list, tuple, Path, str, type(None)]
    return 1 + order.index(_container(member)) if _container(member) in order else len(order) + 1


def _is_exponent(value: str, members: Sequence[object]) -> bool:
    """Whether YAML read a number such as `1e-6` as text (its grammar wants `1.0e-6`)."""
    return float in members and value[:1] in "+-.0123456789" and _as_float(value) is not None


def _is_null(value: object, members: Sequence[object]) -> bool:
    """Whether a word of the command line means `null`; `none` may also be a text that the field accepts."""
    words = ("null", "~") if str in members else ("null", "~", "none")
    return isinstance(value, str) and value.lower() in words


def _as_float(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _convert_one(value: object, member: object, *, typed: bool) -> object:
    if typing.get_origin(member) is typing.Literal:
        return _choice(value, {choice: choice for choice in typing.get_args(member)}, typed=typed)
    if _is_enum(member):
        return _choice(value, {item.value: item for item in member}, typed=typed)
    container = _container(member)
    if container is bool:
        return _boolean(value, typed=typed)
    if container in (int, float):
        return _number(value, container)
    if container is str:
        if typed and not isinstance(value, str):
            raise ConversionError(_PLAIN[str])
        return str(value)
    if container is Path:
        if not isinstance(value, str):
            raise ConversionError(_PLAIN[Path])
        return Path(value)
    if container in (dict, list, tuple):
        return _collection(value, member, typed=typed)
    if container is type(None):
        raise ConversionError("`null`")
    return value


def _choice(value: object, choices: dict, *, typed: bool) -> object:
    for choice, result in choices.items():
        if type(value) is type(choice) and value == choice:
            return result
        if not typed and str(choice).lower() == str(value).lower():
            return result
    raise ConversionError("a choice")


def _boolean(value: object, *, typed: bool) -> bool:
    if isinstance(value, bool):
        return value
    if not typed and isinstance(value, str) and value.lower() in _BOOLEANS:
        return _BOOLEANS[value.lower()]
    raise ConversionError(describe(bool))


def _number(value: object, kind: type) -> int | float:
    if isinstance(value, str):
        number = _as_float(value)
    else:
        number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    if number is None or math.isnan(number) or (kind is int and not float(number).is_integer()):
        raise ConversionError(_PLAIN[kind])
    return kind(number)


def _collection(value: object, member: object, *, typed: bool) -> object:
    container = _container(member)
    if not typed and isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConversionError(describe(member)) from None
        typed = True
    inner = typing.get_args(member)
    if container is dict:
        if not isinstance(value, dict):
            raise ConversionError(describe(member))
        if not inner:
            return value
        return {convert(k, inner[0], typed=typed): convert(v, inner[1], typed=typed) for k, v in value.items()}
    if not isinstance(value, (list, tuple)):
        raise ConversionError(describe(member))
    items = list(value) if not inner else [convert(item, inner[0], typed=typed) for item in value]
    return container(items)
