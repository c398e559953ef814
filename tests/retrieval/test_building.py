from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grounded_rl.cli import main
from grounded_rl.errors import ConfigurationError, IndexMismatchError
from grounded_rl.retrieval import Passage, build_retriever
from grounded_rl.retrieval.bm25 import build_bm25_index
from grounded_rl.retrieval.building import Meter, resumable_index
from grounded_rl.retrieval.corpus import CorpusDigest
from grounded_rl.retrieval.manifest import check_files, load_manifest, write_manifest
from tests.retrieval import contract
from tests.retrieval.fake_encoder import WordEncoder
from tests.retrieval.kill_build import NUM_DIMS, SHARD

NUM_PASSAGES = 600
KILLED_AT = (0, NUM_PASSAGES // 3, NUM_PASSAGES)
"""Passages a build has recorded when it is killed; the last time, it is at what comes after the corpus."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    passages = [
        Passage(f"p{row}", f"title {row}", f"word{row} word{row % 13} word{row % 29} shared")
        for row in range(NUM_PASSAGES)
    ]
    return contract.write_corpus(tmp_path_factory.mktemp("killed") / "corpus.jsonl", passages)


def command(*arguments: object) -> int:
    """Exit status of `grounded-rl`."""
    return main([str(argument) for argument in arguments])


def recorded_passages(out: Path) -> int:
    """Passages that the unfinished build has recorded."""
    try:
        state = out.with_name(f".{out.name}.unfinished") / "build.json"
        return json.loads(state.read_text())["progress"].get("num_passages", 0)
    except FileNotFoundError:
        return 0


def run_and_kill(arguments: list[str], out: Path, target: int, delay: float) -> None:
    """Start a build, and kill it a moment after it has recorded some passages, if it is still running."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.retrieval.kill_build", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    while process.poll() is None and recorded_passages(out) < target:
        time.sleep(0.001)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors


def killed_build(corpus: Path, out: Path, backend: str, *server: str, targets: tuple[int, ...] = KILLED_AT) -> None:
    """Build, killed at random moments all over the corpus, and left alone at last."""
    rng = random.Random(0)
    arguments = [backend, str(corpus), str(out), *server]
    before = 0
    for target in targets:
        run_and_kill(arguments, out, target, rng.uniform(0.0, 0.02))
        if out.exists():
            break
        now = recorded_passages(out)
        assert now >= max(before, target)
        before = now
    assert before > 0
    if not out.exists():  # the last kill may have come after the publication
        run_and_kill(arguments, out, 2 * NUM_PASSAGES, 0)
    assert out.exists()


@pytest.mark.parametrize("kind", ["Flat", "IVF,SQ8"])
def test_a_dense_build_killed_at_random_equals_one_that_was_not(corpus, tmp_path, kind):
    pytest.importorskip("faiss", reason="the extra `dense` is not installed")
    from grounded_rl.retrieval.dense import DenseOptions, build_dense_index

    killed_build(corpus, tmp_path / "killed", kind)
    options = DenseOptions(kind=kind, shard_passages=SHARD)
    whole = build_dense_index(corpus, tmp_path / "whole", WordEncoder(NUM_DIMS), options=options)
    killed = load_manifest(tmp_path / "killed")
    check_files(tmp_path / "killed", killed)
    assert killed["files"] == whole["files"]
    assert killed == whole
    assert {path.name for path in tmp_path.iterdir()} == {"killed", "whole"}


def test_a_bm25_build_killed_at_random_answers_as_one_that_was_not(corpus, tmp_path):
    killed_build(corpus, tmp_path / "killed", "bm25")
    whole = build_bm25_index(corpus, tmp_path / "whole")
    killed = build_retriever(tmp_path / "killed")
    assert killed.manifest["index_id"] == whole["index_id"]
    assert killed.sample(NUM_PASSAGES) == build_retriever(tmp_path / "whole").sample(NUM_PASSAGES)
    queries = [f"word{row} shared" for row in range(40)]
    assert killed.search(queries, 20) == build_retriever(tmp_path / "whole").search(queries, 20)


@pytest.mark.elasticsearch
def test_an_elasticsearch_build_killed_at_random_has_every_passage_once(corpus, tmp_path, es_node, es_index):
    killed_build(corpus, tmp_path / "killed", "elasticsearch", es_node.url, es_index, targets=(0, NUM_PASSAGES // 2))
    retriever = build_retriever(tmp_path / "killed")
    try:
        whole = build_bm25_index(corpus, tmp_path / "whole")
        assert retriever.manifest["corpus_sha256"] == whole["corpus_sha256"]
        assert retriever.sample(NUM_PASSAGES) == build_retriever(tmp_path / "whole").sample(NUM_PASSAGES)
        (hits,) = retriever.search(["shared"], NUM_PASSAGES)
        assert sorted(int(hit.passage.id[1:]) for hit in hits) == list(range(NUM_PASSAGES))
    finally:
        retriever.close()


@pytest.mark.elasticsearch
def test_an_index_on_a_server_is_built_described_verified_and_searched(tmp_path, capsys, es_node, es_index):
    passages = [passage for passage in contract.PASSAGES if passage.title != "Lighthouse"]
    corpus, folder = contract.write_corpus(tmp_path / "corpus.jsonl", passages), tmp_path / "server"
    build = ["index", "build", "--corpus", corpus, "--out", folder, "--backend", "elasticsearch", "--url", es_node.url]
    assert command(*build, "--alias", es_index, "--bulk-threads", 2) == 0
    assert capsys.readouterr().out.startswith("Indexed 14 passages in ")
    assert command("index", "info", folder) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["server"]["url"] == es_node.url
    assert shown["server"]["index"].startswith(f"{es_index}-")
    assert command("index", "verify", folder, "--corpus", corpus) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "files",
        "passages",
        "known",
        "corpus",
    ]
    assert command("search", "--index", folder, "capital of Peru", "--k", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["hits"][0]["title"] == "Peru"


# --- interruptions at every record -----------------------------------------------------------------------------------


class InterruptedBuildError(Exception):
    """Stands for a crash inside the process."""


@pytest.mark.parametrize("after", [1, 2, 5])
def test_nothing_is_encoded_twice_but_the_shard_that_was_interrupted(corpus, tmp_path, after):
    pytest.importorskip("faiss", reason="the extra `dense` is not installed")
    from grounded_rl.retrieval.dense import DenseOptions, build_dense_index

    class Interrupting(WordEncoder):
        def encode_passages(self, texts):
            if self.num_encoded >= after * SHARD:
                raise InterruptedBuildError
            return super().encode_passages(texts)

    options = DenseOptions(shard_passages=SHARD)
    with pytest.raises(InterruptedBuildError):
        build_dense_index(corpus, tmp_path / "index", Interrupting(NUM_DIMS), options=options)
    encoder = WordEncoder(NUM_DIMS)
    with pytest.raises(ConfigurationError, match="must not have an unfinished build: .* with `--resume`"):
        build_dense_index(corpus, tmp_path / "index", encoder, options=options)
    build_dense_index(corpus, tmp_path / "index", encoder, options=options, resume=True)
    num_probes = 3
    assert encoder.num_encoded == NUM_PASSAGES - after * SHARD + num_probes


def test_a_build_is_resumed_only_with_the_same_choices_and_the_same_passages(corpus, tmp_path):
    pytest.importorskip("faiss", reason="the extra `dense` is not installed")
    from grounded_rl.retrieval.dense import DenseOptions, build_dense_index

    class Interrupting(WordEncoder):
        def encode_passages(self, texts):
            if self.num_encoded >= 2 * SHARD:
                raise InterruptedBuildError
            return super().encode_passages(texts)

    changing = tmp_path / "corpus.jsonl"
    changing.write_bytes(corpus.read_bytes())
    options = DenseOptions(shard_passages=SHARD)
    with pytest.raises(InterruptedBuildError):
        build_dense_index(changing, tmp_path / "index", Interrupting(NUM_DIMS), options=options)
    other = DenseOptions(kind="HNSW", shard_passages=SHARD)
    with pytest.raises(ConfigurationError, match="must continue with the same `kind`: got 'HNSW', begun with None"):
        build_dense_index(changing, tmp_path / "index", WordEncoder(NUM_DIMS), options=other, resume=True)
    with pytest.raises(ConfigurationError, match="must continue with the same `num_dims`: got 8, begun with 16"):
        build_dense_index(changing, tmp_path / "index", WordEncoder(8), options=options, resume=True)
    with pytest.raises(IndexMismatchError, match="must give the vectors it gave when the index was built"):
        build_dense_index(changing, tmp_path / "index", WordEncoder(NUM_DIMS, seed=1), options=options, resume=True)
    changing.write_bytes(corpus.read_bytes().replace(b"title 3", b"title 4", 1))
    with pytest.raises(ConfigurationError, match="must begin with the 74 passages of the unfinished build: got other"):
        build_dense_index(changing, tmp_path / "index", WordEncoder(NUM_DIMS), options=options, resume=True)
    changing.write_bytes(b"".join(corpus.read_bytes().splitlines(keepends=True)[:SHARD]))
    with pytest.raises(ConfigurationError, match="must begin with the 74 passages of the unfinished build: got other"):
        build_dense_index(changing, tmp_path / "index", WordEncoder(NUM_DIMS), options=options, resume=True)
    changing.write_bytes(corpus.read_bytes())
    build_dense_index(changing, tmp_path / "index", WordEncoder(NUM_DIMS), options=options, resume=True)
    assert load_manifest(tmp_path / "index")["num_passages"] == NUM_PASSAGES


def test_resume_without_an_unfinished_build_begins_one(corpus, tmp_path):
    assert build_bm25_index(corpus, tmp_path / "index", resume=True)["num_passages"] == NUM_PASSAGES


def test_a_commit_that_was_made_but_not_recorded_is_taken_over(corpus, tmp_path, monkeypatch):
    from grounded_rl.retrieval.building import BuildFolder

    save = BuildFolder.save

    def failing(self, **progress):
        if progress.get("num_passages") == 300:
            raise InterruptedBuildError
        save(self, **progress)

    monkeypatch.setattr(BuildFolder, "save", failing)
    with pytest.raises(InterruptedBuildError):
        build_bm25_index(corpus, tmp_path / "index", commit_passages=100)
    monkeypatch.setattr(BuildFolder, "save", save)
    build_bm25_index(corpus, tmp_path / "index", commit_passages=100, resume=True)
    retriever = build_retriever(tmp_path / "index")
    digest = CorpusDigest(corpus)
    for passage in retriever.sample(NUM_PASSAGES):
        digest.add(passage)
    assert (digest.num_passages, digest.sha256) == (NUM_PASSAGES, retriever.manifest["corpus_sha256"])


# --- the folder ------------------------------------------------------------------------------------------------------


def publish(target: Path, *, fail: bool = False, save: bool = False, **options) -> None:
    with resumable_index(target, {"backend": "x"}, **options) as build:
        (build.path / "part").write_text("half")
        if save:
            build.save(num_passages=1)
        if fail:
            raise InterruptedBuildError
        write_manifest(build.path, FACTS)


FACTS = {
    "backend": "x",
    "corpus_name": "c",
    "corpus_sha256": "0",
    "num_passages": 1,
    "library": "l",
    "library_version": "1",
    "parameters": {},
}


def test_a_failure_leaves_something_only_if_progress_was_recorded(tmp_path):
    with pytest.raises(InterruptedBuildError):
        publish(tmp_path / "index", fail=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InterruptedBuildError):
        publish(tmp_path / "index", fail=True, save=True)
    assert [path.name for path in tmp_path.iterdir()] == [".index.unfinished"]
    publish(tmp_path / "index", resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert {path.name for path in (tmp_path / "index").iterdir()} == {"manifest.json", "part"}
    assert set(load_manifest(tmp_path / "index")["files"]) == {"part"}


def test_two_processes_do_not_build_the_same_index(tmp_path):
    with resumable_index(tmp_path / "index", {}) as build:
        with pytest.raises(ConfigurationError, match="got another process that is building it"):
            publish(tmp_path / "index")
        write_manifest(build.path, FACTS)
    assert load_manifest(tmp_path / "index")


def test_the_meter_tells_rate_and_remaining_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter, endless = Meter(total=10_000, num_done=1_000), Meter()
    now = 110.0
    assert meter.describe(2_000) == "2,000 passages, 100/s, 20 %, 1 min 20 s left"
    assert endless.describe(50) == "50 passages, 5/s"
    assert Meter(total=10).describe(0) == "0 passages, 0/s"
