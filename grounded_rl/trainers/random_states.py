"""The random states at the last point a run can be resumed from."""

from __future__ import annotations

import random
from collections.abc import Callable
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

    Args:
        skip_epochs (`Callable[[int], None]`):
            Called when a run is resumed, with the number of epochs it has behind it.
    """

    def __init__(self, skip_epochs: Callable[[int], None]) -> None:
        self._skip_epochs = skip_epochs
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

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        train_dataloader: DataLoader,
        **kwargs: Any,
    ) -> None:
        """Go on with the order of the questions where the checkpoint left it."""
        self._skip_epochs(state.global_step // _steps_per_epoch(args, train_dataloader))

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
        *,
        train_dataloader: DataLoader,
        **kwargs: Any,
    ) -> None:
        """Remember the states a step begins with, unless it is the first of its epoch."""
        if state.global_step % _steps_per_epoch(args, train_dataloader):
            self.keep()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the states after a step: an evaluation may follow it."""
        self.keep()


def _steps_per_epoch(args: TrainingArguments, train_dataloader: DataLoader) -> int:
    """Updates in an epoch, as the trainer counts them."""
    return max(1, -(-len(train_dataloader) // args.gradient_accumulation_steps))
