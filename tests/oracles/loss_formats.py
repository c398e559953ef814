"""Policy losses with their gradients."""

from __future__ import annotations

import torch

from grounded_rl.credit import (
    clipped_surrogate,
    entropy_weighted_advantages,
    importance_ratio,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from tests.oracles.comparison import Differences
from tests.oracles.group_formats import matrix

REDUCTIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
}


def loss_and_gradient(case: dict, advantages: torch.Tensor, level: str, reduction, **clip):
    logps, mask = matrix(case["new_logp"]).requires_grad_(), matrix(case["response_mask"])
    ratio = importance_ratio(logps, matrix(case["old_logp"]), mask=mask, level=level)
    loss = -reduction(clipped_surrogate(ratio, advantages, mask=mask, **clip), mask)
    loss.backward()
    return loss.detach(), logps.grad


def policy_losses(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        for name, recorded in case["out"].items():
            level, reduction = "token", name.removeprefix("ppo_dual_")
            if name.startswith("gspo"):
                level, reduction = ("turn" if "turn" in name else "sequence_token"), "seq-mean-token-mean"
            loss, gradient = loss_and_gradient(
                case,
                matrix(case["advantages"]),
                level,
                REDUCTIONS[reduction],
                clip_low=recorded["clip_low"],
                clip_high=recorded["clip_high"],
                dual_clip=recorded.get("clip_c"),
            )
            result.compare(f"case {number} {name} loss", loss, recorded["loss"])
            result.compare(f"case {number} {name} gradient", gradient, recorded["grad"])
    return result


def aepo_loss(oracle: dict) -> Differences:
    result = Differences()
    for number, case in enumerate(oracle["cases"]):
        mask, plain = matrix(case["response_mask"]), matrix(case["advantages"])
        weighted = entropy_weighted_advantages(plain, matrix(case["entropy"]), mask)
        for name, recorded in case["out"].items():
            loss, gradient = loss_and_gradient(
                case,
                weighted if name.endswith("adv1") else plain,
                "token",
                token_mean,
                clip_low=0.2,
                clip_high=0.28,
                dual_clip=case["clip_c"],
                keep_clipped_gradient=name.startswith("clip1"),
            )
            result.compare(f"case {number} {name} loss", loss, recorded["loss"])
            result.compare(f"case {number} {name} gradient", gradient, recorded["grad"])
    return result
