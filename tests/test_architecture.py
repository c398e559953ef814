"""Import contracts, size budgets, names and documentation: what review would otherwise have to count by hand."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "grounded_rl"
SOURCES = sorted(PACKAGE.rglob("*.py"))
PROGRAMS = sorted(path for folder in ("tests", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py"))

MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_POSITIONAL = 5
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
FUNCTION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef)
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def functions(tree: ast.AST) -> Iterator[FunctionNode]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTION_NODES))


def code_lines(node: FunctionNode) -> int:
    """Lines of a function without its docstring; decorators are not counted."""
    docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    lines = node.end_lineno - node.lineno + 1
    return lines - (docstring.end_lineno - docstring.lineno + 1) if docstring else lines


def parameters(node: FunctionNode) -> list[str]:
    """Parameters a caller may pass; `self`, `cls` and catch-alls are not counted."""
    arguments = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return arguments[1:] if arguments[:1] in (["self"], ["cls"]) else arguments


def test_the_measures_count_what_they_claim():
    source = '''
@decorated
def function(self, a, /, b, *args, c, **kwargs):
    """
    Docstring.
    """
    def inner():
        return 1
    return inner
'''
    outer, inner = functions(ast.parse(source))
    assert (code_lines(outer), code_lines(inner)) == (4, 2)
    assert parameters(outer) == ["a", "b", "c"]


def test_import_contracts_hold():
    program = shutil.which("lint-imports", path=os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    assert program is not None, "import-linter must be installed: run `pip install -r requirements/ci.txt`"
    result = subprocess.run(
        [program, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


@pytest.mark.parametrize("path", SOURCES + PROGRAMS, ids=name)
def test_a_module_is_short(path):
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_MODULE_LINES, f"{name(path)} has {lines} lines: split it by what its parts know"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_function_is_short_and_takes_few_parameters(path):
    problems = []
    for node in functions(TREES[path]):
        if (lines := code_lines(node)) > MAX_FUNCTION_LINES:
            problems.append(f"{name(path)}:{node.lineno} `{node.name}` has {lines} code lines")
        if (count := len(parameters(node))) > MAX_PARAMETERS:
            problems.append(f"{name(path)}:{node.lineno} `{node.name}` takes {count} parameters")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_a_public_function_takes_few_arguments_by_position(path):
    problems = []
    for node in functions(TREES[path]):
        positional = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        positional = positional[1:] if positional[:1] in (["self"], ["cls"]) else positional
        public = not node.name.startswith("_") or node.name == "__init__"
        if public and len(positional) > MAX_POSITIONAL:
            problems.append(f"{name(path)}:{node.lineno} `{node.name}` takes {len(positional)} by position")
    assert not problems, "\n".join(problems)


def test_no_module_is_a_drawer_for_odds_and_ends():
    paths = [path for path in SOURCES + PROGRAMS if {path.stem, path.parent.name} & FORBIDDEN_NAMES]
    assert not paths, f"name a module after what it knows: {[name(path) for path in paths]}"


@pytest.mark.parametrize("path", SOURCES + PROGRAMS, ids=name)
def test_nothing_is_left_for_later(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b", text)
    assert not re.search(r"from \S+ import \*", text)


@pytest.mark.parametrize("path", [path for path in SOURCES if "cli" not in path.parts], ids=name)
def test_only_the_command_line_prints(path):
    calls = [node for node in ast.walk(TREES[path]) if isinstance(node, ast.Call)]
    prints = [node.lineno for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]
    assert not prints, f"{name(path)} prints at lines {prints}: log, or return the text"


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(TREES[path])


def exported() -> list[tuple[str, str]]:
    """Every name in an `__all__` of the package, with the module that exports it."""
    names = []
    for path, tree in TREES.items():
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                names += [(module_name(path), element) for element in ast.literal_eval(node.value)]
    return names


def definition(module: str, wanted: str) -> ast.AST | None:
    """Class or function behind an exported name, followed through re-exports; `None` for a constant."""
    tree = next((tree for path, tree in TREES.items() if module_name(path) == module), None)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.ClassDef, *FUNCTION_NODES)) and node.name == wanted:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == wanted:
                    return definition(node.module, alias.name)
    return None


def test_exported_names_are_followed_to_where_they_are_defined():
    assert isinstance(definition("grounded_rl.rollouts", "Rollout"), ast.ClassDef)
    assert isinstance(definition("grounded_rl.rollouts", "load_rollouts"), ast.FunctionDef)


def test_every_exported_function_and_class_has_a_docstring():
    found = {(module, exported_name): definition(module, exported_name) for module, exported_name in exported()}
    assert sum(node is not None for node in found.values()) > len(found) / 2
    bare = [".".join(key) for key, node in found.items() if node is not None and not ast.get_docstring(node)]
    assert not bare, f"exported without a docstring: {bare}"


def test_nothing_names_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.])/(?:home|Users|root|work|mnt)/\w+")
    tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if tracked.returncode != 0:
        pytest.skip("not a git checkout")
    problems = []
    for line in tracked.stdout.splitlines():
        path = REPOSITORY / line
        if path.suffix in {".py", ".md", ".cfg", ".toml", ".yaml", ".yml", ".txt", ".ipynb"} and path.is_file():
            problems += [f"{line}: {found}" for found in pattern.findall(path.read_text(encoding="utf-8"))]
    assert not problems, problems
