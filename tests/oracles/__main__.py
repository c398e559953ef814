"""Command line of the replay; exit code 0 if all files agree, 1 if one differs, 2 if something cannot be replayed."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.oracles.registry import TOLERANCE, OracleError, oracle_files, replay_file

MAX_SHOWN = 5


def main(arguments: list[str]) -> int:
    """Replay the folder named by the only argument."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m tests.oracles FOLDER\n")
        return 2
    passed = True
    try:
        for path in oracle_files(Path(arguments[0])):
            report = replay_file(path)
            passed = passed and report.passed
            sys.stdout.write(report.line() + "\n")
            for failure in report.differences.failures[:MAX_SHOWN]:
                sys.stdout.write(f"    {failure}\n")
    except OracleError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{'all files agree' if passed else 'some files differ'} within {TOLERANCE:g}\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
