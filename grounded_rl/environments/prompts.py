"""Prompt styles as data. A prompt is part of the method: treat an edit as a change of behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from grounded_rl.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How a question is put to the policy."""

    user: str
    """User message; `{question}` stands for the question."""
    system: str | None = None
    """System message, if any."""
    tools: bool = False
    """Whether the chat template also presents the schema of the search tool."""
    question_mark: bool = False
    """Whether a missing question mark is added."""


_GCA_USER = """\
Answer the question below. Whenever you receive new information, first reason about it between <think> and \
</think>. If your reasoning shows that you lack some knowledge, ask the search engine by calling the tool inside \
<tool_call> and </tool_call>; its results will be given to you between <tool_response> and </tool_response>. You \
may search as often as you need. Once no further knowledge is needed, give the final answer between <answer> and \
</answer>, as short as possible and without explanation. For example: <answer> Lisbon </answer>.

Question: {question}"""

_SEARCH_R1_USER = """\
Answer the question below. Whenever you receive new information, first reason about it between <think> and \
</think>. If your reasoning shows that you lack some knowledge, ask the search engine by writing <search> query \
</search>; the best results will be given to you between <information> and </information>. You may search as \
often as you need. Once no further knowledge is needed, give the final answer between <answer> and </answer>, as \
short as possible and without explanation. For example: <answer> Lisbon </answer>.

Question: {question}
"""

_SIPO_SYSTEM = """\
You solve questions step by step with the help of a tool that searches Wikipedia. Before every action, reason \
about the question between <think> and </think>. To look something up, write the query between <search> and \
</search>; what was found is given to you between <result> and </result>. You may search as often as you need. \
When you know the answer, write it between <answer> and </answer>, with the exact final answer in \\boxed{}. A \
complete response looks like this: <think> what I need to know </think> <search> a query </search> <result> what \
was found </result> <think> what follows from it </think> <answer> The final answer is \\boxed{the exact answer} \
</answer>."""

PROMPT_STYLES: dict[str, PromptStyle] = {
    "gca": PromptStyle(_GCA_USER, system="You are a helpful and harmless assistant.", tools=True),
    "search_r1": PromptStyle(_SEARCH_R1_USER, question_mark=True),
    "sipo": PromptStyle("{question}", system=_SIPO_SYSTEM, question_mark=True),
    "brief": PromptStyle("{question}"),
    "plain": PromptStyle("{question}", tools=True),
}
"""
Prompt styles by the name used in recipes: function calling (`gca`), the two raw tag formats, and the bare question
without (`brief`, for tiny policies) or with (`plain`) the schema of the tool.
"""


def prompt_style(name: str) -> PromptStyle:
    """The style of that name."""
    if name not in PROMPT_STYLES:
        raise ConfigurationError(
            f"`prompt_style` must be one of {sorted(PROMPT_STYLES)}: got {name!r}. Choose one of these."
        )
    return PROMPT_STYLES[name]


def render_messages(style: str, question: str) -> list[dict[str, str]]:
    """
    Messages that put a question to the policy.

    Args:
        style (`str`):
            Key of `PROMPT_STYLES`.
        question (`str`):
            The question, inserted as it is.

    Returns:
        `list[dict[str, str]]`: Chat messages with `role` and `content`.

    Raises:
        `ConfigurationError`: If the style is unknown.
    """
    wanted = prompt_style(style)
    question = question.strip()
    if wanted.question_mark and not question.endswith("?"):
        question += "?"
    # Not `str.format`: both the prompts and the questions may contain braces.
    messages = [{"role": "user", "content": wanted.user.replace("{question}", question)}]
    if wanted.system is not None:
        messages.insert(0, {"role": "system", "content": wanted.system})
    return messages
