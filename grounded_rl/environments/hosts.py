"""
Rewards of the hosts, on whole responses: Search-R1 (tag format, v0.3) and AT²PO (boxed format).

They exist for parity with published numbers. Training under the function-calling format uses `environments.rewards`,
which scores parsed turns and has none of the quirks named here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from grounded_rl.environments.tags import last_boxed, spans
from grounded_rl.text import contains_alias, exact_match, token_f1

_ASSISTANT = "<|im_start|>assistant"
_SEARCH_R1_TAG = re.compile(r"(</?(?:think|search|information|answer)>)")
# Where each tag may stand and where it leads; text is allowed inside an element only.
_SEARCH_R1_STEPS = {
    ("start", "<think>"): "<think>",
    ("<think>", "</think>"): "</think>",
    ("</think>", "<search>"): "<search>",
    ("<search>", "</search>"): "</search>",
    ("</search>", "<information>"): "<information>",
    ("<information>", "</information>"): "</information>",
    ("</information>", "<think>"): "<think>",
    ("</think>", "<answer>"): "<answer>",
    ("<answer>", "</answer>"): "</answer>",
}


def search_r1_answer(text: str, *, min_spans: int = 2) -> str | None:
    """
    Last `<answer>` span of a text, or `None` if it has fewer than `min_spans` of them.

    Search-R1 scores prompt and response together and asks for two spans because its prompt holds an example answer;
    verl's copy asks for one, which pays for the example. Pass the response alone with `min_spans=1` to avoid both.
    """
    found = spans(text, "answer")
    return found[-1][1].strip() if len(found) >= min_spans else None


def search_r1_format_ok(text: str) -> bool:
    """Whether all that follows the first assistant marker is think, search, information, think, …, answer."""
    start = text.find(_ASSISTANT)
    if start < 0:
        return False
    state = "start"
    for part in _SEARCH_R1_TAG.split(text[start + len(_ASSISTANT) :]):
        if not part.strip():
            continue
        if _SEARCH_R1_TAG.fullmatch(part):
            if (state, part) not in _SEARCH_R1_STEPS:
                return False
            state = _SEARCH_R1_STEPS[state, part]
        elif state == "start" or state.startswith("</"):
            return False
    return state == "</answer>"


def search_r1_reward(
    text: str,
    answers: str | Sequence[str],
    *,
    structure: float = 0.2,
    final: float = 0.1,
    retrieval: float = 0.0,
    empty_matches: bool = True,
) -> float:
    """
    Search-R1's reward v0.3 of prompt and response.

    Args:
        text (`str`):
            Prompt and response with the chat template's markers.
        answers (`str` or `Sequence[str]`):
            Gold answers.
        structure (`float`, *optional*, defaults to `0.2`):
            Value of a kept format.
        final (`float`, *optional*, defaults to `0.1`):
            Value of a wrong answer in a broken format.
        retrieval (`float`, *optional*, defaults to `0.0`):
            Further value of a kept format when a result holds an alias and the answer is wrong or missing.
        empty_matches (`bool`, *optional*, defaults to `True`):
            Let texts that normalise to nothing match, as the host does.

    Returns:
        `float`
    """
    valid = search_r1_format_ok(text)
    answer = search_r1_answer(text)
    if answer is not None and exact_match(answer, answers, empty_matches=empty_matches):
        return 1.0 if valid else 1.0 - structure
    if not valid:
        return 0.0 if answer is None else final
    results = (body for _, body in spans(text, "information"))
    found = any(contains_alias(body.strip(), answers, empty_matches=empty_matches) for body in results)
    return structure + retrieval if found else structure


def at2po_format_ok(response: str) -> bool:
    """
    Whether a response in the boxed format counts as well-formed for AT²PO.

    Equally many, at least one, `<think>` and `</think>`; exactly one answer pair with a box inside; after every call
    its end and a result. (The host looks for the *next* result, so a call may borrow that of a later one.)
    """
    if not 0 < response.count("<think>") == response.count("</think>"):
        return False
    if not response.count("<answer>") == response.count("</answer>") == 1:
        return False
    answer = spans(response, "answer")
    if not answer or "\\boxed{" not in answer[0][1] or "}" not in answer[0][1]:
        return False
    return all(_calls_have_results(response, tag) for tag in ("search", "python"))


def _calls_have_results(response: str, tag: str) -> bool:
    position = 0
    while (start := response.find(f"<{tag}>", position)) >= 0:
        end = response.find(f"</{tag}>", start)
        result = response.find("<result>", start)
        position = response.find("</result>", result)
        if min(end, result, position) < 0 or not end < result < position:
            return False
    return True


def at2po_answer(response: str) -> str | None:
    r"""Answer of a response as AT²PO reads it: the last box of the first answer span, `\boxed x` included."""
    found = spans(response, "answer")
    if not found:
        return None
    span = found[0][1].strip()
    if "\\boxed " in span:
        return span.split("\\boxed ")[-1].split("$")[0]
    last = span.rfind("\\boxed")
    return last_boxed(span[last:]) if last >= 0 else None


def at2po_reward(response: str, answers: str | Sequence[str], *, check_format: bool = True) -> float:
    """
    AT²PO's reward of a response: `-1.0` for a broken format or an unreadable answer, else exact match.

    Args:
        response (`str`):
            Response alone, results included.
        answers (`str` or `Sequence[str]`):
            Gold answers.
        check_format (`bool`, *optional*, defaults to `True`):
            `False` for the host's validation score.

    Returns:
        `float`: `-1.0`, `0.0` or `1.0`; with both tools used, token F1 plus `0.1` unless F1 is zero.
    """
    if check_format and not at2po_format_ok(response):
        return -1.0
    answer = at2po_answer(response)
    if answer is None:
        return -1.0
    f1 = token_f1(answer, answers)
    if f1 and "</search>" in response and "</python>" in response:
        return f1 + 0.1
    return float(f1 > 0.0 and exact_match(answer, answers, empty_matches=True))
