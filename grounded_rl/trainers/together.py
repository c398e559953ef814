"""Failures that all processes of a run learn of."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import gather_object

from grounded_rl.errors import RetrievalError
from grounded_rl.sampling.scheduler import raise_failure


def raise_together(accelerator: Accelerator, failure: RetrievalError | None) -> None:
    """
    Raise on every process if any of them failed, so that none waits in a collective call for one that is gone.

    Args:
        accelerator (`Accelerator`):
            The run's accelerator; every process must call.
        failure (`RetrievalError`, *optional*):
            What failed on this process.

    Raises:
        `RetrievalError`: The own failure, or one that tells of another process's.
    """
    if accelerator.num_processes > 1:
        messages = gather_object([None if failure is None else str(failure)])
        other = next((message for message in messages if message is not None), None)
        if failure is None and other is not None:
            failure = RetrievalError(f"Another process failed: {other}")
    raise_failure(failure)
