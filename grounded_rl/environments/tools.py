"""The one tool of the environment: its schema, and a function that carries it for `GRPOTrainer(tools=[search])`."""

from __future__ import annotations

from grounded_rl.errors import ConfigurationError

SEARCH_TOOL: dict = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search Wikipedia and return the best matching passages.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {
                    "type": "string",
                    "description": "What to look for, in a few words or as a question.",
                }
            },
            "required": ["query"],
        },
        "return": {"type": "string", "description": "The passages, best first, each with its title."},
    },
}
"""Schema of the search tool as the chat template presents it. It is part of the prompt."""


def search(query: str) -> str:
    """
    Search Wikipedia and return the best matching passages.

    Args:
        query: What to look for, in a few words or as a question.

    Returns:
        The passages, best first, each with its title.
    """
    raise ConfigurationError(
        "`search` must be executed by the rollout loop, which batches searches: got a direct call. "
        "Pass the tool to the trainer together with `rollout_func`."
    )
