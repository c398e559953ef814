"""The selection report: every figure on trees small enough to count, and the command that prints it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from grounded_rl.cli import main
from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation.prefixes import prefix_rows
from grounded_rl.evaluation.selection import analyse_selections, calibration_samples, run_facts, run_forest
from grounded_rl.evaluation.selection_report import selection_markdown, write_selection_report
from grounded_rl.rollouts import Leaf, StopReason, save_rollouts, save_trees
from tests.builders import make_rollout
from tests.trees.records import make_tree
from tests.trees.simulation import play


def scored_tree(number: int, rewards, *, step: int = 0, **fields):
    """The tree of the records' tests with the rewards of its three leaves."""
    tree = make_tree(number=number, step=step, **fields)
    leaves = [
        Leaf(leaf.node, StopReason.ANSWER, rewards={"em": reward}, value=0.5, corrected=0.5 + 0.1 * place)
        for place, (leaf, reward) in enumerate(zip(tree.leaves, rewards, strict=True))
    ]
    return replace(tree, leaves=tuple(leaves))


def test_facts_are_counted_over_valid_leaves():
    trees = [scored_tree(0, (1.0, 0.0, 1.0)), scored_tree(1, (1.0, 1.0, None), step=4)]
    facts = run_facts(run_forest(trees))
    assert (facts["trees"], facts["steps"], facts["leaves"]) == (2, 2, 6)
    assert facts["leaves that failed or have no reward"] == 1
    assert facts["mean reward"] == pytest.approx(4 / 5)
    assert facts["share of trees with equal rewards"] == 0.5
    # Corrections 0, 0.1, 0.2 and 0, 0.1; the third leaf of the second tree does not count.
    assert facts["mean correction of a leaf (absolute)"] == pytest.approx(0.4 / 5)
    assert facts["mean correction of a leaf in trees with equal rewards (absolute)"] == pytest.approx(0.05)
    # Root and node 1 have two children, node 3 has one.
    assert facts["share of internal nodes with one child"] == pytest.approx(1 / 3)
    assert facts["selection events"] == 2
    assert facts["sampled / linear"] == pytest.approx(9 / 11)


def test_the_calibration_pairs_the_incumbent_at_selection_with_its_fresh_sibling():
    # Leaf 4 lies below the incumbent 3, leaf 5 is the fresh sibling.
    trees = [scored_tree(0, (1.0, 0.0, 0.25)), scored_tree(1, (0.0, 0.0, None), step=1)]
    candidates, pairs = calibration_samples(run_forest(trees))
    assert pairs.displacements.tolist() == [0.75]
    assert (pairs.ranks.tolist(), pairs.set_sizes.tolist()) == ([2], [2])
    assert candidates.outcomes.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert candidates.scores.tolist() == [0.4, -0.5] * 2
    # Steps are counted in the order of the batches, whatever the optimiser's numbers are.
    assert candidates.steps.tolist() == [0, 0, 1, 1]


def test_prefix_rows_are_a_one_way_analysis_of_variance_within_trees():
    # Two trees; depth 1: clusters {1, 0}, {0} and {1, 1}, {0}.
    parents = torch.tensor([-1, 0, 0, 1, 1, -1, 5, 5, 6, 6])
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    counted = torch.tensor([False, False, True, True, True, False, False, True, True, True])
    first, second = prefix_rows(
        parents, rewards, counted, torch.tensor([0, 0]), num_resamples=50, generator=torch.Generator().manual_seed(0)
    )
    assert (first.depth, first.clusters_per_tree, first.leaves_per_tree) == (1, 2.0, 3.0)
    # Per tree: sum of squares 5, so m0 = (3 - 5/3) / 1. Means 1/3 and 2/3.
    between = (2 * (0.5 - 1 / 3) ** 2 + (0 - 1 / 3) ** 2 + 2 * (1 - 2 / 3) ** 2 + (0 - 2 / 3) ** 2) / 2
    within = (0.25 + 0.25) / 2
    size = 4 / 3
    expected = (between - within) / (between + (size - 1) * within)
    assert first.cluster_size == pytest.approx(size)
    assert first.correlation.estimate == pytest.approx(expected)
    assert first.effective_leaves == pytest.approx(3 / (1 + expected * (5 / 3 - 1)))
    # At depth 2 every leaf is its own cluster: nothing to correlate.
    assert (second.depth, second.clusters_per_tree) == (2, 2.0)
    assert math.isnan(second.correlation.estimate)


