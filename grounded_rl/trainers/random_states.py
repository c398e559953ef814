"""The random states at the last point a run can be resumed from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class RandomStates(TrainerCallback):
    """
    Keeps the random states from which the current step began.

    A run that stops in the middle of a step has drawn random numbers for rollouts that are sampled again after it is
    resumed; `restore` takes them back before the checkpoint is written. As a resumed run loads the states before it
    opens the data of an epoch, those of an epoch's first step are taken there.
    """

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}

    def keep(self) -> None:
        """Remember the states as they are."""
        self._states = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }

    def restore(self) -> None:
        """Go back to the states that were remembered; without any, nothing is changed."""
        if not self._states:
            return
        random.setstate(self._states["python"])
        np.random.set_state(self._states["numpy"])
        torch.set_rng_state(self._states["cpu"])
        if self._states["cuda"]:
            torch.cuda.set_rng_state_all(self._states["cuda"])

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the states before the data of the epoch are opened."""
        self.keep()

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        train_dataloader: DataLoader | None = None,
        **kwargs: Any,
    ) -> None:
        """Remember the states a step begins with, unless it is the first of its epoch."""
        per_epoch = -(-len(train_dataloader) // args.gradient_accumulation_steps) if train_dataloader else 1
        if state.global_step % per_epoch:
            self.keep()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the states after a step: an evaluation may follow it."""
        self.keep()
