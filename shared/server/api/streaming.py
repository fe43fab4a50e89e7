"""Responses of a generation: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from shared.server.api.transport import EventStream, watch_client
from shared.server.completions.choice import ChoiceUpdate
from shared.server.completions.generation import Generation
from shared.server.completions.serializer import Serializer, StreamEvent
from shared.server.protocol.errors import ApiError
from shared.text.parsing.delta import Delta

KEEP_ALIVE_S = 5.0
"""Seconds without an event after which a stream begins, and between events that keep it open."""


async def respond(
    request: Request, generation: Generation, serializer: Serializer, stream: bool
) -> Response:
    """Returns the response of a generation, and closes the generation at its end."""
    with contextlib.ExitStack() as ends:
        ends.callback(generation.close)
        with watch_client(generation, request.receive):
            if not stream:
                return json_response(await _whole(generation, serializer))
            events = _events(generation, serializer)
            first = await anext(events)
        ends.pop_all()  # the stream closes it
    return EventStream(generation, _put_back(first, events))


async def _whole(generation: Generation, serializer: Serializer) -> dict[str, Any]:
    messages = [Delta()] * len(generation.output.choices)
    async for index, piece in generation.pieces():
        messages[index] += piece.delta
    return serializer.whole(messages)


async def _events(generation: Generation, serializer: Serializer) -> AsyncIterator[bytes]:
    """Yields the events of a stream; an error after the first event is sent as an event."""
    has_begun = False
    try:
        async for update in _updates(generation, serializer):
            events = [] if has_begun else [*serializer.begin()]
            if update is None:
                events += _keep_alive(serializer)
            else:
                index, piece = update
                events += serializer.update(index, piece)
            if events:
                has_begun = True
                yield _encoded(events)
        yield _encoded(serializer.end())
    except ApiError as error:
        if not has_begun:
            raise
        yield _encoded(serializer.fail(error))


async def _updates(
    generation: Generation, serializer: Serializer
) -> AsyncIterator[tuple[int, ChoiceUpdate] | None]:
    """Yields the updates; None each time that the first one takes longer than `KEEP_ALIVE_S`."""
    if serializer.keep_alive is not None:
        first = asyncio.ensure_future(generation.next())
        try:
            while not (await asyncio.wait((first,), timeout=KEEP_ALIVE_S))[0]:
                yield None
            yield first.result()
        finally:
            first.cancel()
    async for update in generation.pieces():
        yield update


def _keep_alive(serializer: Serializer) -> list[StreamEvent]:
    return [] if serializer.keep_alive is None else [serializer.keep_alive]


def _encoded(events: Sequence[StreamEvent]) -> bytes:
    return b"".join([event.encode() for event in events])


async def _put_back(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    """Returns a JSON response."""
    return Response(json.dumps(content), status, media_type="application/json")
