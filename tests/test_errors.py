"""The exception tree: standard-library parents, pickling, and a docstring that draws the tree as it is."""

from __future__ import annotations

import inspect
import pickle

import pytest

from grounded_rl import errors
from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    BadResponseError,
    ConfigurationError,
    GroundedRLError,
    IndexMismatchError,
    MissingDependencyError,
    RetrievalError,
    RolloutError,
)

PARENTS = {
    ConfigurationError: ValueError,
    RolloutError: ValueError,
    RetrievalError: RuntimeError,
    BackendUnavailableError: RetrievalError,
    BackendOverloadedError: RetrievalError,
    BackendTimeoutError: RetrievalError,
    BadResponseError: RetrievalError,
    IndexMismatchError: RetrievalError,
    MissingDependencyError: ImportError,
}
CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == errors.__name__]


def test_the_tree_is_exactly_the_one_listed_here():
    assert set(CLASSES) == {GroundedRLError, *PARENTS}


@pytest.mark.parametrize("kind", PARENTS, ids=lambda kind: kind.__name__)
def test_an_error_may_be_caught_as_ours_or_as_its_standard_type(kind):
    for caught in (GroundedRLError, PARENTS[kind]):
        with pytest.raises(caught, match="the message"):
            raise kind("the message")


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_between_processes(kind):
    copy = pickle.loads(pickle.dumps(kind("`a` must be 1: got 2.")))
    assert type(copy) is kind
    assert str(copy) == "`a` must be 1: got 2."


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_module_draws_every_class_with_its_standard_type(kind):
    drawn = kind.__name__ + (f" ({PARENTS[kind].__name__})" if kind in PARENTS else "")
    assert drawn in errors.__doc__


def test_waiting_is_worth_it_only_for_what_may_pass_by_itself():
    retryable = {kind for kind in CLASSES if getattr(kind, "is_retryable", False)}
    assert retryable == {BackendUnavailableError, BackendOverloadedError, BackendTimeoutError}


def test_what_an_overloaded_backend_asked_for_survives_the_way_between_processes():
    error = pickle.loads(pickle.dumps(BackendOverloadedError("full", retry_after=2.5)))
    assert (str(error), error.retry_after) == ("full", 2.5)
