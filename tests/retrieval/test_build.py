from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval import Hit, Passage, build_retriever
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.build import known_item_recall
from grounded_rl.retrieval.manifest import check_files, index_id, load_manifest, staged_index
from tests.retrieval import contract


@pytest.fixture
def index(tmp_path) -> Path:
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    build_bm25_index(corpus, tmp_path / "index")
    return tmp_path / "index"


def edit_manifest(index: Path, **changes) -> None:
    path = index / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_index_opens_with_the_backend_that_built_it(index):
    for options in ({}, {"backend": "bm25"}, {"num_threads": 1}):
        retriever = build_retriever(index, **options)
        assert isinstance(retriever, BM25Retriever)
        assert retriever.manifest["corpus_name"] == "corpus.jsonl"
        assert retriever.search(["Lima"], 1)[0][0].passage.title == "Peru"


def test_an_unknown_backend_is_refused_with_the_known_ones(index):
    with pytest.raises(ConfigurationError, match="`backend` must be one of `bm25`.*: got 'lucene'"):
        build_retriever(index, backend="lucene")
    edit_manifest(index, backend="lucene", index_id=index_id({**load_manifest(index), "backend": "lucene"}))
    with pytest.raises(ConfigurationError, match="`backend` must be one of `bm25`.*: got 'lucene'"):
        build_retriever(index)
    with pytest.raises(ConfigurationError, match="`backend` must be the one .* was built with, `lucene`: got 'bm25'"):
        build_retriever(index, backend="bm25")
    with pytest.raises(ConfigurationError, match="must be a `bm25` index: got `lucene`"):
        BM25Retriever.open(index)


def test_importing_the_package_imports_no_backend():
    script = "import sys, grounded_rl.retrieval; sys.exit('tantivy' in sys.modules or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


# --- the manifest ----------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_index_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"must be the folder of an index: got .* \(no such folder\)"):
        load_manifest(tmp_path / "absent")
    with pytest.raises(ConfigurationError, match=r"got .* \(a folder without `manifest.json`\)"):
        load_manifest(tmp_path)


def test_a_manifest_that_is_not_json_is_refused(index):
    for text in ("{", "", "\x00"):
        (index / "manifest.json").write_text(text)
        with pytest.raises(ConfigurationError, match="^[^\n]*must be readable JSON[^\n]*$"):
            load_manifest(index)


@pytest.mark.parametrize("version", [2, "1", None])
def test_a_manifest_of_another_schema_is_refused(index, version):
    edit_manifest(index, schema_version=version)
    with pytest.raises(ConfigurationError, match=f"must have `schema_version` 1: got {version!r}"):
        load_manifest(index)


def test_a_manifest_that_is_no_object_is_refused(index):
    (index / "manifest.json").write_text("[]")
    with pytest.raises(ConfigurationError, match="must have `schema_version` 1: got None"):
        load_manifest(index)


@pytest.mark.parametrize("name", ["backend", "corpus_sha256", "num_passages", "parameters", "files", "index_id"])
def test_a_manifest_without_a_field_is_refused(index, name):
    edit_manifest(index, **{name: None})
    with pytest.raises(ConfigurationError, match=f"must have `{name}` of type .*: got None"):
        load_manifest(index)


def test_an_edited_manifest_is_refused(index):
    edit_manifest(index, corpus_sha256="0" * 64)
    with pytest.raises(ConfigurationError, match="The manifest was edited"):
        load_manifest(index)


def files_of(index: Path) -> list[Path]:
    return [index / name for name in load_manifest(index)["files"]]


def test_a_missing_or_cut_file_is_named_at_opening(index):
    path = max(files_of(index), key=lambda path: path.stat().st_size)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(
        ConfigurationError, match=rf"{path.name}` must have {len(content)} bytes: got {len(content) - 1}"
    ):
        build_retriever(index)
    path.unlink()
    with pytest.raises(ConfigurationError, match=f"{path.name}` must have .* bytes: got no such file"):
        build_retriever(index)


def test_a_changed_byte_is_found_by_the_full_check(index):
    check_files(index, load_manifest(index))
    path = max(files_of(index), key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"{path.name}` must have sha256 "):
        check_files(index, load_manifest(index))


# --- publication -----------------------------------------------------------------------------------------------------


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_an_index_is_not_overwritten_unless_asked(index):
    before = load_manifest(index)
    contract.write_corpus(index.parent / "corpus.jsonl", contract.PASSAGES[:5])
    with pytest.raises(ConfigurationError, match="must not exist: got an index.*`--overwrite`"):
        build_bm25_index(index.parent / "corpus.jsonl", index)
    assert load_manifest(index) == before
    build_bm25_index(index.parent / "corpus.jsonl", index, overwrite=True)
    assert load_manifest(index)["num_passages"] == 5
    assert names_in(index.parent) == {"corpus.jsonl", "index"}


def test_a_failed_build_leaves_the_old_index_and_nothing_else(index):
    before = load_manifest(index)
    corpus = index.parent / "corpus.jsonl"
    corpus.write_text(corpus.read_text() + "{}\n")
    with pytest.raises(ConfigurationError, match=f"line {len(contract.PASSAGES) + 1}: must have `id`"):
        build_bm25_index(corpus, index, overwrite=True)
    assert load_manifest(index) == before
    assert build_retriever(index).search(["Lima"], 1)[0]
    assert names_in(index.parent) == {"corpus.jsonl", "index"}


