r"""
Statistics of a frozen sample of GCA credit, and the tables its ablations are run with.

*Without salience*: [`cell_means`] fills `Routing.mean_salience`. *Without segment split*: [`merged_search_table`]
fills `Routing.polarity` and `Routing.lambdas`, and segments go through [`merge_search_segments`].

Shapes: `B` rollouts, `T` completion tokens (right-padded); tables have shape `(4, 3)`.
"""

from __future__ import annotations

from typing import Literal

import torch

from grounded_rl.credit._checks import check_choice, check_rows, check_same_shape, full_precision
from grounded_rl.credit.gca import NUM_SEGMENTS, POLARITY, R_SEARCH, V_SEARCH, lambda_table


def cell_counts(cells: torch.Tensor) -> torch.Tensor:
    """
    Number of tokens of every cell.

    Args:
        cells (`torch.Tensor`, integer):
            Cell of every token (`GCACredit.cells`), `-1` where the gate is closed.

    Returns:
        `torch.Tensor` of shape `(4, 3)`, `torch.long`: The counts.

    Example:

    ```python
    >>> cell_counts(torch.tensor([[0, 0, -1, 5]]))[:2]
    tensor([[2, 0, 0],
            [0, 0, 1]])

    ```
    """
    return torch.bincount(cells[cells >= 0].long(), minlength=4 * NUM_SEGMENTS).reshape(4, NUM_SEGMENTS)


def cell_means(salience: torch.Tensor, cells: torch.Tensor) -> torch.Tensor:
    """
    Mean salience of the tokens of every cell: the constants of the ablation without salience.

    Means of several batches are combined with the weights of [`cell_counts`].

    Args:
        salience (`torch.Tensor`):
            Salience of every token (`GCACredit.salience`); any other quantity per token works alike.
        cells (`torch.Tensor` of the same shape, integer):
            Cell of every token (`GCACredit.cells`), `-1` where the gate is closed.

    Returns:
        `torch.Tensor` of shape `(4, 3)`: The means, `0.0` for a cell without tokens.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> cell_means(torch.tensor([[0.5, 0.3, 0.0, 0.2]]), torch.tensor([[0, 0, -1, 5]]))[:2]
    tensor([[0.4000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.2000]])

    ```
    """
    check_same_shape(salience=salience, cells=cells)
    selected = cells >= 0
    values = full_precision(salience)[selected]
    totals = values.new_zeros(4 * NUM_SEGMENTS).index_add(0, cells[selected].long(), values)
    return totals.reshape(4, NUM_SEGMENTS) / cell_counts(cells).clamp(min=1)


def merged_search_table(
    num_valid: torch.Tensor,
    num_redundant: torch.Tensor,
    *,
    lambdas: torch.Tensor | None = None,
    mode: Literal["signed", "absolute"] = "signed",
) -> tuple[torch.Tensor, torch.Tensor]:
    r"""
    Polarity and magnitude when both search segments of a type are treated as one.

    With token masses \\( n_v, n_r \\), the merged polarity is the sign of
    \\( m = (n_v P_v \lambda_v + n_r P_r \lambda_r) / (n_v + n_r) \\). The magnitude is \\( |m| \\) in mode `"signed"`,
    which preserves the summed residual, or \\( (n_v \lambda_v + n_r \lambda_r) / (n_v + n_r) \\) in mode `"absolute"`.
    A type with \\( m = 0 \\) has no search credit. The ablation without segment split; medians must then be taken over
    the merged segment ([`merge_search_segments`]).

    Args:
        num_valid (`torch.Tensor` of shape `(4,)`):
            Tokens of `V_SEARCH` of every type, in a frozen sample.
        num_redundant (`torch.Tensor` of shape `(4,)`):
            Tokens of `R_SEARCH` of every type, in the same sample.
        lambdas (`torch.Tensor` of shape `(4, 3)`, *optional*):
            Magnitudes to merge. The default table when not given.
        mode (`str`, *optional*, defaults to `"signed"`):
            `"signed"` or `"absolute"`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: Polarity and magnitudes, both of shape `(4, 3)`, for the fields of
        [`Routing`]; both search columns are equal, and zero for a type without search tokens.

    Raises:
        `ValueError`: If a mass vector has another shape, or if the mode is unknown.

    Example:

    ```python
    >>> polarity, lambdas = merged_search_table(torch.tensor([300, 0, 0, 0]), torch.tensor([100, 0, 0, 0]))
    >>> polarity[0], lambdas[0]  # (300 * 1.0 - 100 * 0.5) / 400 = 0.625
    (tensor([1., 1., 1.], dtype=torch.float64), tensor([0.6250, 0.6250, 0.5000], dtype=torch.float64))

    ```
    """
    check_rows("num_valid", num_valid, 4, per="type A to D")
    check_rows("num_redundant", num_redundant, 4, per="type A to D")
    check_choice("mode", mode, ("signed", "absolute"))
    lambdas = (lambda_table() if lambdas is None else lambdas).to(torch.float64)
    polarity = torch.tensor(POLARITY, dtype=torch.float64)
    masses = torch.stack((num_valid, num_redundant), dim=1).to(torch.float64)
    shares = masses / masses.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    search = slice(V_SEARCH, R_SEARCH + 1)
    mean = (shares * polarity[:, search] * lambdas[:, search]).sum(1, keepdim=True)
    size = mean.abs() if mode == "signed" else (shares * lambdas[:, search]).sum(1, keepdim=True)
    polarity[:, search] = mean.sign()
    merged = lambdas.clone()
    merged[:, search] = torch.where(mean == 0, 0.0, size)
    return polarity, merged


def merge_search_segments(segments: torch.Tensor) -> torch.Tensor:
    """
    Segments with every `R_SEARCH` token moved to `V_SEARCH`, for the ablation without segment split.

    Args:
        segments (`torch.Tensor`, integer):
            Segment of every token.

    Returns:
        `torch.Tensor` of the same shape: The merged segments.

    Example:

    ```python
    >>> merge_search_segments(torch.tensor([0, 1, 2, -1]))
    tensor([ 0,  0,  2, -1])

    ```
    """
    return torch.where(segments == R_SEARCH, V_SEARCH, segments)
