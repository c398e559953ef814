"""Argument checks of this package: one cause per message, expected before got, and what to do last."""

from __future__ import annotations

from collections.abc import Collection

import torch


def full_precision(values: torch.Tensor) -> torch.Tensor:
    """Integers, booleans and half floats as the default float type; `float32` and `float64` as they are."""
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.get_default_dtype())


def check_same_shape(**tensors: torch.Tensor) -> None:
    """Every tensor has the shape of the first one."""
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != reference.shape:
            raise ValueError(
                f"`{name}` must have the shape of `{first}`, {tuple(reference.shape)}: got {tuple(tensor.shape)}. "
                f"Pass one entry of `{name}` per entry of `{first}`."
            )


def check_dimensions(name: str, tensor: torch.Tensor, *letters: str) -> None:
    """The tensor has one dimension per letter."""
    if tensor.dim() != len(letters):
        raise ValueError(
            f"`{name}` must have the shape ({', '.join(letters)}): got {tuple(tensor.shape)}. "
            f"Reshape it to {len(letters)} dimension(s)."
        )


def check_rows(name: str, tensor: torch.Tensor, rows: int, *, per: str = "rollout") -> None:
    """The tensor is a vector with one entry per rollout (or whatever `per` names)."""
    if tuple(tensor.shape) != (rows,):
        raise ValueError(
            f"`{name}` must have the shape ({rows},): got {tuple(tensor.shape)}. Pass one entry per {per}."
        )


def check_ids(name: str, ids: torch.Tensor, upper: int | None = None, *, bound: str = "", hint: str = "") -> None:
    """The ids are integers in `[-1, upper)`; `bound` names the argument the upper end came from, if any."""
    if ids.dtype.is_floating_point or ids.dtype == torch.bool:
        raise TypeError(f"`{name}` must hold integers: got {ids.dtype}. Convert it with `.long()`.")
    if ids.numel() == 0:
        return
    low, high = (int(end) for end in ids.aminmax())
    if upper is None:
        if low < -1:
            raise ValueError(
                f"`{name}` must be at least -1: got a minimum of {low}. Use `-1` for tokens that belong to no segment."
            )
    elif low < -1 or high >= upper:
        named = f"[-1, {bound}) = " if bound else ""
        hint = hint or f"Pass a larger `{bound}`, or use `-1` for tokens that belong to no segment."
        raise ValueError(f"`{name}` must lie in {named}[-1, {upper}): got a range of [{low}, {high}]. {hint}")


def check_choice(name: str, value: object, accepted: Collection[object]) -> None:
    """The value is one of the accepted ones."""
    if value not in accepted:
        listed = ", ".join(repr(choice) for choice in accepted)
        raise ValueError(f"`{name}` must be one of {listed}: got {value!r}. Pick one of them.")


def check_at_least(name: str, value: float, low: float, *, exclusive: bool = False) -> None:
    """The number is finite and at least (or, when `exclusive`, above) `low`."""
    # Written so that NaN fails too.
    if not (value > low if exclusive else value >= low) or value == float("inf"):
        relation = "greater than" if exclusive else "at least"
        raise ValueError(f"`{name}` must be finite and {relation} {low}: got {value}. Choose a larger finite value.")
