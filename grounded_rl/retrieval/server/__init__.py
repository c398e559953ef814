"""
A retrieval server: any index of this package behind Search-R1's `POST /retrieve`.

`ServerSettings` says how to serve, `ServedIndex` opens the index in the background, `create_app` puts both behind
HTTP, and `serve` runs it until it is told to stop.
"""

from grounded_rl.retrieval.server.app import create_app
from grounded_rl.retrieval.server.index import ServedIndex
from grounded_rl.retrieval.server.run import serve
from grounded_rl.retrieval.server.settings import ServerSettings

__all__ = ["ServedIndex", "ServerSettings", "create_app", "serve"]
