"""Formats of oracle files, and the replay of one file or folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.oracles import group_formats, loss_formats, text_formats, tree_formats, turn_formats
from tests.oracles.comparison import TOLERANCE, Differences

REPLAYERS: dict[str, Callable[[dict], Differences]] = {
    "aepo_loss": loss_formats.aepo_loss,
    "arpo_entropy": turn_formats.arpo_entropy,
    "at2po_leaf_budget": tree_formats.at2po_leaf_budget,
    "at2po_reward": text_formats.at2po_reward_format,
    "at2po_tree": tree_formats.at2po_tree,
    "cw_grpo": turn_formats.cw_grpo,
    "desa": text_formats.desa,
    "gae": turn_formats.gae,
    "gigpo": group_formats.gigpo,
    "hgpo": group_formats.hgpo,
    "igpo": turn_formats.igpo,
    "mt_grpo": turn_formats.mt_grpo,
    "policy_losses": loss_formats.policy_losses,
    "search_r1": text_formats.search_r1,
    "sipo": tree_formats.sipo,
    "stepsearch": turn_formats.stepsearch,
    "tips_phi": turn_formats.tips_phi,
    "tree_grpo": group_formats.tree_grpo,
    "verl_grpo": group_formats.verl_grpo,
}


class OracleError(ValueError):
    """A folder or file that cannot be replayed."""


@dataclass(frozen=True)
class Report:
    """Result of one file."""

    name: str
    num_cases: int
    differences: Differences

    @property
    def passed(self) -> bool:
        return not self.differences.failures and self.differences.num_values > 0

    def line(self) -> str:
        """The file's line of the table."""
        verdict = "pass" if self.passed else f"FAIL at {self.differences.where}"
        return f"{self.name:<24} {self.num_cases:>5} cases  {self.differences.largest:>9.2e}  {verdict}"


def replay_file(path: Path) -> Report:
    """
    Recompute every case of an oracle file.

    Raises:
        `OracleError`: If the file is no JSON object with cases, or its format is unknown.
    """
    try:
        oracle = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OracleError(f"{path} must be a readable JSON file: got {error}.") from error
    if not isinstance(oracle, dict) or "cases" not in oracle:
        raise OracleError(f"{path} must hold an object with `cases`: got {type(oracle).__name__}.")
    method = next((oracle[key] for key in ("method", "format", "name") if isinstance(oracle.get(key), str)), path.stem)
    if method not in REPLAYERS:
        raise OracleError(f"{path} must have a known format, one of {', '.join(sorted(REPLAYERS))}: got {method!r}.")
    cases = oracle["cases"]
    num_cases = sum(map(len, cases.values())) if isinstance(cases, dict) else len(cases)
    try:
        return Report(path.name, num_cases, REPLAYERS[method](oracle))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise OracleError(f"{path} must follow the format {method!r}: got {type(error).__name__} {error}.") from error


def oracle_files(folder: Path) -> list[Path]:
    """
    JSON files of a folder.

    Raises:
        `OracleError`: If the folder does not exist or holds none.
    """
    if not folder.is_dir():
        raise OracleError(f"{folder} must be a folder of oracle files: got no such folder.")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise OracleError(f"{folder} must hold oracle files: got no *.json.")
    return files


__all__ = ["REPLAYERS", "TOLERANCE", "OracleError", "Report", "oracle_files", "replay_file"]
