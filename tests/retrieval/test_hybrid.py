from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from grounded_rl.errors import BackendUnavailableError, ConfigurationError, IndexMismatchError
from grounded_rl.retrieval import Hit, Passage, build_retriever
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.dense import DenseOptions, DenseRetriever, build_dense_index
from grounded_rl.retrieval.fusion import reciprocal_rank_fusion, weighted_score_fusion
from grounded_rl.retrieval.hybrid import HybridRetriever, combine_indexes
from tests.retrieval import contract
from tests.retrieval.fake_encoder import WordEncoder

pytest.importorskip("faiss", reason="the extra `dense` is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    corpus = contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES)
    build_bm25_index(corpus, folder / "bm25")
    build_dense_index(corpus, folder / "dense", WordEncoder())
    return folder


@pytest.fixture(scope="module")
def members(folder) -> list:
    return [BM25Retriever.open(folder / "bm25"), DenseRetriever.open(folder / "dense", encoder=WordEncoder())]


@pytest.fixture(scope="module", params=["rrf", "weighted"])
def retriever(request, members) -> HybridRetriever:
    return HybridRetriever(members, fuse=request.param)


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check, retriever):
    check(retriever)


@pytest.mark.parametrize(("fuse", "function"), [("rrf", reciprocal_rank_fusion), ("weighted", weighted_score_fusion)])
def test_results_are_the_fusion_of_both_rankings(members, fuse, function):
    queries = ["capital of Peru", "lighthouse on a rock"]
    hybrid = HybridRetriever(members, fuse=fuse, weights=[1.0, 2.5], window=7)
    rankings = [member.search(queries, 7) for member in members]
    for found, *both in zip(hybrid.search(queries, 4), *rankings, strict=True):
        assert found == function(both, 4, weights=[1.0, 2.5])


def test_a_window_smaller_than_k_does_not_cut_the_result(members):
    (hits,) = HybridRetriever(members, window=1).search(["country capital"], 8)
    assert len(hits) == 8


class Stub:
    """A retriever whose answers and facts are given."""

    def __init__(self, manifest, error=None):
        self.manifest = manifest
        self.error = error
        self.is_closed = False

    def search(self, queries, k):
        if self.error is not None:
            raise self.error
        return [[Hit(Passage("1", "a", "b"), 1.0)] for _ in queries]

    def ready(self, timeout=5.0):
        if self.error is not None:
            raise self.error

    def close(self):
        self.is_closed = True


def manifest_of(**changes) -> dict:
    facts = {"backend": "stub", "corpus_name": "c", "corpus_sha256": "0", "num_passages": 1, "index_id": "x"}
    return {**facts, **changes}


def test_a_failed_member_fails_the_search_and_not_half_of_it():
    broken = Stub(manifest_of(), BackendUnavailableError("gone"))
    hybrid = HybridRetriever([Stub(manifest_of()), broken])
    with pytest.raises(BackendUnavailableError, match="gone"):
        hybrid.search(["a"], 1)
    with pytest.raises(BackendUnavailableError, match="gone"):
        hybrid.ready()
    broken.error = None
    hybrid.ready()
    assert hybrid.search(["a"], 1)[0][0].passage.id == "1"


def test_closing_closes_every_member():
    members = [Stub(manifest_of()), Stub(manifest_of())]
    HybridRetriever(members).close()
    assert [member.is_closed for member in members] == [True, True]


@pytest.mark.parametrize("changes", [{"corpus_sha256": "1"}, {"num_passages": 2}])
def test_members_of_different_corpora_are_refused(changes):
    with pytest.raises(IndexMismatchError, match="must hold the same passages"):
        HybridRetriever([Stub(manifest_of()), Stub(manifest_of(**changes))])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fuse": "sum"}, "`fuse` must be one of `rrf`, `weighted`: got 'sum'"),
        ({"window": 0}, "`window` must be an integer of at least 1: got 0"),
        ({"weights": [1.0]}, "`weights` must have one number for each of 2 members: got 1"),
        ({"weights": [1.0, -1.0]}, "`weights` must"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        HybridRetriever([Stub(manifest_of()), Stub(manifest_of())], **arguments)
    assert str(caught.value).startswith(message)
    with pytest.raises(ConfigurationError, match="must have at least 2 members: got 1"):
        HybridRetriever([Stub(manifest_of())])


def test_a_folder_opens_its_members_wherever_both_are_moved(folder, members, tmp_path):
    combine_indexes([folder / "bm25", folder / "dense"], folder / "both", weights=[2, 1], window=9)
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    opened = build_retriever(moved / "both", dense={"encoder": WordEncoder()}, bm25={"num_threads": 1})
    assert isinstance(opened, HybridRetriever)
    expected = HybridRetriever(members, weights=[2.0, 1.0], window=9)
    assert opened.manifest["index_id"] == expected.manifest["index_id"]
    assert opened.search(["Lima", "lighthouse"], 5) == expected.search(["Lima", "lighthouse"], 5)
    assert opened.sample(2) == members[0].sample(2)


def test_the_identity_depends_on_members_and_fusion(members):
    variants = [{}, {"fuse": "weighted"}, {"weights": [1, 2]}, {"window": 10}]
    ids = [HybridRetriever(members, **options).manifest["index_id"] for options in variants]
    assert len(set(ids)) == len(variants)
    assert HybridRetriever(members[::-1]).manifest["index_id"] not in ids


def test_a_member_that_was_rebuilt_is_refused(folder, tmp_path):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    shutil.copytree(folder / "bm25", tmp_path / "bm25")
    build_dense_index(corpus, tmp_path / "dense", WordEncoder())
    combine_indexes([tmp_path / "bm25", tmp_path / "dense"], tmp_path / "both")
    build_dense_index(
        corpus, tmp_path / "dense", WordEncoder(), options=DenseOptions(vectors="float16"), overwrite=True
    )
    with pytest.raises(IndexMismatchError, match="must be the index that was combined"):
        build_retriever(tmp_path / "both", dense={"encoder": WordEncoder()})


def test_an_option_for_no_member_is_refused(folder, tmp_path):
    combine_indexes([folder / "bm25", folder / "dense"], tmp_path / "both")
    with pytest.raises(ConfigurationError, match=r"named after the backends of its members: got \['device'\]"):
        build_retriever(tmp_path / "both", device="cpu")


def test_a_hybrid_index_holds_no_data_of_its_own(folder, tmp_path):
    combine_indexes([folder / "bm25", folder / "dense"], tmp_path / "both")
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"manifest.json"}
    assert json.loads((tmp_path / "both" / "manifest.json").read_text())["files"] == {}
