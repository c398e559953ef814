"""GCA: token advantages from a diagnosis of what each rollout did."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from grounded_rl.credit import (
    ANSWER,
    NO_SEGMENT,
    NO_TYPE,
    R_SEARCH,
    TYPE_A,
    TYPE_B,
    TYPE_C,
    TYPE_D,
    V_SEARCH,
    GCACredit,
    gca_token_advantages,
    has_reward_variance,
)
from grounded_rl.environments.structure import structural_mask
from grounded_rl.errors import RetrievalError
from grounded_rl.grounding import Diagnosis, Retrievability, RolloutType, Segment, diagnose, segments
from grounded_rl.retrieval.outage import index_failure
from grounded_rl.rollouts.types import Group, Rollout
from grounded_rl.trainers._trl import GenerationBatch
from grounded_rl.trainers.gca_config import GCAConfig
from grounded_rl.trainers.passes import padded
from grounded_rl.trainers.probe import SalienceProbe
from grounded_rl.trainers.search_agent_trainer import SearchAgentTrainer

_TYPES = {RolloutType.A: TYPE_A, RolloutType.B: TYPE_B, RolloutType.C: TYPE_C, RolloutType.D: TYPE_D}
_SEGMENTS = {
    Segment.V_SEARCH: V_SEARCH,
    Segment.R_SEARCH: R_SEARCH,
    Segment.ANSWER: ANSWER,
    Segment.NONE: NO_SEGMENT,
}


class GCATrainer(SearchAgentTrainer):
    """
    GRPO with grounded credit assignment.

    Every rollout is diagnosed by two questions, whether a search showed the answer and whether the answer is right;
    the diagnosis routes a bounded, signed residual to the tokens of its search and answer turns, weighted by how
    contested each token was under the old policy. Group statistics, loss and ratio stay those of the host.

    Everything but the credit is inherited from [`SearchAgentTrainer`]; see there for the arguments.

    Args:
        *args, **kwargs:
            As for [`SearchAgentTrainer`], with a [`GCAConfig`] as `args`.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "gca", "grounded-rl"]
    _name = "GCA"
    config_class: ClassVar[type[GCAConfig]] = GCAConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.make_probe()  # a model that cannot be measured is refused here, not in mid-run
        self._routing = self.args.routing()
        self.retrievability = Retrievability(
            self.retriever,
            self.environment.show,
            top_k=self.args.retrieval_top_k,
            templates=self.args.gca_retr_templates,
            **self._matching,
        )

    @property
    def _matching(self) -> dict[str, Any]:
        return {"matcher": self.args.gca_matcher, "fold_unicode": self.args.gca_fold_unicode}

    def make_probe(self) -> SalienceProbe:
        """Probe of margins and entropies under the old policy."""
        return SalienceProbe(
            self.accelerator.unwrap_model(self.model),
            temperature=self.temperature,
            margin=self.args.gca_margin,
            num_competitors=self.args.gca_num_competitors,
            top_m=self.args.gca_entropy_top_m,
        )

    def assign_credit(self, batch: GenerationBatch) -> None:
        """Token advantages of the batch; unretrievable right answers leave the loss."""
        advantages = self.rollout_advantages(batch)
        batch.advantages = self.route(batch, advantages).advantages.to(advantages.dtype)

    def route(self, batch: GenerationBatch, advantages: torch.Tensor) -> GCACredit:
        """Credit on top of one advantage per rollout, `(B,)`; sets which rollouts leave the loss."""
        retrievable = self._retrievable(batch)
        types = torch.tensor([_TYPES[diagnosis.type] for diagnosis in batch.diagnoses], device=advantages.device)
        types = types.masked_fill(~batch.valid, NO_TYPE)
        batch.masked = (types == TYPE_D) & ~retrievable & (self.args.gca_eta > 0)
        has_variance = has_reward_variance(batch.rewards, batch.group_ids, batch.valid)
        structural = self._structural(batch)
        credit = gca_token_advantages(
            advantages,
            types,
            self._segments(batch),
            batch.margins,
            batch.entropies,
            eligible=batch.sampled_mask & ~structural,
            gate_open=has_variance & ~batch.masked & batch.valid,
            routing=self._routing,
        )
        batch.metrics |= _metrics(batch, types, credit)
        is_type_d = types == TYPE_D
        batch.metrics["credit/retrievable_share"] = _share(retrievable & is_type_d, is_type_d)
        return credit

    def diagnose(self, rollout: Rollout) -> Diagnosis:
        """Diagnosis with the configured matcher."""
        return diagnose(rollout, **self._matching)

    def _retrievable(self, batch: GenerationBatch) -> torch.Tensor:
        """Whether the corpus can deliver the answer, per rollout."""
        size = int((batch.group_ids == batch.group_ids[0]).sum())
        parts = [slice(start, start + size) for start in range(0, len(batch.rollouts), size)]
        groups = [Group(tuple(batch.rollouts[part])) for part in parts]
        diagnoses = [batch.diagnoses[part] for part in parts]
        values: list[bool] = []
        failure: RetrievalError | None = None
        try:
            values = self.retrievability(groups, diagnoses)
        except RetrievalError as error:
            if self.masks_failures:
                values = [self._is_retrievable(*pair) for pair in zip(groups, diagnoses, strict=True)]
            else:
                failure = error
        self.raise_together(failure or index_failure(self.retriever, may_be_away=self.masks_failures))
        return torch.tensor(values, device=batch.group_ids.device)[batch.group_ids]

    def _is_retrievable(self, group: Group, diagnoses: list[Diagnosis]) -> bool:
        """The same for one group; where the search fails, its right answers count as not retrievable this time."""
        try:
            return self.retrievability([group], [diagnoses])[0]
        except RetrievalError:
            return False

    def _segments(self, batch: GenerationBatch) -> torch.Tensor:
        """Segment of every token, `(B, T)`."""
        longest = max(len(rollout.turns) for rollout in batch.rollouts)
        codes = [
            [_SEGMENTS[segment] for segment in segments(rollout, diagnosis)]
            for rollout, diagnosis in zip(batch.rollouts, batch.diagnoses, strict=True)
        ]
        by_turn = padded(codes, longest, NO_SEGMENT, batch.turn_ids.device)
        return by_turn.gather(1, batch.turn_ids.clamp(min=0)).masked_fill(batch.turn_ids < 0, NO_SEGMENT)

    def _structural(self, batch: GenerationBatch) -> torch.Tensor:
        """Tokens that are part of a tag, `(B, T)`."""
        rows = [self._structural_row(rollout) for rollout in batch.rollouts]
        return padded(rows, batch.turn_ids.size(1), 0, batch.turn_ids.device).bool()

    def _structural_row(self, rollout: Rollout) -> list[int]:
        row: list[int] = []
        for turn in rollout.turns:
            row += [int(flag) for flag in structural_mask(self.environment.tokenizer, turn.ids)]
            row += [0] * len(turn.observation_ids)
        return row


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    return part.sum().item() / whole.sum().item() if whole.any() else float("nan")


def _metrics(batch: GenerationBatch, types: torch.Tensor, credit: GCACredit) -> dict[str, float]:
    """What the credit did: mean saliences, share of residual against the outcome, share of masked rollouts."""
    gated = credit.cells >= 0
    polarity = torch.where(gated, credit.polarity, 0.0)
    outcome = credit.advantages.sign()
    trained = batch.sampled_mask & batch.valid.unsqueeze(1) & ~batch.masked.unsqueeze(1)

    def mean(where: torch.Tensor, values: torch.Tensor) -> float:
        return values[where].double().mean().item() if where.any() else float("nan")

    return {
        "credit/gated_share": _share(gated & trained, trained),
        "credit/conflict_share": _share(gated & (polarity * outcome < 0), gated),
        "credit/c_plus": mean(polarity > 0, credit.salience),
        "credit/c_minus": mean(polarity < 0, credit.salience),
        "credit/masked_share": batch.masked.float().mean().item(),
        "credit/undiagnosed_share": (types == NO_TYPE).float().mean().item(),
        "credit/margin_negative_share": mean(gated, (batch.margins < 0).float()),
        "credit/top_entropy": mean(trained, batch.entropies),
    }
