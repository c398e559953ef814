"""
A policy whose surprisal goes with its return by a known amount.

A rollout searches once, with a surprisal of `1 + 0.3 z`, and answers right with probability `0.5 + association * z`.
Only the searches are candidates, all of them children of the prompt with equally many siblings, so that the rank
model of the correction holds up to the standardisation within trees.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import torch

from grounded_rl.credit import sipo_options
from grounded_rl.rollouts.tree import RolloutTree
from grounded_rl.sampling import TreeSampler, TreeShape, build_forest
from tests.trees.token_world import ANSWER, CALL, FunctionEngine, make_requests, make_sampler

RIGHT, WRONG = 10, 11
OFFSET, UNIT = 1000, 100
"""Word of a search: its z in hundredths, shifted above the other ids."""

NUM_STEPS, TREES_PER_STEP = 6, 40


def policy(association: float, seed: int):
    generator = random.Random(seed)

    def turn(context, rollout):
        if context[-1] == 1:
            z = max(-3.0, min(3.0, generator.gauss(0.0, 1.0)))
            return [OFFSET + round(UNIT * z), CALL], [-(1.0 + 0.3 * z)] * 2
        z = (context[1] - OFFSET) / UNIT
        is_right = generator.random() < min(1.0, max(0.0, 0.5 + association * z))
        return [RIGHT if is_right else WRONG, ANSWER], [-0.1, -0.1]

    return turn


@functools.cache
def play(association: float, *, weight: float, num_steps: int = NUM_STEPS) -> list[RolloutTree]:
    """Steps of SIPO without a policy update: each is corrected with the slope of the one before."""
    sampler = TreeSampler(make_sampler(), TreeShape(10, 2, 3, 2))
    engine, slope, finished = FunctionEngine(policy(association, seed=0)), None, []
    for step in range(num_steps):
        engine.seen.clear()
        trees = sampler.sample(engine, make_requests(TREES_PER_STEP), step=step)
        rewards = torch.tensor([float(leaf.answer == str(RIGHT)) for tree in trees for leaf in tree.leaves])
        forest = build_forest(trees)
        credit = forest.credit(rewards, slope, weight=weight, options=sipo_options())
        finished += [scored(tree, credit, start, slope) for tree, start in zip(trees, forest.starts, strict=True)]
        slope = credit.slope_sums.estimate(slope)
    return finished


def scored(tree: RolloutTree, credit, start: int, slope: float | None) -> RolloutTree:
    nodes = [
        replace(node, advantage=credit.values[start + n].item()) if n else node for n, node in enumerate(tree.nodes)
    ]
    leaves = [
        replace(
            leaf,
            rewards={"em": float(leaf.answer == str(RIGHT))},
            value=credit.leaf_values[start + leaf.node].item(),
            corrected=credit.corrected[start + leaf.node].item(),
        )
        for leaf in tree.leaves
    ]
    return replace(tree, nodes=tuple(nodes), leaves=tuple(leaves), extras={"slope": slope})
