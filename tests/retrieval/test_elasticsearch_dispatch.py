"""Slots, batches and repetition: what happens between many threads and few requests. No server is needed."""

from __future__ import annotations

import random
import threading
import time

import pytest

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.elasticsearch.dispatch import Dispatcher, InFlightLimit, RetryPolicy

FAST = RetryPolicy(patience=20.0, backoff_base=0.001, backoff_cap=0.01)


def echo(bodies):
    return [{"echo": body["n"]} for body in bodies]


def make(transmit, *, slots=2, maximum=8, retry=FAST, max_batch_size=8):
    return Dispatcher(transmit, InFlightLimit(slots, maximum), retry, max_batch_size=max_batch_size)


def run_threads(count, work):
    errors = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_every_query_gets_the_answers_to_its_own_bodies():
    dispatcher = make(echo)
    groups = [[{"n": 10 * row + column} for column in range(1 + row % 2)] for row in range(30)]
    answers = dispatcher.run(groups)
    assert [[answer["echo"] for answer in row] for row in answers] == [[body["n"] for body in row] for row in groups]


def test_bodies_of_a_query_are_never_split_and_batches_are_bounded():
    sizes = []

    def transmit(bodies):
        sizes.append([body["n"] for body in bodies])
        return echo(bodies)

    make(transmit, max_batch_size=5).run([[{"n": row}, {"n": row}] for row in range(7)])
    assert all(len(batch) <= 5 for batch in sizes)
    assert all(batch[::2] == batch[1::2] for batch in sizes)


def test_a_query_larger_than_a_batch_is_sent_alone():
    assert len(make(echo, max_batch_size=1).run([[{"n": 1}, {"n": 2}]])[0]) == 2


def test_threads_share_requests_while_slots_are_taken():
    gate = threading.Event()
    batches = []

    def transmit(bodies):
        batches.append(len(bodies))
        gate.wait(10)
        return echo(bodies)

    dispatcher = make(transmit, slots=1, maximum=1, max_batch_size=64)

    def work(number):
        if number == 40:
            time.sleep(0.3)
            gate.set()
        else:
            assert dispatcher.run([[{"n": number}]]) == [[{"echo": number}]]

    assert run_threads(41, work) == []
    assert sum(batches) == 40
    assert len(batches) <= 4


def test_many_threads_fill_their_requests_and_few_do_not_wait():
    lock = threading.Lock()
    batches, now, most = [], 0, 0

    def transmit(bodies):
        nonlocal now, most
        with lock:
            batches.append(len(bodies))
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1
        return echo(bodies)

    many = make(transmit, slots=16, maximum=16, max_batch_size=64)
    assert run_threads(64, lambda number: [many.run([[{"n": number}]]) for _ in range(6)]) == []
    assert sum(batches) == 64 * 6
    assert len(batches) <= 64 * 6 / 8
    batches, most = [], 0
    few = make(transmit, slots=16, maximum=16, max_batch_size=64)
    assert run_threads(2, lambda number: [few.run([[{"n": number}]]) for _ in range(20)]) == []
    assert most == 2


def test_no_more_requests_than_slots_are_ever_on_their_way():
    lock = threading.Lock()
    now = most = 0

    def transmit(bodies):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1
        return echo(bodies)

    dispatcher = make(transmit, slots=3, maximum=3, max_batch_size=2)
    assert run_threads(32, lambda number: dispatcher.run([[{"n": number}] for _ in range(4)])) == []
    assert most == 3


def test_only_what_failed_is_sent_again():
    sent = []

    def transmit(bodies):
        sent.append([body["n"] for body in bodies])
        fail = len(sent) == 1
        return [
            BackendUnavailableError("shard is away") if fail and body["n"] % 3 == 0 else {"echo": body["n"]}
            for body in bodies
        ]

    dispatcher = make(transmit, slots=1)
    answers = dispatcher.run([[{"n": number}] for number in range(7)])
    assert [answer["echo"] for (answer,) in answers] == list(range(7))
    assert sent == [list(range(7)), [0, 3, 6]]
    assert dispatcher.num_retries == 3


def test_a_failure_that_cannot_mend_is_raised_at_once():
    calls = []

    def transmit(bodies):
        calls.append(1)
        return [IndexMismatchError("gone") for _ in bodies]

    with pytest.raises(IndexMismatchError, match=r"^gone$"):
        make(transmit).run([[{"n": 1}]])
    assert len(calls) == 1


def test_patience_ends_with_the_last_error_and_the_number_of_tries():
    def transmit(bodies):
        raise BackendOverloadedError("queue is full")

    impatient = RetryPolicy(patience=0.2, backoff_base=0.01, backoff_cap=0.02)
    with pytest.raises(BackendOverloadedError, match=r"queue is full Gave up after \d+ tries in 0\.\d s"):
        make(transmit, retry=impatient).run([[{"n": 1}]])


