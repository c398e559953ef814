from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from grounded_rl.errors import ConfigurationError, IndexMismatchError, RetrievalError
from grounded_rl.retrieval import Passage, build_retriever
from grounded_rl.retrieval.dense import DenseOptions, DenseRetriever, build_dense_index
from grounded_rl.retrieval.dense.lists import KINDS, default_kind, structure_parameters
from grounded_rl.retrieval.manifest import check_files, load_manifest
from tests.retrieval import contract
from tests.retrieval.fake_encoder import SETTINGS, WordEncoder

pytest.importorskip("faiss", reason="the extra `dense` is not installed")


@pytest.fixture(scope="module", params=[*KINDS, "Flat, float16"])
def retriever(request, tmp_path_factory) -> DenseRetriever:
    folder = tmp_path_factory.mktemp("dense")
    kind, _, vectors = request.param.partition(", ")
    corpus = contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES)
    build_dense_index(
        corpus,
        folder / "index",
        WordEncoder(),
        options=DenseOptions(
            kind=kind,
            nlist=2 if kind == "IVF,SQ8" else None,
            nprobe=2 if kind == "IVF,SQ8" else None,
            vectors=vectors or "float32",
            shard_passages=16,
        ),
    )
    return DenseRetriever.open(folder / "index", encoder=WordEncoder())


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_it_keeps_the_contract(check, retriever):
    check(retriever)


def word_corpus(path: Path, count: int, seed: int = 0) -> tuple[Path, list[Passage]]:
    """Passages of words drawn by Zipf's law."""
    rng = np.random.default_rng(seed)
    passages = []
    for row in range(count):
        words = np.minimum(rng.zipf(1.3, size=12), 5000)
        passages.append(Passage(f"p{row}", f"title{row % 7}", " ".join(f"w{word}" for word in words)))
    return contract.write_corpus(path, passages), passages


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> tuple[Path, list[Passage]]:
    return word_corpus(tmp_path_factory.mktemp("words") / "corpus.jsonl", 3000)


@pytest.fixture(scope="module")
def flat(words) -> DenseRetriever:
    folder = words[0].parent / "flat"
    build_dense_index(words[0], folder, WordEncoder(32), options=DenseOptions(kind="Flat"))
    return DenseRetriever.open(folder, encoder=WordEncoder(32))


QUERIES = [f"w{2 + number} w{3 * number} title{number % 7}" for number in range(40)]


def test_exact_search_equals_products_with_every_vector(words, flat):
    encoder = WordEncoder(32)
    texts = [f"{passage.title}\n{passage.text}" for passage in words[1]]
    scores = encoder.encode_queries(QUERIES).astype(np.float64) @ encoder.encode_passages(texts).T.astype(np.float64)
    for row, hits in zip(scores, flat.search(QUERIES, 5), strict=True):
        best = np.sort(row)[::-1][:5]
        assert [hit.score for hit in hits] == pytest.approx(best, abs=6e-6)
        for hit in hits:
            assert row[int(hit.passage.id[1:])] == pytest.approx(hit.score, abs=6e-6)


def test_lists_probed_in_full_find_what_exact_search_finds(words, flat, tmp_path):
    build_dense_index(words[0], tmp_path / "index", WordEncoder(32), options=DenseOptions(kind="IVF,SQ8"))
    manifest = load_manifest(tmp_path / "index")
    nlist = manifest["parameters"]["nlist"]
    assert 1 < manifest["parameters"]["nprobe"] < nlist <= 3000 // 39
    everywhere = DenseRetriever.open(tmp_path / "index", encoder=WordEncoder(32), nprobe=nlist)
    assert everywhere.search(QUERIES, 3) == flat.search(QUERIES, 3)
    few = DenseRetriever.open(tmp_path / "index", encoder=WordEncoder(32), nprobe=1).search(QUERIES, 3)
    assert few != flat.search(QUERIES, 3)
    assert everywhere.manifest["index_id"] != manifest["index_id"] != flat.manifest["index_id"]


