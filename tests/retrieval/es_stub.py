"""
A stand-in for Elasticsearch 9 where no real one can run: exact search by vectors, on this machine.

Every request must be one that Elastic's API description allows, and so must every answer. Search by words counts
shared words; it is here to be fused with, not to be measured. Faults can be put between a request and its answer.
"""

from __future__ import annotations

import base64
import itertools
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from tests.retrieval.es_schema import ApiSchema, SchemaError

Fault = Callable[[str, str], tuple[int, dict[str, str], bytes] | None]
"""From method and target to status, headers and body of a false answer; `None` lets the request through. A body that
is shorter than its `Content-Length` is cut off."""

_SHARDS = {"total": 1, "successful": 1, "skipped": 0, "failed": 0}


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.body = {"error": {"type": kind, "reason": reason, "root_cause": []}, "status": status}


class StubElasticsearch:
    """
    The stub as a server; a context manager.

    Args:
        schema ([`ApiSchema`]):
            Elastic's description.
        version (`str`, *optional*, defaults to `"9.5.0"`):
            Version it states. One of 8 refuses the media types of clients of version 9, as real ones do.
    """

    def __init__(self, schema: ApiSchema, version: str = "9.5.0") -> None:
        self._schema = schema
        self.version = version
        self.indices: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, Any]] = []
        """Endpoint and body of every request it accepted."""
        self.problems: list[str] = []
        """What was not as described, in requests or answers."""
        self.fault: Fault | None = None
        self._lock = threading.RLock()
        self._uuids = itertools.count(1)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        """Address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StubElasticsearch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
        if kind is None:
            assert not self.problems, self.problems[:5]

    def answer(self, method: str, target: str, body: bytes, headers: Any) -> tuple[int, Any]:
        """Status and body for a request."""
        media_type = headers.get("Content-Type") or headers.get("Accept") or ""
        if self.version.startswith("8") and "compatible-with=9" in media_type:
            refusal = RefusedError(
                400, "media_type_header_exception", "Accept version must be either version 8 or 7, not 9"
            )
            return refusal.status, refusal.body
        try:
            endpoint = self._schema.check_request(method, target, body, headers.get("Content-Type") or "")
        except SchemaError as error:
            self.problems.append(f"{method} {target}: {error}")
            return 400, RefusedError(400, "illegal_argument_exception", str(error)).body
        lines = [json.loads(line) for line in body.splitlines()] if body else []
        try:
            with self._lock:
                self.requests.append((endpoint, lines))
                answer = self._carry_out(endpoint, urlsplit(target).path, lines)
        except RefusedError as refusal:
            return refusal.status, refusal.body
        try:
            self._schema.check_response(endpoint, answer)
        except SchemaError as error:
            self.problems.append(f"answer to {endpoint}: {error}")
        return 200, answer

    def _carry_out(self, endpoint: str, path: str, lines: list[Any]) -> Any:
        """Body of a successful answer."""
        first = path.strip("/").split("/")[0]
        body = lines[0] if lines else {}
        if endpoint == "info":
            return self._info()
        if endpoint == "indices.create":
            return self._create(first, body)
        if endpoint == "indices.update_aliases":
            return self._update_aliases(body["actions"])
        if endpoint == "tasks.get":
            return self._task()
        name = self._resolve(first)
        index = self.indices[name]
        if endpoint == "indices.get":
            return {name: {part: index[part] for part in ("aliases", "mappings", "settings")}}
        if endpoint == "indices.get_settings":
            return {name: {"settings": index["settings"]}}
        if endpoint == "indices.put_mapping":
            index["mappings"].update(body)
            return {"acknowledged": True}
        if endpoint == "indices.put_settings":
            index["settings"]["index"].update(body["index"])
            return {"acknowledged": True}
        if endpoint == "indices.delete":
            del self.indices[name]
            return {"acknowledged": True}
        if endpoint == "indices.refresh":
            return {"_shards": _SHARDS}
        if endpoint == "indices.forcemerge":
            return {"task": "stub:1", "_shards": _SHARDS}
        if endpoint == "count":
            return {"count": len(index["documents"]), "_shards": _SHARDS}
        if endpoint == "bulk":
            return self._bulk(name, lines)
        if endpoint == "search":
            return self._search(name, body)
        if endpoint == "msearch":
            return {"took": 1, "responses": [self._search(name, item) | {"status": 200} for item in lines[1::2]]}
        raise RefusedError(501, "not_implemented", endpoint)

    def _info(self) -> dict[str, Any]:
        facts = {
            "number": self.version,
            "build_flavor": "default",
            "build_type": "docker",
            "build_hash": "0" * 40,
            "build_date": "2026-01-01T00:00:00.000000000Z",
            "build_snapshot": False,
            "lucene_version": "10.3.0",
            "minimum_wire_compatibility_version": "8.19.0",
            "minimum_index_compatibility_version": "8.0.0",
        }
        return {
            "name": "stub",
            "cluster_name": "stub",
            "cluster_uuid": "stub",
            "version": facts,
            "tagline": "You Know, for Search",
        }

    def _task(self) -> dict[str, Any]:
        task = {
            "node": "stub",
            "id": 1,
            "type": "transport",
            "action": "indices:admin/forcemerge",
            "start_time_in_millis": 0,
            "running_time_in_nanos": 1,
            "cancellable": False,
            "headers": {},
        }
        return {"completed": True, "task": task}

    def _resolve(self, name: str) -> str:
        if name in self.indices:
            return name
        named = [own for own, index in self.indices.items() if name in index["aliases"]]
        if len(named) != 1:
            raise RefusedError(404, "index_not_found_exception", f"no such index [{name}]")
        return named[0]

    def _create(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        if name in self.indices:
            raise RefusedError(400, "resource_already_exists_exception", f"index [{name}] already exists")
        settings = {**body["settings"]["index"], "uuid": f"uuid-{next(self._uuids)}"}
        settings["number_of_shards"] = str(settings["number_of_shards"])
        self.indices[name] = {
            "aliases": {},
            "mappings": body["mappings"],
            "settings": {"index": settings},
            "documents": {},
        }
        return {"acknowledged": True, "shards_acknowledged": True, "index": name}

    def _update_aliases(self, actions: list[dict[str, Any]]) -> dict[str, Any]:
        for action in actions:
            ((kind, change),) = action.items()
            aliases = self.indices[change["index"]]["aliases"]
            if kind == "add":
                aliases[change["alias"]] = {}
            else:
                del aliases[change["alias"]]
        return {"acknowledged": True}

    def _bulk(self, name: str, lines: list[Any]) -> dict[str, Any]:
        properties = self.indices[name]["mappings"]["properties"]
        items = []
        for action, source in zip(lines[::2], lines[1::2], strict=True):
            item = {"_index": name, "_id": action["index"]["_id"], "status": 201, "result": "created"}
            unknown = sorted(source.keys() - properties.keys())
            if unknown:
                error = {"type": "strict_dynamic_mapping_exception", "reason": f"[{unknown[0]}] is not allowed"}
                item = {"_index": name, "_id": item["_id"], "status": 400, "error": error}
            else:
                self.indices[name]["documents"][item["_id"]] = source
            items.append({"index": item})
        return {"took": 1, "errors": any("error" in item["index"] for item in items), "items": items}

    def _search(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        documents = self.indices[name]["documents"]
        scored = self._by_vector(name, body["knn"]) if "knn" in body else self._by_query(documents, body["query"])
        keys = [next(iter(part)) for part in body.get("sort", [])]
        if keys == ["pid"]:
            scored.sort(key=lambda pair: documents[pair[0]]["pid"])
        elif keys:
            scored.sort(key=lambda pair: (-pair[1], documents[pair[0]]["id_order"]))
        else:
            scored.sort(key=lambda pair: -pair[1])
        hits = []
        for identity, score in scored[: body["size"]]:
            source = {field: documents[identity][field] for field in body.get("_source", ())}
            hit = {"_index": name, "_id": identity, "_score": score, "_source": source}
            if keys:
                hit["sort"] = [documents[identity][key] if key != "_score" else score for key in keys]
            hits.append(hit)
        found: dict[str, Any] = {"max_score": hits[0]["_score"] if hits else None, "hits": hits}
        if body.get("track_total_hits") is True:
            found["total"] = {"value": len(scored), "relation": "eq"}
        return {"took": 1, "timed_out": False, "_shards": _SHARDS, "hits": found}

    def _by_query(self, documents: dict[str, Any], query: dict[str, Any]) -> list[tuple[str, float]]:
        ((kind, clause),) = query.items()
        if kind == "bool":
            fields = [part["exists"]["field"] for part in clause["filter"]]
            return [(name, 0.0) for name, source in documents.items() if all(_has(source, field) for field in fields)]
        if kind == "constant_score":
            wanted = set(clause["filter"]["terms"]["pid"])
            return [(name, 1.0) for name, source in documents.items() if source["pid"] in wanted]
        words = set(_words(clause["contents"]["query"]))
        scores = ((name, len(words & set(_words(_contents(source))))) for name, source in documents.items())
        return [(name, float(score)) for name, score in scores if score]

    def _by_vector(self, name: str, knn: dict[str, Any]) -> list[tuple[str, float]]:
        index = self.indices[name]
        if knn["field"] not in index["mappings"]["properties"]:
            return []
        query = np.array(knn["query_vector"], dtype=np.float32)
        dims = index["mappings"]["properties"][knn["field"]]["dims"]
        if len(query) != dims:
            raise RefusedError(
                400, "illegal_argument_exception", f"the query vector has {len(query)} dimensions, not {dims}"
            )
        scored = [
            (identity, float(np.float32((1.0 + float(query @ _vector(source[knn["field"]]))) / 2.0)))
            for identity, source in index["documents"].items()
        ]
        return sorted(scored, key=lambda pair: -pair[1])[: knn["k"]]


def _has(source: dict[str, Any], field: str) -> bool:
    return bool(_contents(source)) if field == "contents" else field in source


def _contents(source: dict[str, Any]) -> str:
    return f"{source['title']} {source['text']}"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _vector(stored: Any) -> np.ndarray:
    if isinstance(stored, str):
        return np.frombuffer(base64.b64decode(stored), dtype=">f4").astype(np.float32)
    return np.array(stored, dtype=np.float32)


def _handler(stub: StubElasticsearch) -> type[BaseHTTPRequestHandler]:
    """Handler of requests to a stub."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            forged = stub.fault(self.command, self.path) if stub.fault is not None else None
            if forged is not None:
                self._send(*forged)
                return
            status, answer = stub.answer(self.command, self.path, body, self.headers)
            content = json.dumps(answer).encode()
            self._send(
                status,
                {"X-Elastic-Product": "Elasticsearch", "Content-Type": "application/vnd.elasticsearch+json"},
                content,
            )

        def _send(self, status: int, headers: dict[str, str], content: bytes) -> None:
            length = int(headers.pop("Content-Length", len(content)))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = length != len(content)

        do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing is written to the terminal."""

    return Handler
