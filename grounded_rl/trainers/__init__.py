"""Trainers: thin subclasses of TRL's `GRPOTrainer`."""

from grounded_rl.trainers.gca_config import GCAConfig
from grounded_rl.trainers.gca_trainer import GCATrainer
from grounded_rl.trainers.gspo_token_config import GSPOTokenConfig
from grounded_rl.trainers.search_agent_config import SearchAgentConfig
from grounded_rl.trainers.search_agent_trainer import SearchAgentTrainer

__all__ = ["GCAConfig", "GCATrainer", "GSPOTokenConfig", "SearchAgentConfig", "SearchAgentTrainer"]
