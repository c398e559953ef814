"""
How a policy writes a search call: one `ToolFormat` per syntax, in `TOOL_FORMATS`.

To add one: write a function `(content, complete) -> tuple[ParsedCall, ...]` that never raises and runs in linear
time, and register it with its tags. `content` is the message without its closed thinking.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from grounded_rl.errors import ConfigurationError

TOOL_NAME = "search"

CALL_ERRORS = {
    "invalid_json": "the tool call is not one valid JSON object",
    "invalid_syntax": "the tool call does not follow the required syntax",
    "several_calls_in_block": "one block must hold one call; write a separate block for every call",
    "unclosed_call": "the tool call was opened and never closed",
    "unopened_call": "the tool call was closed and never opened",
    "nested_call": "a tool call was opened inside another one",
    "not_an_object": "the tool call must be a JSON object with `name` and `arguments`",
    "missing_name": "the tool call has no `name`",
    "unknown_tool": f"there is no such tool; the only tool is `{TOOL_NAME}`",
    "invalid_arguments": "`arguments` must be a JSON object",
    "missing_query": "the argument `query` is missing",
    "invalid_query": "`query` must be a text",
    "empty_query": "`query` must not be empty",
    "too_many_calls": "too many calls in one turn; this call was not executed",
}
"""Kinds of mistakes in a call, and what the policy is told about each. The keys are also the names of the counters."""

TRUNCATED_CALL = "truncated_call"
"""A call cut off by the token budget: never executed and, because the rollout ends there, never answered."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call as it was read from a message."""

    query: str | None
    """The query; `None` exactly when `error` is given."""
    error: str | None = None
    """Key of `CALL_ERRORS`, or `TRUNCATED_CALL`."""
    detail: str = ""
    """What exactly could not be read, for the error observation."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Syntax of calls, results and answers."""

    read_calls: Callable[[str, bool], tuple[ParsedCall, ...]]
    """Calls of a message (thinking taken out, end tokens stripped); the flag says that the message was not cut off."""
    response_tag: str
    """Tag of results: the policy inventing one is recorded and breaks the format."""
    raw: bool = False
    """Results are appended as plain text instead of chat messages."""
    boxed: bool = False
    r"""The answer is the last `\boxed{}` instead of the last `<answer>` span."""
    stop_strings: tuple[str, ...] = ()
    """Strings at which generation of a turn must stop, kept in the ids."""


def _clean(query: str) -> str:
    """A query that can be encoded: JSON may spell lone surrogates."""
    return query.encode("utf-8", "replace").decode("utf-8")


def _query_calls(arguments: object) -> tuple[ParsedCall, ...]:
    """Calls from the arguments: one for `query`, one each for the entries of a list."""
    if not isinstance(arguments, dict):
        return (ParsedCall(None, "invalid_arguments"),)
    query = arguments.get("query", arguments.get("query_list"))
    if query is None:
        return (ParsedCall(None, "missing_query"),)
    queries = query if isinstance(query, list) else [query]
    if not queries:
        return (ParsedCall(None, "empty_query"),)
    if not all(isinstance(entry, str) for entry in queries):
        return (ParsedCall(None, "invalid_query"),)
    return tuple(ParsedCall(_clean(entry)) if entry.strip() else ParsedCall(None, "empty_query") for entry in queries)


def _json_call(value: object, argument_keys: tuple[str, ...]) -> tuple[ParsedCall, ...]:
    if not isinstance(value, dict):
        return (ParsedCall(None, "not_an_object"),)
    if not isinstance(value.get("name"), str):
        return (ParsedCall(None, "missing_name"),)
    if value["name"] != TOOL_NAME:
        return (ParsedCall(None, "unknown_tool", value["name"][:60]),)
    return _query_calls(next((value[key] for key in argument_keys if key in value), None))


def _decode(body: str) -> tuple[object, ParsedCall | None]:
    """The JSON value of a body, or what is wrong with it."""
    try:
        value, end = json.JSONDecoder().raw_decode(body)
    except json.JSONDecodeError as error:
        return None, ParsedCall(None, "invalid_json", f"{error.msg} at character {error.pos}")
    except RecursionError:
        return None, ParsedCall(None, "invalid_json", "nested too deeply")
    except ValueError:  # an integer beyond Python's limit of digits
        return None, ParsedCall(None, "invalid_json", "a number is too long")
    rest = body[end:].lstrip()
    if rest:
        kind = "several_calls_in_block" if rest[0] in "{[;," else "invalid_json"
        return None, ParsedCall(None, kind, "text after the JSON object" if kind == "invalid_json" else "")
    return value, None