def test_a_report_names_every_finding_and_is_the_same_in_json(tmp_path):
    analysis = analyse_selections(play(-0.2, weight=1.0, num_steps=2), name="runs/a|b", num_resamples=50)
    text = selection_markdown([analysis, replace(analysis, name="other")])
    for heading in (
        "## The trees",
        "## Selected and fresh branches",
        "calibration of the rank model",
        "share a prefix",
        "slope over time",
        "told in advance",
    ):
        assert heading in text
    assert "runs/a\\|b" in text
    files = write_selection_report(tmp_path / "selection.md", [analysis], command="the command")
    assert [path.name for path in files] == [
        "selection.md",
        "selection.json",
        "selection_displacement.png",
        "selection_signals.png",
        "selection_slope.png",
    ]
    assert all(path.stat().st_size > 1000 for path in files)
    record = json.loads((tmp_path / "selection.json").read_text(encoding="utf-8"))
    assert record["command"] == "the command"
    assert record["runs"][0]["facts"]["trees"] == analysis.facts["trees"]
    assert record["runs"][0]["contrasts"]["fresh - fresh, as trained"]["num_entries"] > 0
    with pytest.raises(ConfigurationError, match="`path` must end in `.md`"):
        write_selection_report(tmp_path / "selection.txt", [analysis])


def test_ways_of_choosing_are_bounded_by_hindsight():
    signals = analyse_selections(play(-0.2, weight=1.0, num_steps=2), num_resamples=20).signals
    assert signals.num_events == 2 * 40 * 2 * 3
    assert signals.chosen_in_hindsight >= max(signals.chosen_by_score, signals.chosen_by_ridge)
    assert signals.ridge_correlation >= abs(signals.score_correlation) - 0.02


def test_trees_without_choices_or_rewards_make_no_analysis_or_an_empty_one(tmp_path):
    tree = scored_tree(0, (1.0, 0.0, 1.0))
    analysis = analyse_selections([replace(tree, selections=())], num_resamples=10)
    assert analysis.facts["selection events"] == 0
    assert math.isnan(analysis.contrasts["selected - fresh, as trained"].estimate)
    assert "–" in selection_markdown([analysis])
    write_selection_report(tmp_path / "empty.md", [analysis])
    with pytest.raises(ConfigurationError, match="at least one tree"):
        analyse_selections([])
    with pytest.raises(ConfigurationError, match="leaves with rewards"):
        analyse_selections([scored_tree(0, (None, None, None))])


def test_the_command_reports_on_a_run(tmp_path, capsys):
    save_trees(tmp_path / "run" / "rollouts.jsonl", [scored_tree(n, (1.0, 0.0, 0.5 * n), step=n) for n in range(3)])
    out = tmp_path / "selection.md"
    words = ["report", "--selection", str(tmp_path / "run"), "--num-resamples", "20", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "# Selection report" in printed
    assert f"wrote {out}" in printed
    assert f"--out {out}" in out.read_text(encoding="utf-8")


def test_the_command_refuses_a_run_without_trees(tmp_path, capsys):
    save_rollouts(tmp_path / "rollouts.jsonl", [make_rollout("hit right")])
    assert main(["report", "--selection", str(tmp_path)]) == 2
    assert "`RUN` must hold trees" in capsys.readouterr().err
