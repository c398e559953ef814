import math

import numpy as np
import pytest
from scipy import stats

from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.bootstrap import (
    Interval,
    bootstrap_interval,
    bootstrap_intervals,
    paired_bootstrap,
    paired_intervals,
)

SETTINGS = {"n_resamples": 3000, "confidence_level": 0.95, "method": "percentile"}


def named(values):
    return {f"q{number}": float(value) for number, value in enumerate(values)}


def outcomes(n, share, seed):
    return (np.random.default_rng(seed).random(n) < share).astype(float)


def test_the_interval_of_a_mean_is_that_of_scipy_draw_for_draw():
    values = outcomes(200, 0.4, seed=1)
    ours = bootstrap_interval(values, num_resamples=3000, seed=5)
    theirs = stats.bootstrap((values,), np.mean, rng=np.random.default_rng(5), **SETTINGS).confidence_interval
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=1e-12)
    assert (ours.value, ours.n) == (pytest.approx(values.mean(), abs=1e-12), 200)


def test_the_paired_interval_is_that_of_scipy_on_paired_samples():
    before, after = outcomes(150, 0.3, seed=2), outcomes(150, 0.5, seed=3)
    ours = paired_bootstrap(named(before), named(after), num_resamples=3000, seed=7)
    theirs = stats.bootstrap(
        (before, after),
        lambda x, y, axis: y.mean(axis) - x.mean(axis),
        paired=True,
        rng=np.random.default_rng(7),
        **SETTINGS,
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=1e-12)
    assert ours.difference == pytest.approx(after.mean() - before.mean(), abs=1e-12)


def test_a_ratio_is_resampled_as_a_ratio_like_scipys():
    hit = outcomes(120, 0.6, seed=4)
    both = hit * outcomes(120, 0.5, seed=5)
    ours = bootstrap_interval(both, hit, num_resamples=3000, seed=11)
    theirs = stats.bootstrap(
        (both, hit),
        lambda x, y, axis: x.sum(axis) / y.sum(axis),
        paired=True,
        rng=np.random.default_rng(11),
        **SETTINGS,
    ).confidence_interval
    assert (ours.low, ours.high) == pytest.approx(tuple(theirs), abs=1e-12)


def test_pairing_removes_the_difficulty_that_questions_share():
    rng = np.random.default_rng(0)
    difficulty = rng.normal(0, 10, 100)
    before, after = named(difficulty), named(difficulty + 1 + rng.normal(0, 0.1, 100))
    interval = paired_bootstrap(before, after, num_resamples=2000)
    assert 0.95 < interval.low < interval.high < 1.05


def test_the_order_of_ids_does_not_matter():
    before, after = named([0, 1, 0, 1, 1]), named([1, 1, 0, 1, 1])
    shuffled = {name: after[name] for name in sorted(after, reverse=True)}
    assert paired_bootstrap(before, after, num_resamples=500) == paired_bootstrap(before, shuffled, num_resamples=500)


def test_chunks_do_not_change_the_draws(monkeypatch):
    values = outcomes(50, 0.5, seed=6)
    whole = bootstrap_interval(values, num_resamples=1000, seed=3)
    monkeypatch.setattr("grounded_rl.evaluation.bootstrap._CHUNK_ENTRIES", 50 * 7)
    assert bootstrap_interval(values, num_resamples=1000, seed=3) == whole


def test_several_quantities_at_once_equal_one_at_a_time():
    before, after = outcomes(80, 0.3, 1), outcomes(80, 0.6, 2)
    together = paired_intervals(
        {"mean": (before, None), "ratio": (before * after, after)},
        {"mean": (after, None), "ratio": (after, after)},
        num_resamples=400,
    )
    alone = paired_bootstrap(named(before), named(after), num_resamples=400)
    assert together["mean"] == alone
    ratio = paired_bootstrap(
        named(before * after),
        named(after),
        before_denominator=named(after),
        after_denominator=named(after),
        num_resamples=400,
    )
    assert together["ratio"] == ratio
    assert bootstrap_intervals({"x": (before, None)}, num_resamples=400)["x"] == bootstrap_interval(
        before, num_resamples=400
    )


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(12)
    covered = 0
    for trial in range(300):
        interval = bootstrap_interval((rng.random(100) < 0.4).astype(float), num_resamples=300, seed=trial)
        covered += interval.low <= 0.4 <= interval.high
    # Standard error of the share at 300 trials is 0.013.
    assert 0.90 <= covered / 300 <= 0.99


def test_excluding_zero_means_that_zero_lies_outside():
    assert Interval(0.1, 0.05, 0.2, 10).excludes_zero
    assert Interval(-0.1, -0.2, -0.05, 10).excludes_zero
    assert not Interval(0.1, -0.05, 0.2, 10).excludes_zero
    assert not Interval(0.0, 0.0, 0.0, 10).excludes_zero
    assert not Interval(math.nan, math.nan, math.nan, 10).excludes_zero


def test_an_undefined_ratio_has_no_interval():
    estimate = bootstrap_interval([0.0, 0.0], [0.0, 0.0], num_resamples=50)
    assert all(math.isnan(value) for value in (estimate.value, estimate.low, estimate.high))


def test_resamples_without_a_denominator_are_left_out():
    # One hit in three questions: about 30 % of the resamples have none; the ratio is 1 in all others.
    estimate = bootstrap_interval([1.0, 0.0, 0.0], [1.0, 0.0, 0.0], num_resamples=400)
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)


def test_no_questions_give_nan():
    interval = paired_bootstrap({}, {}, num_resamples=10)
    assert interval.n == 0
    assert math.isnan(interval.difference)


def test_different_questions_are_refused_with_their_ids():
    with pytest.raises(ConfigurationError, match=r"got 1 only before \['q1'\], 2 only after \['q2', 'q3'\]"):
        paired_bootstrap({"q0": 1.0, "q1": 1.0}, {"q0": 1.0, "q2": 0.0, "q3": 0.0})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_resamples": 0}, "`num_resamples` must be at least 1: got 0"),
        ({"confidence": 95}, "must lie in .0, 1.: got 95"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        bootstrap_interval([1.0], **settings)


def test_half_a_pair_of_denominators_is_refused():
    with pytest.raises(ConfigurationError, match="must be given together"):
        paired_bootstrap({"q": 1.0}, {"q": 1.0}, before_denominator={"q": 1.0})


def test_a_denominator_of_another_length_is_refused():
    with pytest.raises(ConfigurationError, match=r"one entry per value \(2\): got 1"):
        bootstrap_interval([1.0, 0.0], [1.0])
