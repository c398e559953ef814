"""Configuration of GCA."""

from __future__ import annotations

from dataclasses import dataclass, field

from grounded_rl.credit import LAMBDA_TABLES, Routing, SalienceWeights, lambda_table
from grounded_rl.trainers.search_agent_config import SearchAgentConfig

MARGINS = ("lse", "mean", "max")
MATCHERS = ("substring", "word_boundary")


@dataclass
class GCAConfig(SearchAgentConfig):
    r"""
    Configuration of [`GCATrainer`].

    Only what GCA adds to [`SearchAgentConfig`] is listed.

    Parameters:
        > Parameters that control the residual

        gca_eta (`float`, *optional*, defaults to `0.2`):
            Scale \\( \eta \\) of the residual. `0.0` is the host method, with the diagnosis in the log: nothing leaves
            the loss either.
        gca_lambda_table (`str`, *optional*, defaults to `"default"`):
            Magnitudes per rollout type and segment: `"default"`, `"ans_first"` or `"flat"`. The paper fixes their
            signs and order; the numbers are choices of this package.
        gca_lambda_scale (`float`, *optional*, defaults to `1.0`):
            Factor on every magnitude, capped at one.

        > Parameters that control salience

        gca_margin (`str`, *optional*, defaults to `"lse"`):
            How competitors are pooled: `"lse"`, `"mean"` or `"max"`.
        gca_num_competitors (`int`, *optional*, defaults to `3`):
            Competitors \\( K \\) of the margin.
        gca_entropy_top_m (`int`, *optional*, defaults to `32`):
            Tokens \\( M \\) the entropy is taken over.
        gca_alpha, gca_beta, gca_gamma (`float`, *optional*, default to `0.6`, `0.3`, `0.1`):
            Weights of margin, entropy and their product.
        gca_tau (`float`, *optional*, defaults to `0.5`):
            Temperature of the margin.
        gca_c_max (`float`, *optional*, defaults to `0.5`):
            Largest salience.

        > Parameters that control the diagnosis

        gca_matcher (`str`, *optional*, defaults to `"substring"`):
            How an alias is found in a passage: `"substring"` of the normalised text, or at `"word_boundary"`.
        gca_fold_unicode (`bool`, *optional*, defaults to `False`):
            Fold accents, dashes and quotes before matching.
        gca_retr_templates (`list[str]`, *optional*, defaults to `["{question}", "{alias}", "{question} {alias}"]`):
            Oracle queries that decide whether the corpus can deliver an answer.
    """

    gca_eta: float = field(default=0.2, metadata={"help": "Scale of the residual; 0 is the host method."})
    gca_lambda_table: str = field(
        default="default", metadata={"help": "Magnitudes per type and segment: 'default', 'ans_first' or 'flat'."}
    )
    gca_lambda_scale: float = field(default=1.0, metadata={"help": "Factor on every magnitude, capped at one."})
    gca_margin: str = field(default="lse", metadata={"help": "How competitors are pooled: 'lse', 'mean' or 'max'."})
    gca_num_competitors: int = field(default=3, metadata={"help": "Competitors of the margin."})
    gca_entropy_top_m: int = field(default=32, metadata={"help": "Tokens the entropy is taken over."})
    gca_alpha: float = field(default=0.6, metadata={"help": "Weight of the margin in the salience."})
    gca_beta: float = field(default=0.3, metadata={"help": "Weight of the entropy in the salience."})
    gca_gamma: float = field(default=0.1, metadata={"help": "Weight of their product in the salience."})
    gca_tau: float = field(default=0.5, metadata={"help": "Temperature of the margin."})
    gca_c_max: float = field(default=0.5, metadata={"help": "Largest salience."})
    gca_matcher: str = field(
        default="substring", metadata={"help": "How an alias is found in a passage: 'substring' or 'word_boundary'."}
    )
    gca_fold_unicode: bool = field(
        default=False, metadata={"help": "Fold accents, dashes and quotes before matching."}
    )
    gca_retr_templates: list[str] = field(
        default_factory=lambda: ["{question}", "{alias}", "{question} {alias}"],
        metadata={"help": "Oracle queries that decide whether the corpus can deliver an answer."},
    )

    def _rules(self) -> list[tuple[str, str, bool]]:
        choices = {"gca_lambda_table": tuple(LAMBDA_TABLES), "gca_margin": MARGINS, "gca_matcher": MATCHERS}
        largest = max(max(row) for row in LAMBDA_TABLES.get(self.gca_lambda_table, ((1.0,),)))
        kappa = self.gca_eta * min(1.0, largest * self.gca_lambda_scale) * self.gca_c_max
        return [
            *super()._rules(),
            *((name, f"one of {allowed}", getattr(self, name) in allowed) for name, allowed in choices.items()),
            (
                "gca_eta",
                "at least 0 and, times the largest magnitude and `gca_c_max`, below 1",
                self.gca_eta >= 0 and kappa < 1,
            ),
            ("gca_lambda_scale", "at least 0", self.gca_lambda_scale >= 0),
            ("gca_num_competitors", "at least 1", self.gca_num_competitors >= 1),
            (
                "gca_entropy_top_m",
                "larger than `gca_num_competitors`",
                self.gca_entropy_top_m > self.gca_num_competitors,
            ),
            *((name, "at least 0", getattr(self, name) >= 0) for name in ("gca_alpha", "gca_beta", "gca_gamma")),
            *((name, "positive", getattr(self, name) > 0) for name in ("gca_tau", "gca_c_max")),
            (
                "importance_sampling_level",
                "another level than 'sequence', under which a token-level advantage would be averaged away "
                "('sequence_token' is the form that keeps it)",
                self.importance_sampling_level != "sequence",
            ),
        ]

    def routing(self) -> Routing:
        """Tables and coefficients as `credit` takes them."""
        weights = SalienceWeights(
            alpha=self.gca_alpha, beta=self.gca_beta, gamma=self.gca_gamma, tau=self.gca_tau, c_max=self.gca_c_max
        )
        return Routing(lambda_table(self.gca_lambda_table, self.gca_lambda_scale), eta=self.gca_eta, weights=weights)
