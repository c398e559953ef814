"""`grounded-rl index build` and `index combine`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grounded_rl.cli.index.progress import CorpusProgress
from grounded_rl.errors import ConfigurationError

if TYPE_CHECKING:
    from grounded_rl.retrieval.dense import DenseOptions

CORPUS_HELP = (
    'rows {"id", "title", "text"} or {"id", "contents"}: JSON Lines (plain, .gz, .zst), .parquet, '
    "or datasets:NAME#SPLIT"
)

_WRITER_HEAP_MB = 128
_MIN_HEAP_MB_PER_THREAD = 32

_ENCODER_OPTIONS = (
    "encoder",
    "query_prefix",
    "passage_prefix",
    "pooling",
    "max_length",
    "device",
    "dtype",
    "batch_size",
)
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "bm25": ("threads",),
    "dense": ("kind", "nlist", "nprobe", "vectors", *_ENCODER_OPTIONS),
    "elasticsearch": (
        *("url", "alias", "vector_index", "k1", "b", "analyzer", "shards", "bulk_threads"),
        *("ca_certs", "ca_fingerprint", "no_verify_certs"),
        *_ENCODER_OPTIONS,
    ),
}
"""Options that only some backends take, by the backend."""


def add_build_options(parser: argparse.ArgumentParser) -> None:
    """
    Declare the options of `index build`. Those of one backend have no default, so that misplaced ones are noticed.

    Args:
        parser (`argparse.ArgumentParser`):
            Parser of the action.
    """
    parser.add_argument("--corpus", required=True, metavar="FILE", help=CORPUS_HELP)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--backend", default="bm25", help=f"{', '.join(_OPTIONS)} (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="continue an unfinished build if there is one")
    parser.add_argument("--overwrite", action="store_true", help="replace an index that is already there")

    bm25 = parser.add_argument_group("bm25")
    bm25.add_argument("--threads", type=int, help="threads that write (default: 1)")

    encoder = parser.add_argument_group("encoder (dense; elasticsearch with vectors)")
    encoder.add_argument("--encoder", metavar="MODEL", help="sentence-transformers or transformers model, or minilm")
    encoder.add_argument("--query-prefix", metavar="TEXT", help="before every query (default: the model's own)")
    encoder.add_argument("--passage-prefix", metavar="TEXT", help="before every passage (default: the model's own)")
    encoder.add_argument("--pooling", help="mean, cls or lasttoken (default: the model's own)")
    encoder.add_argument("--max-length", type=int, metavar="N", help="tokens that are read (default: at most 256)")
    encoder.add_argument("--device", help="device of the encoder, for instance cuda:0 (default: cpu)")
    encoder.add_argument("--dtype", help="float32, bfloat16 or float16 (default: float32)")
    encoder.add_argument("--batch-size", type=int, metavar="N", help="texts encoded at once (default: 32)")

    dense = parser.add_argument_group("dense")
    dense.add_argument("--kind", help="Flat, IVF,SQ8 or HNSW (default: Flat below a million passages, else IVF,SQ8)")
    dense.add_argument("--nlist", type=int, metavar="N", help="lists of IVF,SQ8 (default: by the number of passages)")
    dense.add_argument("--nprobe", type=int, metavar="N", help="lists a query looks into (default: by nlist)")
    dense.add_argument("--vectors", help="how vectors are stored: float32 or float16 (default: float32)")

    server = parser.add_argument_group("elasticsearch (API key from the environment: ES_API_KEY)")
    server.add_argument("--url", help="address of the server")
    server.add_argument("--alias", help="name of the index there (default: the name of the folder)")
    server.add_argument("--vector-index", help="hnsw, int8_hnsw, int4_hnsw or bbq_hnsw (default: int8_hnsw)")
    server.add_argument("--k1", type=float, help="saturation of BM25 (default: 0.9)")
    server.add_argument("--b", type=float, help="length normalisation of BM25 (default: 0.4)")
    server.add_argument("--analyzer", help="built-in analyzer (default: english)")
    server.add_argument("--shards", type=int, metavar="N", help="primary shards (default: 1)")
    server.add_argument("--bulk-threads", type=int, metavar="N", help="requests on their way at once (default: 1)")
    server.add_argument("--ca-certs", metavar="FILE", help="certificate authorities to trust")
    server.add_argument("--ca-fingerprint", metavar="HEX", help="SHA-256 fingerprint of the server's certificate")
    server.add_argument("--no-verify-certs", action="store_const", const=True, help="do not check the certificate")


def run_build(args: argparse.Namespace) -> int:
    """
    Build an index and say where it is.

    Args:
        args (`argparse.Namespace`):
            Options of `add_build_options`.

    Returns:
        `int`: Exit status.
    """
    builders: Mapping[str, Callable[[argparse.Namespace, CorpusProgress], dict[str, Any]]] = {
        "bm25": _build_bm25,
        "dense": _build_dense,
        "elasticsearch": _build_elasticsearch,
    }
    _check_options(args)
    started = time.perf_counter()
    with CorpusProgress("Indexing") as progress:
        manifest = builders[args.backend](args, progress)
    seconds = time.perf_counter() - started
    print(
        f"Indexed {manifest['num_passages']:,} passages in {seconds:.1f} s: {args.out} "
        f"({manifest['backend']}, {megabytes(manifest['files'])}, id {manifest['index_id']})"
    )
    return 0


def run_combine(args: argparse.Namespace) -> int:
    """
    Write a hybrid index.

    Args:
        args (`argparse.Namespace`):
            `indexes`, `out`, `fuse`, `weights`, `window`, `overwrite`.

    Returns:
        `int`: Exit status.
    """
    from grounded_rl.retrieval.hybrid import combine_indexes

    manifest = combine_indexes(
        args.indexes,
        args.out,
        fuse=args.fuse,
        weights=args.weights,
        window=args.window,
        overwrite=args.overwrite,
    )
    backends = " + ".join(member["backend"] for member in manifest["parameters"]["members"])
    print(f"Combined {backends} over {manifest['num_passages']:,} passages: {args.out} (id {manifest['index_id']})")
    return 0


def megabytes(files: Mapping[str, Mapping[str, int]]) -> str:
    """
    Total size of the files of a manifest.

    Args:
        files (`Mapping[str, Mapping[str, int]]`):
            `files` of a manifest.

    Returns:
        `str`: In MB with one decimal.
    """
    return f"{sum(entry['bytes'] for entry in files.values()) / 1e6:.1f} MB"


def _check_options(args: argparse.Namespace) -> None:
    """Raise for an unknown backend, or an option that belongs to another one."""
    if args.backend not in _OPTIONS:
        raise ConfigurationError(
            f"`backend` must be one of {', '.join(f'`{name}`' for name in _OPTIONS)}: got {args.backend!r}. "
            "Choose one of these; hybrid indexes are made with `grounded-rl index combine`."
        )
    for name in sorted({name for names in _OPTIONS.values() for name in names}):
        if getattr(args, name) is not None and name not in _OPTIONS[args.backend]:
            takers = [backend for backend, names in _OPTIONS.items() if name in names]
            raise ConfigurationError(
                f"`--{name.replace('_', '-')}` must be used with `--backend {'` or `'.join(takers)}`: "
                f"got `{args.backend}`. Leave it out."
            )


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options that were given, so that defaults stay where they are defined."""
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _build_bm25(args: argparse.Namespace, progress: CorpusProgress) -> dict[str, Any]:
    """Build an embedded BM25 index."""
    from grounded_rl.retrieval.bm25 import build_bm25_index

    threads = 1 if args.threads is None else args.threads
    return build_bm25_index(
        args.corpus,
        args.out,
        overwrite=args.overwrite,
        resume=args.resume,
        writer_heap_mb=max(_WRITER_HEAP_MB, _MIN_HEAP_MB_PER_THREAD * threads),
        num_threads=threads,
        on_progress=progress.update,
    )


