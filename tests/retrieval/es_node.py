"""
A genuine Elasticsearch server for tests: version 7.0.0, lexical search, on this machine, gone with the process.

    with ElasticsearchNode() as node:
        client = Elasticsearch(node.url)
        node.kill()
        node.restart()

It is the real server code: thread pools, circuit breakers, bulk, `_msearch`, aliases, translog. It has no vectors, no
licence and no security. `python -m tests.retrieval.es_node prepare` fetches and builds its parts beforehand.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from tests.retrieval.es_node_parts import PartsMissingError, prepare_node, prepare_schema

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 15.0
_LOG_TAIL = 3_000


class ElasticsearchNode:
    """
    One server process on a free port of the loopback interface, with its data in a temporary folder.

    The process watches its standard input and ends when it closes, so that none is left behind if this one is killed.

    Args:
        settings (`Mapping[str, object]`, *optional*):
            Settings of the server, for instance `{"thread_pool.search.queue_size": 5}`.
        heap_mb (`int`, *optional*, defaults to 512):
            Memory of the server, in MB.
        modern_clients (`bool`, *optional*, defaults to `True`):
            Accept the media types of clients 8 and 9 and say that this is Elasticsearch, as newer servers do. Without
            it, such a client refuses the server.
        optimize (`bool`, *optional*, defaults to `False`):
            Compile thoroughly: starts slower and is faster later, for measurements.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        heap_mb: int = 512,
        modern_clients: bool = True,
        optimize: bool = False,
    ) -> None:
        self._parts = prepare_node()
        self._settings = dict(settings or {})
        self._heap_mb = heap_mb
        self._modern_clients = modern_clients
        self._optimize = optimize
        self._home = Path(tempfile.mkdtemp(prefix="grounded-rl-es-"))
        self._port = 0
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Address of the node; it survives `restart`."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Process id, or `None` if the node is down."""
        return self._process.pid if self.is_running else None

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """File of the server's log, in the folder of the node."""
        return self._home / "server.log"

    def start(self, timeout: float = START_TIMEOUT_S) -> ElasticsearchNode:
        """Start the process and return once it answers."""
        if self.is_running:
            return self
        deadline = time.monotonic() + timeout
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            self._port = self._read_port(timeout)
            self._await_health(deadline)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """End the process at once, as a crash would (SIGKILL). Data that was acknowledged survives a `restart`."""
        self._end(signal.SIGKILL)

    def restart(self, timeout: float = START_TIMEOUT_S) -> None:
        """Start again on the same data and port; a node that still runs is closed first."""
        self._close_process()
        self.start(timeout)

    def stop(self) -> None:
        """Close the node and remove its data."""
        self._close_process()
        shutil.rmtree(self._home, ignore_errors=True)

    def pause(self) -> None:
        """Freeze the process: connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a frozen process go on."""
        self._signal(signal.SIGCONT)

    def log(self) -> str:
        """End of what the server wrote to its log."""
        if not self.log_path.is_file():
            return ""
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:]

    def __enter__(self) -> ElasticsearchNode:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _command(self) -> list[str]:
        """Command line of the server."""
        parts = self._parts
        return [
            parts.java,
            f"-Xmx{self._heap_mb}m",
            "-XX:+UseSerialGC",
            *([] if self._optimize else ["-XX:TieredStopAtLevel=1"]),
            # Without it every answer waits 40 ms for an acknowledgement.
            "-Dsun.net.httpserver.nodelay=true",
            "-Dsun.net.httpserver.maxIdleConnections=1024",
            f"-Dlog4j.configurationFile={parts.log_configuration}",
            *([] if self._modern_clients else ["-Dplain=true"]),
            "-cp",
            f"{parts.classes}:{parts.jar}",
            "EmbeddedNode",
            str(self._home / "node"),
            str(self._port),
            *(f"{name}={value}" for name, value in self._settings.items()),
        ]

    def _read_port(self, timeout: float) -> int:
        """Port from the line the server prints when it is up."""
        process = self._process
        assert process is not None
        ready: list[int] = []

        def read() -> None:
            # Libraries and the virtual machine may print before the server does.
            for line in process.stdout or ():
                if line.startswith("READY "):
                    ready.append(int(line.split()[1]))
                    return

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(timeout)
        if not ready:
            state = f"said nothing for {timeout:.0f} s" if reader.is_alive() else "ended"
            raise RuntimeError(f"the Elasticsearch node {state} during its start:\n{self.log()}")
        return ready[0]

    def _await_health(self, deadline: float) -> None:
        """Wait until the shards of all indices answer."""
        while True:
            with contextlib.suppress(urllib.error.URLError, OSError):
                path = "/_cluster/health?wait_for_status=yellow&timeout=5s"
                with urllib.request.urlopen(self.url + path, timeout=10) as response:
                    if response.status == 200:
                        return
            if time.monotonic() > deadline or not self.is_running:
                raise RuntimeError(f"the Elasticsearch node did not become healthy:\n{self.log()}")
            time.sleep(0.1)

    def _close_process(self) -> None:
        """Let the server close by itself; kill it if it does not."""
        process = self._process
        if process is None:
            return
        self._signal(signal.SIGCONT)
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> None:
        """Signal the process, collect it and close its pipes."""
        process = self._process
        if process is None:
            return
        self._signal(number)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        """Signal the process if it is alive."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


def main(arguments: list[str]) -> int:
    """Entry point: `prepare` fetches and builds the parts, `serve` runs a node until Enter is pressed."""
    if arguments not in (["prepare"], ["serve"]):
        sys.stderr.write("usage: python -m tests.retrieval.es_node prepare|serve\n")
        return 2
    try:
        parts = prepare_node()
        sys.stdout.write(f"node: {parts.jar.parent}\nAPI description: {prepare_schema()}\n")
    except PartsMissingError as error:
        sys.stderr.write(f"not prepared: {error}. Tests that need it will be skipped.\n")
        return 1
    if arguments == ["serve"]:
        with ElasticsearchNode() as node:
            input(f"Elasticsearch 7.0.0 listens on {node.url}; press Enter to stop it ")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
