from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from grounded_rl.cli import main
from grounded_rl.errors import IndexMismatchError
from grounded_rl.retrieval import encoders
from tests.retrieval import contract
from tests.retrieval.fake_encoder import WordEncoder

pytest.importorskip("faiss", reason="the extra `dense` is not installed")


@pytest.fixture(autouse=True)
def encoder(monkeypatch) -> WordEncoder:
    """The encoder of every command of these tests."""
    from grounded_rl.retrieval.dense import search

    chosen = WordEncoder()

    def load(model, **_):
        assert model == "words"
        return chosen

    def load_recorded(record, probe_vectors, **_):
        encoders.check_probe(chosen, probe_vectors)
        return chosen

    monkeypatch.setattr(encoders, "load_encoder", load)
    monkeypatch.setattr(search, "load_recorded_encoder", load_recorded)
    return chosen


@pytest.fixture
def corpus(tmp_path) -> Path:
    passages = [passage for passage in contract.PASSAGES if passage.title != "Lighthouse"]
    return contract.write_corpus(tmp_path / "corpus.jsonl", passages)


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def build_dense(corpus: Path, *more: object) -> Path:
    folder = corpus.parent / "dense"
    assert (
        run("index", "build", "--corpus", corpus, "--out", folder, "--backend", "dense", "--encoder", "words", *more)
        == 0
    )
    return folder


def refused(capsys, *arguments: object) -> str:
    """The one line on the error stream of a command that fails."""
    capsys.readouterr()
    assert run(*arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    return errors


def test_a_dense_build_says_what_is_recorded_and_what_it_will_need(corpus, capsys):
    folder = build_dense(corpus, "--kind", "IVF,SQ8", "--nlist", 2, "--nprobe", 1, "--vectors", "float16")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Encoder words: 256 dimensions, mean pooling, 256 tokens, query prefix ''")
    assert lines[1].startswith("About 14 passages, IVF,SQ8: ")
    assert lines[2].startswith("Indexed 14 passages in ")
    parameters = json.loads((folder / "manifest.json").read_text())["parameters"]
    assert [parameters[name] for name in ("kind", "nlist", "nprobe", "vectors")] == ["IVF,SQ8", 2, 1, "float16"]


def test_verify_passes_an_intact_dense_index(corpus, capsys):
    folder = build_dense(corpus)
    capsys.readouterr()
    assert run("index", "verify", folder, "--corpus", corpus) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["files", "passages", "vectors", "known", "corpus"]
    assert all(" ok: " in line for line in lines)


def test_verify_finds_vectors_that_belong_to_other_passages(corpus, capsys):
    from grounded_rl.retrieval.manifest import MANIFEST_NAME, write_manifest

    folder = build_dense(corpus)
    vectors = np.fromfile(folder / "vectors.bin", dtype="<f4").reshape(-1, 256)
    vectors[::-1].tofile(folder / "vectors.bin")
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    write_manifest(folder, {name: value for name, value in manifest.items() if name != "files"})
    assert run("index", "verify", folder) == 2
    assert "must encode to the vector that is stored for it" in capsys.readouterr().err


def test_verify_refuses_the_encoder_when_it_has_changed(corpus, capsys, encoder):
    folder = build_dense(corpus)
    encoder._directions.clear()
    encoder._seed = 1
    capsys.readouterr()
    assert run("index", "verify", folder) == 2
    assert "must give the vectors it gave when the index was built" in capsys.readouterr().err
    with pytest.raises(IndexMismatchError):
        encoders.check_probe(encoder, encoders.probe(WordEncoder()))


def test_verify_finds_texts_that_are_not_those_of_the_corpus(corpus, capsys):
    folder = build_dense(corpus)
    content = (folder / "passages.jsonl").read_bytes()
    (folder / "passages.jsonl").write_bytes(content.replace(b"Lima", b"Lama"))
    assert "passages.jsonl` must have sha256" in refused(capsys, "index", "verify", folder)


def test_combine_makes_a_hybrid_that_is_searched_and_verified(corpus, capsys):
    dense = build_dense(corpus)
    bm25, hybrid = corpus.parent / "bm25", corpus.parent / "hybrid"
    assert run("index", "build", "--corpus", corpus, "--out", bm25) == 0
    capsys.readouterr()
    assert run("index", "combine", bm25, dense, "--out", hybrid, "--weights", 1, 2, "--window", 20) == 0
    assert capsys.readouterr().out.startswith("Combined bm25 + dense over 14 passages: ")
    assert run("index", "verify", hybrid, "--corpus", corpus) == 0
    capsys.readouterr()
    assert run("search", "--index", hybrid, "capital of Peru", "--k", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["hits"][0]["title"] == "Peru"
    assert run("index", "info", hybrid) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["backend"], shown["parameters"]["weights"], shown["parameters"]["window"]) == ("hybrid", [1, 2], 20)
    assert "at least 2 members: got 1" in refused(capsys, "index", "combine", bm25, "--out", corpus.parent / "one")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "dense"], "`--encoder` must name a model: got none"),
        (["--backend", "dense", "--encoder", "words", "--kind", "PQ"], "`kind` must be one of `Flat`"),
        (
            ["--backend", "dense", "--encoder", "words", "--batch-size", "0"],
            "`--batch-size` must be at least 1: got 0",
        ),
        (["--backend", "elasticsearch"], "`--url` must be the address of the server: got none"),
        (["--kind", "Flat"], "`--kind` must be used with `--backend dense`: got `bm25`"),
        (["--encoder", "words"], "`--encoder` must be used with `--backend dense` or `elasticsearch`: got `bm25`"),
        (["--backend", "dense", "--threads", "2"], "`--threads` must be used with `--backend bm25`: got `dense`"),
        (["--backend", "hybrid"], "hybrid indexes are made with `grounded-rl index combine`"),
    ],
)
def test_options_of_another_backend_are_refused(corpus, capsys, arguments, message):
    assert message in refused(capsys, "index", "build", "--corpus", corpus, "--out", corpus.parent / "x", *arguments)
    assert not (corpus.parent / "x").exists()


def test_an_interrupted_build_goes_on_when_asked(corpus, capsys, encoder, monkeypatch):
    from grounded_rl.retrieval.dense import lists

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("grounded_rl.retrieval.dense.build.build_structure", interrupted)
    folder = corpus.parent / "dense"
    build = ["index", "build", "--corpus", corpus, "--out", folder, "--backend", "dense", "--encoder", "words"]
    assert run(*build) == 130
    assert not folder.exists()
    monkeypatch.setattr("grounded_rl.retrieval.dense.build.build_structure", lists.build_structure)
    assert "Continue it with `--resume`" in refused(capsys, *build)
    encoded = encoder.num_encoded
    assert run(*build, "--resume") == 0
    assert encoder.num_encoded == encoded


def test_plan_prints_a_table_for_every_option(capsys):
    assert run("index", "plan", "--passages", 21_015_324, "--dims", 768) == 0
    lines = capsys.readouterr().out.splitlines()
    kinds = [line.split("|")[2].strip() for line in lines[2:]]
    assert kinds == ["tantivy", "Flat", "IVF,SQ8", "HNSW", "bm25 only", "hnsw", "int8_hnsw", "int4_hnsw", "bbq_hnsw"]
    assert "`passages` must be at least 1: got 0" in refused(capsys, "index", "plan", "--passages", 0)


@pytest.mark.parametrize("action", ["combine", "plan"])
def test_help_shows_an_example(action, capsys):
    assert run("index", action, "--help") == 0
    assert f"grounded-rl index {action} " in capsys.readouterr().out.partition("example")[2]
