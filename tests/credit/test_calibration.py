"""Bootstrap over trees and calibration of the rank model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grounded_rl.credit import (
    CandidateSample,
    PairSample,
    blom,
    bootstrap_mean,
    calibration_groups,
    rank_calibration,
    tree_multiplicities,
)
from tests.credit.batches import assert_equal

NAN = math.nan


def double(entries):
    return torch.tensor(entries, dtype=torch.float64)


def longs(entries):
    return torch.tensor(entries, dtype=torch.long)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_trees_are_drawn_with_replacement_within_their_step():
    steps = longs([4, 7, 4, 4, 7])
    counts = tree_multiplicities(steps, 300, generator=seeded())
    assert (counts[:, steps == 4].sum(1) == 3).all()
    assert (counts[:, steps == 7].sum(1) == 2).all()
    assert counts[:, 0].unique().tolist() == [0, 1, 2, 3]
    # Each tree is drawn once on average; 300 resamples of variance 2/3 give a standard error of .05.
    assert ((counts.mean(0) - 1).abs() < 0.2).all()


def test_draws_follow_the_generator():
    steps = longs([0, 0, 0])
    assert torch.equal(
        tree_multiplicities(steps, 9, generator=seeded(1)), tree_multiplicities(steps, 9, generator=seeded(1))
    )
    assert not torch.equal(
        tree_multiplicities(steps, 9, generator=seeded(1)), tree_multiplicities(steps, 9, generator=seeded(2))
    )


def test_a_single_tree_per_step_leaves_nothing_to_resample():
    interval = bootstrap_mean(double([1.0, 3.0, 5.0]), longs([0, 0, 0]), longs([0, 0, 1]), generator=seeded())
    assert (interval.estimate, interval.low, interval.high) == (3.0, 3.0, 3.0)
    assert (interval.num_entries, interval.num_trees) == (3, 2)


def test_equal_tree_numbers_of_different_steps_are_different_trees():
    interval = bootstrap_mean(
        double([0.0, 1.0, 0.0, 1.0]), longs([0, 1, 0, 1]), longs([0, 0, 1, 1]), generator=seeded()
    )
    assert interval.num_trees == 4
    assert interval.low < 0.5 < interval.high


def test_undefined_entries_are_left_out():
    interval = bootstrap_mean(double([1.0, NAN, 3.0]), longs([0, 1, 0]), longs([0, 0, 0]), generator=seeded())
    assert (interval.estimate, interval.num_entries, interval.num_trees) == (2.0, 2, 1)
    nothing = bootstrap_mean(double([NAN]), longs([0]), longs([0]), generator=seeded())
    assert math.isnan(nothing.estimate)
    assert math.isnan(nothing.low)
    assert math.isnan(nothing.high)
    assert nothing.num_entries == 0


def test_the_interval_is_that_of_resampled_trees():
    """Every tree's entries enter or leave together: the interval equals a plain loop over the same draws."""
    entries, trees = double([1.0, 1.2, 5.0, -2.0, -2.2, -1.8]), longs([0, 0, 1, 2, 2, 2])
    steps = torch.zeros(6).long()
    interval = bootstrap_mean(entries, trees, steps, num_resamples=50, level=0.8, generator=seeded(3))
    counts = tree_multiplicities(torch.zeros(3).long(), 50, generator=seeded(3))
    means = []
    for draw in counts:
        weights = draw[trees]
        means.append(float((weights * entries).sum() / weights.sum()))
    low, high = torch.quantile(double(means), double([0.1, 0.9])).tolist()
    assert math.isclose(interval.low, low)
    assert math.isclose(interval.high, high)
    assert math.isclose(interval.estimate, float(entries.mean()))


def test_an_interval_follows_its_generator_and_no_other():
    entries, trees = torch.randn(40, generator=seeded(5), dtype=torch.float64), torch.arange(40)
    intervals = []
    for seed in range(2):
        torch.manual_seed(seed)
        intervals.append(bootstrap_mean(entries, trees, torch.zeros(40).long(), num_resamples=20, generator=seeded(3)))
    assert intervals[0] == intervals[1]


def test_the_interval_covers_the_mean_of_clustered_data():
    """With strong dependence within trees, a tree bootstrap is wide enough where one over entries would not be."""
    generator = seeded(11)
    covered = 0
    for _ in range(60):
        effects = torch.randn(40, generator=generator, dtype=torch.float64)
        entries = (effects[:, None] + 0.1 * torch.randn(40, 5, generator=generator, dtype=torch.float64)).reshape(-1)
        trees = torch.repeat_interleave(torch.arange(40), 5)
        interval = bootstrap_mean(
            entries, trees, torch.zeros(200).long(), num_resamples=200, level=0.9, generator=generator
        )
        covered += interval.low <= 0 <= interval.high
    # 60 intervals at 90 %: 54 expected, standard deviation 2.3. Entry-wise intervals would cover about 35.
    assert covered >= 46


