r"""
Slope between selection score and outcome, as sums that add over processes.

Every worker computes its sums, the sums are added (`all_reduce` of `as_tensor()`), and only then divided: the slope of
the pooled batch. Estimate from uncorrected values, and use the result at the next step.

Shapes: `C` candidates of all sets together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass, fields
from typing import Self

import torch

from grounded_rl.credit._checks import check_same_shape
from grounded_rl.credit.selection import set_moments, standardized_scores

MIN_SLOPE_CANDIDATES = 50
"""Fewest pooled candidates for a new estimate; with fewer the previous one is kept."""


@dataclass(frozen=True)
class _AddableSums(ABC):
    """Sums of a batch that can be added, reduced over processes, and turned into one number."""

    count: float = 0.0

    def __add__(self, other: object) -> Self:
        if not isinstance(other, type(self)):
            return NotImplemented
        return type(self)(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def as_tensor(self) -> torch.Tensor:
        """The sums as one `torch.float64` vector, ready for `torch.distributed.all_reduce`."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def from_tensor(cls, sums: torch.Tensor) -> Self:
        """Inverse of `as_tensor`."""
        expected = (len(fields(cls)),)
        if sums.shape != expected:
            raise ValueError(
                f"`sums` must have shape {expected}: got {tuple(sums.shape)}. Pass what `as_tensor` returned."
            )
        return cls(*sums.tolist())

    @abstractmethod
    def _ratio(self) -> float | None:
        """The estimate, if the sums define one."""

    def estimate(self, previous: float | None = None, *, min_count: int = MIN_SLOPE_CANDIDATES) -> float | None:
        """
        Estimate of the pooled batch.

        Args:
            previous (`float`, *optional*):
                Estimate to keep when this batch cannot give one. `None` means that there is none yet.
            min_count (`int`, *optional*, defaults to `50`):
                Fewest pooled candidates for a new estimate.

        Returns:
            `float` or `None`: The new estimate, or `previous`.
        """
        ratio = self._ratio() if self.count >= min_count else None
        return previous if ratio is None else ratio


@dataclass(frozen=True)
class SlopeSums(_AddableSums):
    """Sums behind the regression slope of outcomes on standardised scores."""

    numerator: float = 0.0
    denominator: float = 0.0

    def _ratio(self) -> float | None:
        return self.numerator / self.denominator if self.denominator > 0 else None


@dataclass(frozen=True)
class CorrelationSums(_AddableSums):
    """Raw moments behind a Pearson correlation; the estimator of the released SIPO code."""

    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def _ratio(self) -> float | None:
        covariance = self.count * self.xy - self.x * self.y
        spread = (self.count * self.xx - self.x**2) * (self.count * self.yy - self.y**2)
        return covariance / spread**0.5 if spread > 0 else None


def selection_slope(
    scores: torch.Tensor,
    outcomes: torch.Tensor,
    set_ids: torch.Tensor | None = None,
    *,
    keep: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> SlopeSums:
    r"""
    Sums behind the slope of outcome on standardised selection score, over whole candidate sets.

    $$
    \hat a_2 = \frac{\sum_i Z_i Y_i}{\sum_i Z_i^2}, \qquad Z_i = \frac{q_i - \bar q}{\max(\operatorname{sd}(q),
    \epsilon)}
    $$

    with mean and population standard deviation within the set. Because the Z of a set sum to 0 this is
    \\( \operatorname{Cov}(Z, Y) / \operatorname{Var}(Z) \\), and a constant added to all outcomes of a set changes
    nothing. Use the unselected candidates too: fitting the selected ones alone would condition on the selection. SIPO
    ([Eq. 10](https://huggingface.co/papers/2609.34805)).

    Args:
        scores (`torch.Tensor` of shape `(C,)`):
            The score that ranked the candidates; see `sfc_scores`.
        outcomes (`torch.Tensor` of shape `(C,)`):
            Uncorrected outcomes; see `candidate_outcomes`. A set with a NaN outcome is left out.
        set_ids (`torch.Tensor` of shape `(C,)`, `torch.long`, *optional*):
            Candidate set of every candidate; one set if omitted.
        keep (`torch.Tensor` of shape `(C,)`, `torch.bool`, *optional*):
            Candidates whose sets are pooled; a set with one candidate outside is left out.
        epsilon (`float`, *optional*, defaults to `1e-6`):
            Floor of the standard deviation.

    Returns:
        `SlopeSums`: Number of pooled candidates, numerator and denominator. Sets of one candidate, and sets whose
        scores are all equal, contribute to none of the three. Call `.estimate(previous)` for the slope.

    Raises:
        `ValueError`: If the shapes differ.

    Example:

    ```python
    >>> scores = torch.tensor([0.55, 0.30, 0.10, 0.9, 0.2])
    >>> outcomes = torch.tensor([-0.8, 1.2, 0.4, -0.5, 0.5])
    >>> sums = selection_slope(scores, outcomes, torch.tensor([0, 0, 0, 1, 1]))
    >>> round(sums.estimate(min_count=5), 4)
    -0.5187

    ```
    """
    keep = torch.ones_like(scores, dtype=torch.bool) if keep is None else keep.bool()
    check_same_shape(scores=scores, outcomes=outcomes, keep=keep)
    if len(scores) == 0:
        return SlopeSums()
    scores, outcomes = scores.detach().double(), outcomes.detach().double()
    _, _, _, flat = set_moments(scores, set_ids)
    left_out = ~torch.isfinite(outcomes) | ~keep
    share_left_out = set_moments(left_out.double(), set_ids)[1]
    pooled = ~flat & (share_left_out == 0)
    z = standardized_scores(scores, set_ids, epsilon=epsilon)[pooled]
    return SlopeSums(
        count=float(pooled.sum()), numerator=float((z * outcomes[pooled]).sum()), denominator=float((z * z).sum())
    )


def correlation_sums(scores: torch.Tensor, outcomes: torch.Tensor) -> CorrelationSums:
    """
    Moments behind the Pearson correlation of score and outcome, pooled without regard to sets.

    Args:
        scores (`torch.Tensor` of shape `(C,)`):
            One score per candidate.
        outcomes (`torch.Tensor` of shape `(C,)`):
            Uncorrected outcomes. Candidates with a NaN score or outcome are dropped.

    Returns:
        `CorrelationSums`: The moments; call `.estimate(previous)` for the correlation.

    Raises:
        `ValueError`: If the shapes differ.
    """
    check_same_shape(scores=scores, outcomes=outcomes)
    both = torch.isfinite(scores) & torch.isfinite(outcomes)
    x, y = scores.detach()[both].double(), outcomes.detach()[both].double()
    moments = (x.sum(), y.sum(), (x * x).sum(), (y * y).sum(), (x * y).sum())
    return CorrelationSums(float(both.sum()), *(float(moment) for moment in moments))
