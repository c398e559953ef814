"""
The exception tree. Every class is also a standard-library type, so that callers may catch either.

    GroundedRLError
    ├── ConfigurationError (ValueError)       a recipe, an argument or a file the user can correct
    ├── RolloutError (ValueError)             a rollout record that breaks an invariant
    ├── RetrievalError (RuntimeError)         a search that failed for infrastructural reasons
    │   ├── BackendUnavailableError (RetrievalError)  no connection, or one that broke; another try may succeed
    │   ├── BackendOverloadedError (RetrievalError)   the backend asked for fewer or later requests
    │   ├── BackendTimeoutError (RetrievalError)      no answer in time
    │   ├── BadResponseError (RetrievalError)         an answer that cannot be trusted
    │   └── IndexMismatchError (RetrievalError)       the index is not the one the run was started with
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

    is_retryable = False
    """Whether the same request may succeed later without anyone acting."""


class BackendUnavailableError(RetrievalError):
    """The backend could not be reached, or the connection broke before the whole answer was there."""

    is_retryable = True


class BackendOverloadedError(RetrievalError):
    """
    The backend refused work for now (HTTP 429 or 503, a full queue, a circuit breaker).

    Args:
        message (`str`):
            What happened.
        retry_after (`float`, *optional*):
            Seconds the backend asked to wait.
    """

    is_retryable = True

    def __init__(self, message: str, retry_after: float | None = None):
        super().__init__(message, retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return self.args[0]


class BackendTimeoutError(RetrievalError):
    """The backend did not answer in time."""

    is_retryable = True


class BadResponseError(RetrievalError):
    """The backend answered something that cannot be trusted: wrong shape, missing items, empty passages."""


class IndexMismatchError(RetrievalError):
    """The index behind the backend is missing, or not the one the run was started with."""


class MissingDependencyError(GroundedRLError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""
