"""Running a retrieval server until it is told to stop."""

from __future__ import annotations

import contextlib
import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from grounded_rl.errors import ConfigurationError
from grounded_rl.import_utils import require
from grounded_rl.retrieval.server.app import create_app
from grounded_rl.retrieval.server.index import ServedIndex
from grounded_rl.retrieval.server.settings import ServerSettings

_BACKLOG = 2048
_KEEPALIVE_S = 30


def serve(index: ServedIndex, settings: ServerSettings, *, on_listening: Callable[[str], None] | None = None) -> None:
    """
    Serve an index until the process is interrupted or terminated; requests in progress are finished first.

    Args:
        index ([`ServedIndex`]):
            What is served; opened in the background.
        settings ([`ServerSettings`]):
            Where and how.
        on_listening (`Callable[[str], None]`, *optional*):
            Called with the address once the port is open.

    Raises:
        `ConfigurationError`: If the address cannot be listened on.
        `GroundedRLError`: If the index can never be opened.
    """
    require("uvicorn", "serve", needed_by="grounded-rl serve")
    import uvicorn

    listener = _listen(settings)
    address = _address(listener, settings)
    server: uvicorn.Server

    def stop() -> None:
        server.should_exit = True

    config = uvicorn.Config(
        create_app(index, settings, on_failure=stop),
        log_level="warning",
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=_KEEPALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_timeout),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
    )
    try:
        server = uvicorn.Server(config)
        if on_listening is not None:
            on_listening(address)
        with _harmless_signals():
            server.run(sockets=[listener])
    finally:
        listener.close()
    if index.failure is not None:
        raise index.failure


@contextlib.contextmanager
def _harmless_signals() -> Iterator[None]:
    """Let the server raise the signal that stopped it once more, as it does at its end: a clean stop is no failure."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(settings: ServerSettings) -> socket.socket:
    """An open port; raises `ConfigurationError` if the address is taken or not ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigurationError(
            f"`host` must be an address of this machine: got {settings.host!r} ({error.strerror})."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"`port` must be free: got {where}, which is in use. Choose another, or `--port 0` for any."
            ) from error
        raise ConfigurationError(
            f"`host` and `port` must be an address this process may listen on: got {where} ({error.strerror})."
        ) from error
    return listener


def _address(listener: socket.socket, settings: ServerSettings) -> str:
    """URL of an open port."""
    port = listener.getsockname()[1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{port}"
