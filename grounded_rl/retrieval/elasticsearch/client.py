"""
One connection to a server: what it may be, how requests are sent, and what every failure means to us.

The official client is used for its transport alone: it tries once, never on its own again, since it would sleep after
broken connections only and not after refusals. A request ends in an answer or in one of the types of
`grounded_rl.errors`.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from grounded_rl.errors import (
    BackendTimeoutError,
    BackendUnavailableError,
    BadResponseError,
    ConfigurationError,
    RetrievalError,
)
from grounded_rl.import_utils import require
from grounded_rl.retrieval.elasticsearch.failures import (
    API_KEY_VARIABLE,
    OLDEST_SERVER,
    ForeignServerError,
    status_error,
)

_DEFAULT_PORTS = {"http": 80, "https": 443}
_LOGGER = logging.getLogger(__name__)
_FINGERPRINT = re.compile(r"(?:[0-9a-fA-F]{2}:?){31}[0-9a-fA-F]{2}")


@dataclass(frozen=True, slots=True)
class ElasticsearchSettings:
    """
    How a server is reached and how hard it is pressed.

    Args:
        url (`str`):
            Address of the server or of what stands before it, for instance `"https://search.example.org:9200"`.
        ca_certs (`str`, *optional*):
            File of certificate authorities to trust instead of the system's.
        ca_fingerprint (`str`, *optional*):
            SHA-256 fingerprint of the server's certificate, as Elasticsearch prints it at its first start.
        verify_certs (`bool`, *optional*, defaults to `True`):
            Check the server's certificate. Without it anyone between can read the API key and forge passages.
        timeout (`float`, *optional*, defaults to `30.0`):
            Seconds for one request.
        patience (`float`, *optional*, defaults to `120.0`):
            Seconds a search may take with all its tries, waits for a slot included.
        max_in_flight (`int`, *optional*, defaults to 16):
            Most requests on their way at once; fewer when the server refuses work.
        max_batch_size (`int`, *optional*, defaults to 64):
            Most searches in one request.

    Raises:
        `ConfigurationError`: If a value cannot be used.
    """

    url: str
    ca_certs: str | None = None
    ca_fingerprint: str | None = None
    verify_certs: bool = True
    timeout: float = 30.0
    patience: float = 120.0
    max_in_flight: int = 16
    max_batch_size: int = 64

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if (
            parts.scheme not in _DEFAULT_PORTS
            or not parts.hostname
            or parts.query
            or parts.fragment
            or _port(self.url) < 1
        ):
            raise ConfigurationError(
                f"`url` must be the address of a server, `http(s)://host:port`: got {_redacted(self.url)!r}. "
                "Correct the address."
            )
        if parts.username or parts.password:
            raise ConfigurationError(
                f"`url` must not hold a password: got {_redacted(self.url)!r}. "
                f"Put an API key into the environment variable `{API_KEY_VARIABLE}`."
            )
        for name in ("timeout", "patience"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(
                    f"`{name}` must be above 0 seconds: got {getattr(self, name)!r}. Leave it out for the default."
                )
        for name in ("max_in_flight", "max_batch_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1024:
                raise ConfigurationError(f"`{name}` must lie in [1, 1024]: got {value!r}. Leave it out.")
        if self.ca_fingerprint is not None and not _FINGERPRINT.fullmatch(self.ca_fingerprint):
            raise ConfigurationError(
                f"`ca_fingerprint` must be a SHA-256 in hexadecimal digits: got {self.ca_fingerprint!r}. "
                "Copy it from the server's first start."
            )

    @property
    def is_encrypted(self) -> bool:
        """Whether requests travel by TLS."""
        return urlsplit(self.url).scheme == "https"


class ElasticsearchClient:
    """
    A pooled connection to one address. Thread-safe.

    Nothing is sent before the first request. The API key is read from the environment variable `ES_API_KEY`.

    Args:
        settings ([`ElasticsearchSettings`]):
            How the server is reached.
        node_class (`type`, *optional*):
            Class of `elastic_transport` that carries requests, for tests.

    Raises:
        `ConfigurationError`: If the API key would travel in the clear to another machine.
        `MissingDependencyError`: If the package `elasticsearch` is not installed.
    """

    def __init__(self, settings: ElasticsearchSettings, *, node_class: type | None = None) -> None:
        self._library = require("elasticsearch", "elasticsearch", needed_by="retrieval_backend: elasticsearch")
        self.settings = settings
        self._compatible_with = 9
        self._client = self._library.Elasticsearch(**_client_options(settings, node_class))

    def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        lines: Iterable[Mapping[str, Any]] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """
        One request, tried once.

        Args:
            method (`str`):
                HTTP method.
            path (`str`):
                Path, quoted.
            params (`Mapping[str, Any]`, *optional*):
                Query parameters.
            body (`Mapping[str, Any]`, *optional*):
                JSON body.
            lines (`Iterable[Mapping[str, Any]]`, *optional*):
                Body of one JSON object per line, instead of `body`.
            timeout (`float`, *optional*):
                Seconds; that of the settings if left out.

        Returns:
            `dict[str, Any]`: Parsed answer.

        Raises:
            `RetrievalError`: For anything but a JSON object with a status of success from Elasticsearch.
        """
        suffix = f"; compatible-with={self._compatible_with}"
        headers = {"accept": f"application/vnd.elasticsearch+json{suffix}"}
        payload: Any = None
        if lines is not None:
            headers["content-type"] = f"application/vnd.elasticsearch+x-ndjson{suffix}"
            payload = list(lines)
        elif body is not None:
            headers["content-type"] = f"application/vnd.elasticsearch+json{suffix}"
            payload = dict(body)
        client = self._client.options(request_timeout=timeout or self.settings.timeout)
        try:
            answer = client.perform_request(method, path, params=params, headers=headers, body=payload).body
        except (self._library.ApiError, self._library.TransportError) as error:
            raise self._translated(error) from error
        if not isinstance(answer, dict):
            raise BadResponseError(
                f"{self.settings.url}{path} must answer a JSON object: got {str(answer)[:120]!r}. Check the address."
            )
        return answer

    def server_version(self, timeout: float | None = None) -> str:
        """
        Version of the server; settles which dialect is spoken with it.

        Args:
            timeout (`float`, *optional*):
                Seconds; that of the settings if left out.

        Returns:
            `str`: For instance `"9.5.0"`.

        Raises:
            `ConfigurationError`: If it is another product, or a version this client cannot talk to; names it.
            `RetrievalError`: If it does not answer.
        """
        try:
            facts = self.request("GET", "/", timeout=timeout)
        except ForeignServerError as error:
            # It refuses our media types or does not call itself Elasticsearch: ask in a way that any server answers.
            facts = self._facts_of_stranger(timeout)
            version = str(facts.get("version", {}).get("number", "unknown"))
            if version.split(".")[0] != "8":
                raise ConfigurationError(
                    f"`url` must be Elasticsearch {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer: got "
                    f"version {version} at {self.settings.url}. Use a newer server, or the embedded backends."
                ) from error
            self._compatible_with = 8
            facts = self.request("GET", "/", timeout=timeout)
        version = facts.get("version", {}).get("number")
        if not isinstance(version, str):
            raise BadResponseError(f"{self.settings.url} must state its version: got {str(facts)[:120]}.")
        return version

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def _facts_of_stranger(self, timeout: float | None) -> dict[str, Any]:
        """What `GET /` says; raises with the name of the product if it is not Elasticsearch."""
        client = self._client.options(request_timeout=timeout or self.settings.timeout)
        try:
            facts = client.perform_request("GET", "/", headers={"accept": "*/*"}).body
        except self._library.UnsupportedProductError as error:
            facts = error.body if isinstance(error.body, dict) else {}
            version = facts.get("version", {}) if isinstance(facts.get("version"), dict) else {}
            product = {"opensearch": "OpenSearch"}.get(str(version.get("distribution")), "another product")
            if product == "another product" and version.get("lucene_version"):
                product = "Elasticsearch before 7.14 or a copy of it"
            number = version.get("number", "of unknown version")
            raise ConfigurationError(
                f"`url` must be Elasticsearch {OLDEST_SERVER[0]}.{OLDEST_SERVER[1]} or newer: "
                f"got {product} {number} at {self.settings.url}. Use such a server, or the embedded backends."
            ) from error
        except (self._library.ApiError, self._library.TransportError) as error:
            raise self._translated(error) from error
        return facts if isinstance(facts, dict) else {}

    def _translated(self, error: Exception) -> RetrievalError:
        """Our type for an exception of the client."""
        library, url = self._library, self.settings.url
        if isinstance(error, library.UnsupportedProductError):
            return ForeignServerError(
                f"`url` must be Elasticsearch: got an answer without its product header from {url}. Check the address."
            )
        if isinstance(error, library.ApiError):
            return status_error(error.meta.status, error.body, error.meta.headers, url)
        if isinstance(error, library.ConnectionTimeout):
            return BackendTimeoutError(f"Elasticsearch at {url} did not answer in time.")
        if isinstance(error, library.SSLError):
            return RetrievalError(
                f"The certificate of {url} was not accepted: {_first_line(error)} Set `ca_certs` or `ca_fingerprint`."
            )
        if isinstance(error, library.ConnectionError):
            return BackendUnavailableError(f"Elasticsearch at {url} could not be reached: {_first_line(error)}")
        if isinstance(error, library.SerializationError):
            # A body that was cut on the way: nothing of it can be used, but the next one may be whole.
            return BackendUnavailableError(f"The answer of {url} could not be read: {_first_line(error)[:160]}")
        return RetrievalError(f"The request to {url} failed: {_first_line(error)}")


def _client_options(settings: ElasticsearchSettings, node_class: type | None) -> dict[str, Any]:
    """Arguments of the official client."""
    options: dict[str, Any] = {
        "hosts": [_with_port(settings.url)],
        "request_timeout": settings.timeout,
        "connections_per_node": settings.max_in_flight + 2,
        "max_retries": 0,
        "retry_on_timeout": False,
        "retry_on_status": (),
    }
    if node_class is not None:
        options["node_class"] = node_class
    if settings.is_encrypted:
        options["verify_certs"] = settings.verify_certs
        if not settings.verify_certs:
            _LOGGER.warning(
                "The certificate of %s is not checked (`verify_certs=False`): the API key and the passages are not "
                "protected.",
                settings.url,
            )
            options["ssl_show_warn"] = False
        if settings.ca_certs is not None:
            options["ca_certs"] = settings.ca_certs
        if settings.ca_fingerprint is not None:
            options["ssl_assert_fingerprint"] = settings.ca_fingerprint.replace(":", "")
    api_key = os.environ.get(API_KEY_VARIABLE)
    if api_key:
        if not settings.is_encrypted and not _is_loopback(settings.url):
            raise ConfigurationError(
                f"`url` must be `https` when `{API_KEY_VARIABLE}` is set: got {settings.url!r}, which would send the "
                "key in the clear. Use `https`, or unset the variable."
            )
        options["api_key"] = api_key
    return options


def _is_loopback(url: str) -> bool:
    """Whether an address stays on this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _port(url: str) -> int:
    """Port of an address, given or implied; 0 for one that is none."""
    parts = urlsplit(url)
    try:
        return _DEFAULT_PORTS[parts.scheme] if parts.port is None else parts.port
    except ValueError:
        return 0


def _with_port(url: str) -> str:
    """An address as the official client wants it: with its port, and without a slash at its end."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else parts.hostname
    return f"{parts.scheme}://{host}:{_port(url)}{parts.path.rstrip('/')}"


def _redacted(url: str) -> str:
    """An address without what stands before its `@`."""
    return re.sub(r"//[^/@]*@", "//…@", url)


def _first_line(error: Exception) -> str:
    """First line of an exception's message."""
    return str(error).partition("\n")[0]
