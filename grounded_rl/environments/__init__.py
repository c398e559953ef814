"""The search environment: prompts, calls, observations, answers and rewards."""

from grounded_rl.environments.formats import CALL_ERRORS, TOOL_FORMATS, ParsedCall
from grounded_rl.environments.observation import format_observation, neutralize, water_fill
from grounded_rl.environments.parsing import TurnReading, read_turn
from grounded_rl.environments.prompts import PROMPT_STYLES, render_messages
from grounded_rl.environments.rewards import Scores, reward_value, score
from grounded_rl.environments.search import Layout, Observation, SearchEnvironment
from grounded_rl.environments.structure import structural_mask
from grounded_rl.environments.tools import SEARCH_TOOL

__all__ = [
    "CALL_ERRORS",
    "PROMPT_STYLES",
    "SEARCH_TOOL",
    "TOOL_FORMATS",
    "Layout",
    "Observation",
    "ParsedCall",
    "Scores",
    "SearchEnvironment",
    "TurnReading",
    "format_observation",
    "neutralize",
    "read_turn",
    "render_messages",
    "reward_value",
    "score",
    "structural_mask",
    "water_fill",
]
