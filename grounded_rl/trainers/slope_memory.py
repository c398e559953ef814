"""The one number SIPO carries from step to step, kept with the checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState


class SlopeMemory(TrainerCallback, ExportableState):
    """
    Remembers the slope of every process; written into `trainer_state.json` and read back when a run is resumed.

    Args:
        slopes (`Sequence[float]`, *optional*):
            Slope of every process, `None` where there is none yet. One entry serves all processes.
    """

    def __init__(self, slopes: Sequence[float | None] = (None,)) -> None:
        self.slopes = list(slopes)

    def slope(self, process: int) -> float | None:
        """The slope a process corrects with; `None` before the first estimate."""
        return self.slopes[process] if process < len(self.slopes) else self.slopes[0]

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {"slopes": self.slopes}, "attributes": {}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take over what the resumed checkpoint kept; a fresh run finds its own state here."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        if kept:
            self.slopes = list(kept["args"]["slopes"])
