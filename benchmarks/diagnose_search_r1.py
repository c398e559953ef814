"""
Diagnosis of recorded Search-R1 rollouts, as a Markdown table.

    python benchmarks/diagnose_search_r1.py FOLDER > benchmarks/results/search_r1_diagnosis.md

FOLDER holds JSON files, each a list of evaluation records; the file name begins with the benchmark.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

from grounded_rl.environments.convert import rollout_from_search_r1
from grounded_rl.environments.parsing import read_rollout
from grounded_rl.grounding import RolloutType, diagnose
from grounded_rl.rollouts.types import CallStatus, Rollout

COLUMNS = (
    *("benchmark", "n", "A", "B", "C", "D", "EM", "EM (host)", "ToolHit", "SupCor", "HitAcc", "grounded"),
    *("searches", "refused turns", "invented results"),
)


def ratio(part: float, whole: float) -> float:
    """Share, NaN where there is nothing to share."""
    return part / whole if whole else math.nan


def row(name: str, rollouts: list[Rollout], *, matcher: str) -> list[str]:
    """Cells of one benchmark."""
    n = len(rollouts)
    types = Counter(diagnose(rollout, matcher=matcher).type for rollout in rollouts)
    a, b, c, d = (types[kind] for kind in RolloutType)
    calls = [call for rollout in rollouts for turn in rollout.turns for call in turn.calls]
    searches = sum(call.status in (CallStatus.OK, CallStatus.EMPTY) for call in calls)
    refused = sum(call.status is CallStatus.REJECTED for call in calls)
    invented = sum(
        any("invented_result" in reading.events for reading in read_rollout(rollout.turns, format="search_r1"))
        for rollout in rollouts
    )
    host = sum(float(rollout.extras["em"] or 0) for rollout in rollouts)
    shares = [ratio(part, n) for part in (a, b, c, d, a + d, host, a + b, a)]
    shares += [ratio(a, a + b), ratio(a, a + d)]
    return [
        name,
        str(n),
        *(f"{100 * share:.1f}" for share in shares),
        f"{ratio(searches, n):.2f}",
        f"{ratio(refused, n):.2f}",
        f"{100 * ratio(invented, n):.1f}",
    ]


def main(folder: Path) -> None:
    """Print the tables of a folder."""
    print("# Search-R1 rollouts (base checkpoint), diagnosed\n")
    print("Percentages of rollouts; `searches` and `refused turns` per rollout. HitAcc = A/(A+B), grounded = A/(A+D).")
    print(
        "`invented results`: rollouts in which the policy wrote a result of its own, which never counts as evidence."
    )
    for matcher in ("substring", "word_boundary"):
        print(f"\n## Matcher `{matcher}`\n")
        print("| " + " | ".join(COLUMNS) + " |")
        print("|---" * len(COLUMNS) + "|")
        for path in sorted(folder.glob("*.json")):
            records = json.loads(path.read_text(encoding="utf-8"))
            rollouts = [rollout_from_search_r1(record) for record in records]
            print("| " + " | ".join(row(path.name.split("_")[0], rollouts, matcher=matcher)) + " |")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python benchmarks/diagnose_search_r1.py FOLDER")
    main(Path(sys.argv[1]))
