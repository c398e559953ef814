"""Addresses, keys, certificates, and what every refusal of a server means. No server is needed."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("elasticsearch", reason="the extra `elasticsearch` is not installed")

from elastic_transport import (
    ApiResponseMeta,
    BaseNode,
    ConnectionError,
    ConnectionTimeout,
    HttpHeaders,
    TlsError,
    TransportError,
)
from elastic_transport._node import NodeApiResponse

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    BadResponseError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.retrieval.elasticsearch import ElasticsearchClient, ElasticsearchSettings, IndexSpec, SearchPlan
from grounded_rl.retrieval.elasticsearch.failures import ForeignServerError, status_error
from grounded_rl.retrieval.elasticsearch.identity import check_name
from grounded_rl.retrieval.elasticsearch.mapping import (
    index_body,
    mapping_differences,
    similarity_differences,
)
from grounded_rl.retrieval.elasticsearch.writer import new_index_name

KEY = "c2VjcmV0LWtleQ=="


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("ES_API_KEY", raising=False)


def sent_headers(client) -> dict:
    return dict(client._client._headers)


@pytest.mark.parametrize("url", ["https://search.example.org:9200", "http://localhost:9200", "http://127.0.0.9:9200"])
def test_a_key_from_the_environment_is_sent_where_nobody_else_can_read_it(url, monkeypatch):
    monkeypatch.setenv("ES_API_KEY", KEY)
    client = ElasticsearchClient(ElasticsearchSettings(url))
    assert sent_headers(client)["authorization"] == f"ApiKey {KEY}"
    assert KEY not in repr(client.settings)


@pytest.mark.parametrize(
    "url", ["http://search.example.org:9200", "http://10.0.0.1:9200", "http://localhost.example.org"]
)
def test_a_key_is_never_sent_in_the_clear(url, monkeypatch):
    monkeypatch.setenv("ES_API_KEY", KEY)
    with pytest.raises(ConfigurationError, match="`url` must be `https` when `ES_API_KEY` is set") as caught:
        ElasticsearchClient(ElasticsearchSettings(url))
    assert KEY not in str(caught.value)


def test_without_a_key_none_is_sent():
    assert "authorization" not in sent_headers(ElasticsearchClient(ElasticsearchSettings("http://10.0.0.1:9200")))


def test_certificates_are_checked_unless_somebody_says_not_to(caplog):
    config = next(iter(_nodes("https://search.example.org:9200"))).config
    assert config.verify_certs is True
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        config = next(iter(_nodes("https://search.example.org:9200", verify_certs=False))).config
    assert config.verify_certs is False
    assert "is not checked (`verify_certs=False`)" in caplog.text
    fingerprint = ":".join(["AB"] * 32)
    config = next(iter(_nodes("https://search.example.org:9200", ca_fingerprint=fingerprint))).config
    assert config.ssl_assert_fingerprint == "AB" * 32


def _nodes(url, **options):
    return ElasticsearchClient(ElasticsearchSettings(url, **options))._client.transport.node_pool.all()


class BrokenNode(BaseNode):
    """Fails every request in one way, and counts them."""

    outcome: int | type[TransportError] = 503
    num_requests = 0

    def perform_request(self, method, target, body=None, headers=None, request_timeout=None):
        type(self).num_requests += 1
        if not isinstance(self.outcome, int):
            raise self.outcome("broken")
        meta = ApiResponseMeta(self.outcome, "1.1", HttpHeaders(), 0.0, self.config)
        return NodeApiResponse(meta, b"{}")

    def close(self):
        """Nothing is open."""


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (429, BackendOverloadedError),
        (503, BackendOverloadedError),
        (502, BackendUnavailableError),
        (ConnectionError, BackendUnavailableError),
        (ConnectionTimeout, BackendTimeoutError),
        (TlsError, RetrievalError),
    ],
)
def test_the_client_never_tries_again_by_itself(outcome, kind):
    node = type("Node", (BrokenNode,), {"outcome": outcome})
    client = ElasticsearchClient(ElasticsearchSettings("http://localhost:9200"), node_class=node)
    for count in (1, 2):
        with pytest.raises(kind) as caught:
            client.request("GET", "/wiki")
        assert type(caught.value) is kind
        assert node.num_requests == count


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("https://search.example.org", "https://search.example.org:443"),
        ("http://localhost/", "http://localhost:80"),
        ("http://[::1]:9200", "http://[::1]:9200"),
        ("https://proxy.example.org:8443/search/", "https://proxy.example.org:8443/search"),
    ],
)
def test_an_address_may_leave_out_its_port_and_have_a_path(url, base):
    (node,) = _nodes(url)
    assert node.base_url == base


def test_there_is_a_connection_for_every_request_on_its_way():
    (node,) = _nodes("http://localhost:9200", max_in_flight=48)
    assert node.config.connections_per_node >= 48


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "search.example.org:9200"}, "`url` must be the address of a server"),
        ({"url": "ftp://search.example.org"}, "`url` must be the address of a server"),
        ({"url": "https://"}, "`url` must be the address of a server"),
        ({"url": "https://host:port"}, "`url` must be the address of a server"),
        ({"url": "https://host:70000"}, "`url` must be the address of a server"),
        ({"url": "https://me:secret@host:9200"}, "`url` must not hold a password: got 'https://…@host:9200'"),
        ({"timeout": 0}, "`timeout` must be above 0 seconds: got 0"),
        ({"patience": -1.0}, "`patience` must be above 0 seconds"),
        ({"max_in_flight": 0}, r"`max_in_flight` must lie in \[1, 1024\]: got 0"),
        ({"max_batch_size": 2.0}, r"`max_batch_size` must lie in \[1, 1024\]: got 2.0"),
        ({"ca_fingerprint": "AB:CD"}, "`ca_fingerprint` must be a SHA-256"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message) as caught:
        ElasticsearchSettings(**{"url": "http://localhost:9200", **options})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "bm25"}, "`mode` must be one of `lexical`, `dense`, `hybrid`: got 'bm25'"),
        ({"fusion": "max"}, "`fusion` must be one of `rrf`, `weighted`: got 'max'"),
        ({"weights": (1.0,)}, "`weights` must be two numbers above 0"),
        ({"weights": (1.0, 0.0)}, "`weights` must be two numbers above 0"),
        ({"window": 0}, "`window` must lie in"),
        ({"num_candidates": 20_000}, "`num_candidates` must lie in"),
        ({"num_candidates": 0}, "`num_candidates` must lie in"),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        SearchPlan(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k1": -0.1}, r"`k1` must lie in \[0.0, 10.0\]"),
        ({"b": 1.5}, r"`b` must lie in \[0.0, 1.0\]"),
        ({"num_shards": 0}, "`num_shards` must lie in"),
        ({"dims": 4097, "encoder": {}}, "`dims` must lie in"),
        ({"dims": 8}, "`dims` and `encoder` must be given together"),
        ({"encoder": {}}, "`dims` and `encoder` must be given together"),
        ({"vector_index": "int8hnsw"}, "`vector_index` must be one of `hnsw`, `int8_hnsw`, `int4_hnsw`, `bbq_hnsw`"),
        ({"m": 16.0}, "`m` must lie in"),
    ],
)
def test_specifications_that_no_server_takes_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        IndexSpec(**options)


SPECS = [
    IndexSpec(),
    IndexSpec(k1=1.2, b=0.75, analyzer="standard", num_shards=3),
    IndexSpec(
        dims=768, vector_index="bbq_hnsw", m=32, ef_construction=100, encoder={"model": "e5", "normalize": True}
    ),
]


@pytest.mark.parametrize("spec", SPECS)
def test_a_specification_is_recovered_from_its_parameters(spec):
    assert IndexSpec.from_parameters(spec.parameters()) == spec
    for damaged in ({**spec.parameters(), "new": 1}, {"k1": 0.9}, {**spec.parameters(), "searched": "title"}, {}):
        with pytest.raises(ConfigurationError, match="`parameters` must be those of an Elasticsearch index"):
            IndexSpec.from_parameters(damaged)


@pytest.mark.parametrize("spec", SPECS)
def test_an_index_of_another_specification_is_told_apart(spec):
    body = index_body(spec)
    assert mapping_differences(body["mappings"], spec) == []
    assert similarity_differences(body["settings"]["index"], spec) == []
    for other in SPECS:
        differences = mapping_differences(body["mappings"], other)
        differences += similarity_differences(body["settings"]["index"], other)
        assert bool(differences) == (other != spec)


def test_defaults_that_the_server_adds_or_leaves_out_are_no_differences():
    spec = SPECS[2]
    mappings = index_body(spec)["mappings"]
    fields = mappings["properties"]
    fields["vector"]["index_options"]["rescore_vector"] = {"oversample": 3.0}
    del fields["vector"]["index"], fields["vector"]["element_type"]
    fields["title"]["copy_to"] = "contents"
    fields["contents"]["search_analyzer"] = "english"
    assert mapping_differences(mappings, spec) == []
    fields["vector"]["index_options"]["type"] = "hnsw"
    fields["text"]["index"] = True
    assert mapping_differences(mappings, spec) == [
        "field `text` has index True, not False",
        "field `vector` has index_options.type 'hnsw', not 'bbq_hnsw'",
    ]


def rejected(kind="es_rejected_execution_exception", reason="queue is full", **more):
    return {"error": {"type": kind, "reason": reason, **more}}


def all_shards(cause):
    """What a search reports when each shard failed for one reason."""
    shard = {"shard": 0, "index": "wiki", "reason": cause}
    return {
        "error": {
            "type": "search_phase_execution_exception",
            "reason": "all shards failed",
            "root_cause": [],
            "failed_shards": [shard],
        }
    }


BREAKER = {"type": "circuit_breaking_exception", "reason": "[parent] Data too large", "durability": "PERMANENT"}


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, rejected(), BackendOverloadedError),
        (503, rejected("search_phase_execution_exception", "all shards failed"), BackendOverloadedError),
        (503, "<html>Service Unavailable</html>", BackendOverloadedError),
        (429, rejected("circuit_breaking_exception", "too large", durability="TRANSIENT"), BackendOverloadedError),
        (502, "<html>Bad Gateway</html>", BackendUnavailableError),
        (500, rejected("node_closed_exception", "node closed"), BackendUnavailableError),
        (504, "", BackendTimeoutError),
        (408, "", BackendTimeoutError),
        (500, all_shards({"type": "query_phase_execution_exception", "reason": "Time exceeded"}), BackendTimeoutError),
        (404, rejected("index_not_found_exception", "no such index [wiki]"), IndexMismatchError),
        (400, all_shards({"type": "query_shard_exception", "reason": "No mapping found for [x]"}), IndexMismatchError),
        (400, rejected("parsing_exception", "unknown query [mtach]"), BadResponseError),
        (401, rejected("security_exception", "missing credentials"), RetrievalError),
        (403, rejected("security_exception", "unauthorized"), RetrievalError),
        (429, {"error": BREAKER}, RetrievalError),
        (429, all_shards(BREAKER), RetrievalError),
        (404, "<html>Not Found</html>", BadResponseError),
        (406, rejected("media_type_header_exception", "Invalid media-type value"), ForeignServerError),
    ],
)
def test_every_status_has_one_meaning(status, body, kind):
    error = status_error(status, body, {}, "http://host:9200")
    assert type(error) is kind
    assert "http://host:9200" in str(error)
    assert error.is_retryable == (kind in (BackendOverloadedError, BackendUnavailableError, BackendTimeoutError))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("2", 2.0), ("0.5", 0.5), ("Wed, 21 Oct 2026 07:28:00 GMT", None), ("-3", None), ("1e9", 600.0)],
)
def test_a_wait_is_read_from_the_header(value, seconds):
    error = status_error(503, "", {"retry-after": value}, "http://host:9200")
    assert error.retry_after == seconds
    assert status_error(503, "", {}, "http://host:9200").retry_after is None


@pytest.mark.parametrize(
    "name", ["", "Wiki", "wiki*", "a,b", "_all", "-x", "..", "a/b", "a b", "é" * 200, "a\\b", "a:b"]
)
def test_names_that_mean_something_else_to_the_server_are_refused(name):
    with pytest.raises(ConfigurationError, match="`index` must be a name"):
        check_name(name)


def test_new_names_differ_and_are_accepted():
    names = {new_index_name("wiki-18") for _ in range(50)}
    assert len(names) == 50
    assert all(name.startswith("wiki-18-") for name in names)
