"""Schemas of calls: nested, recursive, with references and unions."""

from __future__ import annotations

import json
from enum import Enum

from pydantic import BaseModel


class Kind(Enum):
    town = "town"
    sea = "sea"


class Place(BaseModel):
    zip: int
    near: list[Place] = []
    kind: Kind = Kind.sea


class Trip(BaseModel):
    to: Place
    by: Kind
    name: str
    note: str | None = None
    days: int | None = None
    other: Place | str | None = None
    more: dict[str, Place] = {}


class Node(BaseModel):
    name: str
    next: Node | None = None


OLD = json.loads(json.dumps(Trip.model_json_schema()).replace("$defs", "definitions"))
CHAIN = {
    "type": "object",
    "properties": {
        "a/b": {"$ref": "#/$defs/first"},
        "same": {"$ref": "#/properties/a~1b"},
        "whole": {"$ref": "#"},
        "word": {"$ref": "#/$defs/word"},
        "const": {"allOf": [{"$ref": "#/$defs/second"}], "description": "a name, no keyword"},
    },
    "required": ["a/b"],
    "additionalProperties": False,
    "$defs": {
        "first": {"$ref": "#/$defs/second"},
        "second": {"type": "array", "items": {"$ref": "#/$defs/third"}, "maxItems": 2},
        "third": {"properties": {"const": {"$ref": "#/$defs/word"}}, "type": "object"},
        "word": {"enum": ["x", "y z", 3, None]},
    },
}
BOUNDS = {
    "type": "object",
    "properties": {
        "day": {"type": "integer", "minimum": 1, "maximum": 31},
        "late": {"type": ["integer", "null"], "exclusiveMinimum": 2},
        "low": {"type": "integer", "maximum": -4},
        "share": {"type": "number", "exclusiveMinimum": 0, "maximum": 1.5},
        "tens": {"type": "array", "items": {"type": "integer", "multipleOf": 10, "minimum": 0}},
    },
    "required": ["day", "late", "low", "share"],
    "additionalProperties": False,
}
SCHEMAS = {
    "bounds": BOUNDS,
    "nested": Trip.model_json_schema(),
    "definitions": OLD,
    "recursive": Node.model_json_schema(),
    "chain": CHAIN,
    "union": {"properties": {"a": {"type": ["integer", "null"]}, "b": {"const": True}}},
    "open": {"properties": {"a": {}, "b": True}, "additionalProperties": False},
}
