"""Builds small indices on a node, the way the index builder does."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from typing import Any

from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.elasticsearch import (
    ElasticsearchClient,
    ElasticsearchSettings,
    ElasticsearchWriter,
    IndexSpec,
    index_facts,
    new_index_name,
)


def build_index(
    url: str, alias: str, passages: Sequence[Passage], *, spec: IndexSpec | None = None, sha256: str = "0" * 64
) -> dict[str, Any]:
    """Index of passages without vectors, published under an alias; its facts."""
    spec = spec or IndexSpec()
    client = ElasticsearchClient(ElasticsearchSettings(url))
    try:
        writer = ElasticsearchWriter(client, new_index_name(alias), spec)
        writer.create()
        writer.write((ordinal, passage, None) for ordinal, passage in enumerate(passages))
        facts = index_facts(
            spec,
            corpus_name="test",
            corpus_sha256=sha256,
            num_passages=len(passages),
            server_version=writer.server_version(),
        )
        writer.finish(facts)
        writer.publish(alias)
    finally:
        client.close()
    return facts


def call(url: str, method: str, path: str, body: Any = None, *, timeout: float = 60.0) -> Any:
    """A plain request to a node, past the code under test."""
    request = urllib.request.Request(
        url + path,
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)
