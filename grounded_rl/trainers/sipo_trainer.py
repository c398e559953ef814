"""SIPO and AT²PO: rollouts in trees, one advantage per node, values corrected for the selection of their branch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from transformers import TrainerCallback

from grounded_rl.credit import CorrelationSums, SlopeSums, node_advantages, spread_to_tokens
from grounded_rl.data.rows import Question
from grounded_rl.errors import ConfigurationError
from grounded_rl.rollouts.tree import RolloutTree
from grounded_rl.rollouts.types import Rollout
from grounded_rl.sampling.forest import Forest, build_forest
from grounded_rl.sampling.scheduler import RolloutRequest
from grounded_rl.sampling.tree import TreeSampler
from grounded_rl.trainers._trl import GenerationBatch, TrainerEngine
from grounded_rl.trainers.search_agent_trainer import SearchAgentTrainer
from grounded_rl.trainers.sipo_config import SIPOConfig
from grounded_rl.trainers.slope_memory import SlopeMemory
from grounded_rl.trainers.tree_records import token_counts, tree_metrics, with_credit

logger = logging.getLogger(__name__)


class SIPOTrainer(SearchAgentTrainer):
    """
    Policy optimisation on trees of rollouts, with values corrected for selection.

    Training samples one tree per question ([`~sampling.TreeSampler`]); its leaves are the rows of the batch, so that
    everything behind the advantages is the host's. A node's tokens have the node's advantage in every row. With the
    defaults of [`SIPOConfig`] this is SIPO ([paper](https://huggingface.co/papers/2609.34805)), with those of
    [`AT2POConfig`] its host AT²PO. Evaluation samples linear rollouts and never touches the slope.

    Everything but sampling and credit is inherited from [`SearchAgentTrainer`]; see there for the arguments.

    Args:
        *args:
            As for [`SearchAgentTrainer`].
        callbacks (`list[TrainerCallback]`, *optional*):
            Further callbacks; one that keeps the slope in the checkpoints is added.
        **kwargs:
            As for [`SearchAgentTrainer`], with a [`SIPOConfig`] as `args`.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "sipo", "grounded-rl"]
    _name = "SIPO"
    config_class: ClassVar[type[SIPOConfig]] = SIPOConfig

    def __init__(self, *args: Any, callbacks: list[TrainerCallback] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, callbacks=[*(callbacks or []), SlopeMemory()], **kwargs)
        self._options = self.args.options()
        self.tree_sampler = TreeSampler(self.sampler, self.args.shape(), self.args.rule(), self.score)
        self._trees: list[RolloutTree] = []

    @property
    def slope_memory(self) -> SlopeMemory:
        """What is kept of the slope; resuming may replace the callback, so it is looked up."""
        return next(each for each in self.callback_handler.callbacks if isinstance(each, SlopeMemory))

    @property
    def slope(self) -> float | None:
        """Slope that corrects the next batch; `None` before the first estimate."""
        return self.slope_memory.slope(self.accelerator.process_index)

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> list[Rollout]:
        """One tree per question in training, its leaves as rows; linear rollouts in evaluation."""
        self._trees = []
        if not self.model.training:
            return super().sample(rows)
        firsts = rows[:: self.num_generations]
        requests = [self._request(row) for row in firsts]
        self._trees = self.tree_sampler.sample(
            TrainerEngine(self),
            requests,
            step=self.state.global_step,
            first_number=self.accelerator.process_index * len(requests),
        )
        rollouts = [rollout for tree in self._trees for rollout in tree.rollouts()]
        if [row["id"] for row in rows] != [rollout.question_id for rollout in rollouts]:
            raise ConfigurationError(
                f"`rows` must hold every question {self.num_generations} times in a row: got another order. "
                "Leave the sampler of the training set as it is."
            )
        self._check_failures(rollouts)
        return rollouts

    def _request(self, row: Mapping[str, Any]) -> RolloutRequest:
        question = Question(row["id"], row["question"], tuple(row["answers"]), kind=row.get("kind"))
        return RolloutRequest(question, tuple(self.environment.prompt_ids(question.question)))

    def assign_credit(self, batch: GenerationBatch) -> None:
        """Advantage of every token from its node; estimates the slope of the next step."""
        if not self._trees:
            super().assign_credit(batch)
            return
        # Diagnoses and the metrics every method shares; the group-relative advantages themselves are not used.
        self.rollout_advantages(batch)
        forest = build_forest(self._trees, batch.valid)
        slope, weight = self.slope, self.args.correction_weight
        credit = forest.credit(batch.rewards, slope, weight=weight, options=self._options)
        advantages = node_advantages(forest.trees.parents, credit.values, mode=self.args.sipo_advantage)
        self.spread_credit(batch, forest, advantages)
        batch.metrics |= token_counts(self._trees) | tree_metrics(self._trees, forest, credit, batch.rewards)
        batch.metrics["credit/slope"] = float("nan") if slope is None else slope
        self._remember(credit.slope_sums)
        batch.metrics["credit/slope_next"] = float("nan") if self.slope is None else self.slope
        self._trees = with_credit(
            self._trees,
            forest,
            credit,
            batch,
            advantages=advantages,
            extras={"slope": slope, "osc_weight": weight, "child_weights": self._options.child_weights},
        )
        logger.info(
            "step %d: %d sampled tokens in trees, %d in as many linear rollouts",
            self.state.global_step,
            batch.metrics["rollout/tree_tokens"],
            batch.metrics["rollout/linear_tokens"],
        )

    def spread_credit(self, batch: GenerationBatch, forest: Forest, advantages: torch.Tensor) -> None:
        """Set the token advantages of the batch from the advantages of the nodes."""
        device = batch.turn_ids.device
        token_nodes = forest.token_nodes(self._trees, batch.turn_ids.size(1)).to(device)
        batch.advantages = spread_to_tokens(advantages.to(device, torch.float32), token_nodes)

    def _remember(self, sums: SlopeSums | CorrelationSums) -> None:
        """Estimate the slope for the next step, over all processes or on each alone."""
        if self._options.slope_scope == "batch":
            total = self.accelerator.reduce(sums.as_tensor().to(self.accelerator.device), reduction="sum")
            sums = type(sums).from_tensor(total.cpu())
        estimate = sums.estimate(self.slope, min_count=self.args.sipo_min_slope_candidates)
        self.slope_memory.slopes = gather_object([estimate])

    def finish_batch(self, batch: GenerationBatch) -> None:
        """Write trees with their selection records; `load_rollouts` reads the leaves, `load_trees` the trees."""
        trees, self._trees = self._trees, []
        last = self.num_logged_groups(len(trees))
        if last > 0:
            self.log_file.append_trees(trees[:last], self.state.global_step)
