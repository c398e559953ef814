"""
The search environment of one question: prompt, reading of turns, observations, answer and format.

It holds no retriever and no state: the rollout loop batches the searches of all rollouts and hands the hits over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grounded_rl.environments import formats, parsing, prompts
from grounded_rl.environments.chat import ChatEncoder
from grounded_rl.environments.formats import CALL_ERRORS, ParsedCall
from grounded_rl.environments.observation import ObservationFormatter
from grounded_rl.environments.parsing import TurnReading
from grounded_rl.environments.tools import SEARCH_TOOL
from grounded_rl.errors import ConfigurationError, RetrievalError, RolloutError
from grounded_rl.retrieval.base import Hit
from grounded_rl.rollouts.types import Call, CallStatus, FinishReason, ShownPassage, Turn

FINAL_TURN_NOTICE = "This was the last search. Give the final answer now."


@dataclass(frozen=True, slots=True)
class Layout:
    """Templates and notices, where the defaults of the tool format and the tokenizer do not fit."""

    observation_template: str | None = None
    """Key of `OBSERVATION_TEMPLATES`; by default the one of the tool format."""
    chat_template: str | None = None
    """Template that replaces the tokenizer's own; must keep earlier messages unchanged."""
    template_kwargs: Mapping[str, object] | None = None
    """Further arguments of the template, for instance `enable_thinking`."""
    final_turn_notice: bool = True
    """Tell the policy when only the answer turn is left."""


DEFAULT_LAYOUT = Layout()


@dataclass(frozen=True, slots=True)
class Observation:
    """What follows a turn."""

    ids: tuple[int, ...]
    """Ids to append: template tokens, results and the next generation prompt; never trained."""
    text: str
    """The results, without template tokens (in the raw tag formats: exactly the text that is appended)."""
    calls: tuple[Call, ...]
    """The calls of the turn with their outcomes, in the order written."""


