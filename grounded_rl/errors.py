"""
The exception tree. Every class is also a standard-library type, so that callers may catch either.

    GroundedRLError
    ├── ConfigurationError (ValueError)       a recipe, an argument or a file the user can correct
    ├── RolloutError (ValueError)             a rollout record that breaks an invariant
    ├── RetrievalError (RuntimeError)         a search that failed for infrastructural reasons
    └── MissingDependencyError (ImportError)  an optional package that is not installed

`grounded_rl.credit` raises plain `ValueError` and `TypeError`. An infrastructural failure is never turned into an
observation or a reward: it travels as one of these types.

To add one: subclass `GroundedRLError` and the closest standard-library type, take a single message (so that it
pickles), and add it to the tree above and to the test of this module.
"""

from __future__ import annotations


class GroundedRLError(Exception):
    """Root of every error this package raises on purpose, `credit` excepted."""


class ConfigurationError(GroundedRLError, ValueError):
    """A recipe, command-line argument or input file that the user can correct."""


class RolloutError(GroundedRLError, ValueError):
    """A rollout record that breaks an invariant (lengths, order of turns, schema version)."""


class RetrievalError(GroundedRLError, RuntimeError):
    """A search that failed for infrastructural reasons; never shown to the policy, never scored."""


class MissingDependencyError(GroundedRLError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""
