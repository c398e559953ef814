"""Trainers: thin subclasses of TRL's `GRPOTrainer`."""

from grounded_rl.trainers.gca_config import GCAConfig
from grounded_rl.trainers.gca_sipo_trainer import GCASIPOTrainer
from grounded_rl.trainers.gca_trainer import GCATrainer
from grounded_rl.trainers.gspo_token_config import GSPOTokenConfig
from grounded_rl.trainers.search_agent_config import SearchAgentConfig
from grounded_rl.trainers.search_agent_trainer import SearchAgentTrainer
from grounded_rl.trainers.sipo_config import AT2POConfig, GCASIPOConfig, SIPOConfig
from grounded_rl.trainers.sipo_trainer import SIPOTrainer

__all__ = [
    "AT2POConfig",
    "GCAConfig",
    "GCASIPOConfig",
    "GCASIPOTrainer",
    "GCATrainer",
    "GSPOTokenConfig",
    "SIPOConfig",
    "SIPOTrainer",
    "SearchAgentConfig",
    "SearchAgentTrainer",
]
