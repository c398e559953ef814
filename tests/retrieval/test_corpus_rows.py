from __future__ import annotations

import gzip
import json
import re

import pytest

from grounded_rl.errors import ConfigurationError, MissingDependencyError
from grounded_rl.retrieval import Passage, corpus_rows
from grounded_rl.retrieval.corpus import CorpusDigest, read_corpus
from grounded_rl.retrieval.corpus_rows import estimate_num_rows
from tests.retrieval import contract

PASSAGES = [Passage(str(row), f"Title {row}", f"Text of {row}, é東\u2028京.") for row in range(3000)]


def lines_of(passages) -> bytes:
    rows = ({"id": p.id, "title": p.title, "text": p.text} for p in passages)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_zstandard(path, content: bytes, *, frames: int = 1):
    zstandard = pytest.importorskip("zstandard", reason="the extra `corpus` is not installed")
    step = len(content) // frames + 1
    parts = (content[start : start + step] for start in range(0, len(content), step))
    path.write_bytes(b"".join(zstandard.ZstdCompressor().compress(part) for part in parts))
    return path


def write_parquet(path, rows: dict, **options):
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `corpus` is not installed")
    import pyarrow

    parquet.write_table(pyarrow.table(rows), path, **options)
    return path


def columns_of(passages) -> dict:
    return {name: [getattr(passage, name) for passage in passages] for name in ("id", "title", "text")}


@pytest.fixture
def sources(tmp_path):
    """The same corpus in every format."""
    datasets = pytest.importorskip("datasets", reason="the extra `corpus` is not installed")
    content = lines_of(PASSAGES)
    (tmp_path / "plain.jsonl").write_bytes(content)
    (tmp_path / "zipped.jsonl.gz").write_bytes(gzip.compress(content))
    write_zstandard(tmp_path / "small.jsonl.zst", content, frames=7)
    write_parquet(tmp_path / "table.parquet", columns_of(PASSAGES), row_group_size=700)
    datasets.Dataset.from_dict(columns_of(PASSAGES)).save_to_disk(tmp_path / "saved")
    files = ("plain.jsonl", "zipped.jsonl.gz", "small.jsonl.zst", "table.parquet")
    return [*(tmp_path / name for name in files), f"datasets:{tmp_path / 'saved'}"]


def test_every_format_gives_the_same_passages_and_the_same_hash(sources):
    hashes = set()
    for source in sources:
        digest = CorpusDigest(source)
        passages = list(read_corpus(source))
        assert passages == PASSAGES
        for passage in passages:
            digest.add(passage)
        hashes.add(digest.sha256)
    assert len(hashes) == 1


def test_progress_never_falls_and_ends_with_everything(sources):
    for source in sources[:4]:
        seen = []
        list(read_corpus(source, on_progress=lambda done, total, seen=seen: seen.append((done, total))))
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1] == (source.stat().st_size, source.stat().st_size)


def test_the_number_of_rows_is_estimated_before_they_are_read(sources, tmp_path):
    plain, zipped, small, table, saved = sources
    assert estimate_num_rows(table) == 3000
    assert estimate_num_rows(saved) == 3000
    for source in (plain, zipped, small):
        assert 1500 <= estimate_num_rows(source) <= 4500
    few = tmp_path / "few.jsonl"
    few.write_bytes(lines_of(PASSAGES[:10]))
    assert estimate_num_rows(few) == 10


def test_a_named_split_of_a_saved_data_set_is_read(tmp_path):
    datasets = pytest.importorskip("datasets", reason="the extra `corpus` is not installed")
    parts = {"train": PASSAGES[:3], "wiki": PASSAGES[3:5]}
    splits = {name: datasets.Dataset.from_dict(columns_of(part)) for name, part in parts.items()}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert list(read_corpus(f"datasets:{tmp_path / 'saved'}")) == PASSAGES[:3]
    assert list(read_corpus(f"datasets:{tmp_path / 'saved'}#wiki")) == PASSAGES[3:5]
    for name in (f"{tmp_path / 'saved'}#absent", str(tmp_path / "nowhere")):
        with pytest.raises(ConfigurationError, match=r"must be a data set: got .* Write `datasets:NAME`"):
            list(read_corpus(f"datasets:{name}"))


def test_integer_ids_and_search_r1_rows_are_read_from_tables(tmp_path):
    table = write_parquet(tmp_path / "a.parquet", {"id": [7, 8], "contents": ['"Lima"\nA city.', "no title"]})
    assert list(read_corpus(table)) == [Passage("7", "Lima", "A city."), Passage("8", "", "no title")]


def test_columns_that_are_not_needed_are_not_read(tmp_path):
    rows = {**columns_of(PASSAGES[:2]), "embedding": [[0.0] * 4, [1.0] * 4]}
    assert list(read_corpus(write_parquet(tmp_path / "a.parquet", rows))) == PASSAGES[:2]


def test_a_bad_row_of_a_table_is_named_by_its_number(tmp_path):
    table = write_parquet(tmp_path / "a.parquet", {"id": ["1", "2"], "text": ["x", None]})
    with pytest.raises(
        ConfigurationError, match=re.escape(f"`{table}`, row 2: `text` must be a string: got NoneType")
    ):
        list(read_corpus(table))
    questions = write_parquet(tmp_path / "q.parquet", {"id": ["1"], "question": ["?"], "golden_answers": [["a"]]})
    with pytest.raises(ConfigurationError, match="must not carry answer fields: got `golden_answers`, `question`"):
        list(read_corpus(questions))
    repeated = write_parquet(tmp_path / "r.parquet", {"id": ["2", "1", "1"], "text": ["x", "y", "z"]})
    digest = CorpusDigest(repeated)
    for passage in read_corpus(repeated):
        digest.add(passage)
    with pytest.raises(ConfigurationError, match="row 3: `id` must be unique: got '1', used on row 2"):
        digest.finish()


def test_damaged_files_are_one_line(tmp_path):
    whole = write_zstandard(tmp_path / "whole.jsonl.zst", lines_of(PASSAGES)).read_bytes()
    (tmp_path / "cut.jsonl.zst").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "foreign.jsonl.zst").write_bytes(lines_of(PASSAGES[:3]))
    (tmp_path / "foreign.parquet").write_bytes(lines_of(PASSAGES[:3]))
    table = write_parquet(tmp_path / "table.parquet", columns_of(PASSAGES)).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(table[:-100])
    for name in ("cut.jsonl.zst", "foreign.jsonl.zst", "foreign.parquet", "cut.parquet", "absent.parquet"):
        kind = "Parquet" if name.endswith("parquet") else "JSON Lines"
        with pytest.raises(ConfigurationError, match=f"^The corpus `.*{name}` must be a readable {kind} file: got"):
            list(read_corpus(tmp_path / name))


def test_a_format_whose_package_is_missing_names_the_extra(tmp_path, monkeypatch):
    contract.write_corpus(tmp_path / "a.jsonl", PASSAGES[:1])

    def absent(package, extra, *, needed_by):
        raise MissingDependencyError(f"`{needed_by}` needs the package `{package}`: grounded-rl[{extra}]")

    monkeypatch.setattr(corpus_rows, "require", absent)
    for name in ("a.parquet", "a.jsonl.zst"):
        with pytest.raises(MissingDependencyError, match=rf"`--corpus {name}` needs .*\[corpus\]"):
            list(read_corpus(tmp_path / name))
    assert list(read_corpus(tmp_path / "a.jsonl")) == PASSAGES[:1]
