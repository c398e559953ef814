"""
What is stored of a passage, and how texts become words: the same for passages and queries.

Title and body are searched as one field. Analysis: Unicode NFC, words of letters and digits, lower case, accents
folded to ASCII, English stems. A query is a bag of distinct words; nothing in it is syntax. Function words ("the",
"of") are indexed, but left out of a query that has other words: they cost half of its time and change next to nothing.
"""

from __future__ import annotations

import unicodedata
from typing import Final

import tantivy

from grounded_rl.retrieval.base import Passage

BACKEND: Final = "bm25"

MAX_QUERY_CHARACTERS: Final = 65_536
"""What follows in a longer query is not read."""

MAX_QUERY_TERMS: Final = 256
"""Distinct words of a query that are searched for: the first ones."""

_MAX_TOKEN_BYTES = 40
PARAMETERS: Final = {
    "k1": 1.2,
    "b": 0.75,
    "searched": "title + line break + text",
    "query": "distinct words; no english function words if there are others",
    "analysis": f"nfc, words of at most {_MAX_TOKEN_BYTES - 1} bytes, lower case, ascii folding, english stemmer",
}
"""What decides results; another release with other values refuses the index."""

ANALYZER: Final = "grounded_rl_english"
FILES: Final = "tantivy"
"""Folder of the library's files in the folder of an index."""


def schema() -> tantivy.Schema:
    """
    Stored id, title and text; one searched field; position in the corpus as a column.

    Returns:
        `tantivy.Schema`: The schema of every index.
    """
    builder = tantivy.SchemaBuilder()
    for name in ("id", "title", "text"):
        # Text fields are always indexed by the binding; bytes are stored only.
        builder.add_bytes_field(name, stored=True)
    builder.add_text_field("contents", tokenizer_name=ANALYZER, index_option="freq")
    builder.add_unsigned_field("ordinal", fast=True)
    return builder.build()


def analyzer(*, drop_function_words: bool = False) -> tantivy.TextAnalyzer:
    """
    Analysis of passages and of queries, but for the Unicode normalisation, which is done before.

    Args:
        drop_function_words (`bool`, *optional*, defaults to `False`):
            Leave out English function words.

    Returns:
        `tantivy.TextAnalyzer`: The analysis.
    """
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.remove_long(_MAX_TOKEN_BYTES)).filter(tantivy.Filter.lowercase())
    builder = builder.filter(tantivy.Filter.ascii_fold())
    if drop_function_words:
        builder = builder.filter(tantivy.Filter.stopword("english"))
    return builder.filter(tantivy.Filter.stemmer("english")).build()


def document(passage: Passage, *, ordinal: int) -> tantivy.Document:
    """
    What is written for one passage.

    Args:
        passage (`Passage`):
            The passage.
        ordinal (`int`):
            Its position in the corpus, from 0.

    Returns:
        `tantivy.Document`: Fields of the schema.
    """
    document = tantivy.Document()
    for name in ("id", "title", "text"):
        document.add_bytes(name, getattr(passage, name).encode("utf-8"))
    document.add_text("contents", unicodedata.normalize("NFC", f"{passage.title}\n{passage.text}"))
    document.add_unsigned("ordinal", ordinal)
    return document


def stored_text(document: tantivy.Document, name: str) -> str:
    """
    A stored field; the binding returns bytes as a sequence of integers or as bytes.

    Args:
        document (`tantivy.Document`):
            Document of a search.
        name (`str`):
            Name of the field.

    Returns:
        `str`: Its text.
    """
    return bytes(document.get_first(name) or b"").decode("utf-8")


def query_terms(analyzer: tantivy.TextAnalyzer, query: str) -> list[str]:
    """
    Distinct words of a query in order of appearance, as the index spells them.

    Args:
        analyzer (`tantivy.TextAnalyzer`):
            Result of `analyzer`.
        query (`str`):
            Any text.

    Returns:
        `list[str]`: At most `MAX_QUERY_TERMS` words.
    """
    # A query may hold unpaired surrogates (a model's broken byte sequences), which the analyser could not encode.
    text = query[:MAX_QUERY_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    terms = dict.fromkeys(analyzer.analyze(unicodedata.normalize("NFC", text)))
    return list(terms)[:MAX_QUERY_TERMS]


def first_line(error: Exception) -> str:
    """
    First line of an exception's message, so that ours stays one line.

    Args:
        error (`Exception`):
            Error of the library.

    Returns:
        `str`: Its first line.
    """
    return str(error).partition("\n")[0]
