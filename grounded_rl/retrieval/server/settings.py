"""How a retrieval server listens, batches and refuses."""

from __future__ import annotations

from dataclasses import dataclass, field

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.connection import is_loopback
from grounded_rl.retrieval.wire import TOKEN_VARIABLE

_MIN_TOKEN_CHARACTERS = 16


@dataclass(frozen=True)
class ServerSettings:
    """
    Everything a retrieval server can be told.

    Args:
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to listen on. Any but a loopback address needs a token.
        port (`int`, *optional*, defaults to 8000):
            Port to listen on; 0 takes a free one.
        token (`str`, *optional*):
            Bearer token every request must carry, but those that ask for health and readiness.
        allow_unauthenticated (`bool`, *optional*, defaults to `False`):
            Serve an address other than loopback to anyone who can reach it.
        default_k (`int`, *optional*, defaults to 3):
            Passages per query for a request without `topk`.
        max_k (`int`, *optional*, defaults to 100):
            Most passages per query.
        max_queries (`int`, *optional*, defaults to 512):
            Most queries per request.
        max_body_bytes (`int`, *optional*, defaults to 8 MiB):
            Largest request.
        max_batch (`int`, *optional*, defaults to 256):
            Most queries searched in one call of the retriever. 1 searches every query on its own.
        max_wait_ms (`float`, *optional*, defaults to 2.0):
            Milliseconds the first request of a batch waits for others.
        queue (`int`, *optional*, defaults to 4096):
            Most queries that wait; a request beyond them is answered 503 with `Retry-After`.
        workers (`int`, *optional*, defaults to 1):
            Batches searched at once. More than one needs a retriever that is thread-safe.
        request_timeout (`float`, *optional*, defaults to 60.0):
            Seconds after which a request is answered 504.
        drain_timeout (`float`, *optional*, defaults to 30.0):
            Seconds that requests may take to finish when the server is told to stop.
        tls_cert (`str`, *optional*):
            PEM file with the server's certificate; serves https.
        tls_key (`str`, *optional*):
            PEM file with its key.
        version (`str`, *optional*, defaults to `"unknown"`):
            What `/info` says about the release that serves.

    Raises:
        `ConfigurationError`: If a value is out of range, or strangers could search.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = field(default=None, repr=False)
    allow_unauthenticated: bool = False
    default_k: int = 3
    max_k: int = 100
    max_queries: int = 512
    max_body_bytes: int = 8 * 1024 * 1024
    max_batch: int = 256
    max_wait_ms: float = 2.0
    queue: int = 4096
    workers: int = 1
    request_timeout: float = 60.0
    drain_timeout: float = 30.0
    tls_cert: str | None = None
    tls_key: str | None = None
    version: str = "unknown"

    def __post_init__(self):
        counts = ("default_k", "max_k", "max_queries", "max_body_bytes", "max_batch", "queue", "workers")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigurationError(f"`{name}` must be at least 1: got {getattr(self, name)}. Raise it.")
        for name, least in (("max_wait_ms", 0.0), ("request_timeout", 0.001), ("drain_timeout", 0.0)):
            if not getattr(self, name) >= least:
                raise ConfigurationError(f"`{name}` must be at least {least:g}: got {getattr(self, name)}. Raise it.")
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"`port` must be from 0 to 65535: got {self.port}. Choose another.")
        if self.default_k > self.max_k:
            raise ConfigurationError(
                f"`default_k` must be at most `max_k`, {self.max_k}: got {self.default_k}. Raise `max_k`."
            )
        if self.queue < self.max_queries:
            raise ConfigurationError(
                f"`queue` must hold one request of `max_queries`, {self.max_queries}, queries: got {self.queue}. "
                "Raise it, or lower `max_queries`."
            )
        if self.tls_key is not None and self.tls_cert is None:
            raise ConfigurationError("`tls_cert` must be given with `tls_key`: got none. Name the certificate.")
        self._check_access()

    def _check_access(self) -> None:
        """Raise if the token is weak, or strangers could search."""
        if self.token is not None and len(self.token) < _MIN_TOKEN_CHARACTERS:
            raise ConfigurationError(
                f"`{TOKEN_VARIABLE}` must have at least {_MIN_TOKEN_CHARACTERS} characters: got {len(self.token)}. "
                "Make one with `python -c 'import secrets; print(secrets.token_urlsafe())'`."
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise ConfigurationError(f"`{TOKEN_VARIABLE}` must be printable ASCII: got other characters. Change it.")
        if self.token is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ConfigurationError(
                f"`host` must be a loopback address while there is no token: got {self.host!r}. Set the environment "
                f"variable `{TOKEN_VARIABLE}`, or pass `--allow-unauthenticated` on a network you trust."
            )
