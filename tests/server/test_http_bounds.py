"""Numbers and lengths beyond their bound return 400 with the bound in the message.

The fields are those of the served `/openapi.json`, so the test covers all of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.http_fixtures import ADMIN_KEY, JSON, VOCAB, Server, save_tokenizer, serving
from tests.support.schema_places import Place, places

HEADERS = {**JSON, "authorization": f"Bearer {ADMIN_KEY}".encode()}
FAR = 10**30
NUMBERS = ("integer", "number")
MOST_PARTS = 1 << 16  # a longer list exceeds the size limit of a body


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    flags = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    with serving(["-m", "tests.support.http_fixtures", str(folder), *flags]) as running:
        yield running


@pytest.fixture(scope="module")
def found(server) -> list[Place]:
    return list(places(httpx.get(server.url + "/openapi.json").json()))


@pytest.fixture(scope="module")
def client(server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=HEADERS, timeout=60) as made:
        yield made


def refusal(client: httpx.Client, place: Place, value: Any) -> str:
    """Returns the error message of a value; the error must name the field."""
    answer = client.post(place.route, content=json.dumps(place.put(value)))
    assert answer.status_code == 400, (str(place), str(value)[:80], answer.text[:300])
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    # Anthropic's format has the path at the start of the message.
    is_anthropic = place.route.startswith("/v1/messages")
    param = error["message"].partition(": ")[0] if is_anthropic else error["param"]
    if len(place.field) < len(place.name) or param:
        assert re.split(r"[.\[]", param)[0] == place.field, (str(place), error)
    assert len(error["message"]) < 300
    return error["message"]


def states_bound(message: str, bound: float) -> bool:
    """Returns True if a message contains the number before its `got` part."""
    required = message.partition(", got")[0]
    number = str(int(bound) if bound == int(bound) else bound)
    return re.search(rf"(?<![\d.-]){re.escape(number)}(?![\d.]\d)", required) is not None


def is_number(schema: dict[str, Any]) -> bool:
    return schema.get("type") in NUMBERS and "enum" not in schema


def beyond(schema: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """Yields each bound with values beyond it."""
    near = 1 if schema["type"] == "integer" else 0.001
    for name, way in (("minimum", -1), ("maximum", 1)):
        if name in schema:
            bound = schema[name]
            yield bound, bound + way * near
            yield bound, way * FAR
    for name, way in (("exclusiveMinimum", -1), ("exclusiveMaximum", 1)):
        if name in schema:
            yield schema[name], schema[name]
            yield schema[name], way * FAR


def test_openapi_numbers_reject_values_beyond_bounds(client, found):
    numbers = [place for place in found if is_number(place.schema)]
    assert len({(place.route, place.name) for place in numbers}) > 30
    for place in numbers:
        bounds = {bound for bound, _ in beyond(place.schema)}
        assert len(bounds) == 2, f"{place} has no lower or no upper bound"
        own = {0, VOCAB - 1} if place.schema.get("format") == "token-id" else set()
        for bound, value in beyond(place.schema):
            message = refusal(client, place, value)
            assert any(states_bound(message, each) for each in {bound, *own}), (
                str(place),
                value,
                message,
            )


def longer(place: Place) -> Iterator[tuple[int, Any]]:
    """Yields each length bound with a longer value."""
    most = {name: n for name, n in place.schema.items() if name.startswith("max")}
    if "maxLength" in most:
        yield most["maxLength"], "a" * (most["maxLength"] + 1)
    if most.get("maxItems", MOST_PARTS) < MOST_PARTS:
        yield most["maxItems"], [place.part] * (most["maxItems"] + 1)
    if "maxProperties" in most:
        keys = map(str, range(most["maxProperties"] + 1))
        others = place.schema.get("additionalProperties")
        is_text = isinstance(others, dict) and others.get("type") == "string"
        yield most["maxProperties"], dict.fromkeys(keys, "a" if is_text else 1)


def test_openapi_lengths_reject_values_beyond_bounds(client, found):
    seen = 0
    for place in found:
        for most, value in longer(place):
            assert states_bound(refusal(client, place, value), most), str(place)
            seen += 1
    assert seen > 20
