from __future__ import annotations

import gzip
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval import Passage, corpus
from grounded_rl.retrieval.corpus import CorpusDigest, id_sort_key, read_corpus, split_contents
from tests.retrieval import contract

GOOD_ROW = b'{"id": 1, "title": "Lima", "text": "Capital of Peru."}\n'


def read(tmp_path, content: bytes, name: str = "corpus.jsonl") -> list[Passage]:
    path = tmp_path / name
    path.write_bytes(content)
    return list(read_corpus(path))


def test_passages_survive_a_round_trip_plain_and_gzipped(tmp_path):
    plain = contract.write_corpus(tmp_path / "corpus.jsonl", contract.PASSAGES)
    zipped = tmp_path / "corpus.jsonl.gz"
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(read_corpus(plain)) == list(read_corpus(zipped)) == contract.PASSAGES


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Chechnya"\nThe republic lies.', "Chechnya", "The republic lies."),
        ("Chechnya\nThe republic lies.", "Chechnya", "The republic lies."),
        ("no newline here", "", "no newline here"),
        ('"only a quoted line"', "", '"only a quoted line"'),
        ('""Heroes" (album)"\nAn album.', '"Heroes" (album)', "An album."),
        ('""Heroes""\nAn album.', '"Heroes"', "An album."),
        ('"Heroes" (album)\nAn album.', '"Heroes" (album)', "An album."),
        ('"Two"\nlines\nof "text"', "Two", 'lines\nof "text"'),
        ('"Windows"\r\nA body.', "Windows", "A body."),
        ('"\nA lone quote.', '"', "A lone quote."),
        ('""\nAn empty title.', "", "An empty title."),
    ],
)
def test_case_r04_contents_split_into_title_and_body(contents, title, text):
    assert split_contents(contents) == (title, text)


