"""Scheduler and credit together grow, select and value the trees recorded from other implementations."""

from __future__ import annotations

import json

import pytest
import torch

from grounded_rl.credit import node_advantages, sipo_options
from grounded_rl.rollouts.tree import RolloutTree
from grounded_rl.sampling import BranchRule, TreeSampler, TreeShape, build_forest
from tests.trees.token_world import ANSWER, CALL, FIRST_WORD, FunctionEngine, make_requests, make_sampler

TOLERANCE = 1e-7
"""The recordings are rounded to nine digits."""


def recorded(shared_dir, name: str) -> list[dict]:
    return json.loads((shared_dir / "oracles" / f"{name}.json").read_text(encoding="utf-8"))["cases"]


class Replay:
    """Plays the branches of a recorded tree: initial ones, then the fresh ones in the order they were made."""

    def __init__(self, record: dict) -> None:
        self.nodes = {node["id"]: node for node in record["tree"]}
        births = {}
        for node in record["tree"]:
            above = births.get(node["parent"], -1)
            births[node["id"]] = above if node["created_iter"] is None else node["created_iter"]
        root = record["tree"][0]["id"]
        starts = [child for child in self.nodes[root]["children"] if births[child] < 0]
        starts += [new for event in record["events"] for new, *_ in event["new"]]
        self.branches = [self._chain(start, births) for start in starts]
        self.names: list[str] = []

    def _chain(self, name: str, births: dict[str, int]) -> list[str]:
        chain = [name]
        while own := [child for child in self.nodes[chain[-1]]["children"] if births[child] == births[name]]:
            # What a branch goes on with was made before anything else was put under the same parent.
            chain.append(own[0])
        return chain

    def turn(self, rollout: int, played: int) -> tuple[list[int], list[float]]:
        node = self.nodes[self.branches[rollout][played]]
        self.names.append(node["id"])
        # The word says which node this is.
        ids = [FIRST_WORD + int(node["id"][1:]), ANSWER if node["leaf"] else CALL]
        return ids, [-node["entropy"]] * 2


def replay(records: list[dict], shape: TreeShape, rule: BranchRule) -> list[RolloutTree]:
    replays = [Replay(record) for record in records]
    played: dict[int, int] = {}

    def policy(context, rollout):
        played[rollout] = played.get(rollout, -1) + 1
        tree, branch = divmod(rollout, shape.num_leaves)
        return replays[tree].turn(branch, played[rollout])

    sampler = make_sampler(max_turns=50, max_completion_tokens=10_000)
    return TreeSampler(sampler, shape, rule).sample(FunctionEngine(policy), make_requests(len(records)))


def names_of(tree: RolloutTree) -> list[str]:
    """Recorded names by node number."""
    return ["n0", *(f"n{node.turn.ids[0] - FIRST_WORD}" for node in tree.nodes[1:])]


def check_growth(tree: RolloutTree, record: dict) -> None:
    names = names_of(tree)
    parents = {node["id"]: node["parent"] for node in record["tree"]}
    assert sorted(names) == sorted(parents)
    assert [parents[name] for name in names[1:]] == [names[node.parent] for node in tree.nodes[1:]]
    for event in record["events"]:
        choices = [choice for choice in tree.selections if choice.round == event["iter"]]
        by_node = {names[each.node]: each for each in choices[0].candidates}
        assert sorted(by_node) == sorted(event["candidates"])
        found = [by_node[name] for name in event["candidates"]]
        assert [each.num_siblings for each in found] == event["n_sib"]
        assert [each.surprisal for each in found] == pytest.approx(event["entropy"], abs=TOLERANCE)
        if "score" in event:
            assert [each.score for each in found] == pytest.approx(event["score"], abs=TOLERANCE)
        assert [names[choice.incumbent] for choice in choices] == list(dict.fromkeys(event["selected"]))
        made = {(names[fresh], names[choice.incumbent]) for choice in choices for fresh in choice.fresh}
        assert made == {(new, incumbent) for new, incumbent, *_ in event["new"]}


def leaf_rewards(trees: list[RolloutTree], records: list[dict]) -> torch.Tensor:
    return torch.tensor(
        [
            record["reward"][names_of(tree)[leaf.node]]
            for tree, record in zip(trees, records, strict=True)
            for leaf in tree.leaves
        ]
    )


@pytest.mark.parametrize("number", range(7))
def test_at2po_grows_selects_and_values_as_recorded(shared_dir, number):
    case = recorded(shared_dir, "at2po_tree")[number]
    shape = TreeShape(case["M"], case["L"], case["K"], case["B"])
    (tree,) = replay([case], shape, BranchRule(standardize=False, root_candidate="always"))
    check_growth(tree, case)
    forest = build_forest([tree])
    rewards = leaf_rewards([tree], [case])
    credit = forest.credit(rewards, None, weight=0.0, options=sipo_options("release"))
    expected = case["out"]["child_softmax/node_value"]["value"]
    values = dict(zip(names_of(tree), credit.values.tolist(), strict=True))
    assert values == pytest.approx(expected, abs=TOLERANCE)
    less_parent = node_advantages(forest.trees.parents, credit.values, mode="minus_parent").tolist()
    expected = case["out"]["child_softmax/diff_parent"]["advantage"]
    assert dict(zip(names_of(tree), less_parent, strict=True)) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("number", range(4))
def test_sipo_in_release_mode_grows_selects_corrects_and_estimates_as_recorded(shared_dir, number):
    case = recorded(shared_dir, "sipo")[number]
    shape = TreeShape(case["M"], case["L"], case["K"], case["B"])
    trees = replay(case["trees"], shape, BranchRule(root_candidate="always", spread="absolute"))
    for tree, record in zip(trees, case["trees"], strict=True):
        check_growth(tree, record)
    forest = build_forest(trees)
    credit = forest.credit(
        leaf_rewards(trees, case["trees"]), case["a2_in"], weight=case["weight"], options=sipo_options("release")
    )
    for tree, record, start in zip(trees, case["trees"], forest.starts, strict=True):
        part = slice(start, start + len(tree.nodes))
        values = dict(zip(names_of(tree), credit.values[part].tolist(), strict=True))
        assert values == pytest.approx(record["value"], abs=TOLERANCE)
        corrected = dict(zip(names_of(tree), credit.corrected[part].tolist(), strict=True))
        assert {name: corrected[name] for name in record["leaf_corrected"]} == pytest.approx(
            record["leaf_corrected"], abs=TOLERANCE
        )
    assert credit.slope_sums.count == case["a2_n"]
    assert credit.slope_sums.estimate(min_count=1) == pytest.approx(case["a2_next_if_min1"], abs=TOLERANCE)