def test_every_vector_is_in_exactly_one_list(words, tmp_path):
    build_dense_index(
        words[0], tmp_path / "index", WordEncoder(32), options=DenseOptions(kind="IVF,SQ8", shard_passages=500)
    )
    sizes = np.load(tmp_path / "index" / "list_sizes.npy")
    content = (tmp_path / "index" / "lists.bin").read_bytes()
    ids, start = [], 0
    for size in sizes:
        own = np.frombuffer(content, dtype="<i8", count=size, offset=start + 32 * size)
        assert (np.diff(own) > 0).all()
        ids += own.tolist()
        start += size * (32 + 8)
    assert start == len(content)
    assert sorted(ids) == list(range(3000))


def test_a_graph_finds_nearly_what_exact_search_finds(words, flat, tmp_path):
    build_dense_index(words[0], tmp_path / "index", WordEncoder(32), options=DenseOptions(kind="HNSW"))
    found = DenseRetriever.open(tmp_path / "index", encoder=WordEncoder(32)).search(QUERIES, 3)
    exact = flat.search(QUERIES, 3)
    shared = sum(len({h.passage.id for h in a} & {h.passage.id for h in b}) for a, b in zip(found, exact, strict=True))
    assert shared >= 0.9 * 3 * len(QUERIES)


def test_the_passage_file_is_what_the_corpus_hash_is_taken_of(flat):
    import hashlib

    folder = Path(flat._passages._path)
    assert hashlib.sha256(folder.read_bytes()).hexdigest() == flat.manifest["corpus_sha256"]


def test_the_structure_follows_the_size():
    assert [default_kind(count) for count in (1, 999_999, 1_000_000)] == ["Flat", "Flat", "IVF,SQ8"]
    small, large = (structure_parameters("IVF,SQ8", count, 768) for count in (10_000, 21_015_324))
    assert small == {"nlist": 256, "nprobe": 64}
    assert large["nlist"] * 39 * 768 * 4 <= 1 << 29
    assert large == {"nlist": 4481, "nprobe": 168}
    assert structure_parameters("IVF,SQ8", 5, 8, nlist=3, nprobe=9) == {"nlist": 3, "nprobe": 3}
    with pytest.raises(ConfigurationError, match="`nlist` must not exceed the 5 passages: got 6"):
        structure_parameters("IVF,SQ8", 5, 8, nlist=6)


def test_other_weights_make_another_index(words, tmp_path):
    ids = [
        build_dense_index(words[0], tmp_path / str(seed), WordEncoder(32, seed=seed))["index_id"] for seed in (0, 1)
    ]
    assert ids[0] != ids[1]


# --- the encoder belongs to the index --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_prefix": "query: "}, "`query_prefix` 'query: ' for ''"),
        ({"passage_prefix": "passage: "}, "`passage_prefix` 'passage: ' for ''"),
        ({"pooling": "cls"}, "`pooling` 'cls' for 'mean'"),
        ({"normalize": False}, "`normalize` False for True"),
        ({"max_length": 8}, "`max_length` 8 for 256"),
    ],
)
def test_an_encoder_with_other_settings_is_refused(flat, words, changes, message):
    encoder = WordEncoder(32, settings=dataclasses.replace(SETTINGS, **changes))
    with pytest.raises(IndexMismatchError, match="must have the settings the index was built with") as caught:
        DenseRetriever.open(words[0].parent / "flat", encoder=encoder)
    assert message in str(caught.value)


def test_an_encoder_with_other_weights_or_dimensions_is_refused(flat, words):
    with pytest.raises(IndexMismatchError, match="must give the vectors it gave when the index was built"):
        DenseRetriever.open(words[0].parent / "flat", encoder=WordEncoder(32, seed=1))
    with pytest.raises(IndexMismatchError, match="must give vectors of 32 dimensions, as the index has: got 64"):
        DenseRetriever.open(words[0].parent / "flat", encoder=WordEncoder(64))


