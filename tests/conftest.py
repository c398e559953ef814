"""Fixtures shared by the whole suite: offline settings, the optional material folder, fixed seeds."""

from __future__ import annotations

import os
from pathlib import Path

# Set before anything imports a Hugging Face library: tests never talk to a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores; with a pool of threads each, small matrices take several times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def find_shared_dir() -> Path | None:
    """Folder with oracles, bug reports and real data; present for developers and CI, absent for users."""
    named = os.environ.get("GROUNDED_RL_SHARED")
    candidates = [Path(named)] if named else [REPOSITORY.parent / "shared"]
    return next((path for path in candidates if (path / "oracles").is_dir()), None)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Path of the material folder; the test is skipped where it does not exist."""
    path = find_shared_dir()
    if path is None:
        pytest.skip("needs the developers' material folder (set `GROUNDED_RL_SHARED` to its path)")
    return path