def _build_dense(args: argparse.Namespace, progress: CorpusProgress) -> dict[str, Any]:
    """Build a dense index."""
    from grounded_rl.retrieval.dense import DenseOptions, build_dense_index

    if args.encoder is None:
        raise ConfigurationError("`--encoder` must name a model: got none. Try `--encoder minilm`.")
    options = DenseOptions(**_given(args, "kind", "nlist", "nprobe", "vectors"))
    encoder = _load_encoder(args)
    _say_estimate(args, options, encoder.num_dims)
    return build_dense_index(
        args.corpus,
        args.out,
        encoder,
        options=options,
        overwrite=args.overwrite,
        resume=args.resume,
        on_progress=progress.update,
        on_stage=progress.stage,
    )


def _build_elasticsearch(args: argparse.Namespace, progress: CorpusProgress) -> dict[str, Any]:
    """Write an index on a server."""
    from grounded_rl.retrieval.elasticsearch import ElasticsearchSettings, IndexSpec, WriteLimits
    from grounded_rl.retrieval.elasticsearch_build import ElasticsearchTarget, build_elasticsearch_index

    if args.url is None:
        raise ConfigurationError("`--url` must be the address of the server: got none. Add it.")
    encoder = None if args.encoder is None else _load_encoder(args)
    choices = _given(args, "k1", "b", "analyzer", "vector_index")
    if args.shards is not None:
        choices["num_shards"] = args.shards
    if encoder is not None:
        choices |= {"dims": encoder.num_dims, "encoder": encoder.settings.as_dict()}
    target = ElasticsearchTarget(
        ElasticsearchSettings(
            args.url, **_given(args, "ca_certs", "ca_fingerprint"), verify_certs=not args.no_verify_certs
        ),
        args.out.name if args.alias is None else args.alias,
        IndexSpec(**choices),
        WriteLimits(num_threads=1 if args.bulk_threads is None else args.bulk_threads),
    )
    return build_elasticsearch_index(
        args.corpus,
        args.out,
        target,
        encoder=encoder,
        overwrite=args.overwrite,
        resume=args.resume,
        on_progress=progress.update,
        on_stage=progress.stage,
    )


