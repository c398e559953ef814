"""The names users import: they exist, they are listed, and light imports stay light."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import grounded_rl

REPOSITORY = Path(__file__).resolve().parent.parent
STABLE = {
    "grounded_rl": [
        "SearchAgentTrainer",
        "SearchAgentConfig",
        "GCATrainer",
        "GCAConfig",
        "SIPOTrainer",
        "SIPOConfig",
    ],
    "grounded_rl.credit": [
        "group_advantages",
        "gca_token_advantages",
        "token_margin",
        "topk_entropy",
        "salience",
        "tree_values",
        "sfc_scores",
        "blom",
        "selection_slope",
        "corrected_leaf_values",
        "segment_importance_ratio",
    ],
    "grounded_rl.text": ["normalize_answer", "exact_match", "token_f1", "contains_alias"],
    "grounded_rl.grounding": ["diagnose", "segments"],
    "grounded_rl.retrieval": ["build_retriever", "Retriever", "Passage", "Hit"],
    "grounded_rl.rollouts": ["load_rollouts", "save_rollouts", "load_trees", "save_trees"],
}


def modules_after(statement: str) -> set[str]:
    """Top-level modules a fresh interpreter has loaded after a statement."""
    code = f"import sys\n{statement}\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=120
    )
    return set(result.stdout.split())


@pytest.mark.parametrize("module", STABLE)
def test_the_stable_names_of_a_module_exist_and_are_listed(module):
    loaded = importlib.import_module(module)
    missing = [name for name in STABLE[module] if not hasattr(loaded, name)]
    assert not missing, f"{module} lost {missing}"
    assert set(STABLE[module]) <= set(getattr(loaded, "__all__", STABLE[module]))


def test_the_lazy_names_are_exactly_those_listed():
    assert sorted(grounded_rl.__all__) == sorted([*grounded_rl._HOMES, "__version__"])
    assert set(grounded_rl.__all__) <= set(dir(grounded_rl))


def test_a_lazy_name_is_the_object_of_its_home():
    for name, home in grounded_rl._HOMES.items():
        assert getattr(grounded_rl, name) is getattr(importlib.import_module(home), name)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'grounded_rl' has no attribute 'SearchTrainer'"):
        grounded_rl.SearchTrainer  # noqa: B018


def test_the_installed_version_is_the_one_the_package_states():
    assert metadata.version("grounded-rl") == grounded_rl.__version__


def test_the_console_command_leads_to_the_command_line():
    entries = metadata.entry_points(group="console_scripts", name="grounded-rl")
    assert [entry.value for entry in entries] == ["grounded_rl.cli:main"]


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import grounded_rl", {"torch", "trl", "transformers", "numpy", "rich", "matplotlib"}),
        ("import grounded_rl.rollouts, grounded_rl.text", {"torch", "trl", "transformers"}),
        ("import grounded_rl.credit", {"trl", "transformers", "accelerate", "datasets"}),
        ("import grounded_rl.retrieval", {"torch", "trl", "transformers", "faiss", "elasticsearch", "fastapi"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_light_import_loads_nothing_heavy(statement, absent):
    assert not modules_after(statement) & absent


def test_every_public_list_is_sorted_unique_and_true():
    for path in sorted((REPOSITORY / "grounded_rl").glob("*/__init__.py")):
        module = importlib.import_module(f"grounded_rl.{path.parent.name}")
        names = getattr(module, "__all__", [])
        assert len(names) == len(set(names)), f"{module.__name__} lists a name twice"
        assert not [name for name in names if not hasattr(module, name)], module.__name__