def test_the_model_of_an_encoder_may_have_moved(flat, words):
    moved = WordEncoder(32, settings=dataclasses.replace(SETTINGS, model="/elsewhere/words"))
    assert DenseRetriever.open(words[0].parent / "flat", encoder=moved).search(["w2"], 1)[0]


class BrokenEncoder(WordEncoder):
    """Gives a vector that is no vector for some texts."""

    def __init__(self, fault):
        super().__init__(32)
        self.fault = fault

    def _encode(self, prefix, texts):
        rows = super()._encode(prefix, texts)
        for row, text in enumerate(texts):
            if "Norway" in text:
                rows[row] = self.fault
        return rows


@pytest.mark.parametrize("fault", [np.nan, np.inf, 0.0, 1.0])
def test_a_passage_without_a_unit_vector_is_named(tmp_path, fault):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    with pytest.raises(
        ConfigurationError, match=r"finite vectors of length 1: got norms .* for the passages \['1002'\]"
    ):
        build_dense_index(corpus, tmp_path / "index", BrokenEncoder(fault))
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.jsonl"}


def test_a_query_without_a_finite_vector_is_an_error_and_not_an_empty_result(flat, words):
    retriever = DenseRetriever.open(words[0].parent / "flat", encoder=BrokenEncoder(np.nan))
    with pytest.raises(RetrievalError, match="vector that is not finite"):
        retriever.search(["w2", "Norway"], 3)


# --- the folder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "PQ"}, "`kind` must be one of `Flat`, `IVF,SQ8`, `HNSW`: got 'PQ'"),
        ({"vectors": "int8"}, "`vectors` must be one of `float32`, `float16`: got 'int8'"),
        ({"nlist": 0}, "`nlist` must be at least 1: got 0"),
        ({"nprobe": 0}, "`nprobe` must be at least 1: got 0"),
        ({"shard_passages": 0}, "`shard_passages` must be at least 1: got 0"),
    ],
)
def test_options_out_of_range_are_refused(arguments, message):
    with pytest.raises(ConfigurationError) as caught:
        DenseOptions(**arguments)
    assert str(caught.value).startswith(message)


def test_nprobe_is_for_lists_only(flat, words):
    with pytest.raises(ConfigurationError, match="`nprobe` must lie in .* got 4 for a `Flat` index"):
        DenseRetriever.open(words[0].parent / "flat", encoder=WordEncoder(32), nprobe=4)


def test_an_intact_index_passes_the_full_check_and_a_changed_vector_does_not(words, tmp_path):
    build_dense_index(words[0], tmp_path / "index", WordEncoder(32))
    check_files(tmp_path / "index", load_manifest(tmp_path / "index"))
    path = tmp_path / "index" / "vectors.bin"
    content = bytearray(path.read_bytes())
    content[999] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="vectors.bin` must have sha256"):
        check_files(tmp_path / "index", load_manifest(tmp_path / "index"))


def test_the_folder_opens_by_its_manifest(words, flat):
    opened = build_retriever(words[0].parent / "flat", encoder=WordEncoder(32))
    assert isinstance(opened, DenseRetriever)
    assert opened.search(QUERIES[:3], 2) == flat.search(QUERIES[:3], 2)
    manifest = json.loads((words[0].parent / "flat" / "manifest.json").read_text())
    assert manifest["parameters"]["encoder"] == SETTINGS.as_dict()
    assert set(manifest["files"]) == {"passages.jsonl", "offsets.bin", "vectors.bin", "probe.npy"}


def test_samples_are_evenly_spaced(words, flat):
    assert flat.sample(3) == [words[1][500], words[1][1500], words[1][2500]]
    assert flat.sample(10_000) == words[1]
