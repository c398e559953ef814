"""A search that fails on one of two processes stops both, at the same step, with one checkpoint."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.failing_processes import FAILING_RANK, FIRST_FAILING_STEP

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900


def launch(folder: Path, mode: str, *arguments: str) -> list[dict]:
    """What both processes wrote."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainers.failing_processes", str(folder), mode, *arguments],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [json.loads((folder / f"{mode}-{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("collective",)], ids=["each generates for itself", "collective"])
def test_a_search_that_fails_on_one_process_stops_both_and_both_go_on(tmp_path, arguments):
    whole = launch(tmp_path, "whole", *arguments)
    assert [found["error"] for found in whole] == [None, None]
    failed = launch(tmp_path, "failing", *arguments)
    for rank, found in enumerate(failed):
        assert found["step"] == FIRST_FAILING_STEP
        assert found["error"].startswith(f"Training stopped after step {FIRST_FAILING_STEP}: ")
        assert ("Another process failed: " in found["error"]) == (rank != FAILING_RANK)
        assert "did not come back within `retrieval_patience`" in found["error"]
    checkpoint = tmp_path / "run" / f"checkpoint-{FIRST_FAILING_STEP}"
    states = sorted(path.name for path in checkpoint.glob("rng_state*"))
    assert states == ["rng_state_0.pth", "rng_state_1.pth"]
    resumed = launch(tmp_path, "resumed", *arguments)
    for mine, other in zip(resumed, whole, strict=True):
        assert mine["error"] is None
        assert mine["weights"] == other["weights"]
        assert mine["losses"] == other["losses"]
