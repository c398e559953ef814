"""The build of an Elasticsearch index: a pass over the corpus that encodes and writes, resumable after every shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grounded_rl.errors import ConfigurationError, IndexMismatchError
from grounded_rl.retrieval.base import Passage
from grounded_rl.retrieval.building import BuildFolder, Meter, remaining_passages, resumable_index, shards
from grounded_rl.retrieval.corpus import CorpusDigest, CorpusSource, ProgressCallback
from grounded_rl.retrieval.corpus_rows import estimate_num_rows
from grounded_rl.retrieval.elasticsearch import (
    BACKEND,
    ElasticsearchClient,
    ElasticsearchSettings,
    ElasticsearchWriter,
    IndexSpec,
    WriteLimits,
    index_facts,
    new_index_name,
)
from grounded_rl.retrieval.elasticsearch.pointer import PROBE_FILE
from grounded_rl.retrieval.encoders import Encoder, encode_checked, keep_probe
from grounded_rl.retrieval.manifest import write_manifest


@dataclass(frozen=True, slots=True)
class ElasticsearchTarget:
    """
    Where an index is written, and what is decided when it is created.

    Args:
        settings ([`ElasticsearchSettings`]):
            How the server is reached.
        alias (`str`):
            Name under which the index is found.
        spec ([`IndexSpec`], *optional*):
            What is decided when the index is created. One with `dims` needs an encoder.
        limits ([`WriteLimits`], *optional*):
            How passages are cut into requests.
        shard_passages (`int`, *optional*, defaults to 8192):
            Passages between two records of progress: what a killed build writes again, at most.
    """

    settings: ElasticsearchSettings
    alias: str
    spec: IndexSpec = field(default_factory=IndexSpec)
    limits: WriteLimits = field(default_factory=WriteLimits)
    shard_passages: int = 8_192


def build_elasticsearch_index(
    corpus: CorpusSource,
    index_dir: str | Path,
    target: ElasticsearchTarget,
    *,
    encoder: Encoder | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_progress: ProgressCallback | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """
    Write a corpus to a new index of an Elasticsearch server, and publish it: the alias there, a folder here.

    A passage is written under its own id, so that one written twice is there once. Memory is that of one shard and its
    vectors, plus 8 bytes per passage. Only a complete, counted index gets the alias; earlier ones are kept.

    Args:
        corpus (`str` or `Path`):
            What `grounded_rl.retrieval.corpus.read_corpus` takes.
        index_dir (`str` or `Path`):
            Folder to create: a manifest that says where the index is.
        target ([`ElasticsearchTarget`]):
            Server, name and kind of the index. The API key comes from the environment.
        encoder (`Encoder`, *optional*):
            Gives the vectors; must normalise.
        resume (`bool`, *optional*, defaults to `False`):
            Continue an unfinished build if there is one.
        overwrite (`bool`, *optional*, defaults to `False`):
            Replace the folder of another index.
        on_progress (`Callable[[int, int], None]`, *optional*):
            Called now and then with the bytes of the corpus read so far and its size in bytes.
        on_stage (`Callable[[str], None]`, *optional*):
            Called with a line on what is being done, and how fast.

    Returns:
        `dict[str, Any]`: The manifest of the folder.

    Raises:
        `ConfigurationError`: If a row of the corpus is malformed, two rows share an id, a text has no vector, or an
            argument is out of range.
        `RetrievalError`: If the server refused passages, with their ids, or did not answer for too long.
    """
    spec, settings = target.spec, target.settings
    _check_encoder(spec, encoder)
    stage = on_stage or (lambda _: None)
    identity: dict[str, Any] = {
        "backend": BACKEND,
        "corpus_name": Path(corpus).name,
        "alias": target.alias,
        "url": settings.url,
        "parameters": spec.parameters(),
    }
    expected = estimate_num_rows(corpus)
    with resumable_index(index_dir, identity, resume=resume, overwrite=overwrite) as build:
        client = ElasticsearchClient(settings)
        try:
            writer = _open_writer(build, client, target)
            if encoder is not None:
                keep_probe(build.path / PROBE_FILE, encoder)
            if not build.progress["is_written"]:
                meter = Meter(expected, build.progress["num_passages"])
                _write(build, corpus, writer, encoder, target.shard_passages, meter, on_progress, stage)
            stage("merging the segments")
            facts = index_facts(
                spec,
                corpus_name=identity["corpus_name"],
                corpus_sha256=build.progress["corpus_sha256"],
                num_passages=build.progress["num_passages"],
                server_version=writer.server_version(),
            )
            writer.finish(facts)
            manifest = write_manifest(
                build.path, {**facts, "server": {"url": settings.url, "index": writer.index, "alias": target.alias}}
            )
            writer.publish(target.alias)
            return manifest
        finally:
            client.close()


def _check_encoder(spec: IndexSpec, encoder: Encoder | None) -> None:
    """Raise unless the specification agrees with the encoder."""
    if spec.has_vectors != (encoder is not None):
        raise ConfigurationError(
            f"`encoder` must be given with `dims`, and only then: got {encoder} and {spec.dims}. Give both or none."
        )
    if encoder is not None and not encoder.settings.normalize:
        raise ConfigurationError(
            f"`encoder` must normalise its vectors for Elasticsearch: got `normalize` False from "
            f"`{encoder.settings.model}`. Load it with `normalize=True`."
        )


def _open_writer(build: BuildFolder, client: ElasticsearchClient, target: ElasticsearchTarget) -> ElasticsearchWriter:
    """The writer of a new index, or of the one an earlier try began."""
    progress = build.progress
    if not progress:
        # Recorded before it is created: an index nobody knows of would stay on the server for ever.
        build.save(index=new_index_name(target.alias), num_passages=0, corpus_sha256="", is_written=False)
    writer = ElasticsearchWriter(client, progress["index"], target.spec, limits=target.limits)
    if writer.exists():
        if not progress["is_written"]:
            writer.check_resumable()
    elif progress["num_passages"]:
        raise IndexMismatchError(
            f"The server must have the unfinished index `{writer.index}` of this build: got none. "
            f"Remove `{build.path}` and build again."
        )
    else:
        writer.create()
    return writer


def _write(
    build: BuildFolder,
    corpus: CorpusSource,
    writer: ElasticsearchWriter,
    encoder: Encoder | None,
    shard_passages: int,
    meter: Meter,
    on_progress: ProgressCallback | None,
    stage: Callable[[str], None],
) -> None:
    """Write what is left of the corpus, and check it as a whole."""
    progress: Mapping[str, Any] = build.progress
    digest = CorpusDigest(corpus)
    passages = remaining_passages(
        corpus,
        digest,
        num_done=progress["num_passages"],
        sha256=progress["corpus_sha256"],
        on_progress=on_progress,
    )
    for shard in shards(passages, shard_passages):
        first = digest.num_passages
        for passage in shard:
            digest.add(passage)
        writer.write(_items(shard, first, encoder))
        build.save(num_passages=digest.num_passages, corpus_sha256=digest.sha256)
        stage(f"writing: {meter.describe(digest.num_passages)}")
    digest.finish()
    build.save(is_written=True)


def _items(shard: list[Passage], first: int, encoder: Encoder | None) -> list[tuple[int, Passage, Any]]:
    """Position, passage and vector."""
    vectors: Any = [None] * len(shard) if encoder is None else encode_checked(encoder, shard)
    return [(first + row, passage, vector) for row, (passage, vector) in enumerate(zip(shard, vectors, strict=True))]
