"""Every location in the bodies of an OpenAPI document, and bodies with a value there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]
Put = Callable[[Any], Any]
MOST_DEEP = 24  # no schema of ours refers to itself


@dataclass(frozen=True)
class Place:
    """A part of the body of a route.

    Attributes:
      route: The path of the route.
      name: Where it is, as `messages[].content`; `{}` is a key of an object, `{}=` its value.
      schema: Its schema in the document.
      part: A value that a list there may hold; None where there is no list.
      put: The smallest body that has a value there.
    """

    route: str
    name: str
    schema: Schema
    part: Any
    put: Put

    @property
    def field(self) -> str:
        """The field of the body that it is in."""
        return self.name.replace("[", ".").split(".")[0].split("{")[0]

    def __str__(self) -> str:
        return f"{self.route}:{self.name}"


def places(document: Schema) -> Iterator[Place]:
    reader = _Reader(document["components"]["schemas"])
    for route, methods in document["paths"].items():
        for operation in methods.values():
            if body := operation.get("requestBody"):
                schema = body["content"]["application/json"]["schema"]
                for name, found, put in reader.below(schema, "", lambda value: value, 0):
                    part = reader.smallest(found["items"]) if "items" in found else None
                    yield Place(route, name, found, part, put)


class _Reader:
    def __init__(self, schemas: dict[str, Schema]) -> None:
        self._schemas = schemas

    def _whole(self, schema: Schema) -> Schema:
        reference = schema.get("$ref")
        return self._schemas[reference.rpartition("/")[2]] if reference else schema

    def below(
        self, schema: Schema, name: str, put: Put, depth: int
    ) -> Iterator[tuple[str, Schema, Put]]:
        """The place itself, and those below it."""
        assert depth < MOST_DEEP, name
        schema = self._whole(schema)
        for part in schema.get("anyOf") or schema.get("oneOf") or ():
            yield from self.below(part, name, put, depth + 1)
        if name:
            yield name, schema, put
        for key, field in schema.get("properties", {}).items():
            inner = _into(put, lambda value, key=key: self._object(schema, {key: value}))
            yield from self.below(field, f"{name}.{key}".lstrip("."), inner, depth + 1)
        if items := schema.get("items"):
            yield from self.below(items, f"{name}[]", _into(put, lambda v: [v]), depth + 1)
        if keys := schema.get("propertyNames"):
            keyed = _into(put, lambda v: {str(v): self.smallest(schema["additionalProperties"])})
            yield f"{name}{{}}", keys, keyed
        if isinstance(values := schema.get("additionalProperties"), dict):
            yield from self.below(values, f"{name}{{}}=", _into(put, lambda v: {"1": v}), depth + 1)

    def _object(self, schema: Schema, given: dict[str, Any]) -> dict[str, Any]:
        needed = {name: schema["properties"][name] for name in schema.get("required", ())}
        return {name: self.smallest(part) for name, part in needed.items()} | given

    def smallest(self, schema: Schema | bool) -> Any:
        """A value that the schema takes."""
        if schema is True:
            return None
        schema = self._whole(schema)
        if parts := schema.get("anyOf") or schema.get("oneOf"):
            return self.smallest(parts[0])
        if "const" in schema:
            return schema["const"]
        if values := schema.get("enum"):
            return next((value for value in values if value is not None), None)
        kind = schema.get("type")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "array":
            return [self.smallest(schema["items"]) for _ in range(schema.get("minItems", 0))]
        if kind == "object":
            return self._object(schema, {}) if "properties" in schema else {}
        if kind == "string":
            return json.dumps({}) if "JSON" in schema.get("description", "") else "a"
        return {"integer": 1, "number": 1, "boolean": False}.get(kind or "")


def _into(put: Put, wrap: Put) -> Put:
    return lambda value: put(wrap(value))
