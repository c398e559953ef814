"""Random batches of diagnosed rollouts, with the gate of every token from its definition."""

import torch

from grounded_rl.credit import gca_token_advantages
from tests.credit import reference
from tests.credit.batches import batches

# The tables once more, typed from the specification: polarity and magnitude of every cell.
DEFAULT = {
    "A": {"V_SEARCH": (1, 1.0), "R_SEARCH": (-1, 0.5), "ANSWER": (1, 0.5)},
    "B": {"V_SEARCH": (1, 0.5), "R_SEARCH": (-1, 0.25), "ANSWER": (-1, 1.0)},
    "C": {"V_SEARCH": (0, 0.0), "R_SEARCH": (0, 0.0), "ANSWER": (0, 0.0)},
    "D": {"V_SEARCH": (0, 0.0), "R_SEARCH": (-1, 0.5), "ANSWER": (-1, 0.25)},
}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


class Case:
    """A batch of rollouts with every type, garbage margins at tokens that are not eligible, some closed gates."""

    def __init__(self, batch):
        self.batch = batch
        rows = batch.rows
        self.advantages = torch.where(batch.uniform(rows) < 0.2, 0.0, batch.normal(rows))
        self.types = batch.integers(-1, 4, rows)
        self.segments = batch.integers(-1, 3)
        self.eligible = batch.mask
        self.margins = batch.garbage(2 * batch.normal())
        self.entropies = batch.garbage(batch.uniform())
        self.gate_open = batch.uniform(rows) < 0.8

    def arguments(self):
        return {
            "advantages": self.advantages,
            "types": self.types,
            "segments": self.segments,
            "margins": self.margins,
            "entropies": self.entropies,
            "eligible": self.eligible,
            "gate_open": self.gate_open,
        }

    def credit(self, routing=None, **changes):
        return gca_token_advantages(**{**self.arguments(), **changes}, routing=routing)

    def baseline(self):
        return self.advantages.unsqueeze(1).expand(self.segments.shape)

    def is_open(self):
        """The gate of every token, from the definition."""
        rows = zip(self.types.tolist(), self.gate_open.tolist(), self.segments.tolist(), strict=True)
        cells = [
            [
                gate and kind >= 0 and segment >= 0
                and DEFAULT[reference.TYPES[kind]][reference.SEGMENTS[segment]][0] != 0
                for segment in segments
            ]
            for kind, gate, segments in rows
        ]  # fmt: skip
        return torch.tensor(cells) & self.eligible


def cases():
    return batches(5, 10).map(Case)
