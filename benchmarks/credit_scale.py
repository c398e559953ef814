"""
Time and peak memory of credit on batches of two sizes.

    python benchmarks/credit_scale.py --rows 1408 --tokens 4096 --out benchmarks/results/credit_scale.md

Every function runs on half of the rows and on all of them. `memory` is the largest amount held above what was held
before the call, results included, as a multiple of one `(B, T)` float tensor; `growth` is the time and memory of the
large batch over those of the small one, so 2.0 is linear. Peak memory is that of the process, which Linux alone lets a
program reset.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

# glibc keeps freed blocks below a growing threshold; with a fixed one the process holds what its tensors hold.
if os.environ.get("MALLOC_MMAP_THRESHOLD_") is None:
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch

from grounded_rl import credit


def resident_bytes(field: str) -> int:
    """`VmRSS` (held now) or `VmHWM` (largest since the last reset) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no field {field}")


def measure(call: Callable[[], object], repeats: int) -> tuple[float, int]:
    """Best time of a few calls, and the largest number of bytes any of them added."""
    seconds, extra = float("inf"), 0
    for _ in range(repeats):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        start = time.perf_counter()
        result = call()
        seconds = min(seconds, time.perf_counter() - start)
        extra = max(extra, resident_bytes("VmHWM") - before)
        del result
    return seconds, extra


def token_calls(rows: int, tokens: int) -> dict[str, Callable[[], object]]:
    """Functions of a `(B, T)` batch, on random rollouts of five turns each."""
    generator = torch.Generator().manual_seed(rows)
    normal = torch.randn(rows, tokens, generator=generator)
    uniform = torch.rand(rows, tokens, generator=generator)
    turns = (torch.arange(tokens) * 10 // tokens).expand(rows, -1)
    mask = (turns % 2 == 0).contiguous()
    turn_ids = torch.where(mask, turns // 2, -1)
    segments = torch.where(mask, turn_ids % 3, -1)
    rewards, groups = (uniform[:, 0] > 0.5).float(), torch.arange(rows) // 8
    types = torch.randint(0, 4, (rows,), generator=generator)
    ratio = (0.01 * normal).exp()

    def one_step() -> object:
        """All GCA credit of one step, from rewards to token advantages."""
        advantages = credit.group_advantages(rewards, groups)
        gate = credit.has_reward_variance(rewards, groups)
        return credit.gca_token_advantages(advantages, types, segments, normal, uniform, eligible=mask, gate_open=gate)

    return {
        "gca step": one_step,
        "salience": lambda: credit.salience(normal, uniform, segments, mask.to(torch.int8)),
        "segment_medians": lambda: credit.segment_medians(normal, segments, 3),
        "importance_ratio token": lambda: credit.importance_ratio(normal, uniform, mask=mask),
        "importance_ratio sequence": lambda: credit.importance_ratio(normal, uniform, mask=mask, level="sequence"),
        "importance_ratio turn": lambda: credit.importance_ratio(
            normal, uniform, mask=mask, turn_ids=turn_ids, level="turn"
        ),
        "clipped_surrogate": lambda: credit.clipped_surrogate(ratio, normal, dual_clip=3.0),
        "approximate_kl": lambda: credit.approximate_kl(normal, uniform, mask=mask),
        "seq_mean_token_mean": lambda: credit.seq_mean_token_mean(normal, mask),
    }


def tree_calls(rows: int) -> dict[str, Callable[[], object]]:
    """Functions of a forest: trees of 22 leaves below chains of three turns."""
    leaves = 22
    trees = max(1, rows // leaves)
    # Per tree: a root, then three levels of 22 nodes, each the child of the node above it.
    one = torch.tensor([-1] + [0] * leaves + list(range(1, 2 * leaves + 1)))
    offsets = (torch.arange(trees) * len(one)).unsqueeze(1)
    parents = torch.where(one >= 0, one + offsets, -1).flatten()
    generator = torch.Generator().manual_seed(rows)
    surprisals = torch.rand(len(parents), generator=generator)
    rewards = (torch.rand(len(parents), generator=generator) > 0.5).float()
    return {
        "tree_values": lambda: credit.tree_values(
            parents, surprisals, credit.standardized_leaf_values(parents, rewards)
        )
    }


def report(rows: int, tokens: int, repeats: int) -> str:
    """Table of both sizes, one line per function, as Markdown."""
    sizes = (rows // 2, rows)
    tensor_bytes = [size * tokens * 4 for size in sizes]
    measured: dict[str, list[tuple[float, int]]] = {}
    for call in token_calls(8, tokens).values():
        call()  # what torch loads on first use is not the function's
    for size in sizes:
        for name, call in {**token_calls(size, tokens), **tree_calls(size)}.items():
            measured.setdefault(name, []).append(measure(call, repeats))
    lines = [
        "# Credit on large batches",
        "",
        f"`python benchmarks/credit_scale.py --rows {rows} --tokens {tokens} --repeats {repeats}`",
        "",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, torch "
        f"{torch.__version__}, {torch.get_num_threads()} thread(s). Load average: {os.getloadavg()[0]:.1f}.",
        "",
        f"Two batches, of {sizes[0]} and {sizes[1]} rollouts of {tokens} tokens. Memory is the largest amount held "
        "above what was held before the call, results included, in units of one float tensor of the batch's shape.",
        "",
        "| function | seconds | | memory | | growth of time | of memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ((small_s, small_b), (large_s, large_b)) in measured.items():
        shares = [extra / unit for extra, unit in zip((small_b, large_b), tensor_bytes, strict=True)]
        growth = f"{large_b / small_b:.2f}" if small_b else ""
        lines.append(
            f"| {name} | {small_s:.3f} | {large_s:.3f} | {shares[0]:.2f} | {shares[1]:.2f} | {large_s / small_s:.2f} "
            f"| {growth} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the sizes and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1408, help="rollouts of the large batch (64 trees of 22 leaves)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a rollout")
    parser.add_argument("--repeats", type=int, default=3, help="calls per function; the fastest counts")
    parser.add_argument("--out", type=Path, help="file for the report")
    arguments = parser.parse_args()
    text = report(arguments.rows, arguments.tokens, arguments.repeats)
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
