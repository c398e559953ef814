r"""
Statistics over some of the positions of a tensor: over a mask, or over every segment of every row.

Positions that do not count are replaced *before* anything is computed, never multiplied by zero, so NaN or infinity
there neither reaches a result nor a gradient.

Shapes: `B` rollouts, `T` completion tokens (right-padded), `S` segments.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from grounded_rl.credit._checks import check_dimensions, check_ids, check_same_shape, full_precision

NO_SEGMENT = -1
"""Segment id of a token that belongs to no segment: tool output, padding, or a token that is not eligible."""

CHUNK_ELEMENTS = 2**16
"""Elements handled at a time by functions that need several temporaries of the size of their input."""


def masked_sum(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, *, keepdim: bool = False
) -> torch.Tensor:
    """
    Sum of the selected entries.

    Args:
        values (`torch.Tensor`):
            Numbers of any shape. Carries gradient; entries outside the mask are ignored, even when they are NaN.
        mask (`torch.Tensor` of the shape of `values`):
            Non-zero where an entry counts.
        dim (`int`, *optional*):
            Dimension to sum over. All of them when not given.
        keepdim (`bool`, *optional*, defaults to `False`):
            Whether the summed dimension stays, with size one.

    Returns:
        `torch.Tensor`: The sums, `0.0` where nothing is selected.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> masked_sum(torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([1, 0, 1]))
    tensor(4.)

    ```
    """
    check_same_shape(values=values, mask=mask)
    selected = torch.where(mask.bool(), full_precision(values), 0.0)
    return selected.sum() if dim is None else selected.sum(dim, keepdim=keepdim)


def masked_mean(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, *, keepdim: bool = False
) -> torch.Tensor:
    """
    Mean of the selected entries; `0.0`, with zero gradient, where nothing is selected.

    Args and errors are those of [`masked_sum`].

    Returns:
        `torch.Tensor`: The means.

    Example:

    ```python
    >>> masked_mean(torch.tensor([[1.0, 5.0], [2.0, 4.0]]), torch.tensor([[1, 0], [1, 1]]), dim=1)
    tensor([1., 3.])

    ```
    """
    totals = masked_sum(values, mask, dim, keepdim=keepdim)
    counts = mask.bool().sum() if dim is None else mask.bool().sum(dim, keepdim=keepdim)
    return totals / counts.clamp(min=1)


def masked_std(
    values: torch.Tensor, mask: torch.Tensor, dim: int | None = None, *, ddof: int = 1, keepdim: bool = False
) -> torch.Tensor:
    """
    Standard deviation of the selected entries; `0.0` where no more than `ddof` are selected.

    Args:
        values (`torch.Tensor`):
            Numbers of any shape. Carries gradient where the deviation is not zero; entries outside the mask are
            ignored.
        mask (`torch.Tensor` of the shape of `values`):
            Non-zero where an entry counts.
        dim (`int`, *optional*):
            Dimension to reduce. All of them when not given.
        ddof (`int`, *optional*, defaults to `1`):
            What is subtracted from the count: `1` for the sample, `0` for the population standard deviation.
        keepdim (`bool`, *optional*, defaults to `False`):
            Whether the reduced dimension stays, with size one.

    Returns:
        `torch.Tensor`: The standard deviations.

    Example:

    ```python
    >>> masked_std(torch.tensor([1.0, 3.0, 100.0]), torch.tensor([1, 1, 0]), ddof=0)
    tensor(1.)

    ```
    """
    selected = mask.bool()
    if dim is None:
        centred, counts = full_precision(values) - masked_mean(values, mask), selected.sum()
    else:
        centred = full_precision(values) - masked_mean(values, mask, dim, keepdim=True)
        counts = selected.sum(dim, keepdim=keepdim)
    squares = masked_sum(centred.square(), mask, dim, keepdim=keepdim)
    return (squares / (counts - ddof).clamp(min=1)).sqrt()


def masked_median(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """
    Median of the selected entries along the last dimension, the two middle values averaged over an even count.

    `torch.median` returns the lower of the two middle values instead.

    Args:
        values (`torch.Tensor` of shape `(..., T)`):
            Numbers. Entries outside the mask are ignored, even when they are NaN.
        mask (`torch.Tensor` of shape `(..., T)`):
            Non-zero where an entry counts.

    Returns:
        `torch.Tensor` of shape `(...)`: The medians, `0.0` where nothing is selected.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> masked_median(torch.tensor([4.0, 1.0, 100.0, 2.0]), torch.tensor([1, 1, 0, 1]))
    tensor(2.)
    >>> masked_median(torch.tensor([4.0, 1.0, 100.0, 2.0]), torch.tensor([1, 1, 1, 1]))
    tensor(3.)

    ```
    """
    check_same_shape(values=values, mask=mask)
    rows = values.reshape(-1, values.shape[-1])
    segment_ids = torch.where(mask.bool(), 0, NO_SEGMENT).reshape(rows.shape)
    return segment_medians(rows, segment_ids, num_segments=1).reshape(values.shape[:-1])


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """
    Slices that cover `rows` rows, each of about [`CHUNK_ELEMENTS`] elements and at least one row.

    Args:
        rows (`int`):
            Number of rows.
        columns (`int`):
            Number of entries of a row.

    Returns:
        `Iterator[slice]`: Consecutive slices; none for zero rows.

    Example:

    ```python
    >>> list(row_chunks(3, 2**15))
    [slice(0, 2, None), slice(2, 3, None)]

    ```
    """
    size = max(1, CHUNK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def contiguous_segments(mask: torch.Tensor) -> torch.Tensor:
    """
    Segment ids of the maximal runs of a mask, numbered from zero in every row.

    Args:
        mask (`torch.Tensor` of shape `(B, T)`):
            Non-zero at sampled tokens.

    Returns:
        `torch.Tensor` of shape `(B, T)`, `torch.long`: The run of every token, `-1` outside the mask.

    Raises:
        `ValueError`: If `mask` is no matrix.

    Example:

    ```python
    >>> contiguous_segments(torch.tensor([[1, 1, 0, 1, 0]]))
    tensor([[ 0,  0, -1,  1, -1]])

    ```
    """
    check_dimensions("mask", mask, "B", "T")
    selected = mask.bool()
    starts = selected.clone()
    starts[:, 1:] &= ~selected[:, :-1]
    return torch.where(selected, starts.long().cumsum(1) - 1, NO_SEGMENT)


def segment_counts(segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """
    Number of tokens of every segment.

    Args:
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Segment of every token, in `[0, num_segments)`, or `-1` for none.
        num_segments (`int`):
            Number of columns `S` of the result.

    Returns:
        `torch.Tensor` of shape `(B, S)`, `torch.long`: The counts.

    Raises:
        `ValueError`: If a segment id lies outside `[-1, num_segments)`.

    Example:

    ```python
    >>> segment_counts(torch.tensor([[0, 0, -1, 2]]), num_segments=3)
    tensor([[2, 0, 1]])

    ```
    """
    check_dimensions("segment_ids", segment_ids, "B", "T")
    check_ids("segment_ids", segment_ids, num_segments, bound="num_segments")
    inside = (segment_ids >= 0).long()
    counts = inside.new_zeros(len(segment_ids), num_segments)
    return counts if num_segments == 0 else counts.scatter_add(1, segment_ids.clamp(min=0).long(), inside)


def segment_sums(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """
    Sum over the tokens of every segment.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            Numbers. Carries gradient; values at `-1` positions are ignored, even when they are NaN.
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Segment of every token, in `[0, num_segments)`, or `-1` for none.
        num_segments (`int`):
            Number of columns `S` of the result.

    Returns:
        `torch.Tensor` of shape `(B, S)`: The sums, `0.0` for a segment without tokens.

    Raises:
        `ValueError`: If the shapes differ, or if a segment id lies outside `[-1, num_segments)`.

    Example:

    ```python
    >>> segment_sums(torch.tensor([[1.0, 2.0, 9.0, 4.0]]), torch.tensor([[0, 0, -1, 1]]), num_segments=2)
    tensor([[3., 4.]])

    ```
    """
    check_dimensions("values", values, "B", "T")
    check_same_shape(values=values, segment_ids=segment_ids)
    check_ids("segment_ids", segment_ids, num_segments, bound="num_segments")
    selected = torch.where(segment_ids >= 0, full_precision(values), 0.0)
    totals = selected.new_zeros(len(values), num_segments)
    return totals if num_segments == 0 else totals.scatter_add(1, segment_ids.clamp(min=0).long(), selected)


def segment_means(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """
    Mean over the tokens of every segment; `0.0` for a segment without tokens.

    Args and errors are those of [`segment_sums`].

    Returns:
        `torch.Tensor` of shape `(B, S)`: The means.

    Example:

    ```python
    >>> segment_means(torch.tensor([[1.0, 2.0, 9.0, 4.0]]), torch.tensor([[0, 0, -1, 1]]), num_segments=3)
    tensor([[1.5000, 4.0000, 0.0000]])

    ```
    """
    totals = segment_sums(values, segment_ids, num_segments)
    return totals / segment_counts(segment_ids, num_segments).clamp(min=1)


@torch.no_grad()
def segment_medians(values: torch.Tensor, segment_ids: torch.Tensor, num_segments: int) -> torch.Tensor:
    """
    Median over the tokens of every segment, the two middle values averaged over an even count. Carries no gradient.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            Numbers; values at `-1` positions are ignored, even when they are NaN.
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Segment of every token, in `[0, num_segments)`, or `-1` for none. The tokens of a segment need not touch.
        num_segments (`int`):
            Number of columns `S` of the result.

    Returns:
        `torch.Tensor` of shape `(B, S)`: The medians, `0.0` for a segment without tokens.

    Raises:
        `ValueError`: If the shapes differ, or if a segment id lies outside `[-1, num_segments)`.

    Example:

    ```python
    >>> segment_medians(torch.tensor([[5.0, 1.0, 9.0, 4.0, 2.0]]), torch.tensor([[0, 0, -1, 1, 0]]), num_segments=2)
    tensor([[2., 4.]])

    ```
    """
    check_dimensions("values", values, "B", "T")
    check_same_shape(values=values, segment_ids=segment_ids)
    check_ids("segment_ids", segment_ids, num_segments, bound="num_segments")
    medians = full_precision(values.new_zeros(len(values), num_segments))
    if medians.numel() == 0 or values.numel() == 0:
        return medians
    for rows in row_chunks(*values.shape):
        ids = segment_ids[rows]
        ascending, order = torch.where(ids >= 0, full_precision(values[rows]), 0.0).sort(dim=1)
        # A stable sort by segment keeps the ascending values of each segment together, those without one in front.
        ids, regroup = ids.gather(1, order).sort(dim=1, stable=True)
        ascending = ascending.gather(1, regroup)
        counts = segment_counts(ids, num_segments)
        first = (ids < 0).sum(1, keepdim=True) + counts.cumsum(1) - counts
        # An empty last segment would point past the row; whatever it reads is discarded below.
        lower, upper = (
            ascending.gather(1, (first + offset).clamp(max=values.shape[1] - 1))
            for offset in ((counts - 1).clamp(min=0) // 2, counts // 2)
        )
        medians[rows] = torch.where(counts > 0, (lower + upper) / 2, 0.0)
    return medians


def spread_segments(segment_values: torch.Tensor, segment_ids: torch.Tensor, *, fill: float = 0.0) -> torch.Tensor:
    """
    The value of its segment at every token.

    Args:
        segment_values (`torch.Tensor` of shape `(B, S)`):
            One number per segment. Carries gradient.
        segment_ids (`torch.Tensor` of shape `(B, T)`, integer):
            Segment of every token, in `[0, S)`, or `-1` for none.
        fill (`float`, *optional*, defaults to `0.0`):
            Value at `-1` positions.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The spread values.

    Raises:
        `ValueError`: If the numbers of rows differ, or if a segment id lies outside `[-1, S)`.

    Example:

    ```python
    >>> spread_segments(torch.tensor([[0.5, -1.0]]), torch.tensor([[0, 0, -1, 1]]))
    tensor([[ 0.5000,  0.5000,  0.0000, -1.0000]])

    ```
    """
    check_dimensions("segment_values", segment_values, "B", "S")
    check_dimensions("segment_ids", segment_ids, "B", "T")
    if len(segment_values) != len(segment_ids):
        raise ValueError(
            f"`segment_ids` must have as many rows as `segment_values`, {len(segment_values)}: "
            f"got {len(segment_ids)}. Pass one row per rollout."
        )
    num_segments = segment_values.shape[1]
    check_ids("segment_ids", segment_ids, num_segments, bound="segment_values.shape[1]")
    if num_segments == 0:
        return segment_values.new_full(segment_ids.shape, fill)
    spread = segment_values.gather(1, segment_ids.clamp(min=0).long())
    return torch.where(segment_ids >= 0, spread, fill)
