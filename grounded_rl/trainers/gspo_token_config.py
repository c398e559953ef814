"""Configuration of GSPO with one gradient per token."""

from __future__ import annotations

from dataclasses import dataclass, field

from grounded_rl.trainers.search_agent_config import SearchAgentConfig


@dataclass
class GSPOTokenConfig(SearchAgentConfig):
    r"""
    Configuration of [`SearchAgentTrainer`] that makes it GSPO-token
    ([Sec. 4.3](https://huggingface.co/papers/2507.18071)).

    The ratio of a token has the value of its rollout's length-normalised ratio and the gradient of its own
    log-probability.

    Parameters:
        importance_sampling_level (`str`, *optional*, defaults to `"sequence_token"`):
            Level of the importance ratio.
        epsilon (`float`, *optional*, defaults to `3e-3`):
            Lower clip range, the value the AT²PO release uses for its GSPO runs; the GSPO paper's is smaller.
        epsilon_high (`float`, *optional*, defaults to `4e-3`):
            Upper clip range, from the same source.
        loss_type (`str`, *optional*, defaults to `"grpo"`):
            Mean over the tokens of a rollout, then over rollouts.
    """

    importance_sampling_level: str = field(
        default="sequence_token", metadata={"help": "Level of the importance ratio."}
    )
    epsilon: float = field(default=3e-3, metadata={"help": "Lower clip range."})
    epsilon_high: float | None = field(default=4e-3, metadata={"help": "Upper clip range."})
    loss_type: str = field(default="grpo", metadata={"help": "Reduction of the token losses."})
