"""
Mutation tester of `grounded_rl.credit`: small faults, one at a time, each of which a test must notice.

    python -m tests.credit.mutation --module gca --seed 0
    python -m tests.credit.mutation --out mutants.jsonl          # every module; a second run continues the first
    python -m tests.credit.mutation --out mutants.jsonl --retry  # after writing tests: the survivors again

The tests of a module run in the order of their time until the first one fails. Everything is imported once; a forked
process exchanges the code of the mutated functions in place, so a mutant costs about as much as the test that kills
it. Mutants outside functions (constants, defaults of dataclasses) import the package again. No file is changed.

`tests/credit/mutants.py` says what a fault is; `tests/credit/MUTATION.md` has the results and explains the survivors.
Mutants come in random order, so what a run had done when it was stopped is a random sample. Needs `os.fork`.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import random
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

# Threads do not survive a fork, and one is enough for small batches.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tests.credit.mutants import Mutant, find_mutants

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "grounded_rl.credit"
SEVERAL = ("masked", "group", "ratios", "losses", "salience", "gca", "router", "turns", "tree", "sipo", "aepo")

# Test files of each module, the most specific one first.
TESTS = {
    "_checks": SEVERAL,
    "masked": ("masked", "group", "losses", "turns"),
    "group": ("group",),
    "ratios": ("ratios",),
    "losses": ("losses",),
    "salience": ("margins", "salience"),
    "gca": ("gca", "gca_tables"),
    "gca_ablations": ("gca_tables",),
    "router": ("magnitudes", "router"),
    "tree": ("tree", "tree_tokens", "selection", "sipo"),
    "tree_tokens": ("tree_tokens",),
    "selection": ("selection", "events", "sipo"),
    "events": ("events", "sipo"),
    "slope": ("slope", "sipo"),
    "release": ("release", "sipo"),
    "sipo": ("sipo", "release"),
    "turns": ("turns", "igpo"),
    "mt_grpo": ("turns",),
    "gae": ("turns",),
    "desa": ("turns",),
    "stepsearch": ("turns",),
    "tree_grpo": ("tree_grpo",),
    "gigpo": ("gigpo",),
    "hgpo": ("gigpo",),
    "igpo": ("igpo",),
    "aepo": ("aepo",),
    "cw_grpo": ("cw_grpo",),
    "tips": ("tips",),
    "diagnostics": ("diagnostics",),
    "calibration": ("calibration",),
}


def exchange(old: types.FunctionType, new: types.FunctionType) -> None:
    """Give a function the code and the defaults of another: whoever holds it, in whatever registry, gets the fault."""
    old.__code__, old.__defaults__, old.__kwdefaults__ = new.__code__, new.__defaults__, new.__kwdefaults__


def functions(namespace: dict, file: str) -> dict[str, types.FunctionType]:
    """Functions and methods that a file defines, by name."""
    found = {}
    for name, value in namespace.items():
        if isinstance(value, type):
            inner = functions(dict(vars(value)), file)
            found |= {f"{name}.{key}": function for key, function in inner.items()}
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        # Decorated functions run the code of what they wrap.
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.FunctionType) and value.__code__.co_filename == file:
            found[name] = value
    return found


def mutate_functions(module: str, code: str) -> None:
    """Exchange every function of an imported module for that of its mutant."""
    namespace = vars(sys.modules[f"{PACKAGE}.{module}"])
    file = namespace["__file__"]
    fresh = {"__name__": namespace["__name__"], "__file__": file}
    exec(compile(code, file, "exec", dont_inherit=True), fresh)
    originals = functions(namespace, file)
    for name, new in functions(fresh, file).items():
        exchange(originals[name], new)


class MutantImporter(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from the code of a mutant."""

    def __init__(self, module: str, code: str):
        self.name, self.code = f"{PACKAGE}.{module}", code
        self.file = str(ROOT.joinpath(*PACKAGE.split("."), f"{module}.py"))

    def find_spec(self, fullname, path, target=None):
        if fullname != self.name:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=self.file)
        spec.has_location = True
        return spec

    def exec_module(self, module):
        exec(compile(self.code, self.file, "exec", dont_inherit=True), vars(module))


