"""A build that tells when it has begun, for tests that kill it: `kill_build.py BACKEND CORPUS OUT [URL ALIAS]`."""

from __future__ import annotations

import sys
import time

from grounded_rl.retrieval.base import Passage
from tests.retrieval.fake_encoder import SETTINGS, WordEncoder

NUM_DIMS = 16
SHARD = 37
PAUSE_S = 0.002


class SlowEncoder(WordEncoder):
    """Takes its time, so that a process can be killed at any moment of a build."""

    def encode_passages(self, texts):
        time.sleep(PAUSE_S)
        return super().encode_passages(texts)


def slow_passages(read):
    """`read_corpus`, with pauses."""

    def slowed(*args, **kwargs):
        passage: Passage
        for row, passage in enumerate(read(*args, **kwargs)):
            if row % SHARD == 0:
                time.sleep(PAUSE_S)
            yield passage

    return slowed


def begin() -> None:
    """Tell the test that imports are done."""
    sys.stdout.write("begun\n")
    sys.stdout.flush()


def main() -> None:
    backend, corpus, out, *server = sys.argv[1:]
    if backend == "bm25":
        from grounded_rl.retrieval import building
        from grounded_rl.retrieval.bm25 import build_bm25_index

        building.read_corpus = slow_passages(building.read_corpus)
        begin()
        build_bm25_index(corpus, out, resume=True, writer_heap_mb=16, commit_passages=SHARD)
    elif backend == "elasticsearch":
        from grounded_rl.retrieval.elasticsearch import ElasticsearchSettings, IndexSpec, WriteLimits
        from grounded_rl.retrieval.elasticsearch_build import ElasticsearchTarget, build_elasticsearch_index

        target = ElasticsearchTarget(
            ElasticsearchSettings(server[0]),
            server[1],
            IndexSpec(),
            WriteLimits(max_passages=10),
            shard_passages=SHARD,
        )
        begin()
        build_elasticsearch_index(corpus, out, target, resume=True)
    else:
        from grounded_rl.retrieval.dense import DenseOptions, build_dense_index

        options = DenseOptions(kind=backend, shard_passages=SHARD)
        begin()
        build_dense_index(corpus, out, SlowEncoder(NUM_DIMS, settings=SETTINGS), options=options, resume=True)


if __name__ == "__main__":
    main()
