"""A short run of the fuzzer; `python -m tests.environments.fuzz` runs the long one."""

from __future__ import annotations

from grounded_rl.rollouts import TurnKind
from tests.environments.fuzz import fuzz


def test_three_thousand_generated_outputs_break_no_rule():
    fuzzers = fuzz(3000, seed=7)
    for fuzzer in fuzzers:
        # Every kind of turn must occur, or the generator has stopped testing anything.
        assert all(fuzzer.counts[kind.value] > 0 for kind in TurnKind), fuzzer.counts
