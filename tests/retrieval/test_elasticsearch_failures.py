"""What happens when a real node is overloaded, killed, frozen, emptied or changed: never a false or partial result."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("elasticsearch", reason="the extra `elasticsearch` is not installed")

from grounded_rl.errors import (
    BackendTimeoutError,
    BackendUnavailableError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.elasticsearch import (
    ElasticsearchClient,
    ElasticsearchRetriever,
    ElasticsearchSettings,
    ElasticsearchWriter,
    IndexSpec,
    WriteLimits,
    index_facts,
)
from grounded_rl.retrieval.elasticsearch.queries import check_whole
from tests.retrieval.es_indices import build_index, call
from tests.retrieval.es_node import ElasticsearchNode
from tests.retrieval.es_node_parts import PartsMissingError

pytestmark = pytest.mark.elasticsearch

PASSAGES = [
    Passage(str(number), f"Item {number}", f"The marker word{number} stands here, and the river flows by.")
    for number in range(200)
]
SMALL_QUEUES = {
    "thread_pool.search.size": 1,
    "thread_pool.search.queue_size": 4,
    "thread_pool.write.size": 1,
    "thread_pool.write.queue_size": 2,
}


@pytest.fixture(scope="module")
def small_node():
    """A node with short queues, which the tests of this file may kill."""
    try:
        node = ElasticsearchNode(SMALL_QUEUES, heap_mb=256)
    except PartsMissingError as error:
        pytest.skip(str(error))
    with node:
        build_index(node.url, "items", PASSAGES)
        yield node


@pytest.fixture
def connect():
    opened = []

    def open_index(url, index="items", **options):
        opened.append(ElasticsearchRetriever.connect(url, index, **options))
        return opened[-1]

    yield open_index
    for one in opened:
        one.close()


def ask(retriever, numbers):
    """Search for passages by their own words and check that each is found."""
    for number, hits in zip(numbers, retriever.search([f"word{number}" for number in numbers], 3), strict=True):
        assert [hit.passage for hit in hits] == [PASSAGES[number]]


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
    return threads, errors


def finish(threads, errors):
    for thread in threads:
        thread.join(180)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def test_a_full_queue_loses_and_mixes_nothing(small_node, connect):
    retriever = connect(small_node.url, max_in_flight=16, max_batch_size=16)

    def work(number):
        for turn in range(3):
            ask(retriever, [(number * 7 + turn * 31 + item) % len(PASSAGES) for item in range(4)])

    finish(*run_threads(48, work))
    rejected = call(small_node.url, "GET", "/_nodes/stats/thread_pool")["nodes"].popitem()[1]["thread_pool"]["search"]
    assert rejected["rejected"] > 0, "the queue was never full: the test shows nothing"
    assert retriever._dispatcher.num_retries > 0
    assert retriever._dispatcher.slots < 16


def test_a_bulk_that_is_refused_is_sent_again(small_node):
    client = ElasticsearchClient(ElasticsearchSettings(small_node.url, max_in_flight=16))
    writer = ElasticsearchWriter(client, "bulk-1", IndexSpec(), limits=WriteLimits(max_passages=5, num_threads=12))
    writer.create()
    positions = []
    written = writer.write(((row, passage, None) for row, passage in enumerate(PASSAGES)), positions.append)
    assert written == len(PASSAGES)
    assert positions == list(range(5, 201, 5))
    facts = index_facts(
        IndexSpec(),
        corpus_name="c",
        corpus_sha256="0" * 64,
        num_passages=len(PASSAGES),
        server_version=writer.server_version(),
    )
    writer.finish(facts)
    pool = call(small_node.url, "GET", "/_nodes/stats/thread_pool")["nodes"].popitem()[1]["thread_pool"]["write"]
    assert pool["rejected"] > 0, "the queue was never full: the test shows nothing"
    client.close()


def test_searches_wait_for_a_node_that_is_killed_and_comes_back(small_node, connect):
    retriever = connect(small_node.url, patience=120.0, timeout=20.0)
    ask(retriever, [1, 2, 3])
    stop = threading.Event()
    answered = []

    def work(number):
        turn = 0
        while not stop.is_set():
            ask(retriever, [(number * 13 + turn) % len(PASSAGES)])
            answered.append(time.monotonic())
            turn += 1

    threads, errors = run_threads(6, work)
    time.sleep(0.5)
    small_node.kill()
    with pytest.raises(BackendUnavailableError):
        retriever.ready(5.0)
    small_node.restart()
    back = time.monotonic()
    deadline = back + 60
    while not any(moment > back for moment in answered) and time.monotonic() < deadline and not errors:
        time.sleep(0.05)
    stop.set()
    finish(threads, errors)
    assert any(moment > back for moment in answered)
    retriever.ready(30.0)


def test_a_frozen_node_is_a_timeout(small_node, connect):
    retriever = connect(small_node.url, timeout=0.5, patience=1.5)
    small_node.pause()
    try:
        with pytest.raises(BackendTimeoutError, match="did not answer in time"):
            retriever.search(["word1"], 1)
        with pytest.raises(BackendTimeoutError):
            retriever.ready(0.5)
    finally:
        small_node.resume()
    connect(small_node.url).ready(30.0)


def test_an_index_that_is_removed_is_missed_at_once(es_node, es_index, connect):
    build_index(es_node.url, es_index, PASSAGES[:5])
    retriever = connect(es_node.url, es_index)
    call(es_node.url, "DELETE", f"/{retriever.index_name}")
    for attempt in (lambda: retriever.search(["word1"], 1), lambda: retriever.ready(30.0)):
        with pytest.raises(IndexMismatchError, match="not on the server"):
            attempt()


def remake(url: str, retriever, passages, spec=None) -> None:
    """Another index under the name of the one a retriever has open."""
    name = retriever.index_name
    call(url, "DELETE", f"/{name}")
    client = ElasticsearchClient(ElasticsearchSettings(url))
    writer = ElasticsearchWriter(client, name, spec or IndexSpec())
    writer.create()
    writer.write((row, passage, None) for row, passage in enumerate(passages))
    call(url, "POST", f"/{name}/_refresh")
    client.close()


def test_an_index_that_is_emptied_or_refilled_is_noticed_with_the_first_search(es_node, es_index, connect):
    for passages in ([], PASSAGES[:4]):
        build_index(es_node.url, es_index, PASSAGES[:5])
        retriever = connect(es_node.url, es_index)
        remake(es_node.url, retriever, passages)
        with pytest.raises(IndexMismatchError, match="must have 5 passages that can be searched"):
            retriever.search(["word1"], 1)


def test_an_index_made_anew_is_noticed_when_nothing_is_found(es_node, es_index, connect):
    build_index(es_node.url, es_index, PASSAGES[:5])
    retriever = connect(es_node.url, es_index)
    remake(es_node.url, retriever, PASSAGES[10:15])
    retriever._verified_at -= 5.0
    with pytest.raises(IndexMismatchError, match="must be the one that was opened"):
        retriever.search(["word1"], 1)
    with pytest.raises(IndexMismatchError, match="must be the one that was opened"):
        retriever.ready(30.0)


def test_an_index_made_anew_is_noticed_within_half_a_minute_of_searching(es_node, es_index, connect):
    build_index(es_node.url, es_index, PASSAGES[:5])
    retriever = connect(es_node.url, es_index)
    remake(es_node.url, retriever, PASSAGES[:5])
    assert retriever.search(["word1"], 1)[0]
    retriever._verified_at -= 31.0
    with pytest.raises(IndexMismatchError, match="must be the one that was opened"):
        retriever.search(["word1"], 1)


def test_a_mapping_that_loses_its_fields_is_noticed_with_the_first_search(es_node, es_index, connect):
    build_index(es_node.url, es_index, PASSAGES[:5])
    retriever = connect(es_node.url, es_index)
    name = retriever.index_name
    call(es_node.url, "DELETE", f"/{name}")
    call(es_node.url, "PUT", f"/{name}", {"mappings": {"properties": {"content": {"type": "text"}}}})
    call(es_node.url, "PUT", f"/{name}/_doc/1?refresh=true", {"content": "word1"})
    with pytest.raises(IndexMismatchError):
        retriever.search(["word1"], 1)


def test_a_mapping_that_gains_a_field_is_noticed(es_node, es_index, connect):
    build_index(es_node.url, es_index, PASSAGES[:5])
    retriever = connect(es_node.url, es_index)
    call(es_node.url, "PUT", f"/{retriever.index_name}/_mapping", {"properties": {"extra": {"type": "keyword"}}})
    with pytest.raises(IndexMismatchError, match="field `extra` is unknown"):
        retriever.ready(30.0)


def test_a_finished_index_takes_no_more_passages(es_node, es_index, connect):
    build_index(es_node.url, es_index, PASSAGES[:5])
    name = connect(es_node.url, es_index).index_name
    client = ElasticsearchClient(ElasticsearchSettings(es_node.url))
    writer = ElasticsearchWriter(client, name, IndexSpec())
    with pytest.raises(RetrievalError, match=r"1 passages were refused, by id: `99`: .*blocked"):
        writer.write([(5, PASSAGES[99], None)])
    with pytest.raises(IndexMismatchError, match="it is finished"):
        writer.check_resumable()
    client.close()


def test_the_server_reports_partial_hits_as_success_and_we_do_not(es_node, es_index, connect):
    build_index(es_node.url, es_index, PASSAGES)
    name = connect(es_node.url, es_index).index_name
    # The smallest limit there is: whether it is hit depends on the moment, so several are tried.
    body = {"query": {"match": {"contents": "river flows marker"}}, "timeout": "1nanos", "size": 100}
    answers = (call(es_node.url, "POST", f"/{name}/_search", body) for _ in range(1000))
    partial = next((answer for answer in answers if answer["timed_out"]), None)
    assert partial is not None, "no search hit its limit: the test shows nothing"
    with pytest.raises(BackendTimeoutError, match="partial hits were discarded"):
        check_whole(partial)


@pytest.mark.parametrize(
    ("shards", "kind"),
    [
        ({"total": 3, "successful": 2, "skipped": 0, "failed": 1}, BackendUnavailableError),
        ({"total": 3, "successful": 2, "skipped": 0, "failed": 0}, BackendUnavailableError),
        ({"total": 0, "successful": 0, "skipped": 0, "failed": 0}, BackendUnavailableError),
        ({"total": 3, "successful": 3}, RetrievalError),
        (None, RetrievalError),
    ],
)
def test_an_answer_of_some_shards_only_is_not_an_answer(shards, kind):
    with pytest.raises(kind):
        check_whole({"timed_out": False, "_shards": shards})


def test_a_build_goes_on_where_it_stopped(es_node, es_index):
    client = ElasticsearchClient(ElasticsearchSettings(es_node.url))
    name, limits = f"{es_index}-1", WriteLimits(max_passages=10)
    writer = ElasticsearchWriter(client, name, IndexSpec(), limits=limits)
    assert not writer.exists()
    with pytest.raises(IndexMismatchError):
        writer.check_resumable()
    writer.create()
    positions = []

    def broken():
        yield from ((row, PASSAGES[row], None) for row in range(57))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(broken(), positions.append)
    assert positions == [10, 20, 30, 40]
    resumed = ElasticsearchWriter(client, name, IndexSpec(), limits=limits)
    assert resumed.exists()
    resumed.check_resumable()
    with pytest.raises(IndexMismatchError, match="`k1` is 0.9, not 1.2"):
        ElasticsearchWriter(client, name, IndexSpec(k1=1.2)).check_resumable()
    resumed.write(((row, PASSAGES[row], None) for row in range(positions[-1], len(PASSAGES))), positions.append)
    assert positions[-1] == len(PASSAGES)

    facts = index_facts(IndexSpec(), corpus_name="c", corpus_sha256="0" * 64, num_passages=199, server_version="7.0.0")
    with pytest.raises(RetrievalError, match="must hold 199 passages: got 200"):
        resumed.finish(facts)
    facts = index_facts(IndexSpec(), corpus_name="c", corpus_sha256="0" * 64, num_passages=200, server_version="7.0.0")
    with pytest.raises(IndexMismatchError, match="unfinished"):
        ElasticsearchRetriever.connect(es_node.url, name)
    resumed.finish(facts)
    resumed.finish(facts)
    assert resumed.publish(es_index) == []
    assert resumed.publish(es_index) == []
    opened = ElasticsearchRetriever.connect(es_node.url, es_index, manifest=facts)
    ask(opened, list(range(0, 200, 17)))
    opened.close()
    resumed.delete()
    resumed.delete()
    assert not resumed.exists()
    client.close()
