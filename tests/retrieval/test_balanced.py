from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
from grounded_rl.retrieval.balanced import BalancedRetriever
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.http import HTTPRetriever
from grounded_rl.retrieval.server import ServedIndex, ServerSettings, create_app
from tests.retrieval import contract
from tests.retrieval.serving import EchoRetriever, FlakyRetriever, echo, free_port, running


@pytest.fixture
def members():
    return [FlakyRetriever(f"http://server-{number}") for number in range(3)]


@pytest.fixture
def balanced(members):
    with contextlib.closing(BalancedRetriever(members, max_probe_interval=0.2)) as retriever:
        yield retriever


@pytest.fixture(scope="module")
def bm25(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    build_bm25_index(contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES), folder / "index")
    return [BM25Retriever.open(folder / "index") for _ in range(3)]


def until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def pairs_up(hits, queries):
    return [[hit.passage for hit in row] for row in hits] == [[echo(query)] for query in queries]


@pytest.mark.parametrize("check", contract.CHECKS + contract.LEXICAL_CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check, bm25):
    with contextlib.closing(BalancedRetriever(bm25)) as balanced:
        check(balanced)


def test_search_parameters_are_those_of_a_member_in_service(balanced, members):
    assert balanced.search_parameters == {"mode": "echo"}
    members[0].search_parameters = {"mode": "unknown"}
    members[0].error = BackendUnavailableError("gone")
    balanced.search([f"query {number}" for number in range(30)], 1)
    assert balanced.search_parameters == {"mode": "echo"}


def test_a_batch_is_split_over_the_members_and_keeps_its_order(balanced, members):
    queries = [f"query {number}" for number in range(50)]
    assert pairs_up(balanced.search(queries, 1), queries)
    assert sorted(len(sent) for member in members for sent, _ in member.calls) == [16, 17, 17]


def test_the_members_search_their_shares_at_the_same_time(balanced, members):
    for member in members:
        member.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(balanced.search, [f"query {number}" for number in range(30)], 1)
        until(lambda: all(member.calls for member in members))
        for member in members:
            member.gate.set()
        assert len(answer.result()) == 30


def test_searches_go_to_the_member_with_the_fewest_in_flight(balanced, members):
    members[0].gate.clear()
    members[1].gate.clear()
    with ThreadPoolExecutor(2) as pool:
        held = [pool.submit(balanced.search, [f"held {number}"], 1) for number in range(2)]
        until(lambda: members[0].calls and members[1].calls)
        for number in range(5):
            balanced.search([f"query {number}"], 1)
        assert [row["in_flight"] for row in balanced.health] == [1, 1, 0]
        assert len(members[2].calls) == 5
        for member in members:
            member.gate.set()
        assert all(pairs_up(future.result(), [f"held {n}"]) for n, future in enumerate(held))


@pytest.mark.parametrize("kind", [BackendUnavailableError, BackendTimeoutError, BadResponseError, IndexMismatchError])
def test_a_member_that_fails_is_replaced_at_once_and_probed_until_it_is_back(balanced, members, kind):
    members[1].error = kind("gone")
    queries = [f"query {number}" for number in range(40)]
    assert pairs_up(balanced.search(queries, 1), queries)
    assert [row["in_service"] for row in balanced.health] == [True, False, True]
    assert balanced.health[1]["error"] == "gone"
    searched = len(members[1].calls)
    until(lambda: members[1].num_probes >= 2)
    assert pairs_up(balanced.search(queries, 1), queries)
    assert len(members[1].calls) == searched
    members[1].error = None
    until(lambda: balanced.health[1]["in_service"])
    assert pairs_up(balanced.search(queries, 1), queries)
    assert len(members[1].calls) == searched + 1


def test_only_when_every_member_is_out_is_a_search_refused(balanced, members):
    for member in members:
        member.error = BackendUnavailableError("gone")
    for _ in range(3):
        with pytest.raises(BackendUnavailableError, match=r"None of 3 members .*server-0: gone; .*server-2: gone"):
            balanced.search(["Peru"], 1)
    assert sum(len(member.calls) for member in members) == 3
    with pytest.raises(BackendUnavailableError, match="None of 3 members"):
        balanced.ready()
    members[2].error = None
    balanced.ready()
    assert pairs_up(balanced.search(["Peru"], 1), ["Peru"])


def test_the_pauses_between_probes_grow_to_the_longest_allowed(members):
    with contextlib.closing(BalancedRetriever(members, max_probe_interval=0.4)) as balanced:
        members[0].error = BackendUnavailableError("gone")
        balanced.search([f"query {number}" for number in range(30)], 1)
        time.sleep(1.6)  # probes after 0.2, 0.6, 1.0, 1.4 s
        assert 2 <= members[0].num_probes <= 4


def test_an_overloaded_member_stays_in_service_and_is_passed_over_while_it_asked(balanced, members):
    members[0].error = BackendOverloadedError("busy", 30.0)
    queries = [f"query {number}" for number in range(24)]
    assert pairs_up(balanced.search(queries, 1), queries)
    members[0].error = None
    calls = len(members[0].calls)
    for query in queries:
        balanced.search([query], 1)
    assert len(members[0].calls) == calls == 1
    assert [row["in_service"] for row in balanced.health] == [True] * 3


def test_overload_of_all_members_says_how_long_the_shortest_wait_is(balanced, members):
    for member, seconds in zip(members, (9.0, 4.0, None), strict=True):
        member.error = BackendOverloadedError("busy", seconds)
    with pytest.raises(BackendOverloadedError, match="No member can take the search now") as raised:
        balanced.search(["Peru"], 1)
    assert raised.value.retry_after == 0.5


