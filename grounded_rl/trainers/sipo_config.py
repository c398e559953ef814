"""Configuration of SIPO, of its host AT²PO, and of GCA on trees."""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field

from grounded_rl.credit import SIPOOptions, sipo_options
from grounded_rl.sampling.tree import BranchRule, TreeShape
from grounded_rl.trainers.gca_config import GCAConfig
from grounded_rl.trainers.search_agent_config import SearchAgentConfig

COMPATIBILITY = ("paper", "release")
ADVANTAGES = ("node_value", "minus_parent", "minus_root", "minus_both")

# Options of the credit computation by their field here; those that are `None` follow `sipo_compat`.
_OPTION_FIELDS = {
    "sipo_ranked": "ranked",
    "sipo_event_rule": "event_rule",
    "sipo_slope_estimator": "slope_estimator",
    "sipo_slope_population": "slope_population",
    "sipo_slope_leaves": "slope_leaves",
    "sipo_slope_scope": "slope_scope",
    "sipo_slope_rounds": "slope_rounds",
    "sipo_slope_skip_zero_variance": "slope_skip_zero_variance",
    "sipo_root_candidate": "root_candidate",
    "sipo_score_spread": "score_spread",
    "sipo_on_zero_variance": "on_zero_variance",
    "sipo_child_weights": "child_weights",
}


def _choice(help_text: str) -> typing.Any:
    return field(default=None, metadata={"help": f"{help_text} By default as `sipo_compat` says."})


