"""
Prompts and observations as token ids, through the tokenizer's chat template.

Sampled ids are never encoded again. What a template adds after an assistant turn (the line break behind the
end-of-turn token, the tool messages, the next generation prompt) is found by rendering a dummy conversation once;
after that, an observation costs one encoding of its own text.
"""

from __future__ import annotations

from collections.abc import Sequence

from grounded_rl.environments.formats import TOOL_NAME
from grounded_rl.environments.tags import END_TOKENS
from grounded_rl.errors import ConfigurationError

_SLOT = "\x02slot\x03"
_PROBE = 'é "quoted" <b> \\ {x}\nsecond line'
_DUMMY = [
    {"role": "user", "content": "dummy"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": TOOL_NAME, "arguments": {}}}],
    },
]


class ChatEncoder:
    """
    Encodes messages and tool results with one chat template.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer of the policy.
        tools (`list[dict]`, *optional*):
            Tool schemas; `None` and an empty list are the same.
        chat_template (`str`, *optional*):
            Template that replaces the tokenizer's own.
        template_kwargs (`dict`, *optional*):
            Further arguments of the template, for instance `enable_thinking`.

    Raises:
        `ConfigurationError`: If tools are given and the template does not present them.
    """

    def __init__(self, tokenizer, *, tools=None, chat_template: str | None = None, template_kwargs=None):
        self._tokenizer = tokenizer
        # Some templates change the prompt when they are handed an empty list.
        self.tools = tools or None
        self._options = {"chat_template": chat_template, **(template_kwargs or {})}
        self.has_template = bool(chat_template or tokenizer.chat_template)
        self._between: dict[int, tuple[str, ...] | None] = {}
        if self.tools and not self.has_template:
            raise ConfigurationError(
                "`chat_template` must be given for function calling: got a tokenizer without one. "
                "Pass a template, or choose a raw tag format."
            )
        if self.tools and self._render(_DUMMY[:1], tools=self.tools) == self._render(_DUMMY[:1]):
            raise ConfigurationError(
                "`chat_template` must present tools: got a template that ignores them. "
                "Choose another template or model, or a raw tag format."
            )

    def prompt_ids(self, messages: Sequence[dict]) -> list[int]:
        """Ids of the messages with tools and generation prompt; plain contents where the tokenizer has no template."""
        return self._encode(self.prompt_text(messages))

    def prompt_text(self, messages: Sequence[dict]) -> str:
        """Rendered prompt, generation prompt included."""
        if not self.has_template:
            return "\n\n".join(message["content"] for message in messages)
        return self._render(messages, tools=self.tools, add_generation_prompt=True)

    @property
    def opens_thinking(self) -> bool:
        """Whether the generation prompt ends inside an open `<think>`."""
        return self.has_template and self.prompt_text(_DUMMY[:1]).rstrip().endswith("<think>")

    def text_ids(self, text: str) -> list[int]:
        """Ids of plain text appended after sampled ids."""
        return self._encode(text)

    def observation_ids(self, tool_texts: Sequence[str]) -> list[int]:
        """
        Ids that follow an assistant turn which ended with the end-of-turn token: one tool message per text and the
        next generation prompt.

        Args:
            tool_texts (`Sequence[str]`):
                Content of the tool messages, at least one.

        Returns:
            `list[int]`

        Raises:
            `ConfigurationError`: If the template changes earlier messages when later ones follow.
        """
        between = self._constants(len(tool_texts))
        if between is None:
            return self._encode(self._suffix(tool_texts))
        pieces = [piece for pair in zip(between, tool_texts, strict=False) for piece in pair]
        return self._encode("".join((*pieces, between[-1])))

    def _constants(self, number: int) -> tuple[str, ...] | None:
        """Template text around that many tool messages; `None` if the template alters their content."""
        if number not in self._between:
            between = tuple(self._suffix([_SLOT] * number).split(_SLOT))
            probe = self._suffix([_PROBE] * number)
            verbatim = len(between) == number + 1 and _PROBE.join(between) == probe
            self._between[number] = between if verbatim else None
        return self._between[number]

    def _suffix(self, tool_texts: Sequence[str]) -> str:
        """Rendered text after the assistant's end-of-turn token."""
        messages = [{"role": "tool", "name": TOOL_NAME, "content": text} for text in tool_texts]
        prefix = self._render(_DUMMY)
        end = self._end_token(prefix)
        if end is not None:
            # The template may write a line break after the token, which the engine never samples.
            prefix = prefix[: prefix.rindex(end) + len(end)]
        full = self._render([*_DUMMY, *messages], add_generation_prompt=True)
        if not full.startswith(prefix):
            raise ConfigurationError(
                "`chat_template` must keep earlier messages unchanged when tool messages follow: got one that "
                "rewrites them. Pass `trl.chat_template_utils.get_training_chat_template(tokenizer)`."
            )
        return full[len(prefix) :]

    def _end_token(self, rendered: str) -> str | None:
        """The token that ends a turn; base models declare an end of text that their template does not use."""
        candidates = (self._tokenizer.eos_token, *END_TOKENS)
        return next((token for token in candidates if token and token in rendered), None)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids at which generation of a turn must stop."""
        turn_end = self._end_token(self._render(_DUMMY)) if self.has_template else None
        tokens = dict.fromkeys(token for token in (self._tokenizer.eos_token, turn_end) if token)
        return tuple(self._tokenizer.convert_tokens_to_ids(token) for token in tokens)

    def _render(self, messages: Sequence[dict], *, tools=None, add_generation_prompt: bool = False) -> str:
        return self._tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._options,
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]