class SearchEnvironment:
    """
    Turns a policy's text into calls, and hits into text.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Tokenizer of the policy.
        prompt_style (`str`, *optional*, defaults to `"gca"`):
            Key of `PROMPT_STYLES`.
        tool_format (`str`, *optional*, defaults to `"qwen"`):
            Key of `TOOL_FORMATS`.
        max_turns (`int`, *optional*, defaults to `5`):
            Assistant turns of a rollout, the answer included.
        top_k (`int`, *optional*, defaults to `3`):
            Passages per search.
        observation_tokens (`int`, *optional*, defaults to `1024`):
            Token budget of the passages of one call.
        max_calls_per_turn (`int`, *optional*, defaults to `3`):
            Calls of one turn that are answered; further ones are refused together.
        layout ([`Layout`], *optional*):
            Templates and notices.

    Raises:
        `ConfigurationError`: If a name is unknown, a number is too small, or the template cannot carry tools.
    """

    def __init__(
        self,
        tokenizer,
        *,
        prompt_style: str = "gca",
        tool_format: str = "qwen",
        max_turns: int = 5,
        top_k: int = 3,
        observation_tokens: int = 1024,
        max_calls_per_turn: int = 3,
        layout: Layout = DEFAULT_LAYOUT,
    ):
        for name, value in (("max_turns", max_turns), ("top_k", top_k), ("max_calls_per_turn", max_calls_per_turn)):
            if value < 1:
                raise ConfigurationError(f"`{name}` must be at least 1: got {value}. Raise it.")
        self.tokenizer = tokenizer
        self.prompt_style = prompt_style
        self.tool_format = tool_format
        self.max_turns = max_turns
        self.top_k = top_k
        self.max_calls_per_turn = max_calls_per_turn
        self.layout = layout
        self._format = formats.tool_format(tool_format)
        self.tools: list[dict] | None = [SEARCH_TOOL] if prompts.prompt_style(prompt_style).tools else None
        if self.tools and self._format.raw:
            raise ConfigurationError(
                f"`prompt_style` must fit `tool_format`: got {prompt_style!r} (function calling) with {tool_format!r} "
                f"(raw tags). Set `prompt_style` to {tool_format!r} or 'brief'."
            )
        self.chat = ChatEncoder(
            tokenizer, tools=self.tools, chat_template=layout.chat_template, template_kwargs=layout.template_kwargs
        )
        template = layout.observation_template or (tool_format if self._format.raw else "gca")
        self.formatter = ObservationFormatter(tokenizer, template=template, budget=observation_tokens)
        if self._format.raw and f"<{self._format.response_tag}>" not in self.formatter.template.before:
            raise ConfigurationError(
                f"`observation_template` must enclose results in <{self._format.response_tag}> for `tool_format` "
                f"{tool_format!r}: got {template!r}. Leave it unset."
            )
        self.opened_think = self.chat.opens_thinking
        if not self._format.raw:
            self.chat.observation_ids([""])  # a template that rewrites history is refused here, not in mid-rollout

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings at which the engine must end a turn, keeping them."""
        return self._format.stop_strings

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids at which the engine must end a turn, keeping them."""
        return self.chat.end_token_ids

    def messages(self, question: str) -> list[dict]:
        """Messages that put the question."""
        return prompts.render_messages(self.prompt_style, question)

    def prompt_ids(self, question: str) -> list[int]:
        """Ids of the prompt, tools and generation prompt included."""
        return self.chat.prompt_ids(self.messages(question))

    def read(self, ids: Sequence[int], *, finish: FinishReason) -> TurnReading:
        """
        Read the sampled ids of one turn.

        Args:
            ids (`Sequence[int]`):
                Sampled ids, the end-of-turn token included when there is one.
            finish ([`FinishReason`]):
                Why generation ended; a turn cut off by its budget has no executable call.

        Returns:
            [`TurnReading`]
        """
        # Tags may be special tokens, so nothing is skipped.
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self.read_text(text, finish=finish)

    def read_text(self, text: str, *, finish: FinishReason = FinishReason.STOP) -> TurnReading:
        """Read a decoded turn."""
        return parsing.read_turn(
            text,
            format=self.tool_format,
            complete=finish is FinishReason.STOP,
            opened_think=self.opened_think,
        )

    def executable_queries(self, reading: TurnReading) -> list[str]:
        """Queries to run for a turn, at most `max_calls_per_turn`; none for a turn that was cut off."""
        if not reading.complete:
            return []
        return [call.query for call in reading.calls if call.query is not None][: self.max_calls_per_turn]

    def observe(
        self,
        reading: TurnReading,
        responses: Sequence[Sequence[Hit] | None],
        *,
        turns_left: int,
        cached: Sequence[bool] = (),
    ) -> Observation:
        """
        What follows a turn with calls.

        Args:
            reading ([`TurnReading`]):
                Reading of the turn, holding at least one call.
            responses (`Sequence[Sequence[Hit] | None]`):
                Hits of every executable query, in order; empty where nothing was found.
            turns_left (`int`):
                Turns that may still follow, the answer included.
            cached (`Sequence[bool]`, *optional*):
                Whether each response repeats an identical earlier search of the rollout.

        Returns:
            [`Observation`]

        Raises:
            `RolloutError`: If the turn holds no call or was cut off: nothing follows it.
            `RetrievalError`: If the number of responses differs from the number of executable queries, or one is
            missing:
                a failed search is never an observation.
        """
        if not reading.calls or not reading.complete:
            raise RolloutError(
                f"`reading` must be a complete turn with a call: got a turn of kind {reading.kind.value!r}, "
                f"complete={reading.complete}. End the rollout after this turn."
            )
        expected = len(self.executable_queries(reading))
        if len(responses) != expected or any(response is None for response in responses):
            raise RetrievalError(
                f"`responses` must hold the hits of all {expected} executable queries: got {len(responses)}, of which "
                f"{sum(response is None for response in responses)} are missing. Mark the rollout as failed instead."
            )
        flags = [*cached, *(False for _ in range(expected - len(cached)))]
        pending = iter(zip(responses, flags, strict=True))
        texts: list[str] = []
        calls: list[Call] = []
        refused = 0
        for parsed in reading.calls:
            answered = next(pending, None) if parsed.query is not None else None
            if answered is not None:
                text, passages = self.formatter.format(answered[0][: self.top_k])
                calls.append(_executed(parsed, passages, cached=answered[1]))
                texts.append(text)
                continue
            error = parsed.error or "too_many_calls"
            calls.append(Call(parsed.query, CallStatus.REJECTED, error=error))
            if parsed.query is not None or len(texts) >= self.max_calls_per_turn:
                refused += 1
            else:
                texts.append(self.error_text(parsed))
        if refused:
            texts.append(
                f"Error: {refused} more calls were not executed; at most "
                f"{self.max_calls_per_turn} per turn are answered."
            )
        if turns_left == 1 and self.layout.final_turn_notice:
            texts[-1] += f"\n\n{FINAL_TURN_NOTICE}"
        return self._observation(texts, tuple(calls))

    def _observation(self, texts: list[str], calls: tuple[Call, ...]) -> Observation:
        if not self._format.raw:
            return Observation(tuple(self.chat.observation_ids(texts)), "\n\n".join(texts), calls)
        template = self.formatter.template
        text = template.before + template.separator.join(texts) + template.after
        return Observation(tuple(self.chat.text_ids(text)), text, calls)

    def error_text(self, call: ParsedCall) -> str:
        """What the policy is told about a call that cannot be executed."""
        detail = f" ({self.formatter.neutralize(call.detail)})" if call.detail else ""
        return f"Error: {CALL_ERRORS[call.error or 'too_many_calls']}{detail}."

    def unanswered_calls(self, reading: TurnReading) -> tuple[Call, ...]:
        """Calls of a turn after which the rollout ends: turn limit, token budget, or cut off in writing."""
        return tuple(Call(call.query, CallStatus.NOT_EXECUTED) for call in reading.calls)

    def show(self, hits: Sequence[Hit]) -> tuple[ShownPassage, ...]:
        """The passages of a response as the policy would receive them."""
        return self.formatter.format(hits[: self.top_k])[1]

    def answer(self, turns: Sequence[Turn]) -> str | None:
        """Answer of the final turn, the only one that counts; `None` without one."""
        return parsing.rollout_answer(turns, format=self.tool_format, opened_think=self.opened_think)

    def format_ok(self, turns: Sequence[Turn]) -> bool:
        """Whether a rollout keeps the format."""
        return parsing.rollout_format_ok(turns, format=self.tool_format, opened_think=self.opened_think)


def _executed(parsed: ParsedCall, passages: tuple[ShownPassage, ...], *, cached: bool) -> Call:
    status = CallStatus.OK if passages else CallStatus.EMPTY
    return Call(parsed.query, status, passages, cached=cached)
