"""Strict validation of answers and streams by the server's types and those of the SDKs."""

from __future__ import annotations

import json
from typing import Any

from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from shared.server.protocol import messages_response_types as messages
from shared.server.protocol import responses_response_types as responses
from tests.support.event_streams import parse_events

_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_OWN = {"speculative", "ignored"}
"""Fields that the SDKs do not have."""


def response_of(content: bytes) -> Response:
    """Returns a response."""
    responses.ResponseObject.model_validate_json(content)
    found = Response.model_validate_json(content, strict=True)
    assert set(found.model_extra or ()) <= _OWN
    return found


def response_events(text: str) -> list[Any]:
    """Returns the events of a stream of the Responses API."""
    found = []
    for name, data in parse_events(text):
        event = json.loads(data)
        assert name == event["type"]
        responses.ResponseEvent.model_validate(event)
        _RESPONSE_EVENT.validate_json(data, strict=True)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def message_of(content: bytes) -> Message:
    """Returns a message."""
    messages.Message.model_validate_json(content)
    found = Message.model_validate_json(content, strict=True)
    assert set(found.model_extra or ()) <= _OWN
    return found


def message_events(text: str) -> list[Any]:
    """Returns the events of a stream of the Messages API."""
    found = []
    for name, data in parse_events(text):
        event = json.loads(data)
        assert name == event["type"]
        if event["type"] not in ("ping", "error"):
            messages.MessageEvent.model_validate(event)
            assert set(_MESSAGE_EVENT.validate_json(data, strict=True).model_extra or ()) <= _OWN
        found.append(event)
    return found
