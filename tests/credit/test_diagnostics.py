"""Contrasts of branches, shared-prefix dependence, and the decomposition of outcome credit by hits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.credit import (
    allocation_risk,
    allocation_width,
    anova_cluster_size,
    branch_contrasts,
    design_effect,
    effective_sample_size,
    group_advantages,
    hit_decomposition,
    intraclass_correlation,
)
from tests.credit.batches import Batch, assert_equal, batches, quick
from tests.credit.misfits import assert_misfits_refused

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def longs(entries):
    return torch.tensor(entries, dtype=torch.long)


def test_contrasts_of_an_event():
    # Incumbent 1, fresh 2 and 3: -1 - .5 = -1.5; .5 - .25 = .25. Second event has one fresh sibling, third none.
    advantages = double([9.0, -1.0, 0.5, 0.25])
    contrasts = branch_contrasts(advantages, longs([1, 2, 3]), longs([[2, 3], [1, -1], [-1, -1]]))
    assert_equal(contrasts.selected[:2], [-1.5, 1.5])
    assert_equal(contrasts.fresh[:1], [0.25])
    assert torch.isnan(contrasts.selected[2])
    assert torch.isnan(contrasts.fresh[1:]).all()


def test_one_fresh_sibling_gives_no_reference():
    contrasts = branch_contrasts(double([0.0, 1.0, 3.0]), longs([1]), longs([[2]]))
    assert contrasts.selected.tolist() == [-2.0]
    assert torch.isnan(contrasts.fresh).all()


@quick
@given(batches())
def test_swapping_the_fresh_labels_flips_the_reference(batch: Batch):
    """Exchangeable labels: the mean reference over both labellings is zero."""
    advantages = batch.normal(8)
    nodes = torch.stack([torch.randperm(8, generator=batch.generator)[:3] for _ in range(batch.rows)])
    ours = branch_contrasts(advantages, nodes[:, 0], nodes[:, 1:])
    swapped = branch_contrasts(advantages, nodes[:, 0], nodes[:, [2, 1]])
    assert_equal(ours.fresh, -swapped.fresh)
    assert_equal(ours.selected - swapped.selected, -ours.fresh)


def test_contrast_input_that_does_not_fit_is_refused():
    with pytest.raises(
        ValueError, match=r"`incumbents` and `fresh_siblings` must lie in \[-1, 2\): got a range of \[0, 2\]"
    ):
        branch_contrasts(torch.zeros(2), longs([0]), longs([[2]]))
    with pytest.raises(ValueError, match=r"got a range of \[-2, 0\]"):
        branch_contrasts(torch.zeros(2), longs([0]), longs([[-2]]))
    with pytest.raises(ValueError, match="`incumbents` must have the shape of `fresh_siblings`"):
        branch_contrasts(torch.zeros(2), longs([0, 1]), longs([[1]]))
    with pytest.raises(ValueError, match=r"`fresh_siblings` must have the shape \(E, K\)"):
        branch_contrasts(torch.zeros(2), longs([0]), longs([1]))
    with pytest.raises(ValueError, match=r"`advantages` must have the shape \(N\)"):
        branch_contrasts(torch.zeros(1, 2), longs([0]), longs([[1]]))
    assert branch_contrasts(torch.zeros(2), longs([]), torch.zeros(0, 2).long()).selected.tolist() == []


SIZES = torch.tensor([4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1])


def test_design_effect_and_effective_sample_size_of_22_leaves():
    # sum m^2 = 16 + 9 + 9 + 4*3 + 6 = 52; 52 / 22 = 2.363636; 1 + .385 * 1.363636 = 1.525; 22 / 1.525 = 14.426230.
    assert math.isclose(design_effect(SIZES, 0.385), 1.525, rel_tol=1e-12)
    assert math.isclose(effective_sample_size(SIZES, 0.385), 14.426230, rel_tol=1e-7)
    # m0 = (22 - 2.363636) / 11 = 1.785124.
    assert math.isclose(anova_cluster_size(SIZES), 1.785124, rel_tol=1e-6)


def test_independent_or_lone_leaves_count_in_full():
    assert effective_sample_size(SIZES, 0.0) == 22.0
    assert effective_sample_size(torch.ones(5).long(), 0.9) == 5.0
    assert math.isclose(effective_sample_size(longs([7]), 1.0), 1.0)


def test_equal_clusters_have_their_own_size():
    assert math.isclose(anova_cluster_size(longs([3, 3, 3, 3])), 3.0)
    assert math.isnan(anova_cluster_size(longs([5])))
    assert math.isclose(anova_cluster_size(longs([1, 3])), 1.5)


def test_intraclass_correlation_of_two_clusters():
    # (0, 2), (4, 6): means 1, 5, grand 3: MSB = 2 * (4 + 4) / 1 = 16; MSW = (1+1+1+1) / 2 = 2; m0 = 2: (16 - 2) / (16
    # + 2).
    returns, clusters = double([0.0, 2.0, 4.0, 6.0]), longs([9, 9, 1, 1])
    assert math.isclose(intraclass_correlation(returns, clusters), 14 / 18)


def test_intraclass_correlation_of_unequal_clusters():
    # (0), (2, 4): grand 2, MSB = (4 + 2 * 1) / 1 = 6, MSW = 2 / 1 = 2, m0 = 3 - 5/3 = 4/3: (6 - 2) / (6 + 2/3).
    assert math.isclose(intraclass_correlation(double([0.0, 2.0, 4.0]), longs([0, 1, 1])), 4 / (6 + 2 / 3))


def test_intraclass_correlation_of_three_clusters():
    # Means 1, 3, 5, grand 3: MSB = 2 * (4 + 0 + 4) / 2 = 8; MSW = 6 * 1 / 3 = 2; m0 = 2: 6 / 10.
    returns, clusters = double([0.0, 2.0, 2.0, 4.0, 4.0, 6.0]), longs([0, 0, 1, 1, 2, 2])
    assert math.isclose(intraclass_correlation(returns, clusters), 0.6)


def test_clusters_that_explain_all_or_nothing():
    assert math.isclose(intraclass_correlation(double([0.0, 0.0, 1.0, 1.0]), longs([0, 0, 1, 1])), 1.0)
    assert math.isclose(intraclass_correlation(double([0.0, 1.0, 0.0, 1.0]), longs([0, 0, 1, 1])), -1.0)
    assert math.isnan(intraclass_correlation(double([1.0, 1.0, 1.0]), longs([0, 0, 1])))
    assert math.isnan(intraclass_correlation(double([1.0, 2.0]), longs([0, 0])))
    assert math.isnan(intraclass_correlation(double([1.0, 2.0]), longs([0, 1])))
    with pytest.raises(ValueError, match="`cluster_ids` must have the shape of `returns`"):
        intraclass_correlation(double([1.0]), longs([0, 0]))


def test_variance_of_the_mean_follows_the_design_effect():
    """Simulated one-way model: the variance of the leaf mean is sigma^2 / ESS."""
    generator = torch.Generator().manual_seed(7)
    correlation, draws = 0.4, 40_000
    clusters = torch.repeat_interleave(torch.arange(len(SIZES)), SIZES)
    shared = torch.randn(draws, len(SIZES), generator=generator)[:, clusters] * correlation**0.5
    own = torch.randn(draws, len(clusters), generator=generator) * (1 - correlation) ** 0.5
    variance = float((shared + own).mean(1).var())
    # 40,000 draws estimate a variance to 0.7 % (one standard error).
    assert math.isclose(variance, 1 / effective_sample_size(SIZES, correlation), rel_tol=0.03)


def test_allocation_widths():
    # rho = .99: a = .010101, sqrt(a^2 + 22 a) - a = .461412; rho = .385: a = 1.597403: 4.542186.
    assert math.isclose(allocation_width(0.99, 22), 0.461412, rel_tol=1e-6)
    assert math.isclose(allocation_width(0.385, 22), 4.542186, rel_tol=1e-6)
    assert allocation_width(0.99, 22, constrained=True) == 1.0
    assert allocation_width(0.385, 22, constrained=True) == allocation_width(0.385, 22)
    assert allocation_width(1.0, 22) == 0.0


@quick
@given(st.floats(0.01, 0.999), st.integers(2, 60))
def test_the_allocation_width_minimises_the_risk(correlation: float, num_leaves: int):
    width = allocation_width(correlation, num_leaves)
    best = allocation_risk(width, correlation, num_leaves)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert allocation_risk(factor * width, correlation, num_leaves) >= best - 1e-15


def test_allocation_risk_of_one_leaf_per_cluster():
    # rho = .5: a = 1, m = 1, N = 4: .5 * (1 - .5 * .75) = .3125.
    assert math.isclose(allocation_risk(1.0, 0.5, 4), 0.3125)


@pytest.mark.parametrize("correlation", [0.0, -0.1, 1.01])
def test_widths_need_a_positive_correlation(correlation: float):
    with pytest.raises(ValueError, match=r"`correlation` must lie in \(0, 1\]: got"):
        allocation_width(correlation, 22)


REWARDS, HITS = [1.0, 1.0, 0.0, 0.0, 0.0], [1, 0, 1, 1, 0]


def test_outcome_credit_penalises_the_hits_in_aggregate():
    # p_H = .6, contrast 1/3 - 1/2 = -.166667; 5 * .6 * .4 * -.166667 / .489898 = -.408248 (population sd).
    parts = hit_decomposition(double(REWARDS), longs(HITS), longs([0] * 5), ddof=0, epsilon=0.0)
    assert_equal(parts.hit_rate, [0.6])
    assert_equal(parts.contrast, [-1 / 6])
    assert_equal(parts.covariance, [-0.04])
    assert_equal(parts.predicted, [-0.408248], rtol=1e-6)
    assert_equal(parts.observed, [-0.408248], rtol=1e-6)


def test_a_hit_is_whatever_is_not_zero():
    ids = longs([0] * 5)
    parts = hit_decomposition(double(REWARDS), 3 * longs(HITS), ids)
    for name, value in vars(hit_decomposition(double(REWARDS), longs(HITS), ids)).items():
        assert_equal(getattr(parts, name), value)


def test_the_decomposition_of_a_pair_uses_the_sample_deviation():
    # (1, 0): covariance .25, sample sd sqrt(.5): 2 * .25 / .707107 = .707107, the advantage of the only hit.
    parts = hit_decomposition(double([1.0, 0.0]), longs([1, 0]), longs([0, 0]), epsilon=0.0)
    assert_equal(parts.predicted, [0.5**0.5])
    assert_equal(parts.observed, [0.5**0.5])
    # A large epsilon shrinks both alike: 2 * .25 / 1.707107.
    parts = hit_decomposition(double([1.0, 0.0]), longs([1, 0]), longs([0, 0]), epsilon=1.0)
    assert_equal(parts.predicted, [0.5 / (1 + 0.5**0.5)])
    assert_equal(parts.observed, parts.predicted)


def test_a_format_reward_can_turn_the_sign():
    # R = (1, .8, .2, .2, 0): hit sum .206284 = 5 Cov / sd.
    parts = hit_decomposition(double([1.0, 0.8, 0.2, 0.2, 0.0]), longs(HITS), longs([0] * 5), ddof=0, epsilon=0.0)
    assert_equal(parts.observed, [0.206284], rtol=3e-6)
    assert_equal(parts.predicted, parts.observed)


@quick
@given(batches(max_rows=8), st.sampled_from([0, 1]))
def test_the_decomposition_holds_for_random_groups(batch: Batch, ddof: int):
    rewards, hits = batch.integers(0, 3, batch.rows).double() / 2, batch.integers(0, 2, batch.rows)
    ids = batch.integers(0, 3, batch.rows) * 5
    parts = hit_decomposition(rewards, hits, ids, ddof=ddof)
    assert_equal(parts.predicted, parts.observed, rtol=1e-9)  # both are differences of numbers of order one
    advantages = group_advantages(rewards, ids, ddof=ddof)
    for number, group in enumerate(ids.unique()):
        mine = ids == group
        n, rate = int(mine.sum()), float(parts.hit_rate[number])
        assert math.isclose(rate, float(hits[mine].double().mean()))
        assert math.isclose(float(parts.observed[number]), float((advantages * hits)[mine].sum()), abs_tol=1e-12)
        if 0 < rate < 1:
            deviation = float(rewards[mine].std(correction=ddof))
            predicted = n * rate * (1 - rate) * float(parts.contrast[number]) / (deviation + 1e-6)
            assert math.isclose(float(parts.predicted[number]), predicted, rel_tol=1e-9, abs_tol=1e-9)
            contrast = rewards[mine & (hits > 0)].mean() - rewards[mine & (hits == 0)].mean()
            assert math.isclose(float(parts.contrast[number]), float(contrast), abs_tol=1e-12)
        else:
            assert torch.isnan(parts.contrast[number])
            assert abs(float(parts.predicted[number])) < 1e-9


def test_groups_without_reward_variance_have_no_credit_to_decompose():
    parts = hit_decomposition(double([0.1 + 0.2, 0.3, 0.3]), longs([1, 0, 1]), longs([0] * 3))
    assert parts.predicted.tolist() == [0.0]
    assert parts.observed.tolist() == [0.0]
    with pytest.raises(ValueError, match="`hits` must have the shape of `rewards`"):
        hit_decomposition(double([1.0]), longs([1, 1]), longs([0]))
    with pytest.raises(ValueError, match=r"`rewards` must have the shape \(B\)"):
        hit_decomposition(double([[1.0]]), longs([[1]]), longs([[0]]))


def test_every_column_is_checked():
    assert_misfits_refused(
        hit_decomposition, "hits", "group_ids", rewards=double(REWARDS), hits=longs(HITS), group_ids=longs([0] * 5)
    )
    assert_misfits_refused(
        intraclass_correlation, "cluster_ids", returns=double([1.0, 2.0, 3.0]), cluster_ids=longs([0, 0, 1])
    )
