"""
The connection to a retrieval server: one request, its whole answer within a deadline, and a type for every failure.
"""

from __future__ import annotations

import ipaddress
import json
import os
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from grounded_rl.errors import (
    BackendOverloadedError,
    BackendTimeoutError,
    BackendUnavailableError,
    BadResponseError,
    ConfigurationError,
    IndexMismatchError,
    RetrievalError,
)
from grounded_rl.import_utils import require
from grounded_rl.retrieval.wire import RETRIEVE_PATH, TOKEN_VARIABLE

if TYPE_CHECKING:
    import httpx

_MAX_CONNECT_S = 5.0
_MAX_CONNECTIONS = 64
_MAX_RESPONSE_BYTES = 256 * 1024 * 1024
# Shorter than the five seconds after which common servers drop idle connections, so that none is used as it closes.
_KEEPALIVE_S = 4.0
_ERRORS: Final = {
    kind.__name__: kind
    for kind in (BackendUnavailableError, BackendTimeoutError, BadResponseError, IndexMismatchError, RetrievalError)
}


class Connection:
    """
    Pooled connections to one server. Thread-safe.

    Args:
        url (`str`):
            Address of the server; a trailing `/retrieve` is ignored.
        token (`str`, *optional*):
            Bearer token. Taken from the environment variable `GROUNDED_RL_SERVER_TOKEN` if left out.
        ca_certs (`str`, *optional*):
            File of certificate authorities to trust for `https` instead of the system's.
    """

    def __init__(self, url: str, *, token: str | None = None, ca_certs: str | None = None):
        require("httpx", "serve", needed_by="a retrieval server")
        import httpx

        self.url = _server_address(url)
        """Address without a trailing slash."""
        token = (os.environ.get(TOKEN_VARIABLE, "") if token is None else token).strip()
        if not (token.isascii() and token.isprintable()):
            raise ConfigurationError("`token` must be printable ASCII: got other characters. Choose another token.")
        self._client: httpx.Client = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=_MAX_CONNECTIONS, keepalive_expiry=_KEEPALIVE_S),
            trust_env=not is_loopback(httpx.URL(self.url).host),  # a proxy cannot reach our own loopback
            verify=_tls_context(ca_certs) if ca_certs else True,
        )
        # For callers that never close what they open, as they need not with an embedded index.
        weakref.finalize(self, self._client.close)

    def exchange(self, method: str, path: str, *, timeout: float, payload: object = None) -> Answer:
        """
        Send one request and wait for its whole answer.

        Args:
            method (`str`):
                HTTP method.
            path (`str`):
                Path below the address of the server.
            timeout (`float`):
                Seconds, from waiting for a connection to the last byte of the answer.
            payload (`object`, *optional*):
                Sent as JSON.

        Returns:
            `Answer`: The answer, whatever its status.

        Raises:
            `RetrievalError`: If there is none, or only a part of it.
        """
        import httpx

        where = f"The retrieval server at {self.url}"
        deadline = time.monotonic() + timeout
        body = None if payload is None else json.dumps(payload).encode("ascii")
        request = self._client.build_request(
            method,
            self.url + path,
            content=body,
            headers={"Content-Type": "application/json"} if body else None,
            timeout=httpx.Timeout(timeout, connect=min(timeout, _MAX_CONNECT_S)),
        )
        try:
            response = self._client.send(request, stream=True)
            try:
                content = _read(response, deadline, where)
            finally:
                response.close()
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise BackendUnavailableError(f"{where} cannot be reached: {_reason(error)}") from error
        except httpx.TimeoutException as error:
            raise BackendTimeoutError(f"{where} did not answer in {timeout:g} seconds: {_reason(error)}") from error
        except httpx.DecodingError as error:
            raise BadResponseError(f"{where} sent an answer that cannot be unpacked: {_reason(error)}") from error
        except httpx.TransportError as error:
            raise BackendUnavailableError(f"{where} broke the connection: {_reason(error)}") from error
        except RuntimeError as error:
            if not self._client.is_closed:
                raise
            raise RetrievalError(f"The connection to {self.url} was closed. Connect again.") from error
        return Answer(response.status_code, dict(response.headers), content, where)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class Answer:
    """Status, headers and body of a response."""

    def __init__(self, status: int, headers: Mapping[str, str], content: bytes, where: str):
        self.status = status
        self.headers = headers
        self._content = content
        self._where = where

    @property
    def is_unknown_path(self) -> bool:
        """Whether the server has no such path."""
        return self.status in (404, 405, 501)

    @property
    def detail(self) -> str:
        """What the server said about a failure, on one line."""
        fields = self._fields()
        text = str(fields["detail"]) if "detail" in fields else self._content.decode("utf-8", "replace")
        text = " ".join(text.split())
        return (text if len(text) <= 300 else text[:300] + "…") or "no explanation"

    def json(self) -> object:
        """The body; raises `BadResponseError` if it is not JSON."""
        try:
            return json.loads(self._content)
        except (ValueError, RecursionError) as error:
            raise BadResponseError(
                f"{self._where} must answer JSON: got {self.detail!r}. Check its address."
            ) from error

    def fail(self) -> NoReturn:
        """Raise what the status means."""
        said = f"(status {self.status}): {self.detail}"
        if self.status in (401, 403):
            raise RetrievalError(
                f"{self._where} refused the token {said}. Set the environment variable `{TOKEN_VARIABLE}`."
            )
        if self.status < 400 or self.is_unknown_path:
            raise BadResponseError(f"{self._where} is no retrieval server at this address {said}. Check the URL.")
        kind = _ERRORS.get(str(self._fields().get("error")))
        if kind is not None:
            raise kind(f"{self._where} could not search {said}")
        if self.status in (429, 503):
            raise BackendOverloadedError(f"{self._where} asked for fewer requests {said}", self._retry_after())
        if self.status in (408, 504):
            raise BackendTimeoutError(f"{self._where} found no answer in time {said}")
        if self.status >= 500:
            # Servers that do not tell kinds of failures apart answer 500 for an exhausted GPU as well as for a bug.
            raise BackendUnavailableError(f"{self._where} failed {said}")
        raise RetrievalError(f"{self._where} refused the request {said}")

    def _retry_after(self) -> float | None:
        """Seconds of the header `Retry-After`; `None` if there is none, or a date."""
        try:
            return max(float(self.headers.get("retry-after", "")), 0.0)
        except ValueError:
            return None

    def _fields(self) -> Mapping[str, object]:
        """The body, if it is an object."""
        try:
            payload = json.loads(self._content)
        except (ValueError, RecursionError):
            return {}
        return payload if isinstance(payload, Mapping) else {}