@dataclass
class SIPOConfig(SearchAgentConfig):
    r"""
    Configuration of [`SIPOTrainer`].

    The defaults are those of SIPO ([Table 3](https://huggingface.co/papers/2609.34805)). Every choice the paper leaves
    open is a field; those that default to `None` follow `sipo_compat`.

    Parameters:
        > Parameters that control the tree

        sipo_num_initial (`int`, *optional*, defaults to `10`):
            Rollouts from the prompt, \\( M \\).
        sipo_num_rounds (`int`, *optional*, defaults to `2`):
            Expansion rounds, \\( L \\).
        sipo_num_incumbents (`int`, *optional*, defaults to `3`):
            Turns chosen in every round, \\( K \\).
        sipo_num_fresh (`int`, *optional*, defaults to `2`):
            Fresh siblings of every chosen turn, \\( B \\).
        num_generations (`int`, *optional*):
            Leaves of a tree. Follows from the four numbers, \\( M + L K B \\); given, it must agree with them.

        > Parameters that switch the three parts

        sipo_sfc (`bool`, *optional*, defaults to `True`):
            Scale-free branch criterion: standardise surprisals within a candidate set.
        sipo_exb (`bool`, *optional*, defaults to `True`):
            Exchangeable branching: \\( B \\) fresh siblings for each of \\( K \\) turns. Without it \\( K B \\) turns
            get one each.
        sipo_osc (`bool`, *optional*, defaults to `True`):
            Order-statistic correction of the leaf values.

        > Parameters that control the parts

        sipo_penalty (`float`, *optional*, defaults to `0.05`):
            Penalty per sibling, in standard deviations (in nats without `sipo_sfc`).
        sipo_penalty_per_branch (`bool`, *optional*, defaults to `False`):
            Divide the penalty by the number of fresh siblings.
        sipo_osc_weight (`float`, *optional*, defaults to `1.0`):
            Strength of the correction.
        sipo_min_slope_candidates (`int`, *optional*, defaults to `50`):
            Fewest pooled candidates for a new slope; with fewer the previous one is kept.
        sipo_advantage (`str`, *optional*, defaults to `"node_value"`):
            Advantage of a node: its value, or less the value of its parent (`"minus_parent"`), of the root
            (`"minus_root"`), or the sum of both (`"minus_both"`).

        > Parameters the paper leaves open

        sipo_compat (`str`, *optional*, defaults to `"paper"`):
            `"paper"` or `"release"`, which flips the nine places where the released code differs.
        sipo_ranked (`str`, *optional*):
            Which candidates carry an event: `"chosen"` or all `"candidates"`.
        sipo_event_rule (`str`, *optional*):
            Which event a leaf inherits: `"recent"`, `"deepest"` or `"release"`.
        sipo_slope_estimator (`str`, *optional*):
            `"regression"` on standardised scores or `"correlation"` with raw surprisals.
        sipo_slope_population (`str`, *optional*):
            Candidate sets at `"selection"` or all inner nodes of the `"final"` trees.
        sipo_slope_leaves (`str`, *optional*):
            Outcomes over the leaves of the `"selection"` or of the `"final"` tree.
        sipo_slope_scope (`str`, *optional*):
            One slope per `"batch"`, over all processes, or one per `"worker"`.
        sipo_slope_rounds (`str`, *optional*):
            Rounds pooled by the slope: `"all"` or the `"last"`.
        sipo_slope_skip_zero_variance (`bool`, *optional*):
            Leave trees with equal rewards out of the slope.
        sipo_root_candidate (`str`, *optional*):
            Whether the root competes: `"fallback_only"` or `"always"`.
        sipo_score_spread (`str`, *optional*):
            Without spread: a `"floor"` under the standard deviation, or `"absolute"` scores.
        sipo_on_zero_variance (`str`, *optional*):
            Whether trees with equal rewards are corrected: `"apply"` or `"skip"`.
        sipo_child_weights (`str`, *optional*):
            How siblings share their parent: `"softmax"`, `"proportional"`, `"uniform"` or `"leaf_count"`.
        reward_format (`str`, *optional*):
            `"em"` for the paper, `"em_format_penalty"` for the release, or any other reward scheme.
    """

    sipo_num_initial: int = field(default=10, metadata={"help": "Rollouts from the prompt, M."})
    sipo_num_rounds: int = field(default=2, metadata={"help": "Expansion rounds, L."})
    sipo_num_incumbents: int = field(default=3, metadata={"help": "Turns chosen in every round, K."})
    sipo_num_fresh: int = field(default=2, metadata={"help": "Fresh siblings of every chosen turn, B."})
    sipo_sfc: bool = field(default=True, metadata={"help": "Standardise surprisals within a candidate set."})
    sipo_exb: bool = field(default=True, metadata={"help": "B fresh siblings per turn, or K * B turns with one each."})
    sipo_osc: bool = field(default=True, metadata={"help": "Correct leaf values for the selection of their branch."})
    sipo_penalty: float = field(default=0.05, metadata={"help": "Penalty per sibling."})
    sipo_penalty_per_branch: bool = field(
        default=False, metadata={"help": "Divide the penalty by the number of fresh siblings."}
    )
    sipo_osc_weight: float = field(default=1.0, metadata={"help": "Strength of the correction."})
    sipo_min_slope_candidates: int = field(default=50, metadata={"help": "Fewest pooled candidates for a new slope."})
    sipo_advantage: str = field(
        default="node_value",
        metadata={"help": "Advantage of a node: 'node_value', 'minus_parent', 'minus_root' or 'minus_both'."},
    )
    sipo_compat: str = field(default="paper", metadata={"help": "'paper', or 'release' for its code."})
    sipo_ranked: str | None = _choice("Which candidates carry an event: 'chosen' or 'candidates'.")
    sipo_event_rule: str | None = _choice("Event a leaf inherits: 'recent', 'deepest' or 'release'.")
    sipo_slope_estimator: str | None = _choice("'regression' or 'correlation'.")
    sipo_slope_population: str | None = _choice("Candidates at 'selection' or nodes of the 'final' trees.")
    sipo_slope_leaves: str | None = _choice("Outcomes over leaves at 'selection' or of the 'final' trees.")
    sipo_slope_scope: str | None = _choice("One slope per 'batch' or per 'worker'.")
    sipo_slope_rounds: str | None = _choice("Rounds pooled by the slope: 'all' or 'last'.")
    sipo_slope_skip_zero_variance: bool | None = _choice("Leave trees with equal rewards out of the slope.")
    sipo_root_candidate: str | None = _choice("Whether the root competes: 'fallback_only' or 'always'.")
    sipo_score_spread: str | None = _choice("Without spread: 'floor' or 'absolute'.")
    sipo_on_zero_variance: str | None = _choice("Whether trees with equal rewards are corrected: 'apply' or 'skip'.")
    sipo_child_weights: str | None = _choice("'softmax', 'proportional', 'uniform' or 'leaf_count'.")
    reward_format: str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Reward scheme; 'em' for the paper, 'em_format_penalty' for the release."}
    )
    num_generations: int | None = field(default=None, metadata={"help": "Leaves of a tree, M + L * K * B."})
    rollout_max_turns: int = field(default=7, metadata={"help": "Largest number of turns: six calls and the answer."})
    rollout_max_turn_tokens: int = field(default=6192, metadata={"help": "Largest number of tokens sampled per turn."})
    rollout_log_groups: int = field(
        default=-1, metadata={"help": "Trees per generation batch written to rollouts.jsonl; -1 writes all."}
    )
    max_completion_length: int | None = field(
        default=6192, metadata={"help": "Tokens of a whole completion, observations included."}
    )
    per_device_train_batch_size: int = field(
        default=22, metadata={"help": "Rollouts per process and forward pass; leaves are rows."}
    )
    max_steps: int = field(default=240, metadata={"help": "Optimiser steps."})
    beta: float = field(default=0.0, metadata={"help": "Coefficient of the KL term."})
    importance_sampling_level: str = field(default="turn", metadata={"help": "Level of the importance ratio."})
    epsilon: float = field(default=3e-3, metadata={"help": "Lower clip range."})
    epsilon_high: float | None = field(default=4e-3, metadata={"help": "Upper clip range."})
    loss_type: str = field(default="grpo", metadata={"help": "Mean over the tokens of a rollout, then over rollouts."})

    def __post_init__(self) -> None:
        if self.reward_format is None:
            self.reward_format = "em_format_penalty" if self.sipo_compat == "release" else "em"
        if self.num_generations is None:
            self.num_generations = self._num_leaves
        super().__post_init__()

    @property
    def _num_leaves(self) -> int:
        return self.sipo_num_initial + self.sipo_num_rounds * self.sipo_num_incumbents * self.sipo_num_fresh

    def _rules(self) -> list[tuple[str, str, bool]]:
        leaves = f"sipo_num_initial + sipo_num_rounds * sipo_num_incumbents * sipo_num_fresh = {self._num_leaves}"
        return [
            ("sipo_num_initial", "at least 1", self.sipo_num_initial >= 1),
            ("sipo_num_rounds", "at least 0", self.sipo_num_rounds >= 0),
            ("sipo_num_incumbents", "at least 1", self.sipo_num_incumbents >= 1),
            ("sipo_num_fresh", "at least 1", self.sipo_num_fresh >= 1),
            ("num_generations", f"{leaves}, or left out", self.num_generations == self._num_leaves),
            ("sipo_penalty", "at least 0", self.sipo_penalty >= 0),
            ("sipo_osc_weight", "at least 0", self.sipo_osc_weight >= 0),
            ("sipo_min_slope_candidates", "at least 1", self.sipo_min_slope_candidates >= 1),
            ("sipo_advantage", f"one of {ADVANTAGES}", self.sipo_advantage in ADVANTAGES),
            ("sipo_compat", f"one of {COMPATIBILITY}", self.sipo_compat in COMPATIBILITY),
            *self._option_rules(),
            (
                "scale_rewards",
                "'group': the values of a tree are in standard deviations",
                self.scale_rewards in ("group", True),
            ),
            *super()._rules(),
        ]

    def _option_rules(self) -> list[tuple[str, str, bool]]:
        """Every option of the credit computation on its own, so that all violations are reported at once."""
        hints = typing.get_type_hints(SIPOOptions)
        accepted = {name: typing.get_args(hints[option]) or (True, False) for name, option in _OPTION_FIELDS.items()}
        return [
            (name, f"one of {choices}", getattr(self, name) is None or getattr(self, name) in choices)
            for name, choices in accepted.items()
        ]

    def options(self) -> SIPOOptions:
        """Switches of the credit computation."""
        given = {option: getattr(self, name) for name, option in _OPTION_FIELDS.items()}
        given = {option: value for option, value in given.items() if value is not None}
        known = {"em", "em_format_penalty"}
        reward = {"reward": self.reward_format} if self.reward_format in known else {}
        return sipo_options(self.sipo_compat, **given, **reward)  # type: ignore[arg-type]

    def shape(self) -> TreeShape:
        """How large a tree grows; without `sipo_exb` every chosen turn gets one fresh sibling."""
        shape = TreeShape(self.sipo_num_initial, self.sipo_num_rounds, self.sipo_num_incumbents, self.sipo_num_fresh)
        if self.sipo_exb:
            return shape
        return dataclasses.replace(shape, num_incumbents=shape.num_incumbents * shape.num_fresh, num_fresh=1)

    def rule(self) -> BranchRule:
        """How candidates are scored."""
        options = self.options()
        return BranchRule(
            standardize=self.sipo_sfc,
            penalty=self.sipo_penalty,
            penalty_per_branch=self.sipo_penalty_per_branch,
            root_candidate=options.root_candidate,
            spread=options.score_spread,
        )

    @property
    def correction_weight(self) -> float:
        """Strength of the correction, 0 without `sipo_osc`."""
        return self.sipo_osc_weight if self.sipo_osc else 0.0


@dataclass
class AT2POConfig(SIPOConfig):
    """
    Configuration of [`SIPOTrainer`] that makes it AT²PO ([paper](https://huggingface.co/papers/2601.04767)): SIPO with
    its three parts off.

    Parameters:
        sipo_sfc, sipo_exb, sipo_osc (`bool`, *optional*, default to `False`):
            The parts of SIPO.
    """

    sipo_sfc: bool = field(default=False, metadata={"help": "Standardise surprisals within a candidate set."})
    sipo_exb: bool = field(
        default=False, metadata={"help": "B fresh siblings per turn, or K * B turns with one each."}
    )
    sipo_osc: bool = field(default=False, metadata={"help": "Correct leaf values for the selection of their branch."})


@dataclass
class GCASIPOConfig(SIPOConfig, GCAConfig):
    """
    Configuration of [`GCASIPOTrainer`]: the fields of [`SIPOConfig`] and of [`GCAConfig`], with SIPO's defaults where
    both have one.
    """