def test_bootstrap_input_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="`tree_ids` must have the shape of `entries`"):
        bootstrap_mean(double([1.0]), longs([0, 0]), longs([0]))
    with pytest.raises(ValueError, match="`steps` must have the shape of `entries`"):
        bootstrap_mean(double([1.0]), longs([0]), longs([0, 0]))
    with pytest.raises(ValueError, match=r"`entries` must have the shape \(E\)"):
        bootstrap_mean(double([[1.0]]), longs([[0]]), longs([[0]]))


def worked_sample():
    """Step 0 fits, step 1 is evaluated: the two events of the slope example, then three pairs."""
    candidates = CandidateSample(
        scores=double([0.55, 0.30, 0.10, 0.9, 0.2]),
        outcomes=double([-0.8, 1.2, 0.4, -0.5, 0.5]),
        set_ids=longs([0, 0, 0, 1, 1]),
        tree_ids=longs([0, 0, 0, 1, 1]),
        steps=longs([0] * 5),
    )
    pairs = PairSample(
        displacements=double([-0.5, 0.1, 0.2]),
        ranks=longs([1, 2, 4]),
        set_sizes=longs([5, 22, 31]),
        tree_ids=longs([0, 1, 1]),
        steps=longs([1, 1, 1]),
    )
    return candidates, pairs


def test_predictions_use_the_slope_of_the_step_before():
    candidates, pairs = worked_sample()
    rows = {row.group: row for row in rank_calibration(candidates, pairs, num_resamples=10, generator=seeded())}
    # Slope -.518686; h(1, 5) = 1.179761, h(2, 22) = 1.453563, h(4, 31).
    strengths = blom(pairs.ranks, pairs.set_sizes)
    assert_equal(double(rows["rank 1"].predicted.estimate), -0.518686 * 1.179761, rtol=2e-6)
    assert_equal(double(rows["candidates 21-30"].predicted.estimate), -0.518686 * 1.453563, rtol=2e-6)
    assert_equal(double(rows["all"].predicted.estimate), float(-0.518686 * strengths.mean()), rtol=2e-6)
    assert_equal(double(rows["all"].observed.estimate), -0.2 / 3)
    for row in rows.values():
        assert math.isclose(row.residual.estimate, row.observed.estimate - row.predicted.estimate, abs_tol=1e-12)
    everything = rows.pop("all").observed
    assert (everything.num_entries, everything.num_trees) == (3, 2)
    assert {row.observed.num_entries for row in rows.values()} == {1}


def test_a_candidate_at_the_mean_of_its_set_adds_nothing_to_the_slope():
    # Scores 1, 2, 3 have z = -1.224745, 0, 1.224745: the slope is 1.224745 * (0.8 + 0.4) / 3 = 0.489898.
    _, pairs = worked_sample()
    alone = CandidateSample(
        scores=double([1.0, 2.0, 3.0]),
        outcomes=double([-0.8, 7.0, 0.4]),
        set_ids=longs([0, 0, 0]),
        tree_ids=longs([0, 0, 0]),
        steps=longs([0, 0, 0]),
    )
    rows = {row.group: row for row in rank_calibration(alone, pairs, num_resamples=2, generator=seeded())}
    assert_equal(double(rows["rank 1"].predicted.estimate), 0.489898 * 1.179761, rtol=2e-6)


def test_bins_are_those_of_the_paper():
    ranks = longs([1, 2, 3, 4, 6, 7, 1, 1, 1, 1])
    sizes = longs([10, 20, 21, 30, 31, 40, 20, 21, 30, 31])
    pairs = PairSample(torch.zeros(10), ranks, sizes, torch.arange(10), torch.zeros(10).long())
    members = {name: mask.nonzero().squeeze(1).tolist() for name, mask in calibration_groups(pairs).items()}
    assert members == {
        "all": list(range(10)),
        "rank 1": [0, 6, 7, 8, 9],
        "rank 2-3": [1, 2],
        "rank 4-6": [3, 4],
        "candidates <= 20": [0, 1, 6],
        "candidates 21-30": [2, 3, 7, 8],
        "candidates > 30": [4, 5, 9],
    }


def test_pairs_without_a_fitted_step_before_them_are_left_out():
    candidates, pairs = worked_sample()
    late = replace(pairs, steps=longs([1, 2, 0]))
    (row,) = rank_calibration(
        candidates, late, groups={"all": torch.ones(3).bool()}, num_resamples=5, generator=seeded()
    )
    assert row.observed.num_entries == 1
    assert math.isclose(row.observed.estimate, -0.5)
    (nothing,) = rank_calibration(
        candidates, late, groups={"none": torch.zeros(3).bool()}, num_resamples=5, generator=seeded()
    )
    assert math.isnan(nothing.observed.estimate)
    assert math.isnan(nothing.predicted.estimate)