def _read(response: httpx.Response, deadline: float, where: str) -> bytes:
    """The whole body, unless it takes too long or too much memory."""
    chunks, size = [], 0
    for chunk in response.iter_bytes():
        chunks.append(chunk)
        size += len(chunk)
        if time.monotonic() > deadline:
            raise BackendTimeoutError(f"{where} was still sending its answer when the time was up.")
        if size > _MAX_RESPONSE_BYTES:
            raise BadResponseError(f"{where} sent more than {_MAX_RESPONSE_BYTES:,} bytes. Ask for fewer passages.")
    return b"".join(chunks)


def _server_address(url: str) -> str:
    """The address without a trailing slash or `/retrieve`; raises `ConfigurationError` if it cannot be one."""
    import httpx

    try:
        parsed = httpx.URL(url)
        is_usable = parsed.scheme in ("http", "https") and bool(parsed.host)
    except (httpx.InvalidURL, TypeError):
        is_usable = False
    if not is_usable:
        raise ConfigurationError(
            f"`url` must be the http or https address of a retrieval server: got {url!r}. "
            "Write for instance `http://localhost:8000`."
        )
    if parsed.userinfo or parsed.query or parsed.fragment:
        # Not repeated in the message: it may hold a password.
        raise ConfigurationError(
            "`url` must have no user, query or fragment: got one that has. "
            f"Pass a token by the environment variable `{TOKEN_VARIABLE}`."
        )
    return str(parsed).rstrip("/").removesuffix(RETRIEVE_PATH).rstrip("/")


def is_loopback(host: str) -> bool:
    """
    Whether a host is this machine by its loopback interface.

    Args:
        host (`str`):
            Name or address, without a port.

    Returns:
        `bool`: `False` for any name but `localhost` and names below it.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _tls_context(ca_certs: str) -> Any:
    """A context that trusts the authorities of a file."""
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_certs)
    except OSError as error:
        raise ConfigurationError(
            f"`ca_certs` must be a readable file of PEM certificates: got `{ca_certs}` ({error.strerror or error})."
        ) from error


def _reason(error: Exception) -> str:
    """What an exception of the client says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__
