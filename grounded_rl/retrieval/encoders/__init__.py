"""
Text to vectors, with a record of what decides them.

`load_encoder` makes an encoder from a model; `load_recorded_encoder` makes the one an index was built with, and
refuses any other.
"""

from grounded_rl.retrieval.encoders.base import (
    PROBES,
    Encoder,
    EncoderSettings,
    check_probe,
    encode_checked,
    keep_probe,
    passage_text,
    probe,
)
from grounded_rl.retrieval.encoders.sentence import (
    DTYPES,
    PACKAGED_MODELS,
    POOLINGS,
    SentenceEncoder,
    load_encoder,
    load_recorded_encoder,
)

__all__ = [
    "DTYPES",
    "PACKAGED_MODELS",
    "POOLINGS",
    "PROBES",
    "Encoder",
    "EncoderSettings",
    "SentenceEncoder",
    "check_probe",
    "encode_checked",
    "keep_probe",
    "load_encoder",
    "load_recorded_encoder",
    "passage_text",
    "probe",
]
