"""What is tried again, when, and how often."""

from __future__ import annotations

import random

import pytest

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    BadResponseError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.retrying import RetryingRetriever
from grounded_rl.retrieval.stats import SearchStats
from tests.retrieval.flaky import Clock, FlakyBackend, answer_of, away


class Longest(random.Random):
    """Draws the upper end of every range."""

    def uniform(self, a, b):
        return b


def retrying(failures, **options):
    clock = Clock()
    backend = FlakyBackend(failures)
    options = {"rng": Longest(), "base": 1.0, **options}
    return RetryingRetriever(backend, clock=clock, **options), backend, clock


@pytest.mark.parametrize("failure", [away(), BackendTimeoutError("late"), BackendOverloadedError("busy")])
def test_a_passing_failure_is_tried_again_until_it_is_over(failure):
    stats = SearchStats()
    retriever, backend, clock = retrying([failure] * 3, stats=stats)
    assert retriever.search(["Peru"], 3) == [answer_of("Peru", 3)]
    assert backend.requests == [["Peru"]] * 4
    assert clock.sleeps == [1.0, 2.0, 4.0]
    assert stats.window().retries == 3


@pytest.mark.parametrize("failure", [BadResponseError("half"), IndexMismatchError("gone"), RetrievalError("?")])
def test_a_lasting_failure_is_not_tried_again(failure):
    retriever, backend, clock = retrying([failure] * 3)
    with pytest.raises(type(failure)):
        retriever.search(["Peru"], 3)
    assert (len(backend.requests), clock.sleeps) == (1, [])


def test_the_last_error_comes_out_when_the_tries_are_used_up():
    retriever, backend, _ = retrying([away(number) for number in range(9)], attempts=3)
    with pytest.raises(BackendUnavailableError, match="connection 2 refused"):
        retriever.search(["Peru"], 3)
    assert len(backend.requests) == 3


def test_pauses_double_up_to_their_cap():
    retriever, _, clock = retrying([away()] * 6, attempts=7, cap=5.0)
    retriever.search(["Peru"], 3)
    assert clock.sleeps == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0]


def test_no_try_begins_after_the_deadline():
    retriever, backend, clock = retrying([away()] * 20, attempts=20, deadline=6.0)
    with pytest.raises(BackendUnavailableError):
        retriever.search(["Peru"], 3)
    # 1 + 2 seconds of pauses; the next one of 4 would end at 7.
    assert (clock.sleeps, len(backend.requests)) == ([1.0, 2.0], 3)


def test_the_time_a_backend_asks_for_is_given_and_spread():
    retriever, _, clock = retrying([BackendOverloadedError("busy", 7.0), BackendOverloadedError("busy", 0.0)])
    retriever.search(["Peru"], 3)
    assert clock.sleeps == [8.0, 2.0]


def test_a_backend_that_asks_for_more_than_the_deadline_is_not_waited_for():
    retriever, _, clock = retrying([BackendOverloadedError("busy", 3600.0)])
    with pytest.raises(BackendOverloadedError):
        retriever.search(["Peru"], 3)
    assert clock.sleeps == []


def test_pauses_are_spread_over_their_whole_range():
    retriever, _, clock = retrying([away()] * 400, attempts=401, cap=1.0, rng=random.Random(0), deadline=1e9)
    retriever.search(["Peru"], 3)
    assert min(clock.sleeps) < 0.02
    assert max(clock.sleeps) > 0.98
    # Mean 0.5 of a uniform draw; the standard error of 400 is 0.0144.
    assert abs(sum(clock.sleeps) / 400 - 0.5) < 0.06


def test_pauses_leave_the_random_state_of_the_run_alone():
    state = random.getstate()
    clock = Clock()
    RetryingRetriever(FlakyBackend([away()]), clock=clock).search(["Peru"], 3)
    assert len(clock.sleeps) == 1
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attempts": 0}, "`attempts` must be at least 1: got 0"),
        ({"base": -1.0}, "`base` must be at least 0 seconds: got -1.0"),
        ({"cap": float("nan")}, "`cap` must be at least 0 seconds: got nan"),
        ({"deadline": -1}, "`deadline` must be at least 0 seconds: got -1"),
    ],
)
def test_numbers_out_of_range_are_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        RetryingRetriever(FlakyBackend(), **options)
