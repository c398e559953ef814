"""What selection does to values when surprisal goes with return, and what the correction undoes of it."""

from __future__ import annotations

import pytest
import torch

from grounded_rl.evaluation.selection import analyse_selections, contrasts, run_forest
from grounded_rl.rollouts.tree import RolloutTree
from tests.trees.simulation import NUM_STEPS, TREES_PER_STEP, play


def after_the_first_step(trees: list[RolloutTree]) -> list[RolloutTree]:
    """Trees that had a slope to be corrected with."""
    return [tree for tree in trees if tree.step > 0]


def contrasts_of(trees: list[RolloutTree]):
    generator = torch.Generator().manual_seed(1)
    return contrasts(run_forest(trees), num_resamples=400, generator=generator)


@pytest.mark.parametrize("association", [-0.2, pytest.param(0.2, marks=pytest.mark.slow)])
def test_selection_displaces_incumbents_and_the_correction_undoes_at_least_half_of_it(association):
    trees = after_the_first_step(play(association, weight=1.0))
    found = contrasts_of(trees)
    plain = found["selected - fresh, without correction"]
    corrected = found["selected - fresh, as trained"]
    # The best of 10 to 16 candidates stand 1.1 standard deviations out; the slope is about 0.4.
    assert (plain.high < -0.2) if association < 0 else (plain.low > 0.2)
    assert abs(corrected.estimate) < 0.5 * abs(plain.estimate)
    for label in ("without correction", "as trained"):
        fresh = found[f"fresh - fresh, {label}"]
        assert fresh.low < 0.0 < fresh.high


def test_without_the_correction_what_was_trained_is_what_was_measured():
    trees = play(-0.2, weight=0.0, num_steps=2)
    found = contrasts_of(trees)
    for name in ("selected - fresh", "fresh - fresh"):
        trained, plain = found[f"{name}, as trained"], found[f"{name}, without correction"]
        assert trained.estimate == pytest.approx(plain.estimate, abs=1e-12)


def test_without_an_association_the_correction_changes_nothing_on_average():
    trees = after_the_first_step(play(0.0, weight=1.0))
    found = contrasts_of(trees)
    plain, trained = found["selected - fresh, without correction"], found["selected - fresh, as trained"]
    assert plain.low < 0.0 < plain.high
    # The slope of a step has a standard error of 0.03, so that the mean of five corrections has one of 0.015; with the
    # association above the correction was 0.4.
    assert abs(trained.estimate - plain.estimate) < 0.045
    used = [tree.extras["slope"] for tree in trees]
    assert max(map(abs, used)) < 0.12


def test_the_rank_model_is_calibrated_where_it_holds():
    analysis = analyse_selections(play(-0.2, weight=1.0), num_resamples=300)
    rows = {row.group: row for row in analysis.calibration}
    # Candidate sets of the last round have 16 members and three are chosen.
    assert set(rows) == {"all", "rank 1", "rank 2-3", "candidates <= 20"}
    assert rows["all"].observed.num_entries == 3 * TREES_PER_STEP * (NUM_STEPS - 1)
    assert rows["all"].observed.high < 0.0
    assert rows["rank 1"].predicted.estimate < rows["rank 2-3"].predicted.estimate < 0.0
    assert rows["all"].residual.low < 0.0 < rows["all"].residual.high
    # Slope of a right answer on z is the association; scores are standardised, so it is the slope on Z too.
    slopes = [own for _, _, own in analysis.slopes]
    assert sum(slopes) / len(slopes) == pytest.approx(-0.4, abs=0.06)


def test_the_contrasts_are_those_of_the_recorded_advantages():
    trees = play(-0.2, weight=1.0)[:50]
    selected, fresh, owners = [], [], []
    for number, tree in enumerate(trees):
        for choice in tree.selections:
            advantage = [tree.nodes[node].advantage for node in (choice.incumbent, *choice.fresh)]
            selected.append(advantage[0] - advantage[1])
            fresh.append(advantage[1] - advantage[2])
            owners.append(number)
    found = contrasts_of(trees)
    assert found["selected - fresh, as trained"].estimate == pytest.approx(sum(selected) / len(selected), abs=1e-12)
    assert found["fresh - fresh, as trained"].estimate == pytest.approx(sum(fresh) / len(fresh), abs=1e-12)
    assert found["selected - fresh, as trained"].num_entries == len(owners)
