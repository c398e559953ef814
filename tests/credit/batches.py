"""Random ragged batches for the property tests, and the comparison they share."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st

# Batches are small and the arithmetic is exact, so few examples find what many would.
quick = settings(deadline=None, max_examples=25, derandomize=True)


def assert_equal(actual, expected, *, rtol=1e-12):
    """Equality of shape, type and values up to rounding; `expected` may be nested lists. NaN equals nothing."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=actual.dtype, device=actual.device)
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    # `torch.testing.assert_close` would import half of torch for this.
    is_close = torch.isclose(actual, expected, rtol=rtol, atol=rtol / 10)
    assert is_close.all(), f"got {actual[~is_close].tolist()}, expected {expected[~is_close].tolist()}"


class Batch:
    """A `(B, T)` batch: `mask` has whole empty rows now and then, and `garbage` puts NaN and infinities there."""

    def __init__(self, rows, columns, seed):
        self.rows, self.columns = rows, columns
        self.generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, columns + 1, (rows, 1), generator=self.generator)
        self.mask = (torch.arange(columns) < lengths) & (self.uniform() < 0.7)

    def uniform(self, *shape):
        return torch.rand(shape or (self.rows, self.columns), generator=self.generator, dtype=torch.float64)

    def normal(self, *shape):
        return torch.randn(shape or (self.rows, self.columns), generator=self.generator, dtype=torch.float64)

    def integers(self, low, high, *shape):
        return torch.randint(low, high, shape or (self.rows, self.columns), generator=self.generator)

    def garbage(self, values):
        """The values inside the mask; NaN and infinities outside it."""
        noise = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float64)
        return torch.where(self.mask, values, noise[self.integers(0, 3)])


def batches(max_rows=4, max_columns=9):
    """Strategy of batches; shrinks to one row of one token."""
    return st.builds(Batch, st.integers(1, max_rows), st.integers(1, max_columns), st.integers(0, 2**20))
