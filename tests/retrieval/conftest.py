"""Fixtures of the tests of search: a real Elasticsearch node and the names of indices on it."""

from __future__ import annotations

import contextlib
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.retrieval.es_node import ElasticsearchNode
from tests.retrieval.es_node_parts import PartsMissingError, prepare_schema


def need_client() -> None:
    """Skip the test where the official client is not installed."""
    pytest.importorskip("elasticsearch", reason="the extra `elasticsearch` is not installed")


@pytest.fixture(scope="session")
def es_node() -> Iterator[ElasticsearchNode]:
    """A running node shared by all tests of the session: do not kill it, start one of your own for that."""
    need_client()
    try:
        # Time limits of searches are kept by a clock that stands still for 200 ms unless told otherwise.
        node = ElasticsearchNode({"thread_pool.estimated_time_interval": "1ms"})
    except PartsMissingError as error:
        pytest.skip(str(error))
    with node:
        yield node


@pytest.fixture
def make_es_node() -> Iterator[Callable[..., ElasticsearchNode]]:
    """Starts nodes of a test's own, with settings of its own; all are stopped at its end."""
    need_client()
    with contextlib.ExitStack() as stack:

        def make(settings: dict[str, object] | None = None, **options: object) -> ElasticsearchNode:
            try:
                node = ElasticsearchNode(settings, **options)
            except PartsMissingError as error:
                pytest.skip(str(error))
            return stack.enter_context(node)

        yield make


@pytest.fixture
def es_index(es_node: ElasticsearchNode) -> Iterator[str]:
    """Name of an index nobody else uses; it and `<name>-*` are removed after the test."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    yield name
    request = urllib.request.Request(f"{es_node.url}/{name}*", method="DELETE")
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


@pytest.fixture(scope="session")
def es_schema_path() -> Path:
    """Elastic's description of the API of Elasticsearch 9.5."""
    try:
        return prepare_schema()
    except PartsMissingError as error:
        pytest.skip(str(error))
