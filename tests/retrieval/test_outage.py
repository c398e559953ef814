"""Waiting for a backend that is away."""

from __future__ import annotations

import pytest

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendUnavailableError,
    BadResponseError,
    ConfigurationError,
    IndexMismatchError,
)
from grounded_rl.retrieval.outage import PatientRetriever, index_failure
from grounded_rl.retrieval.stats import SearchStats
from tests.retrieval.flaky import Clock, FlakyBackend, answer_of, away


def patient(failures, **options):
    clock = Clock()
    backend = FlakyBackend(failures)
    return PatientRetriever(backend, clock=clock, **options), backend, clock


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_search_is_answered_once_the_backend_is_back(caplog):
    stats = SearchStats()
    retriever, backend, clock = patient([away()], stats=stats)
    backend.ready_failures = [away()] * 5
    assert retriever.search(["Peru", "Chile"], 3) == [answer_of("Peru", 3), answer_of("Chile", 3)]
    # Asked once before and once after the outage; in between only whether it is ready.
    assert backend.requests == [["Peru", "Chile"]] * 2
    assert backend.num_ready == 6
    window = stats.window()
    assert window.outages == 1
    assert window.outage_s == clock.now > 0
    first, last = warnings_of(caplog)
    assert first.startswith("The search backend does not answer (connection 0 refused). Waiting up to 600 s;")
    assert last.startswith("The search backend answered again after ")


def test_a_backend_that_is_ready_but_fails_is_still_away():
    retriever, backend, _ = patient([away()] * 9)
    assert retriever.search(["Peru"], 3) == [answer_of("Peru", 3)]
    assert len(backend.requests) == 10


def test_patience_ends_and_says_what_was_last():
    retriever, backend, clock = patient([away(number) for number in range(10**5)], patience=120.0)
    with pytest.raises(
        BackendUnavailableError,
        match=r"did not come back within `retrieval_patience`, 120 s; last: connection \d+ refused",
    ):
        retriever.search(["Peru"], 3)
    assert clock.now == 120.0
    assert 8 <= len(backend.requests) <= 40


def test_messages_become_rare(caplog):
    retriever, _, _ = patient([away()] * 10**5, patience=3600.0)
    with pytest.raises(BackendUnavailableError):
        retriever.search(["Peru"], 3)
    reminders = [text for text in warnings_of(caplog) if text.startswith("Still waiting")]
    # After about 60, 120, 240, 480, 960 and 1920 seconds, each late by up to a pause, which the doubling carries on.
    assert 5 <= len(reminders) <= 6


@pytest.mark.parametrize("failure", [BadResponseError("half an answer"), IndexMismatchError("another index")])
def test_what_waiting_cannot_help_is_raised_at_once(failure):
    retriever, _, clock = patient([failure])
    with pytest.raises(type(failure)):
        retriever.search(["Peru"], 3)
    assert clock.sleeps == []


def test_a_backend_that_comes_back_with_another_index_stops_the_wait():
    retriever, backend, clock = patient([away()])
    backend.ready_failures = [away(), IndexMismatchError("another index")]
    with pytest.raises(IndexMismatchError, match="another index"):
        retriever.search(["Peru"], 3)
    assert len(clock.sleeps) == 2
    assert len(backend.requests) == 1


def test_the_time_a_backend_asks_for_is_given_within_the_patience():
    retriever, _, clock = patient([BackendOverloadedError("busy", 40.0)])
    retriever.search(["Peru"], 3)
    assert 40.0 < clock.sleeps[0] <= 55.0
    retriever, _, clock = patient([BackendOverloadedError("busy", 40.0)] * 9, patience=50.0)
    with pytest.raises(BackendOverloadedError):
        retriever.search(["Peru"], 3)
    assert clock.now == 50.0


def test_no_patience_means_no_wait():
    retriever, _, clock = patient([away()], patience=0.0)
    with pytest.raises(BackendUnavailableError, match="^connection 0 refused$"):
        retriever.search(["Peru"], 3)
    assert clock.sleeps == []


def test_a_negative_patience_is_refused():
    with pytest.raises(ConfigurationError, match="`patience` must be at least 0 seconds: got -1"):
        PatientRetriever(FlakyBackend(), patience=-1)


def test_an_index_is_confirmed_once_the_backend_is_back():
    retriever, backend, clock = patient([])
    backend.ready_failures = [away(), away()]
    assert index_failure(retriever) is None
    assert (len(clock.sleeps), backend.num_ready) == (2, 3)
    backend.ready_failures = [IndexMismatchError("another index")]
    assert isinstance(index_failure(retriever, may_be_away=True), IndexMismatchError)


def test_without_patience_an_index_is_confirmed_at_once_or_not_at_all():
    backend = FlakyBackend()
    assert index_failure(backend) is None
    backend.ready_failures = [away()]
    assert isinstance(index_failure(backend), BackendUnavailableError)
    backend.ready_failures = [away()]
    assert index_failure(backend, may_be_away=True) is None
