"""Forward passes over rows of like length, in place of one pass padded to the longest row of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Outputs = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
Forward = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], Outputs]


def passes_of_like_length(
    forward: Forward,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_length: int,
    *,
    rows_per_pass: int,
) -> Outputs:
    """
    Values per completion token from passes that are as long as their own longest row.

    Rows go in order of length, `rows_per_pass` at a time; columns that are padding in all rows of a pass are left out.
    A row's values do not depend on the padding around it, so the result equals that of one padded pass up to the
    rounding of the matrix products. The number of passes depends on the number of rows alone, as collective backends
    need.

    Args:
        forward (`Callable`):
            Takes ids and mask `(b, p + c)`, the completion length `c` and the numbers of the rows `(b,)`; returns
            values `(b, c)`, further values `(b, c)` or `None`, and a scalar or `None`.
        input_ids (`torch.Tensor` of shape `(B, P + C)`):
            Left-padded prompts, right-padded completions.
        attention_mask (`torch.Tensor` of shape `(B, P + C)`):
            0 at padding.
        completion_length (`int`):
            `C`.
        rows_per_pass (`int`):
            Largest number of rows in a pass.

    Returns:
        `tuple`: Both values `(B, C)`, `0.0` where a pass left a column out, and the mean of the scalars; with
        gradient, in the order of the rows.
    """
    is_prompt = attention_mask[:, :-completion_length] != 0
    is_completion = attention_mask[:, -completion_length:] != 0
    prompt_length = is_prompt.size(1)
    order = (is_prompt.sum(dim=1) + is_completion.sum(dim=1)).argsort(stable=True)
    outputs: list[list[torch.Tensor | None]] = [[], [], []]
    for rows in order.split(rows_per_pass):
        left = int(is_prompt[rows].sum(dim=1).max())
        right = max(int(is_completion[rows].sum(dim=1).max()), 1)
        columns = slice(prompt_length - left, prompt_length + right)
        *values, scalar = forward(input_ids[rows, columns], attention_mask[rows, columns], right, rows)
        for kept, value in zip(outputs, values, strict=False):
            kept.append(
                None if value is None else torch.nn.functional.pad(value, (0, completion_length - value.size(1)))
            )
        outputs[2].append(scalar)
    back = order.argsort()
    first, second = (None if kept[0] is None else torch.cat(kept)[back] for kept in outputs[:2])  # type: ignore[arg-type]
    scalars = outputs[2]
    mean = None if scalars[0] is None else torch.stack(scalars).mean()  # type: ignore[arg-type]
    return first, second, mean  # type: ignore[return-value]


def padded(rows: Sequence[Sequence[int]], length: int, value: int, device: torch.device) -> torch.Tensor:
    """Right-padded `(B, length)` tensor of ragged rows."""
    output = torch.full((len(rows), length), value, dtype=torch.long)
    for number, row in enumerate(rows):
        output[number, : len(row)] = torch.tensor(row, dtype=torch.long)
    return output.to(device)
