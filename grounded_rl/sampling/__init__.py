"""Engines and the rollout loop."""

from grounded_rl.sampling.engine import Completion, Engine
from grounded_rl.sampling.scheduler import RolloutRequest, RolloutSampler
from grounded_rl.sampling.scripted import ScriptedEngine

__all__ = ["Completion", "Engine", "RolloutRequest", "RolloutSampler", "ScriptedEngine"]
