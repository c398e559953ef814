"""Turn rewards and turn credit."""

from __future__ import annotations

from itertools import groupby

import torch

from grounded_rl.credit import (
    aepo_branches,
    alias_potentials,
    arpo_branches,
    branching_entropy,
    contiguous_segments,
    contribution_weights,
    cw_grpo_advantages,
    gae_advantages,
    group_advantages,
    igpo_advantages,
    mt_grpo_advantages,
    potential_rewards,
    search_key_score,
    spread_segments,
    whitened,
)
from grounded_rl.text import token_f1
from tests.oracles.comparison import Differences
from tests.oracles.group_formats import matrix, numbered


def igpo_turns(token_rewards: list[list[float]], mask: list[list[int]]):
    """
    Gains, outcomes and turn ids as the released code reads them off token positions.

    The last sampled position holds the outcome; an earlier position is the end of a turn exactly if its reward is not
    0.
    """
    segments, gains, outcomes = [], [], []
    for rewards, sampled in zip(token_rewards, mask, strict=True):
        last = max(position for position, flag in enumerate(sampled) if flag)
        ends = [position for position in range(last) if rewards[position] != 0]
        turns = [sum(end < position for end in ends) for position in range(len(sampled))]
        segments.append([turn if flag else -1 for turn, flag in zip(turns, sampled, strict=True)])
        gains.append([rewards[end] for end in ends])
        outcomes.append(rewards[last])
    width = max(map(len, gains)) + 1
    padded = [row + [torch.nan] * (width - len(row)) for row in gains]
    exists = [[turn <= len(row) for turn in range(width)] for row in gains]
    return matrix(padded), matrix(outcomes), torch.tensor(exists), torch.tensor(segments)


def igpo(oracle: dict) -> Differences:
    """`old_nov2025_joint` is an abandoned algorithm and is not repeated."""
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        gains, outcomes, exists, segments = igpo_turns(case["token_level_rewards"], case["response_mask"])
        for name in (name for name in case if name.startswith("adv_")):
            pooling, discount, *plain = name.removeprefix("adv_").split("_")
            turns = igpo_advantages(
                gains,
                outcomes,
                exists,
                numbered(case["index"]),
                pooling=pooling,
                gamma=float(discount.removeprefix("g")),
                scale="none" if plain else "std",
            )
            result.compare(f"case {number} {name}", spread_segments(turns, segments), case[name])
    return result


def cw_grpo(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        mask = matrix(case["response_mask"])
        segments = contiguous_segments(mask)
        num_rounds = segments.max(1).values + 1
        width = int(num_rounds.max())
        exists = torch.arange(width) < num_rounds[:, None]
        marks = matrix([row + [torch.nan] * (width - len(row)) for row in case["judge_contribution"]])
        searched = torch.arange(width) < num_rounds[:, None] - 1
        shares = contribution_weights(marks, searched, gamma=case["gamma"], without_marks="zero")
        recorded = matrix(case["contribution_norm"])
        for row, turns in enumerate(segments):
            ends = [int((turns == turn).nonzero().max()) for turn in range(int(num_rounds[row]) - 1)]
            result.compare(f"case {number} row {row} shares", shares[row, : len(ends)], recorded[row, ends])
        advantages = group_advantages(matrix(case["outcome"]), numbered(case["index"]), singleton="raw")
        ours = cw_grpo_advantages(advantages, marks, exists, segments, gamma=case["gamma"], without_marks="zero")
        result.compare(f"case {number} adv", ours, case["adv"])
    return result


def mt_grpo(oracle: dict) -> Differences:
    """Only sampled positions are compared: the recording also fills positions that no loss reads."""
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        mask = torch.tensor(case["completion_mask"])
        segments = contiguous_segments(mask)
        first_result = []
        for row, run in zip(case["completion_mask"], case["result_segment"], strict=True):
            runs = [flag for flag, _ in groupby(row)]
            first_result.append(sum(runs[:run]) - 1 if run >= 0 else -1)
        ours = mt_grpo_advantages(
            matrix(case["turn_adv"]),
            matrix(case["outcome_adv"]),
            matrix(case["combined_adv"]),
            segments,
            torch.tensor(first_result),
            coefficient=case["coef"],
        )
        sampled = mask.bool()
        result.compare(f"case {number} adv", ours[sampled], matrix(case["adv"])[sampled])
    return result


def gae(oracle: dict) -> Differences:
    """Only sampled positions are compared, as the recording's note asks."""
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        rewards, values, mask = matrix(case["token_level_rewards"]), matrix(case["values"]), matrix(case["mask"])
        sampled = mask.bool()
        for name, recorded in case["out"].items():
            gamma, lam = (float(part[1:]) for part in name.split("_"))
            for label, observations in (("search_r1", "through"), ("skip_obs", "skip")):
                advantages, returns = gae_advantages(
                    rewards, values, mask, gamma=gamma, lam=lam, observations=observations
                )
                where = f"case {number} {name} {label}"
                result.compare(where, whitened(advantages, mask)[sampled], matrix(recorded[f"{label}_adv"])[sampled])
                result.compare(f"{where} return", returns[sampled], matrix(recorded[f"{label}_ret"])[sampled])
    return result


def tips_phi(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        potentials = alias_potentials(matrix(case["mean_logp"]))
        result.compare(f"case {number} phi", potentials, case["phi"])
        turns = torch.ones(1, len(case["delta"]))
        result.compare(f"case {number} delta", potential_rewards(potentials[None], turns, scale=1.0)[0], case["delta"])
    return result


def arpo_entropy(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        # A call cut off right after the result has no position; an empty list has no columns either.
        top_logps = matrix(case["top_logprobs"]).reshape(len(case["top_logprobs"]), -1 if case["top_logprobs"] else 0)
        entropy = float(branching_entropy(top_logps, case["vocab"]))
        result.compare(f"case {number} entropy", entropy, case["entropy"])
        arguments = (entropy, case["initial_entropy"], case["u"])
        arpo = arpo_branches(*arguments, entropy_weight=case["w"])
        aepo = aepo_branches(*arguments, num_consecutive=case["consecutive"], entropy_weight=case["w"])
        result.compare(f"case {number} arpo_branch", arpo, case["arpo_branch"])
        result.compare(f"case {number} aepo_branch", aepo, case["aepo_branch"])
    return result


def stepsearch(oracle: dict) -> Differences:
    """The recording rounds every F1 to four digits before it averages."""
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        f1 = round(token_f1(case["prediction"], case["golden"]), 4)
        result.compare(f"case {number} f1", f1, case["f1"])
        matches = [[round(token_f1(query, wordings), 4) for wordings in case["keys"]] for query in case["searches"]]
        table = matrix(matches).reshape(len(case["searches"]), len(case["keys"]))
        result.compare(f"case {number} key_score", search_key_score(table, repeated="last"), case["key_score"])
    return result
