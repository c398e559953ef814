"""
What every process of the two-process failure test runs: GCA on ragged rollouts, whose searches fail on one of them.

    RANK=0 WORLD_SIZE=2 ... python -m tests.trainers.failing_processes OUT whole|failing|resumed [collective]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grounded_rl.errors import BackendUnavailableError, RetrievalError
from tests.sampling.world import TinyRetriever
from tests.trainers.two_processes import make_collective, make_run, report

FAILING_RANK = 1
FIRST_FAILING_STEP = 1


class FailingRetriever(TinyRetriever):
    """Fails once `is_away` is set."""

    def __init__(self):
        super().__init__()
        self.is_away = False

    def search(self, queries, k):
        if self.is_away:
            raise BackendUnavailableError("connection refused")
        return super().search(queries, k)


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    retriever = FailingRetriever()
    trainer = make_run(
        folder / "run",
        per_device_train_batch_size=4,
        retriever=retriever,
        retrieval_patience=0.3,
        retrieval_attempts=1,
        retrieval_cache="off",
    )
    rank = trainer.accelerator.process_index
    if "collective" in sys.argv:
        make_collective(trainer)
    if mode == "failing" and rank == FAILING_RANK:
        sample = trainer.sample

        def sample_and_fail(rows):
            retriever.is_away = trainer.state.global_step == FIRST_FAILING_STEP
            return sample(rows)

        trainer.sample = sample_and_fail
    checkpoint = folder / "run" / f"checkpoint-{FIRST_FAILING_STEP}"
    error = None
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if mode == "resumed" else None)
    except RetrievalError as failure:
        error = str(failure)
    found = {**report(trainer), "error": error, "step": trainer.state.global_step}
    (folder / f"{mode}-{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