def _blocks(content: str, tag: str, *, quoted: bool) -> Iterator[str | None]:
    """
    Body of every opened block, `None` for one that is never closed.

    In JSON (`quoted`) a closing tag inside a text value does not close: where a longer body is a JSON value, it runs
    on to the next closing tag, three times at most so that the time stays linear.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    position = 0
    while (start := content.find(opening, position)) >= 0:
        start += len(opening)
        end = content.find(closing, start)
        if end < 0:
            yield None
            return
        candidate = end
        for _ in range(3 if quoted else 0):
            problem = _decode(content[start:candidate].strip())[1]
            if problem is None:
                end = candidate
            if problem is None or not problem.detail.startswith("Unterminated string"):
                break
            candidate = content.find(closing, candidate + 1)
            if candidate < 0:
                break
        yield content[start:end]
        position = end + len(closing)


def _tagged_calls(
    content: str,
    complete: bool,
    tag: str,
    read_body: Callable[[str], tuple[ParsedCall, ...]],
    *,
    quoted: bool = False,
) -> tuple[ParsedCall, ...]:
    calls: list[ParsedCall] = []
    for body in _blocks(content, tag, quoted=quoted):
        if body is None:
            calls.append(ParsedCall(None, "unclosed_call" if complete else TRUNCATED_CALL))
            continue
        read = read_body(body)
        # An opening tag may stand inside a text value; only a body that cannot be read is blamed on it.
        calls.extend((ParsedCall(None, "nested_call"),) if read[0].error and f"<{tag}>" in body else read)
    if not calls and f"</{tag}>" in content and "<answer>" not in content and "\\boxed{" not in content:
        calls.append(ParsedCall(None, "unopened_call"))
    return tuple(calls)


def _read_qwen(content: str, complete: bool) -> tuple[ParsedCall, ...]:
    def read_body(body: str) -> tuple[ParsedCall, ...]:
        value, problem = _decode(body.strip())
        return (problem,) if problem else _json_call(value, ("arguments",))

    return _tagged_calls(content, complete, "tool_call", read_body, quoted=True)


def _read_function_body(body: str) -> tuple[ParsedCall, ...]:
    """One `<function=name>` element with `<parameter=name>` children."""
    syntax = (ParsedCall(None, "invalid_syntax"),)
    body = body.strip()
    head = body.find(">")
    if not body.startswith("<function=") or head < 0:
        return syntax
    name = body[len("<function=") : head].strip()
    if body.find("<function=", head) >= 0 and body.count("</function>") > 1:
        return (ParsedCall(None, "several_calls_in_block"),)
    if not body.endswith("</function>"):
        return syntax
    if name != TOOL_NAME:
        return (ParsedCall(None, "unknown_tool", name[:60]) if name else ParsedCall(None, "missing_name"),)
    arguments: dict[str, object] = {}
    rest = body[head + 1 : -len("</function>")]
    position = 0
    while rest[position:].strip():
        start = position + len(rest[position:]) - len(rest[position:].lstrip())
        head, end = rest.find(">", start), rest.find("</parameter>", start)
        if not rest.startswith("<parameter=", start) or not start < head < end or len(arguments) >= 16:
            return syntax
        # The template writes a line break on either side of the value.
        value = rest[head + 1 : end].removeprefix("\n").removesuffix("\n")
        key = rest[start + len("<parameter=") : head].strip()
        arguments[key] = value if key != "query_list" else _decode(value)[0] or ""
        position = end + len("</parameter>")
    return _query_calls(arguments)


def _read_qwen3_5(content: str, complete: bool) -> tuple[ParsedCall, ...]:
    return _tagged_calls(content, complete, "tool_call", _read_function_body)


def _read_llama(content: str, complete: bool) -> tuple[ParsedCall, ...]:
    """A message that is one JSON object, after an optional `<|python_tag|>`."""
    body = content.strip()
    tagged = body.startswith("<|python_tag|>")
    body = body.removeprefix("<|python_tag|>").strip()
    if not tagged and not (body.startswith("{") and '"name"' in body):
        return ()
    value, problem = _decode(body)
    if problem is None:
        return _json_call(value, ("parameters", "arguments"))
    if not complete and problem.error == "invalid_json":
        return (ParsedCall(None, TRUNCATED_CALL),)
    return (problem,)


def _read_search_tag(content: str, complete: bool) -> tuple[ParsedCall, ...]:
    def read_body(body: str) -> tuple[ParsedCall, ...]:
        if "<search>" in body:
            return (ParsedCall(None, "nested_call"),)
        return _query_calls({"query": body.strip()})

    return _tagged_calls(content, complete, "search", read_body)


TOOL_FORMATS: dict[str, ToolFormat] = {
    "qwen": ToolFormat(_read_qwen, "tool_response"),
    "qwen3_5": ToolFormat(_read_qwen3_5, "tool_response"),
    "llama": ToolFormat(_read_llama, "tool_response"),
    "search_r1": ToolFormat(_read_search_tag, "information", raw=True, stop_strings=("</search>", "</answer>")),
    "sipo": ToolFormat(_read_search_tag, "result", raw=True, boxed=True, stop_strings=("</search>", "</answer>")),
}
"""Call formats by the name used in recipes."""


def tool_format(name: str) -> ToolFormat:
    """The format of that name."""
    if name not in TOOL_FORMATS:
        raise ConfigurationError(
            f"`tool_format` must be one of {sorted(TOOL_FORMATS)}: got {name!r}. "
            "Choose the one your model was trained with."
        )
    return TOOL_FORMATS[name]