def test_a_search_that_every_member_refuses_takes_none_out(balanced, members):
    for member in members:
        member.error = RetrievalError("no such field")
    with pytest.raises(RetrievalError, match="No member could answer the search.*no such field") as raised:
        balanced.search(["Peru"], 1)
    assert type(raised.value) is RetrievalError
    assert [row["in_service"] for row in balanced.health] == [True] * 3


def test_a_mistake_of_the_caller_is_passed_on(balanced, members):
    members[0].trouble = members[1].trouble = members[2].trouble = {"odd": ConfigurationError("`k` must be small")}
    with pytest.raises(ConfigurationError, match="must be small"):
        balanced.search(["odd"], 1)
    assert [(row["in_service"], row["in_flight"]) for row in balanced.health] == [(True, 0)] * 3


def test_members_of_different_or_unnamed_indexes_are_refused(members):
    other = FlakyRetriever("http://other", index_id="other")
    with pytest.raises(IndexMismatchError, match="'echo': got 'other' from http://other"):
        BalancedRetriever([*members, other])
    assert all(member.is_closed for member in members)
    unnamed = FlakyRetriever("http://unnamed")
    del unnamed.manifest["index_id"]
    with pytest.raises(ConfigurationError, match="must tell their index .* http://unnamed"):
        BalancedRetriever([FlakyRetriever("http://named"), unnamed])
    with contextlib.closing(BalancedRetriever([unnamed])) as alone:
        assert pairs_up(alone.search(["Peru"], 1), ["Peru"])
    with pytest.raises(ConfigurationError, match="at least one retriever"):
        BalancedRetriever([])


def test_a_member_that_comes_back_with_another_index_stays_out(balanced, members):
    members[0].error = BackendUnavailableError("gone")
    balanced.search([f"query {number}" for number in range(30)], 1)
    members[0].manifest = {"index_id": "other"}
    members[0].error = None
    until(lambda: "got 'other'" in str(balanced.health[0]["error"]))
    probes = members[0].num_probes
    until(lambda: members[0].num_probes >= probes + 2)
    assert not balanced.health[0]["in_service"]
    assert pairs_up(balanced.search(["Peru"], 1), ["Peru"])


class Absent(FlakyRetriever):
    """Cannot tell its manifest while it is away."""

    def __init__(self, name):
        self._manifest = None
        super().__init__(name)
        self.error = BackendUnavailableError("not started")

    @property
    def manifest(self):
        if self.error is not None:
            raise self.error
        return self._manifest

    @manifest.setter
    def manifest(self, manifest):
        self._manifest = manifest


def test_members_may_be_away_at_the_start_but_not_all(members):
    absent = Absent("http://late")
    with contextlib.closing(BalancedRetriever([absent, *members], max_probe_interval=0.2)) as balanced:
        assert balanced.manifest["index_id"] == "echo"
        assert not balanced.health[0]["in_service"]
        absent.error = None
        until(lambda: balanced.health[0]["in_service"])
    with pytest.raises(BackendUnavailableError, match="None of 2 members is in service.*not started"):
        BalancedRetriever([Absent("http://a"), Absent("http://b")])


def test_readiness_needs_one_member_and_does_not_wait_for_the_others(balanced, members):
    stuck = threading.Event()
    members[0].ready = members[1].ready = lambda timeout: stuck.wait(20)
    started = time.monotonic()
    balanced.ready(10)
    assert time.monotonic() - started < 5
    members[2].ready = members[0].ready
    with pytest.raises(BackendTimeoutError, match=r"None of 3 members said in 0\.2 s"):
        balanced.ready(0.2)
    stuck.set()


def test_closing_closes_the_members_and_ends_the_threads(members):
    balanced = BalancedRetriever(members)
    members[0].error = BackendUnavailableError("gone")
    balanced.search([f"query {number}" for number in range(30)], 1)
    balanced.close()
    balanced.close()
    assert all(member.is_closed for member in members)
    for call in (lambda: balanced.search(["Peru"], 1), balanced.ready):
        with pytest.raises(RetrievalError, match="was closed"):
            call()
    until(lambda: not any(thread.name.startswith("grounded-rl-") for thread in threading.enumerate()))


def _server(port):
    index = EchoRetriever()
    return running(create_app(ServedIndex(lambda: index, manifest=index.manifest), ServerSettings()), port=port)


def test_servers_that_stop_and_start_again_under_load_lose_no_query():
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    finished = threading.Event()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(contextlib.ExitStack()) for _ in ports]
        for server, port in zip(servers, ports, strict=True):
            server.enter_context(_server(port))
        balanced = BalancedRetriever([HTTPRetriever(url, timeout=10) for url in urls], max_probe_interval=0.2)
        stack.callback(balanced.close)

        def ask(name):
            count = 0
            while not finished.is_set():
                queries = [f"{name} {count} {part}" for part in range(1 + count % 20)]
                assert pairs_up(balanced.search(queries, 1), queries)
                count += 1
            return count

        with ThreadPoolExecutor(4) as pool:
            clients = [pool.submit(ask, name) for name in range(4)]
            for server, port, row in ((servers[0], ports[0], 0), (servers[1], ports[1], 1)):
                time.sleep(0.2)
                server.close()
                until(lambda row=row: not balanced.health[row]["in_service"])
                server.enter_context(_server(port))
                until(lambda row=row: balanced.health[row]["in_service"])
            finished.set()
            assert all(client.result() > 0 for client in clients)
