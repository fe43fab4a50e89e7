"""Streams of all serializers: pings before the first token, errors, and counts of cached tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from shared.engine.request import Event, FinishReason
from shared.server.api import streaming
from shared.server.completions.choice import Choice, ChoiceUpdate, Speculation, StopStringMatcher
from shared.server.completions.logprobs import TokenNames
from shared.server.completions.messages_serializer import MessagesSerializer
from shared.server.completions.openai_serializer import ChatForm, OpenAISerializer
from shared.server.completions.output import GenerationOutput
from shared.server.completions.responses_serializer import ResponsesSerializer
from shared.server.completions.serializer import Serializer
from shared.server.protocol.errors import ApiError
from shared.server.protocol.messages_types import MessagesRequest
from shared.server.protocol.openai_types import ChatRequest
from shared.server.protocol.responses_types import ResponsesRequest
from shared.server.protocol.sealed_text import SealedText
from shared.text.parsing.delta import PassthroughParser
from shared.text.tokenizer import Detokenizer, Tokenizer
from tests.support.event_streams import parse_events
from tests.support.http_fixtures import byte_tokenizer

BYTES = Tokenizer(byte_tokenizer(), None, {})
SEALED = SealedText("m", None)
FIELDS: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9}


def new_output() -> GenerationOutput:
    choice = Choice(
        detokenizer=Detokenizer(BYTES, []),
        stops=StopStringMatcher(()),
        parser=PassthroughParser(),
        min_tokens=0,
        speculation=Speculation.empty(3),
        echo="",
        stop_ids=(),
    )
    return GenerationOutput(
        id_prefix="x_",
        model="m",
        num_prompt_tokens=7,
        num_image_tokens=0,
        choices=[choice],
        choices_of_prompt=1,
        names=TokenNames(BYTES),
    )


class Steps:
    """Generation of prepared events; the end is an error if there is none.

    Attributes:
      num_pings: Keep-alives that precede the first event.
      may_begin: Set after them.
    """

    def __init__(self, events: list[Event], num_pings: int = 0) -> None:
        self.output = new_output()
        self.num_pings, self.may_begin = num_pings, asyncio.Event()
        self._events = iter(events)

    async def next(self) -> tuple[int, ChoiceUpdate]:
        if self.num_pings:
            await self.may_begin.wait()
        event = next(self._events, None)
        if event is None:
            raise ApiError(503, "the engine has exited", code="engine_lost")
        return 0, self.output.take(0, event)

    async def pieces(self) -> AsyncIterator[tuple[int, ChoiceUpdate]]:
        while not self.output.ended:
            yield await self.next()


def event(text: str, reason: FinishReason | None = None) -> Event:
    return Event(1, list(text.encode()), None, reason, None, None, cached_tokens=4)


def serializer_of(api: str, steps: Steps) -> Serializer:
    if api == "chat":
        request = ChatRequest.model_validate(FIELDS).to_generation()
        return OpenAISerializer(ChatForm(), request, steps.output)
    if api == "responses":
        body = ResponsesRequest.model_validate({"input": "a"})
        request = body.to_generation(SEALED, ())
        return ResponsesSerializer(request, body, steps.output, SEALED, save=lambda _: None)
    request = MessagesRequest.model_validate(FIELDS).to_generation(SEALED)
    return MessagesSerializer(request, steps.output, SEALED, hides_thinking=False)


def sent(api: str, steps: Steps) -> list[tuple[str | None, Any]]:
    """Returns name and data of each event."""

    async def read() -> bytes:
        got = b""
        async for part in streaming._events(steps, serializer_of(api, steps)):  # type: ignore[arg-type]
            got += part
            if got.count(b"event: ping") + got.count(b": keep-alive") >= steps.num_pings:
                steps.may_begin.set()
        return got

    return parse_events(asyncio.run(read()).decode())


def test_messages_stream_pings_before_first_token(monkeypatch):
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.02)
    found = sent("messages", Steps([event("ab", FinishReason.LENGTH)], num_pings=2))
    names = [name for name, _ in found]
    assert names[:3] == ["message_start", "ping", "ping"]
    assert names[-5:] == [
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]


def test_responses_stream_begins_before_first_token(monkeypatch):
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.02)
    found = sent("responses", Steps([event("ab", FinishReason.LENGTH)], num_pings=1))
    assert [name for name, _ in found[:2]] == ["response.created", "response.in_progress"]
    assert (found[2], found[-1][0]) == ((None, ": keep-alive"), "response.incomplete")


def test_responses_usage_reports_cached_tokens():
    found = dict(sent("responses", Steps([event("ab", FinishReason.STOP)])))
    usage = json.loads(found["response.completed"])["response"]["usage"]
    assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (7, 4)


def test_messages_usage_excludes_cached_tokens():
    """The sum is chat's number of prompt tokens."""
    found = dict(sent("messages", Steps([event("ab", FinishReason.LENGTH)])))
    for usage in (
        json.loads(found["message_start"])["message"]["usage"],
        json.loads(found["message_delta"])["usage"],
    ):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 4)


@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_error_in_stream_has_schema_of_api(api):
    found = sent(api, Steps([event("ab")]))
    name, data = found[-2] if api == "chat" else found[-1]
    body = json.loads(data)
    if api == "chat":
        assert (name, body["error"]["code"]) == (None, "engine_lost")
        assert found[-1] == (None, "[DONE]")
    elif api == "responses":
        response = body["response"]
        assert (name, response["status"]) == ("response.failed", "failed")
        assert response["error"] == {"code": "server_error", "message": "the engine has exited"}
        assert response["output"][0]["status"] == "incomplete"
    else:
        assert (name, body["type"], body["error"]["type"]) == ("error", "error", "api_error")


def test_error_before_first_event_is_raised():
    for api in ("chat", "messages", "responses"):
        with pytest.raises(ApiError, match="exited"):
            sent(api, Steps([]))


def test_sealed_text_opens_on_servers_with_same_key():
    text = "reasoning \U0001f600 " * 50
    value = SealedText("m", "key").seal(text)
    assert len(value) < len(text.encode())
    assert SealedText("m", "key").open(value) == text
    for other in (SealedText("m", None), SealedText("n", "key")):
        assert other.open(value) is None
    for wrong in (
        "",
        "abc",
        "é",
        value[:-8],
        value.replace(value[40], "A" if value[40] != "A" else "B", 1),
    ):
        assert SealedText("m", "key").open(wrong) is None
