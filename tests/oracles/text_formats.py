"""Rewards read off text: Search-R1, DeSA's two stages, AT²PO's boxed answers."""

from __future__ import annotations

import torch

from grounded_rl.credit import desa_rewards
from grounded_rl.environments.hosts import (
    at2po_answer,
    at2po_format_ok,
    at2po_reward,
    search_r1_answer,
    search_r1_format_ok,
    search_r1_reward,
)
from grounded_rl.environments.tags import spans
from grounded_rl.text import contains_alias, exact_match, normalize_answer, token_f1
from tests.oracles.comparison import Differences


def host_match(prediction: str | None, answers: list[str] | str) -> bool:
    """Exact match as the hosts have it: texts that normalise to nothing are equal."""
    return exact_match(prediction, answers, empty_matches=True)


def sub_match(prediction: str | None, answers: list[str] | str) -> bool:
    return prediction is not None and contains_alias(prediction, answers, empty_matches=True)


def search_r1(oracle: dict) -> Differences:
    result, cases = Differences(), oracle["cases"]
    for number, case in enumerate(cases["normalize"]):
        result.compare(f"normalize {number}", normalize_answer(case["input"]), case["output"])
    for number, case in enumerate(cases["em"]):
        result.compare(f"em {number}", host_match(case["prediction"], case["golden"]), case["em"])
        result.compare(f"subem {number}", sub_match(case["prediction"], case["golden"]), case["subem"])
    for number, case in enumerate(cases["extract"]):
        result.compare(f"extract {number}", search_r1_answer(case["text"]), case["extracted"])
    for number, case in enumerate(cases["score"]):
        answer = search_r1_answer(case["text"])
        matched, golden = host_match(answer, case["golden"]), case["golden"]
        result.compare(f"score {number} em", matched, case["em"])
        partial = 1.0 if matched else 0.0 if answer is None else 0.1
        result.compare(f"score {number} em_format", partial, case["em_format_score_0_1"])
        result.compare(f"score {number} subem", sub_match(answer, golden), case["subem"])
        result.compare(f"score {number} valid", search_r1_format_ok(case["text"]), case["valid"])
        retrieved = any(
            contains_alias(body.strip(), golden, empty_matches=True) for _, body in spans(case["text"], "information")
        )
        result.compare(f"score {number} retrieval", retrieved, case["retrieval_correct"])
        result.compare(f"score {number} v03", search_r1_reward(case["text"], golden), case["v03"])
        with_retrieval = search_r1_reward(case["text"], golden, retrieval=0.1)
        result.compare(f"score {number} v03_retr", with_retrieval, case["v03_retr"])
    return result


def at2po_reward_format(oracle: dict) -> Differences:
    """`reason` is prose of the other implementation and is not repeated."""
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        text, golden = case["text"], case["golden"]
        result.compare(f"case {number} valid", at2po_format_ok(text), case["valid"])
        result.compare(f"case {number} score", at2po_reward(text, golden), case["score"])
        unchecked = at2po_reward(text, golden, check_format=False)
        result.compare(f"case {number} val_score", unchecked, case["val_score"])
        answer = at2po_answer(text)
        matched = answer is not None and host_match(answer, golden)
        result.compare(f"case {number} val_em", float(matched and token_f1(answer, golden) > 0), case["val_em"])
        scored = case["valid"] and answer is not None
        result.compare(f"case {number} answer", (answer or "") if scored else "", case["answer"])
        result.compare(f"case {number} em", float(scored and matched and token_f1(answer, golden) > 0), case["em"])
        result.compare(f"case {number} f1", token_f1(answer, golden) if scored else 0.0, case["f1"])
    return result


def desa(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        golden = case["golden"]
        blocks = [body.strip() for _, body in spans(case["text"], "information")]
        result.compare(f"case {number} blocks", blocks, [block.strip() for block in case["blocks"]])
        hit = contains_alias(" ".join(blocks), golden, empty_matches=True)
        match = host_match(search_r1_answer(case["text"]), golden)
        hits, matches = torch.tensor([hit]), torch.tensor([match])
        for stage, name in (("search", "recall_reward"), ("answer", "em")):
            result.compare(f"case {number} {name}", desa_rewards(hits, matches, stage=stage), [case[name]])
        found = [contains_alias(document, golden, empty_matches=True) for document in case["documents"]]
        result.compare(f"case {number} accuracy", sum(found) / max(1, len(found)), case["retrieval_accuracy"])
        first = found.index(True) + 1 if True in found else 0
        result.compare(f"case {number} mrr", 1 / first if first else 0.0, case["mrr"])
    return result