@given(title=st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs", "Zs", "Cc"])), body=st.text())
def test_a_quoted_title_is_recovered_whatever_it_holds(title, body):
    assert split_contents(f'"{title}"\n{body}') == (title, body)


@pytest.mark.parametrize(
    "row",
    [
        {"id": "7", "title": "Lima", "text": "Capital."},
        {"id": 7, "title": "Lima", "text": "Capital.", "src": "wiki", "contents": "not read"},
        {"id": "7", "contents": '"Lima"\nCapital.', "title": "not read"},
    ],
)
def test_row_formats_give_the_same_passage(tmp_path, row):
    assert read(tmp_path, json.dumps(row).encode()) == [Passage("7", "Lima", "Capital.")]


@pytest.mark.parametrize("row", [{"id": "7", "text": "x"}, {"id": "7", "title": None, "text": "x"}])
def test_a_title_may_be_missing(tmp_path, row):
    assert read(tmp_path, json.dumps(row).encode()) == [Passage("7", "", "x")]


def test_blank_lines_carriage_returns_and_a_byte_order_mark_are_skipped(tmp_path):
    content = (
        b"\xef\xbb\xbf\r\n" + GOOD_ROW.replace(b"\n", b"\r\n") + b"   \n\n" + GOOD_ROW.replace(b"1", b"2").strip()
    )
    assert [passage.id for passage in read(tmp_path, content)] == ["1", "2"]
    assert [passage.id for passage in read(tmp_path, b"\xef\xbb\xbf" + GOOD_ROW)] == ["1"]


def test_line_separators_inside_strings_do_not_end_a_row(tmp_path):
    row = {"id": "1", "title": "a\u2028b", "text": "c\x85d"}
    assert read(tmp_path, json.dumps(row, ensure_ascii=False).encode()) == [Passage("1", "a\u2028b", "c\x85d")]


BAD_ROWS = {
    "not JSON": (b"{not json}", "must hold one JSON object: got '{not json}'"),
    "a JSON array": (b"[1, 2]", "must hold one JSON object: got '[1, 2]'"),
    "the start of a JSON array": (b"[", "must hold one JSON object: got '['"),
    "two objects": (b"{} {}", "must hold one JSON object: got '{} {}'"),
    "deep nesting": (b"[" * 200_000, "must hold one JSON object: got '[[["),
    "another encoding": ('{"id": 1, "text": "café"}'.encode("latin-1"), "must be UTF-8"),
    "no id": (b'{"text": "x"}', "must have `id` and either `text` or `contents`: got ['text']. Add `id`."),
    "no text": (b'{"id": 1, "title": "x"}', "got ['id', 'title']. Add `text`."),
    "nothing": (b"{}", "got []. Add `id` and `text`."),
    "id null": (b'{"id": null, "text": "x"}', "`id` must be an integer or a non-empty string: got None"),
    "id true": (b'{"id": true, "text": "x"}', "`id` must be an integer or a non-empty string: got True"),
    "id real": (b'{"id": 1.5, "text": "x"}', "`id` must be an integer or a non-empty string: got 1.5"),
    "id empty": (b'{"id": "", "text": "x"}', "`id` must be an integer or a non-empty string: got ''"),
    "text null": (b'{"id": 1, "text": null}', "`text` must be a string: got NoneType"),
    "title list": (b'{"id": 1, "title": [], "text": "x"}', "`title` must be a string: got list"),
    "contents number": (b'{"id": 1, "contents": 5}', "`contents` must be a string: got int"),
    "empty": (b'{"id": 1, "title": " ", "text": "\\n"}', "must hold some text: got an empty passage"),
    "surrogate": (b'{"id": 1, "text": "\\ud800"}', "must be valid Unicode: got an unpaired surrogate"),
    "case R17": (
        b'{"id": 1, "question": "Capital of Peru?", "golden_answers": ["Lima"]}',
        "must not carry answer fields: got `golden_answers`, `question` (missing passage fields: `text`)",
    ),
    "case R17 with text": (
        b'{"id": 1, "text": "x", "answers": ["Lima"]}',
        "must not carry answer fields: got `answers` (missing passage fields: none)",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_bad_row_is_one_line_that_names_file_and_line(tmp_path, row, message):
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, GOOD_ROW + b"\n" + row + b"\n")
    assert str(caught.value).startswith(f"`{tmp_path / 'corpus.jsonl'}`, line 3: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_files_that_cannot_be_read_are_one_line(tmp_path):
    zipped = gzip.compress(GOOD_ROW * 1000)
    unreadable = {
        "cut.jsonl.gz": zipped[:-30],
        "plain.jsonl.gz": GOOD_ROW,
        "damaged.jsonl.gz": zipped[:20] + b"?" * 99,
    }
    for name, content in unreadable.items():
        with pytest.raises(
            ConfigurationError, match=f"^The corpus `.*{name}` must be a readable JSON Lines file: got"
        ):
            read(tmp_path, content, name)
    with pytest.raises(ConfigurationError, match="got 'No such file or directory'"):
        list(read_corpus(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigurationError, match="got 'Is a directory'"):
        list(read_corpus(tmp_path))


def digest_of(tmp_path, passages: list[Passage]) -> CorpusDigest:
    digest = CorpusDigest(contract.write_corpus(tmp_path / "corpus.jsonl", passages))
    for passage in passages:
        digest.add(passage)
    digest.finish()
    return digest


def test_a_repeated_id_is_refused_with_both_lines(tmp_path):
    passages = [Passage(name, "", "x") for name in ("4", "9", "b", "1", "9")]
    with pytest.raises(ConfigurationError, match="line 5: `id` must be unique: got '9', used on line 2"):
        digest_of(tmp_path, passages)


def test_a_repeated_id_is_found_before_the_end_of_a_long_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "_FIRST_DUPLICATE_CHECK", 4)
    passages = [Passage("1", "", "x"), Passage("1", "", "y"), *(Passage(f"p{n}", "", "x") for n in range(100))]
    digest = CorpusDigest(contract.write_corpus(tmp_path / "corpus.jsonl", passages))
    for passage in passages[:3]:
        digest.add(passage)
    with pytest.raises(ConfigurationError, match="line 2: `id` must be unique: got '1', used on line 1"):
        digest.add(passages[3])


def test_ids_that_differ_in_spelling_are_different(tmp_path):
    passages = [Passage(name, "", "x") for name in ("1", "01", "1 ", "+1", "１")]
    assert digest_of(tmp_path, passages).num_passages == 5


def test_a_corpus_without_passages_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="must hold at least one passage: got none"):
        digest_of(tmp_path, [])


def test_the_hash_depends_on_every_field_and_on_the_order(tmp_path):
    passages = [Passage("1", "a", "b"), Passage("2", "c", "d")]
    variants = [
        passages,
        passages[::-1],
        passages[:1],
        [Passage("1", "ab", ""), passages[1]],
        [Passage("1", "", "ab"), passages[1]],
        [Passage("3", "a", "b"), passages[1]],
    ]
    assert len({digest_of(tmp_path, variant).sha256 for variant in variants}) == len(variants)
    assert digest_of(tmp_path, passages).sha256 == digest_of(tmp_path, list(passages)).sha256


@pytest.mark.parametrize(
    ("ids", "ascending"),
    [
        (["2", "10", "a"], True),
        (["10", "2"], False),
        (["a", "2"], False),
        (["a", "b"], True),
        (["1"], True),
    ],
)
def test_the_digest_knows_whether_ids_ascend(tmp_path, ids, ascending):
    assert digest_of(tmp_path, [Passage(name, "", "x") for name in ids]).ids_ascending is ascending


@given(st.lists(st.one_of(st.integers(0, 10**25).map(str), st.text(min_size=1)), unique=True))
def test_ids_have_one_order_in_which_numbers_come_first_by_value(ids):
    ordered = sorted(ids, key=id_sort_key)
    ids.reverse()
    assert sorted(ids, key=id_sort_key) == ordered
    numbers = [name for name in ordered if re.fullmatch("[0-9]{1,18}", name)]
    assert ordered[: len(numbers)] == numbers
    assert [int(name) for name in numbers] == sorted(int(name) for name in numbers)
