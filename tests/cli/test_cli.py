"""The command line: help, exit codes, and one clear line for whatever the user can correct."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grounded_rl import __version__, cli
from grounded_rl.cli import COMMANDS, main
from grounded_rl.errors import ConfigurationError, MissingDependencyError, RetrievalError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def command(monkeypatch):
    """Register a command `probe` whose effect the test chooses."""

    def register(effect, *, takes_overrides=False):
        class Module:
            @staticmethod
            def add_parser(subparsers):
                parser = subparsers.add_parser("probe", help="a probe")
                parser.add_argument("--depth", type=int, default=1)
                parser.add_argument("--config")
                parser.set_defaults(run=effect, takes_overrides=takes_overrides)

        monkeypatch.setattr(cli, "COMMANDS", ("probe",))
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: {"grounded_rl.cli.probe": Module}[name])

    return register


def raising(error):
    def effect(arguments):
        raise error

    return effect


def error_line(capsys) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err.rstrip("\n")


def run_process(*words: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "grounded_rl", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


def test_help_shows_every_command_and_examples(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert [name for name in re.findall(r"\n    (\w+)\s", out) if name in COMMANDS] == list(COMMANDS)
    assert "examples:" in out
    assert "accelerate launch" in out


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_has_an_example(name, capsys):
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "example" in out
    assert f"grounded-rl {name}" in out.split("example", 1)[1]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_module_with_the_expected_function(name):
    assert callable(importlib.import_module(f"grounded_rl.cli.{name}").add_parser)


def test_every_command_module_is_registered():
    folder = REPOSITORY / "grounded_rl" / "cli"
    modules = {path.stem: path for path in folder.glob("*.py")} | {
        path.parent.name: path for path in folder.glob("*/__init__.py")
    }
    commands = {name for name, path in modules.items() if "\ndef add_parser(" in path.read_text(encoding="utf-8")}
    assert commands == set(COMMANDS)


def test_without_a_command_the_help_is_shown_and_the_exit_code_is_2(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"grounded-rl {__version__}\n"


def test_an_unknown_command_names_the_nearest_one(capsys, command):
    command(lambda arguments: 0)
    assert main(["prob"]) == 2
    line = error_line(capsys)
    assert line == "error: the command must be one of probe: got `prob`. Did you mean `probe`?"
    assert main(["zzzzz"]) == 2
    assert error_line(capsys).endswith("See `grounded-rl --help`.")


def test_an_unknown_option_names_the_nearest_one(capsys, command):
    command(lambda arguments: 0)
    assert main(["probe", "--dept", "2"]) == 2
    assert error_line(capsys) == "error: `--dept` must be an option of `grounded-rl probe`. Did you mean `--depth`?"
    assert main(["probe", "--zzz=2"]) == 2
    assert error_line(capsys) == (
        "error: `--zzz` must be an option of `grounded-rl probe`. See `grounded-rl probe --help`."
    )
    assert main(["probe", "stray"]) == 2
    assert "`stray` must follow an option" in error_line(capsys)
    assert main(["--versio"]) == 2
    assert "Did you mean `--version`?" in error_line(capsys)


def test_a_value_of_the_wrong_type_is_one_line(capsys, command):
    command(lambda arguments: 0)
    assert main(["probe", "--depth", "deep"]) == 2
    assert error_line(capsys) == (
        "error: argument --depth: invalid int value: 'deep'. See `grounded-rl probe --help`."
    )


def test_options_reach_the_command_and_its_result_is_the_exit_code(command):
    seen = []

    def effect(arguments):
        seen.append((arguments.command, arguments.depth, arguments.overrides))
        return 3

    command(effect)
    assert main(["probe", "--depth", "4"]) == 3
    assert seen == [("probe", 4, [])]


def test_a_command_without_a_result_succeeds(command):
    command(lambda arguments: None)
    assert main(["probe"]) == 0


def test_recipe_keys_reach_a_command_in_order_and_are_never_taken_for_its_options(command):
    seen = []
    command(
        lambda arguments: seen.append((arguments.config, arguments.depth, arguments.overrides)), takes_overrides=True
    )
    words = ["--conf", "x", "--lr=1e-6", "--depth", "2", "--beta", "-0.1", "--names", "a", "b", "--bf16"]
    assert main(["probe", *words]) == 0
    assert seen == [(None, 2, ["--conf", "x", "--lr=1e-6", "--beta", "-0.1", "--names", "a", "b", "--bf16"])]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigurationError("`a` must be 1:\n   got 2."), "error: `a` must be 1: got 2."),
        (RetrievalError("the server is down"), "error: the server is down"),
        (MissingDependencyError("`x` needs the package `y`."), "error: `x` needs the package `y`."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_the_package_are_one_line(capsys, command, error, line):
    command(raising(error))
    assert main(["probe"]) == 2
    assert error_line(capsys) == line


def test_faults_of_files_are_one_line_with_the_path(capsys, command, tmp_path):
    binary = tmp_path / "latin.txt"
    binary.write_bytes(b"caf\xe9")
    cases = {
        lambda arguments: (
            tmp_path / "absent"
        ).read_text(): f"error: {tmp_path / 'absent'}: no such file or directory",
        lambda arguments: tmp_path.read_text(): f"error: {tmp_path}: is a directory",
        lambda arguments: (binary / "below").read_text(): f"error: {binary / 'below'}: not a directory",
        lambda arguments: tmp_path.mkdir(): f"error: {tmp_path}: file exists",
        lambda arguments: binary.read_text(encoding="utf-8"): "error: a text file must be UTF-8",
        raising(PermissionError(13, "Permission denied", "/locked/x")): "error: /locked/x: permission denied",
        raising(FileNotFoundError("no index at `x`. Build it.")): "error: no index at `x`. Build it.",
    }
    for effect, line in cases.items():
        command(effect)
        assert main(["probe"]) == 2
        assert error_line(capsys).startswith(line)


def test_a_fault_of_ours_keeps_its_traceback(command):
    command(raising(KeyError("a bug")))
    with pytest.raises(KeyError, match="a bug"):
        main(["probe"])


def test_an_interrupt_ends_with_130(capsys, command):
    command(raising(KeyboardInterrupt()))
    assert main(["probe"]) == 130
    assert error_line(capsys) == "interrupted"


def test_the_module_runs_as_a_program_with_the_same_exit_codes():
    assert run_process("--version").stdout == f"grounded-rl {__version__}\n"
    unknown = run_process("nonsense", stdin=subprocess.DEVNULL)
    assert unknown.returncode == 2
    assert unknown.stdout == ""
    assert unknown.stderr.startswith("error: the command must be one of ")


def test_a_reader_that_leaves_the_pipe_is_not_reported():
    code = "import sys; from grounded_rl import cli; cli._run = lambda argv: print('row'); sys.exit(cli.main())"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        process = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(writing)
    assert process.stderr == ""
    assert process.returncode == 141


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from grounded_rl.cli import build_parser; build_parser().format_help(); "
        "print([name for name in ('torch', 'transformers', 'trl', 'tantivy', 'matplotlib') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