def _load_encoder(args: argparse.Namespace) -> Any:
    """The encoder that was asked for; says what decides its vectors."""
    from grounded_rl.retrieval.encoders import load_encoder

    names = ("query_prefix", "passage_prefix", "pooling", "max_length", "device", "dtype")
    encoder = load_encoder(args.encoder, **_given(args, *names))
    if args.batch_size is not None:
        if args.batch_size < 1:
            raise ConfigurationError(f"`--batch-size` must be at least 1: got {args.batch_size}. Leave it out for 32.")
        encoder.batch_size = args.batch_size
    settings = encoder.settings
    print(
        f"Encoder {settings.model}: {encoder.num_dims} dimensions, {settings.pooling} pooling, "
        f"{settings.max_length} tokens, query prefix {settings.query_prefix!r}, "
        f"passage prefix {settings.passage_prefix!r}"
    )
    return encoder


def _say_estimate(args: argparse.Namespace, options: DenseOptions, num_dims: int) -> None:
    """Print what the index will need, before it is begun."""
    from grounded_rl.retrieval.corpus_rows import estimate_num_rows
    from grounded_rl.retrieval.dense.lists import default_kind
    from grounded_rl.retrieval.plan import dense_estimate, gibibytes

    expected = estimate_num_rows(args.corpus)
    if expected is None:
        return
    kind = options.kind or default_kind(expected)
    needed = dense_estimate(kind, expected, num_dims, vector_bytes=2 if options.vectors == "float16" else 4)
    print(
        f"About {expected:,} passages, {kind}: {gibibytes(needed.build_memory)} of memory to build, "
        f"{gibibytes(needed.search_memory)} to search, {gibibytes(needed.disk)} of disk"
    )
