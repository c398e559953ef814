"""
What every process of the two-process test runs: GCA on ragged rollouts, then what it saw as JSON.

    RANK=0 WORLD_SIZE=2 ... python -m tests.trainers.two_processes OUT [collective]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from grounded_rl.trainers import GCATrainer, SearchAgentTrainer
from tests.sampling.world import SCRIPTS, UNKNOWN_COUNTRY
from tests.trainers.runs import losses, make_trainer, rows

RAGGED = {"Peru": ("A_late", "C", "A_late", "B"), "Chile": ("D", "C_short", "A", "C")}
"""One country's rollouts take four turns, the other's two."""


def plan(country, sample):
    return SCRIPTS[RAGGED.get(country, ("D", "C", "D", "C_short"))[sample]](country)


def make_run(folder: Path, **options) -> GCATrainer:
    """A run of two updates, each on one generation batch of two groups."""
    return make_trainer(
        GCATrainer,
        folder,
        plan=plan,
        dataset=rows("Peru", "Chile", UNKNOWN_COUNTRY),
        steps_per_generation=1,
        rollout_log_groups=-1,
        shuffle_dataset=False,
        **options,
    )


def make_collective(trainer: SearchAgentTrainer) -> list[int]:
    """Make generation a collective that needs equally many contexts everywhere; returns the sizes of its calls."""
    play, sizes = trainer._generate_single_turn, []
    type(trainer).is_generation_collective = property(lambda self: True)

    def generate(contexts, *arguments):
        counts = trainer.accelerator.gather(torch.tensor([len(contexts)])).tolist()
        assert len(set(counts)) == 1, f"processes passed different numbers of contexts: {counts}"
        sizes.append(len(contexts))
        real = [context for context in contexts if len(context) > 1]
        ids = play(real)[0] if real else []
        return ids + [[trainer.eos_token_ids[0]]] * (len(contexts) - len(real)), None

    trainer._generate_single_turn = generate
    return sizes


def report(trainer: GCATrainer) -> dict:
    """What must agree between processes and with a single one."""
    shared = {}
    for number, entry in enumerate(trainer.state.log_history):
        for name, value in entry.items():
            if name.startswith(("rollout/", "credit/", "reward", "tools/")):
                shared[f"{number} {name}"] = value
    return {
        "losses": losses(trainer),
        "metrics": shared,
        "weights": [parameter.double().sum().item() for parameter in trainer.model.parameters()],
    }


def main() -> None:
    folder = Path(sys.argv[1])
    trainer = make_run(folder, per_device_train_batch_size=4)
    rank = trainer.accelerator.process_index
    groups = []
    assign_credit = trainer.assign_credit

    def keep_groups(batch):
        groups.append([rollout.question_id for rollout in batch.rollouts])
        assign_credit(batch)

    trainer.assign_credit = keep_groups
    sizes = make_collective(trainer) if "collective" in sys.argv else []
    trainer.train()
    found = {**report(trainer), "groups": groups, "sizes": sizes}
    (folder / f"rank{rank}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
