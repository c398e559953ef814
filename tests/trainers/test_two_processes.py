"""Two processes on the CPU: groups stay whole, ragged turns do not hang, and the run is that of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.two_processes import make_run, report

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900


def launch(folder: Path, *arguments: str) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir()
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.trainers.two_processes", str(folder), *arguments]
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-4000:]
    return [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    single = make_run(tmp_path / "one", per_device_train_batch_size=8)
    single.train()
    expected = report(single)
    for mode in ((), ("collective",)):
        first, second = launch(tmp_path / "".join(("two", *mode)), *mode)
        assert first["weights"] == second["weights"]
        assert first["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-4)
        assert first["losses"] == pytest.approx(expected["losses"], rel=1e-4, abs=1e-5)
        shares = {name: value for name, value in expected["metrics"].items() if is_mean_over_rollouts(name)}
        assert len(shares) > 20
        assert {name: first["metrics"][name] for name in shares} == pytest.approx(shares, rel=1e-5)
        assert first["metrics"] == second["metrics"]
        # Every process holds one whole group per generation batch.
        for found in (first, second):
            assert [len(set(ids)) for ids in found["groups"]] == [1, 1]
        if mode:
            # As many calls on both, as long as either has a rollout left.
            assert first["sizes"] == second["sizes"]
            assert len(first["sizes"]) > 4


def is_mean_over_rollouts(name: str) -> bool:
    """Whether a metric does not depend on how rollouts are dealt out, as means over tokens do."""
    tokens = ("gated_share", "conflict_share", "c_plus", "c_minus", "margin_negative", "top_entropy", "retrievable")
    return not name.endswith("rollout/failed") and not any(token in name for token in tokens)