def test_a_search_that_never_gets_a_slot_times_out():
    release = threading.Event()

    def transmit(bodies):
        release.wait(10)
        return echo(bodies)

    dispatcher = make(transmit, slots=1, maximum=1, retry=RetryPolicy(patience=0.3), max_batch_size=1)
    holder = threading.Thread(target=lambda: dispatcher.run([[{"n": 1}]]))
    holder.start()
    while dispatcher.num_requests == 0:
        time.sleep(0.005)
    with pytest.raises(BackendTimeoutError, match="all slots were taken"):
        dispatcher.run([[{"n": 2}]])
    release.set()
    holder.join(10)


def test_refusals_halve_the_slots_once_per_volley_and_successes_add_to_them():
    limit = InFlightLimit(16, 16)
    era = limit.era
    for _ in range(10):
        limit.refused(era)
    assert limit.slots == 8
    for expected in (4, 2, 1, 1):
        limit.refused(limit.era)
        assert limit.slots == expected
    for _ in range(16 * 20):
        limit.succeeded()
    assert limit.slots == 16


def test_the_server_is_pressed_less_while_it_refuses_and_more_afterwards():
    state = {"full": True}

    def transmit(bodies):
        if state["full"]:
            return [BackendOverloadedError("queue is full") for _ in bodies]
        return echo(bodies)

    dispatcher = make(transmit, slots=8, retry=RetryPolicy(patience=0.3, backoff_base=0.01, backoff_cap=0.05))
    with pytest.raises(BackendOverloadedError):
        dispatcher.run([[{"n": 1}]])
    assert dispatcher.slots == 1
    state["full"] = False
    for number in range(40):
        dispatcher.run([[{"n": number}]])
    assert dispatcher.slots == 3


def test_pauses_are_spread_and_bounded_and_keep_what_the_server_asked_for():
    policy = RetryPolicy(backoff_base=0.5, backoff_cap=4.0)
    random.seed(7)
    for tries, bound in ((1, 0.5), (2, 1.0), (3, 2.0), (4, 4.0), (9, 4.0), (500, 4.0)):
        pauses = [policy.pause(tries, BackendUnavailableError("")) for _ in range(400)]
        assert max(pauses) <= bound
        assert min(pauses) < 0.1 * bound
        assert max(pauses) > 0.9 * bound
    assert all(3.0 <= policy.pause(1, BackendOverloadedError("", 3.0)) <= 3.5 for _ in range(100))


def test_an_interrupted_sender_leaves_the_searches_of_others_to_others():
    interrupted = threading.Event()
    first = threading.Event()

    def transmit(bodies):
        if not first.is_set():
            first.set()
            time.sleep(0.2)
            return echo(bodies)
        if not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        return echo(bodies)

    dispatcher = make(transmit, slots=1, maximum=1, max_batch_size=64)
    answered = []

    def work(number):
        if number:
            first.wait(5)
        answered.append(dispatcher.run([[{"n": number}]])[0][0]["echo"])

    errors = run_threads(12, work)
    assert [type(error) for error in errors] == [KeyboardInterrupt]
    assert len(answered) == 11
    assert len(set(answered)) == 11


def test_storms_lose_nothing_and_pair_every_answer_with_its_query():
    chance = random.Random(3)
    lock = threading.Lock()

    def transmit(bodies):
        with lock:
            whole, parts = chance.random(), [chance.random() for _ in bodies]
        if whole < 0.1:
            raise BackendUnavailableError("connection reset")
        return [
            BackendOverloadedError("queue is full") if part < 0.3 else {"echo": body["n"]}
            for part, body in zip(parts, bodies, strict=True)
        ]

    dispatcher = make(transmit, slots=4, retry=RetryPolicy(patience=60.0, backoff_base=0.001, backoff_cap=0.01))

    def work(number):
        for turn in range(10):
            wanted = [number * 1000 + turn * 10 + item for item in range(3)]
            answers = dispatcher.run([[{"n": value}] for value in wanted])
            assert [answer["echo"] for (answer,) in answers] == wanted

    assert run_threads(48, work) == []


def test_closing_ends_searches_that_wait():
    started = threading.Event()

    def transmit(bodies):
        started.set()
        return [BackendUnavailableError("down") for _ in bodies]

    dispatcher = make(transmit, retry=RetryPolicy(patience=60.0, backoff_base=30.0, backoff_cap=30.0))
    outcome = []

    def work():
        with pytest.raises(RetrievalError, match="closed") as caught:
            dispatcher.run([[{"n": 1}]])
        outcome.append(caught.value.is_retryable)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(5)
    dispatcher.close()
    thread.join(10)
    assert outcome == [False]
    with pytest.raises(RetrievalError, match="closed"):
        dispatcher.run([[{"n": 1}]])
