"""
What an index looks like on the server: its mapping, its settings, and the facts it carries about itself.

The body is built from an `IndexSpec` alone. Everything that decides results is in `IndexSpec.parameters`, which goes
into the manifest and into the mapping's `_meta`, so that a folder and an index on a server can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.manifest import SCHEMA_VERSION, index_id

BACKEND: Final = "elasticsearch"

META_KEY: Final = "grounded_rl"
"""Key of the mapping's `_meta` under which the manifest's facts lie."""

META_FIELDS: Final = (
    "schema_version",
    "backend",
    "corpus_name",
    "corpus_sha256",
    "num_passages",
    "library",
    "library_version",
    "parameters",
    "index_id",
)

VECTOR_INDEXES: Final = ("hnsw", "int8_hnsw", "int4_hnsw", "bbq_hnsw")
"""Vector structures, from the largest to the smallest. None needs a paid licence."""

OVERSAMPLING: Final = {"hnsw": 1.0, "int8_hnsw": 1.5, "int4_hnsw": 2.0, "bbq_hnsw": 3.0}
"""How many times more candidates are compared by their full vectors than are asked for."""

MAX_DIMS: Final = 4096
_SIMILARITY = "lucene_bm25"


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """
    What is decided when an index is created.

    Args:
        k1 (`float`, *optional*, defaults to `0.9`):
            Saturation of term frequency in BM25.
        b (`float`, *optional*, defaults to `0.4`):
            Normalisation by length in BM25.
        analyzer (`str`, *optional*, defaults to `"english"`):
            Built-in analyzer of passages and queries.
        num_shards (`int`, *optional*, defaults to 1):
            Primary shards. With more than one, scores use the statistics of each shard: results then differ.
        dims (`int`, *optional*):
            Length of the vectors; no vectors if left out.
        vector_index (`str`, *optional*, defaults to `"int8_hnsw"`):
            One of `VECTOR_INDEXES`. Always written out: the server's default changed between versions.
        m (`int`, *optional*, defaults to 16):
            Links per node of the graph.
        ef_construction (`int`, *optional*, defaults to 200):
            Candidates considered when a node is linked.
        encoder (`Mapping[str, Any]`, *optional*):
            `EncoderSettings.as_dict()` of the encoder of the vectors; required with `dims`.

    Raises:
        `ConfigurationError`: If a value is out of range.
    """

    k1: float = 0.9
    b: float = 0.4
    analyzer: str = "english"
    num_shards: int = 1
    dims: int | None = None
    vector_index: str = "int8_hnsw"
    m: int = 16
    ef_construction: int = 200
    encoder: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_range("k1", self.k1, 0.0, 10.0)
        _check_range("b", self.b, 0.0, 1.0)
        _check_range("num_shards", self.num_shards, 1, 1024)
        _check_range("m", self.m, 2, 512)
        _check_range("ef_construction", self.ef_construction, 2, 3200)
        if self.vector_index not in VECTOR_INDEXES:
            raise ConfigurationError(
                f"`vector_index` must be one of {', '.join(f'`{name}`' for name in VECTOR_INDEXES)}: "
                f"got {self.vector_index!r}. Choose one of these."
            )
        if self.dims is not None:
            _check_range("dims", self.dims, 1, MAX_DIMS)
        if (self.dims is None) != (self.encoder is None):
            raise ConfigurationError(
                f"`dims` and `encoder` must be given together: got {self.dims} and {self.encoder}. "
                "Give both for an index with vectors, none for one without."
            )

    @property
    def has_vectors(self) -> bool:
        """Whether passages carry a vector."""
        return self.dims is not None

    def parameters(self) -> dict[str, Any]:
        """Everything that decides results, as JSON values for the manifest."""
        parameters: dict[str, Any] = {
            "k1": self.k1,
            "b": self.b,
            "analyzer": self.analyzer,
            "num_shards": self.num_shards,
            "searched": "title and text",
        }
        if self.has_vectors:
            parameters["vectors"] = {
                "dims": self.dims,
                "similarity": "dot_product",
                "index": self.vector_index,
                "m": self.m,
                "ef_construction": self.ef_construction,
                "encoder": dict(self.encoder or {}),
            }
        return parameters

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> IndexSpec:
        """
        The specification that `parameters` came from.

        Args:
            parameters (`Mapping[str, Any]`):
                Parameters of a manifest.

        Returns:
            `IndexSpec`: The specification.

        Raises:
            `ConfigurationError`: If this release does not know a parameter, or one is missing.
        """
        try:
            vectors = parameters.get("vectors")
            spec = cls(
                **{name: parameters[name] for name in ("k1", "b", "analyzer", "num_shards")},
                **(
                    {}
                    if vectors is None
                    else {
                        **{name: vectors[name] for name in ("dims", "m", "ef_construction", "encoder")},
                        "vector_index": vectors["index"],
                    }
                ),
            )
            known = spec.parameters() == dict(parameters)
        except (KeyError, TypeError, AttributeError):
            known = False
        if not known:
            raise ConfigurationError(
                f"`parameters` must be those of an Elasticsearch index of this release: got {parameters!r}. "
                "Rebuild the index."
            )
        return spec


def index_body(spec: IndexSpec, meta: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """
    Body that creates an index ready to be filled: no refresh and no replicas until it is complete.

    Args:
        spec (`IndexSpec`):
            What was decided.
        meta (`Mapping[str, Any]`, *optional*):
            Facts for `_meta`. An index under construction has none, so that nobody opens it.

    Returns:
        `dict[str, Any]`: Settings and mappings.
    """
    settings = {
        "number_of_shards": spec.num_shards,
        "number_of_replicas": 0,
        "refresh_interval": "-1",
        "codec": "best_compression",
        "similarity": {_SIMILARITY: {"type": "BM25", "k1": spec.k1, "b": spec.b}},
    }
    mappings = {"dynamic": "strict", "properties": _properties(spec)}
    if meta is not None:
        mappings["_meta"] = {META_KEY: dict(meta)}
    return {"settings": {"index": settings}, "mappings": mappings}


def mapping_differences(mappings: Mapping[str, Any], spec: IndexSpec) -> list[str]:
    """
    Where the mapping of an index is not the one a specification asks for.

    Args:
        mappings (`Mapping[str, Any]`):
            `mappings` as the server reports them.
        spec (`IndexSpec`):
            What was decided.

    Returns:
        `list[str]`: One line per field or setting that differs; empty if none does.
    """
    wanted, found = _properties(spec), mappings.get("properties", {})
    lines = []
    if mappings.get("dynamic") != "strict":
        lines.append(f"`dynamic` is {mappings.get('dynamic')!r}, not 'strict'")
    for field in sorted(wanted.keys() | found.keys()):
        expected, actual = _flat(wanted.get(field, {})), _flat(found.get(field, {}))
        if field not in wanted:
            lines.append(f"field `{field}` is unknown")
        elif field not in found:
            lines.append(f"field `{field}` is missing")
        else:
            # The server adds defaults it was not given; what it was given must be there unchanged.
            changed = {name: actual.get(name) for name, value in expected.items() if actual.get(name) != value}
            lines += [
                f"field `{field}` has {name} {value!r}, not {expected[name]!r}" for name, value in changed.items()
            ]
    return lines


def similarity_differences(settings: Mapping[str, Any], spec: IndexSpec) -> list[str]:
    """
    Where the settings of an index are not the ones a specification asks for.

    Args:
        settings (`Mapping[str, Any]`):
            `settings.index` as the server reports them.
        spec (`IndexSpec`):
            What was decided.

    Returns:
        `list[str]`: One line per setting that differs; empty if none does.
    """
    similarity = settings.get("similarity", {}).get(_SIMILARITY, {})
    found = {name: similarity.get(name) for name in ("k1", "b")} | {"num_shards": settings.get("number_of_shards")}
    wanted = {"k1": spec.k1, "b": spec.b, "num_shards": spec.num_shards}
    return [
        f"`{name}` is {found[name]}, not {wanted[name]}"
        for name in wanted
        if found[name] is None or float(found[name]) != float(wanted[name])
    ]


def index_facts(
    spec: IndexSpec, *, corpus_name: str, corpus_sha256: str, num_passages: int, server_version: str
) -> dict[str, Any]:
    """
    Manifest of a finished index, as far as the index itself carries it.

    Args:
        spec (`IndexSpec`):
            What was decided.
        corpus_name (`str`):
            Name of the corpus.
        corpus_sha256 (`str`):
            Hash of its passages, from `CorpusDigest`.
        num_passages (`int`):
            Number of its passages.
        server_version (`str`):
            Version of the server that built it.

    Returns:
        `dict[str, Any]`: The fields `META_FIELDS`.
    """
    facts = {
        "schema_version": SCHEMA_VERSION,
        "backend": BACKEND,
        "corpus_name": corpus_name,
        "corpus_sha256": corpus_sha256,
        "num_passages": num_passages,
        "library": "elasticsearch",
        "library_version": server_version,
        "parameters": spec.parameters(),
    }
    return {**facts, "index_id": index_id(facts)}


def meta_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """
    The part of a manifest that an index carries in `_meta`.

    Args:
        manifest (`Mapping[str, Any]`):
            Complete manifest.

    Returns:
        `dict[str, Any]`: Fields that tell what the index answers.
    """
    return {name: manifest[name] for name in META_FIELDS}


def _properties(spec: IndexSpec) -> dict[str, Any]:
    """Fields of a document. Words are searched in `contents` alone, into which title and text are copied."""
    stored = {"type": "text", "index": False, "copy_to": ["contents"]}
    properties: dict[str, Any] = {
        "id": {"type": "keyword", "index": False, "doc_values": False},
        "id_order": {"type": "keyword", "index": False},
        "pid": {"type": "integer"},
        "title": dict(stored),
        "text": dict(stored),
        "contents": {"type": "text", "analyzer": spec.analyzer, "similarity": _SIMILARITY},
    }
    if spec.has_vectors:
        properties["vector"] = {
            "type": "dense_vector",
            "dims": spec.dims,
            "element_type": "float",
            "index": True,
            "similarity": "dot_product",
            "index_options": {"type": spec.vector_index, "m": spec.m, "ef_construction": spec.ef_construction},
        }
    return properties


def _flat(field: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a field with nested ones under dotted names, in one spelling."""
    flat: dict[str, Any] = {}
    for name, value in field.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": entry for inner, entry in value.items()}
        else:
            flat[name] = [value] if name == "copy_to" and isinstance(value, str) else value
    # What holds for a field that does not say otherwise, and is therefore left out of the server's report.
    flat.setdefault("index", True)
    flat.setdefault("doc_values", True)
    if flat.get("type") == "dense_vector":
        flat.setdefault("element_type", "float")
    return flat


def _check_range(name: str, value: float, low: float, high: float) -> None:
    """Raise unless `value` is a number in the range; counts are given as integers."""
    is_number = isinstance(value, int if isinstance(low, int) else (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ConfigurationError(f"`{name}` must lie in [{low}, {high}]: got {value!r}. Choose another value.")