def in_child(work: Callable[[], str], cpu_seconds: float) -> str:
    """What `work` returned in a forked process; `timeout` or `crash` for one that did not come to its end."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        limit = int(time.process_time() + cpu_seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            answer = work()
        except BaseException as error:
            answer = f"import: {type(error).__name__}"
        os.write(writer, answer.encode()[:500])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return answer
    return "timeout" if -status in (9, 24) else "crash"


class Session:
    """Runs as the test loop of pytest: measures every test, then tries the mutants."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.seconds: dict[str, float] = {}
        self.done = read_results(arguments.out)

    def pytest_collection_modifyitems(self, items) -> None:
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0.0))

    def first_failure(self, items) -> str:
        """Name of the first test that fails, or `survived`."""
        for item in items:
            start = time.process_time()
            reports = runtestprotocol(item, log=False, nextitem=None)
            self.seconds[item.nodeid] = time.process_time() - start
            if any(report.failed for report in reports):
                return item.name
        return "survived"

    def imported_again(self, module: str, code: str) -> str:
        """The same for a mutant that the whole package is imported with."""
        for name in [name for name in sys.modules if name.split(".")[0] in ("grounded_rl", "tests")]:
            del sys.modules[name]
        sys.meta_path.insert(0, MutantImporter(module, code))
        ordered = types.SimpleNamespace(pytest_collection_modifyitems=self.pytest_collection_modifyitems)
        status = pytest.main([*PYTEST_ARGUMENTS, "-x", *test_files(module)], plugins=[ordered])
        return "survived" if status == 0 else f"pytest: {status.name}"

    def try_mutant(self, mutant: Mutant, items: list) -> str:
        seconds = sum(self.seconds[item.nodeid] for item in items)

        def work():
            if not mutant.in_function:
                return self.imported_again(mutant.module, mutant.code)
            mutate_functions(mutant.module, mutant.code)
            return self.first_failure(items)

        return in_child(work, 20 + 5 * seconds)

    def chosen(self) -> list[Mutant]:
        """The mutants to try, in random order."""
        generator, mutants = random.Random(self.arguments.seed), []
        for module in self.arguments.module:
            found = find_mutants(module, read_module(module))
            mutants += generator.sample(found, min(self.arguments.limit or len(found), len(found)))
        generator.shuffle(mutants)
        known = {k for k, record in self.done.items() if record["result"] != "survived" or not self.arguments.retry}
        return [mutant for mutant in mutants if mutant.key not in known]

    def pytest_runtestloop(self, session) -> bool:
        if (failed := self.first_failure(session.items)) != "survived":
            raise pytest.UsageError(f"The unmutated package must pass its tests: {failed}.")
        by_module = {}
        for module in self.arguments.module:
            files = [ROOT / file for file in test_files(module)]
            items = sorted((i for i in session.items if i.path in files), key=lambda i: self.seconds[i.nodeid])
            by_module[module] = items
        mutants = self.chosen()
        for module, in_function in {(mutant.module, mutant.in_function): None for mutant in mutants}:
            unchanged = Mutant(module, 0, "", "", "", read_module(module), in_function)
            if (failed := self.try_mutant(unchanged, by_module[module])) != "survived":
                raise pytest.UsageError(f"The unmutated `{module}` must pass its tests in a child: {failed}.")
        for mutant in mutants:
            self.record(mutant, self.try_mutant(mutant, by_module[mutant.module]))
        return True

    def record(self, mutant: Mutant, result: str) -> None:
        fields = {name: value for name, value in vars(mutant).items() if name != "code"}
        self.done[mutant.key] = {"key": mutant.key, **fields, "result": result}
        with self.arguments.out.open("a") as stream:
            stream.write(json.dumps(self.done[mutant.key]) + "\n")


PYTEST_ARGUMENTS = ["-q", "-p", "no:cacheprovider", "--tb=no", "--assert=plain", f"--rootdir={ROOT}"]


def test_files(module: str) -> list[str]:
    return [f"tests/credit/test_{name}.py" for name in TESTS[module]]


def read_module(module: str) -> str:
    return ROOT.joinpath(*PACKAGE.split("."), f"{module}.py").read_text()


def read_results(path: Path) -> dict[str, dict]:
    """Recorded results by mutant; the last one counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["key"]: record for record in map(json.loads, lines)}


def summary(records: list[dict]) -> Iterator[str]:
    """Lines of a table of modules, then one for every survivor."""
    yield from ("| module | mutants | killed | of these timeouts | survived | score |", "|---|--:|--:|--:|--:|--:|")
    for module in [*dict.fromkeys(record["module"] for record in records), "all"]:
        results = [record["result"] for record in records if module in (record["module"], "all")]
        survived = results.count("survived")
        score = f"{1 - survived / len(results):.1%}" if results else "-"
        numbers = (len(results), len(results) - survived, results.count("timeout"), survived)
        yield f"| `{module}` | {' | '.join(map(str, numbers))} | {score} |"
    for r in records:
        if r["result"] == "survived":
            yield f"{r['module']}.py:{r['line']} {r['kind']}: {r['before']} -> {r['after']}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.credit.mutation", description=__doc__.splitlines()[1])
    parser.add_argument("--module", nargs="+", choices=TESTS, default=list(TESTS), help="modules (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--limit", type=int, help="largest number of mutants of a module (default: all of them)")
    parser.add_argument(
        "--out", type=Path, default=Path("mutants.jsonl"), help="file of results, continued if present"
    )
    parser.add_argument("--retry", action="store_true", help="try recorded survivors again")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    # Shrinking a failure to its smallest example would only take time.
    settings.register_profile("mutation", phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
    settings.load_profile("mutation")
    session = Session(arguments)
    files = dict.fromkeys(file for module in arguments.module for file in test_files(module))
    status = pytest.main([*PYTEST_ARGUMENTS, *files], plugins=[session])
    records = [record for record in session.done.values() if record["module"] in arguments.module]
    sys.stdout.write("\n".join(["", *summary(records), ""]))
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
