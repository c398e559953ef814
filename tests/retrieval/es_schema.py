"""
Requests and responses checked against Elastic's own description of its API, version 9.5.

The description lists every endpoint with its paths, query parameters and bodies, and every type they are made of.
`ApiSchema.check_request` accepts exactly what it allows; nothing is ignored, except what the description itself leaves
open (documents, user metadata).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

Name = tuple[str, str]
Bindings = Mapping[Name, Any]

_INTEGERS = {"integer", "long", "uint", "ulong", "short", "byte"}
_FLOATS = {"float", "double"}
_COMMON_PARAMETERS = "CommonQueryParameters"
_BULK_ACTION: Name = ("_global.bulk", "OperationContainer")
_MSEARCH_HEADER: Name = ("_global.msearch", "MultisearchHeader")
_SEARCH_BODY: Name = ("_global.search", "Request")


class SchemaError(AssertionError):
    """What was sent or answered is not what the description allows; the message starts with the place."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.depth = place.count(".") + place.count("[")


class ApiSchema:
    """
    The description, loaded once.

    Args:
        path (`Path`):
            File from `es_node_parts.prepare_schema`.
    """

    def __init__(self, path: Path) -> None:
        description = json.loads(path.read_text(encoding="utf-8"))
        self._types = {_name(entry["name"]): entry for entry in description["types"]}
        self._endpoints = {entry["name"]: entry for entry in description["endpoints"]}

    def check_request(self, method: str, target: str, body: bytes | None, content_type: str = "") -> str:
        """Name of the endpoint that a request is for; raises if the request is not one it accepts."""
        address = urlsplit(target)
        endpoint = self._endpoint(method, address.path)
        name, request = endpoint["name"], self._types[_name(endpoint["request"])]
        self._check_parameters(name, request, parse_qsl(address.query, keep_blank_values=True))
        described = self._body(request)
        if described["kind"] == "no_body":
            if body:
                raise SchemaError(name, "takes no body")
        elif described["kind"] == "properties":
            self._check_object(self._body_properties(request), json.loads(body) if body else {}, name)
        elif not body:
            raise SchemaError(name, "needs a body")
        elif "ndjson" in content_type:
            self._check_lines(name, body)
        else:
            self._check(described["value"], json.loads(body), name, {})
        return name

    def check_response(self, endpoint: str, body: Any) -> None:
        """Raise unless a body is one that an endpoint answers with."""
        response = self._types[_name(self._endpoints[endpoint]["response"])]
        described = response["body"]
        place = f"{endpoint} response"
        if described["kind"] == "properties":
            self._check_object(self._body_properties(response), body, place)
        elif described["kind"] == "value":
            self._check(described["value"], body, place, {})

    @cached_property
    def _routes(self) -> list[tuple[str, re.Pattern[str], dict[str, Any]]]:
        """Methods and path patterns; those with more fixed parts first."""
        routes = []
        for endpoint in self._endpoints.values():
            for url in endpoint["urls"]:
                parts = [part for part in url["path"].split("/") if part]
                fixed = sum(not part.startswith("{") for part in parts)
                # A part that starts with an underscore is never a name.
                patterns = [r"(?!_)[^/]+" if part.startswith("{") else re.escape(part) for part in parts]
                routes += [
                    (fixed, method, re.compile("/" + "/".join(patterns)), endpoint) for method in url["methods"]
                ]
        routes.sort(key=lambda route: -route[0])
        return [(method, pattern, endpoint) for _, method, pattern, endpoint in routes]

    def _endpoint(self, method: str, path: str) -> dict[str, Any]:
        """The endpoint of a path; index names keep their case and their dots."""
        for candidate, pattern, endpoint in self._routes:
            if candidate == method and pattern.fullmatch(unquote(path) if path.count("%2F") == 0 else path):
                return endpoint
        raise SchemaError(f"{method} {path}", "no endpoint has this path")

    def _check_parameters(self, name: str, request: dict[str, Any], given: Sequence[tuple[str, str]]) -> None:
        """Names and values of query parameters."""
        known = {entry["name"]: entry["type"] for part in self._lineage(request) for entry in part.get("query", ())}
        for part in self._lineage(request):
            for behavior in part.get("attachedBehaviors", ()):
                if behavior == _COMMON_PARAMETERS:
                    shared = self._types[("_spec_utils", _COMMON_PARAMETERS)]
                    known |= {entry["name"]: entry["type"] for entry in shared["properties"]}
        for key, text in given:
            if key not in known:
                raise SchemaError(name, f"unknown query parameter `{key}`")
            values: list[Any] = [text]
            if text in ("true", "false"):
                values.append(text == "true")
            if re.fullmatch(r"-?\d+", text):
                values.append(int(text))
            self._check_any([(known[key], value) for value in values], f"{name}?{key}", {})

    def _check_lines(self, name: str, body: bytes) -> None:
        """Bodies of one object per line: pairs of a header and what it announces."""
        if not body.endswith(b"\n"):
            raise SchemaError(name, "the last line must end in a line break")
        lines = [json.loads(line) for line in body.splitlines()]
        if name == "bulk":
            rest = iter(enumerate(lines))
            for position, action in rest:
                self._check_type(_BULK_ACTION, action, f"bulk[{position}]", {})
                if "delete" not in action:
                    _, source = next(rest, (0, None))
                    if not isinstance(source, dict):
                        raise SchemaError(f"bulk[{position}]", "no source follows the action")
        elif name == "msearch":
            if len(lines) % 2:
                raise SchemaError(name, "a body must follow every header")
            body_properties = self._body_properties(self._types[_SEARCH_BODY])
            for position in range(0, len(lines), 2):
                self._check_type(_MSEARCH_HEADER, lines[position], f"msearch[{position}]", {})
                self._check_object(body_properties, lines[position + 1], f"msearch[{position + 1}]")
        else:
            raise SchemaError(name, "does not take a body of lines")

    def _check(self, described: dict[str, Any], value: Any, place: str, bound: Bindings) -> None:
        """A value against a description of its type."""
        kind = described["kind"]
        if kind == "literal_value":
            if value != described["value"] or isinstance(value, bool) != isinstance(described["value"], bool):
                raise SchemaError(place, f"must be {described['value']!r}: got {value!r}")
        elif kind == "array_of":
            if not isinstance(value, list):
                raise SchemaError(place, f"must be an array: got {value!r:.80}")
            for position, item in enumerate(value):
                self._check(described["value"], item, f"{place}[{position}]", bound)
        elif kind == "dictionary_of":
            if not isinstance(value, dict):
                raise SchemaError(place, f"must be an object: got {value!r:.80}")
            if described.get("singleKey") and len(value) != 1:
                raise SchemaError(place, f"must have exactly one key: got {sorted(value)}")
            for key, item in value.items():
                self._check(described["key"], key, f"{place}<key>", bound)
                self._check(described["value"], item, f"{place}.{key}", bound)
        elif kind == "union_of":
            self._check_any([(option, value) for option in described["items"]], place, bound)
        elif kind == "instance_of":
            self._check_instance(described, value, place, bound)
        elif kind != "user_defined_value":
            raise SchemaError(place, f"the description has a kind this test does not know: {kind}")

    def _check_any(self, options: Sequence[tuple[dict[str, Any], Any]], place: str, bound: Bindings) -> None:
        """At least one option must fit; else the complaint of the one that got furthest."""
        errors = []
        for described, value in options:
            try:
                return self._check(described, value, place, bound)
            except SchemaError as error:
                errors.append(error)
        raise max(errors, key=lambda error: error.depth)

    def _check_instance(self, described: dict[str, Any], value: Any, place: str, bound: Bindings) -> None:
        """A value of a named type."""
        name = _name(described["type"])
        if name in bound:
            return self._check(bound[name], value, place, {})
        if name[0] == "_builtins":
            return _check_builtin(name[1], value, place)
        if name not in self._types:
            # A type the caller chooses, such as that of a document.
            return None
        parameters = self._types[name].get("generics", ())
        arguments = [_substituted(argument, bound) for argument in described.get("generics", ())]
        bindings = {_name(parameter): argument for parameter, argument in zip(parameters, arguments, strict=False)}
        return self._check_type(name, value, place, bindings)

    def _check_type(self, name: Name, value: Any, place: str, bound: Bindings) -> None:
        """A value of a type of the description."""
        entry = self._types[name]
        if entry["kind"] == "type_alias":
            if name[0] == "_types" and name[1] in _INTEGERS | _FLOATS:
                return _check_number(name[1], value, place)
            variants = entry.get("variants", {})
            if variants.get("kind") == "internal_tag":
                return self._check_tagged(entry, value, place)
            return self._check(entry["type"], value, place, bound)
        if entry["kind"] == "enum":
            return _check_enum(entry, value, place)
        if not isinstance(value, dict):
            shortcut = entry.get("shortcutProperty")
            for described, bindings in self._properties(entry, bound):
                if described["name"] == shortcut:
                    return self._check(described["type"], value, place, bindings)
            raise SchemaError(place, f"must be an object ({name[1]}): got {value!r:.80}")
        described = list(self._properties(entry, bound))
        extra = self._check_object(described, value, place, additional=self._additional(entry))
        if entry.get("variants", {}).get("kind") == "container":
            outside = {item["name"] for item, _ in described if item.get("containerProperty")}
            chosen = [key for key in value if key not in outside]
            if len(chosen) != 1:
                raise SchemaError(
                    place, f"{name[1]} must have exactly one variant: got {sorted(chosen)} {extra or ''}"
                )
        return None

    def _check_tagged(self, entry: dict[str, Any], value: Any, place: str) -> None:
        """An object whose type stands in one of its properties."""
        tag = entry["variants"]["tag"]
        if not isinstance(value, dict):
            raise SchemaError(place, f"must be an object with `{tag}`: got {value!r:.80}")
        wanted = value.get(tag, entry["variants"].get("defaultTag"))
        for item in entry["type"]["items"]:
            name = _name(item["type"])
            for described, _ in self._properties(self._types[name], {}):
                kind = described["type"]
                if described["name"] == tag and kind["kind"] == "literal_value" and kind["value"] == wanted:
                    return self._check_type(name, value, place, {})
        raise SchemaError(f"{place}.{tag}", f"unknown {tag} {wanted!r}")

    def _check_object(
        self,
        described: Sequence[tuple[dict[str, Any], Bindings]],
        value: Any,
        place: str,
        *,
        additional: dict[str, Any] | None = None,
    ) -> list[str]:
        """Properties of an object; names of those beyond the described ones."""
        if not isinstance(value, dict):
            raise SchemaError(place, f"must be an object: got {value!r:.80}")
        spellings = {
            name: (entry, bound) for entry, bound in described for name in (entry["name"], *entry.get("aliases", ()))
        }
        seen, extra = set(), []
        for key, item in value.items():
            if key in spellings:
                entry, bound = spellings[key]
                seen.add(entry["name"])
                self._check(entry["type"], item, f"{place}.{key}", bound)
            elif additional is not None:
                extra.append(key)
                self._check(additional, item, f"{place}.{key}", {})
            else:
                raise SchemaError(f"{place}.{key}", "unknown property")
        missing = [entry["name"] for entry, _ in described if entry["required"] and entry["name"] not in seen]
        if missing:
            raise SchemaError(place, f"missing {missing}")
        return extra

    def _properties(self, entry: dict[str, Any], bound: Bindings) -> Iterator[tuple[dict[str, Any], Bindings]]:
        """Properties of an interface and of those it inherits from, with what their parameters stand for."""
        yield from ((described, bound) for described in entry.get("properties", ()))
        parent = entry.get("inherits")
        if parent:
            inherited = self._types[_name(parent["type"])]
            arguments = [_substituted(argument, bound) for argument in parent.get("generics", ())]
            parameters = [_name(parameter) for parameter in inherited.get("generics", ())]
            yield from self._properties(inherited, dict(zip(parameters, arguments, strict=False)))

    def _additional(self, entry: dict[str, Any]) -> dict[str, Any] | None:
        """Type of properties with names of their own, if the interface has such."""
        for part in self._lineage(entry):
            for behavior in part.get("behaviors", ()):
                if behavior["type"]["name"] in ("AdditionalProperty", "AdditionalProperties"):
                    return behavior["generics"][1]
        return None

    def _lineage(self, entry: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A type and those it inherits from."""
        while True:
            yield entry
            if not entry.get("inherits"):
                return
            entry = self._types[_name(entry["inherits"]["type"])]

    def _body(self, request: dict[str, Any]) -> dict[str, Any]:
        """Description of the body of a request, its own or inherited."""
        bodies = (part.get("body", {"kind": "no_body"}) for part in self._lineage(request))
        return next((body for body in bodies if body["kind"] != "no_body"), {"kind": "no_body"})

    def _body_properties(self, entry: dict[str, Any]) -> list[tuple[dict[str, Any], Bindings]]:
        """Properties of a body, its own and inherited ones."""
        return [
            (described, {})
            for part in self._lineage(entry)
            for described in part.get("body", {}).get("properties", ())
        ]


def _name(reference: Mapping[str, str]) -> Name:
    return reference["namespace"], reference["name"]


def _substituted(described: dict[str, Any], bound: Bindings) -> dict[str, Any]:
    """A type argument with the parameters of the surrounding type filled in."""
    if described["kind"] == "instance_of":
        return bound.get(_name(described["type"]), described)
    return described


def _check_builtin(kind: str, value: Any, place: str) -> None:
    """A value of JSON's own types."""
    if kind == "number":
        _check_number("double", value, place)
    elif kind in ("string", "boolean", "null"):
        if not isinstance(value, {"string": str, "boolean": bool, "null": type(None)}[kind]):
            raise SchemaError(place, f"must be a {kind}: got {value!r:.80}")
    else:
        raise SchemaError(place, f"a value of type {kind} cannot be checked")


def _check_number(kind: str, value: Any, place: str) -> None:
    """A number, whole where the type is."""
    allowed = (int,) if kind in _INTEGERS else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise SchemaError(place, f"must be a number ({kind}): got {value!r:.80}")


def _check_enum(entry: dict[str, Any], value: Any, place: str) -> None:
    """One of a list of words; booleans stand for their names."""
    words = {word for member in entry["members"] for word in (member["name"], *member.get("aliases", ()))}
    text = str(value).lower() if isinstance(value, bool) else value
    if not isinstance(text, str) or (text not in words and not entry.get("isOpen")):
        raise SchemaError(place, f"must be one of {sorted(words)[:12]}: got {value!r}")