def test_an_interrupted_build_leaves_nothing(tmp_path):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_bm25_index(corpus, tmp_path / "index", on_progress=interrupt)
    assert names_in(tmp_path) == {"corpus.jsonl"}


def test_a_full_disk_is_one_line_and_the_build_goes_on_when_there_is_room(tmp_path):
    passages = [Passage(str(row), "", f"{row:x} " * 200) for row in range(2000)]
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", passages)
    # A limit on the size of files fails writes as a full disk does; it is for life, hence the process of its own.
    script = (
        "import resource, sys\n"
        "from grounded_rl.errors import RetrievalError\n"
        "from grounded_rl.retrieval.bm25 import build_bm25_index\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try:\n"
        "    build_bm25_index(*sys.argv[1:])\n"
        "except RetrievalError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(corpus), str(tmp_path / "index")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.startswith(f"The index could not be written to `{tmp_path}`: ")
    assert done.stdout.count("\n") == 1
    assert names_in(tmp_path) <= {"corpus.jsonl", ".index.unfinished"}
    build_bm25_index(corpus, tmp_path / "index", resume=True)
    retriever = build_retriever(tmp_path / "index")
    assert retriever.manifest["num_passages"] == 2000
    assert [hits[0].passage.id for hits in retriever.search(["7c7", "3"], 1)] == ["1991", "3"]
    assert names_in(tmp_path) == {"corpus.jsonl", "index"}


def test_only_an_index_is_ever_overwritten(tmp_path):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.tex").write_text("years of work")
    for target in (precious, corpus):
        with pytest.raises(ConfigurationError, match="must be absent or an index: got something else"):
            build_bm25_index(corpus, target, overwrite=True)
    assert (precious / "thesis.tex").read_text() == "years of work"


def test_an_empty_folder_may_be_built_into(tmp_path):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    (tmp_path / "index").mkdir()
    build_bm25_index(corpus, tmp_path / "index")
    assert build_retriever(tmp_path / "index").search(["Lima"], 1)[0]


def test_missing_parents_are_made(tmp_path):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    build_bm25_index(corpus, tmp_path / "a" / "b" / "index")
    assert names_in(tmp_path / "a" / "b") == {"index"}


def test_a_parent_that_is_a_file_is_one_line(tmp_path):
    corpus = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    with pytest.raises(ConfigurationError, match="must be a folder you can write to: got 'Not a directory'"):
        build_bm25_index(corpus, corpus / "index")


def test_a_target_that_appears_during_the_build_is_not_replaced(tmp_path):
    def publish() -> None:
        with staged_index(tmp_path / "index") as staging:
            (staging / "manifest.json").write_text("{}")
            (tmp_path / "index").mkdir()
            (tmp_path / "index" / "other").write_text("someone else's")

    with pytest.raises(ConfigurationError, match="must be absent or an index"):
        publish()
    assert (tmp_path / "index" / "other").read_text() == "someone else's"
    assert names_in(tmp_path) == {"index"}


# --- the known-item check --------------------------------------------------------------------------------------------


class ConstantRetriever:
    """Answers every query alike: the defect the check is there for."""

    @property
    def manifest(self):
        return {"backend": "constant"}

    def search(self, queries, k):
        hits = [Hit(passage, 1.0) for passage in contract.PASSAGES[:k]]
        return [hits for _ in queries]


def test_case_r03_an_index_that_works_finds_its_passages_and_a_constant_one_does_not(index):
    passages = [passage for passage in contract.PASSAGES if passage.title != "Lighthouse"]
    assert known_item_recall(build_retriever(index), passages) == 1.0
    assert known_item_recall(ConstantRetriever(), passages) == pytest.approx(3 / len(passages))


def test_copies_of_a_passage_count_as_the_passage(index):
    assert (
        known_item_recall(build_retriever(index), [Passage("59", "Lighthouse", "The lighthouse stands on a rock.")])
        == 1
    )


def test_samples_are_evenly_spaced_and_distinct(index):
    retriever = build_retriever(index)
    total = len(contract.PASSAGES)
    assert retriever.sample(total) == retriever.sample(10 * total) == contract.PASSAGES
    assert retriever.sample(2) == [contract.PASSAGES[total // 4], contract.PASSAGES[3 * total // 4]]


def test_case_r03_titles_of_real_passages_find_them(shared_dir, tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    with (shared_dir / "data" / "mini_wiki" / "corpus.jsonl").open() as lines:
        corpus.write_text("".join(itertools.islice(lines, 3000)))
    build_bm25_index(corpus, tmp_path / "index")
    retriever = build_retriever(tmp_path / "index")
    sample = retriever.sample(20)
    results = retriever.search([passage.title for passage in sample], 3)
    assert sum(passage in [hit.passage for hit in hits] for passage, hits in zip(sample, results, strict=True)) >= 18
    assert known_item_recall(retriever, retriever.sample(200)) >= 0.99