def simulated(num_steps=4, trees_per_step=16, slope=-0.3, seed=5):
    """Independent candidates with a linear score-outcome relation: exactly the model that the correction assumes."""
    generator = seeded(seed)
    rows = {name: [] for name in ("scores", "outcomes", "set_ids", "tree_ids", "steps")}
    pairs = {name: [] for name in ("displacements", "ranks", "set_sizes", "tree_ids", "steps")}
    for step in range(num_steps):
        for tree in range(trees_per_step):
            size = int(torch.randint(8, 30, (), generator=generator))
            z = torch.randn(size, generator=generator, dtype=torch.float64)
            y = slope * z + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)
            rows["scores"] += z.tolist()
            rows["outcomes"] += y.tolist()
            rows["set_ids"] += [step * 1000 + tree] * size
            rows["tree_ids"] += [tree] * size
            rows["steps"] += [step] * size
            order = torch.argsort(z, descending=True)
            for rank in range(1, 7):
                fresh = 0.3 * float(torch.randn((), generator=generator)) + slope * float(
                    torch.randn((), generator=generator)
                )
                pairs["displacements"].append(float(y[order[rank - 1]]) - fresh)
                pairs["ranks"].append(rank)
                pairs["set_sizes"].append(size)
                pairs["tree_ids"].append(tree)
                pairs["steps"].append(step)
    return CandidateSample(**{k: torch.tensor(v) for k, v in rows.items()}), PairSample(
        **{k: torch.tensor(v) for k, v in pairs.items()}
    )


def test_calibration_matches_loops_over_resamples():
    """Refit and re-evaluation per resample, tree by tree, with the draws of the package."""
    candidates, pairs = simulated(num_steps=3, trees_per_step=5)
    ranks_one = pairs.ranks == 1
    (row,) = rank_calibration(
        candidates, pairs, groups={"rank 1": ranks_one}, num_resamples=20, level=0.5, generator=seeded(2)
    )
    steps = torch.repeat_interleave(torch.arange(3), 5)
    draws = torch.cat([torch.ones(1, 15, dtype=torch.float64), tree_multiplicities(steps, 20, generator=seeded(2))])
    residuals = []
    for draw in draws:
        slopes = {}
        for step in range(3):
            numerator = denominator = 0.0
            for tree in range(5):
                mine = (candidates.steps == step) & (candidates.tree_ids == tree)
                q, y = candidates.scores[mine].double(), candidates.outcomes[mine].double()
                z = (q - q.mean()) / q.std(correction=0)
                weight = float(draw[5 * step + tree])
                numerator += weight * float((z * y).sum())
                denominator += weight * float((z * z).sum())
            slopes[step] = numerator / denominator
        total = weights = 0.0
        for entry in (ranks_one & (pairs.steps > 0)).nonzero().squeeze(1).tolist():
            step, tree = int(pairs.steps[entry]), int(pairs.tree_ids[entry])
            weight = float(draw[5 * step + tree])
            predicted = slopes[step - 1] * float(blom(int(pairs.ranks[entry]), int(pairs.set_sizes[entry])))
            total += weight * (float(pairs.displacements[entry]) - predicted)
            weights += weight
        residuals.append(total / weights)
    low, high = torch.quantile(double(residuals[1:]), double([0.25, 0.75])).tolist()
    # Scores were stored in single precision.
    assert math.isclose(row.residual.estimate, residuals[0], rel_tol=1e-6)
    assert math.isclose(row.residual.low, low, rel_tol=1e-6)
    assert math.isclose(row.residual.high, high, rel_tol=1e-6)
    assert (row.residual.num_entries, row.residual.num_trees) == (10, 10)


def test_the_rank_model_is_calibrated_on_data_that_follow_it():
    candidates, pairs = simulated(num_steps=5, trees_per_step=60)
    rows = {row.group: row for row in rank_calibration(candidates, pairs, num_resamples=300, generator=seeded())}
    for name in ("all", "rank 1", "rank 2-3", "rank 4-6"):
        row = rows[name]
        # Residual 0 within three half-widths of a 95 % interval.
        half = (row.residual.high - row.residual.low) / 2
        assert abs(row.residual.estimate) < 3 * half
        assert row.residual.low < row.residual.estimate < row.residual.high
    assert (
        rows["rank 1"].predicted.estimate
        < rows["rank 2-3"].predicted.estimate
        < rows["rank 4-6"].predicted.estimate
        < 0
    )


def test_a_sample_without_pairs_has_no_estimates():
    candidates, pairs = worked_sample()
    none = PairSample(**{name: column[:0] for name, column in vars(pairs).items()})
    for row in rank_calibration(candidates, none, num_resamples=3, generator=seeded()):
        assert math.isnan(row.observed.estimate)
        assert row.observed.num_entries == row.observed.num_trees == 0


def test_calibration_input_that_does_not_fit_is_refused():
    candidates, pairs = worked_sample()
    with pytest.raises(ValueError, match="`outcomes` must have the shape of `scores`"):
        rank_calibration(replace(candidates, outcomes=double([1.0])), pairs)
    with pytest.raises(ValueError, match="`ranks` must have the shape of `displacements`"):
        rank_calibration(candidates, replace(pairs, ranks=longs([1])))
    with pytest.raises(ValueError, match="`late` must have the shape of `ranks`"):
        rank_calibration(candidates, pairs, groups={"late": torch.ones(2).bool()})
