"""Engines, the rollout loop, and trees on it."""

from grounded_rl.sampling.engine import Completion, Engine
from grounded_rl.sampling.forest import Forest, build_forest
from grounded_rl.sampling.scheduler import RolloutRequest, RolloutSampler
from grounded_rl.sampling.scripted import ScriptedEngine
from grounded_rl.sampling.tree import BranchRule, TreeSampler, TreeShape

__all__ = [
    "BranchRule",
    "Completion",
    "Engine",
    "Forest",
    "RolloutRequest",
    "RolloutSampler",
    "ScriptedEngine",
    "TreeSampler",
    "TreeShape",
    "build_forest",
]
