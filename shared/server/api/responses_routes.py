"""Routes of OpenAI's Responses API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Query, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from shared.server.api.request_parsing import parse_responses
from shared.server.api.streaming import json_response, respond
from shared.server.api.transport import read_json
from shared.server.completions.generation import Generation, Generator
from shared.server.completions.response_store import MAX_STORED_S, ResponseStore, StoredResponse
from shared.server.completions.responses_serializer import ResponsesSerializer
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.protocol.errors import ApiError
from shared.server.protocol.generation_request import GenerationRequest
from shared.server.protocol.responses_items import InputItem
from shared.server.protocol.responses_listing import page_of
from shared.server.protocol.responses_types import ResponsesRequest
from shared.server.protocol.sealed_text import SealedText

CANCEL_WAIT_S = 2.0
MAX_LISTED = 100  # input items of a page, as in OpenAI's API
FLAG = "--store-responses"
_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


class ResponsesRoutes:
    """Handlers of `/v1/responses` and of stored responses."""

    def __init__(self, generator: Generator, work: BodyParsingThread) -> None:
        facts = generator.client.facts
        self._generator, self._work = generator, work
        self._sealed = SealedText(facts.model_name, facts.api_key)
        self._store = ResponseStore() if facts.store_responses else None
        self._running: dict[str, Generation] = {}

    async def create(self, request: Request) -> Response:
        """POST /v1/responses."""
        sent = await read_json(request)
        body, asked, inputs = await self._work.do(len(sent), self._read, sent)
        generation = await self._generator.start(asked, request.headers, len(sent))
        save = self._saver(body, inputs)
        serializer = ResponsesSerializer(asked, body, generation.output, self._sealed, save)
        name = generation.output.name

        def closed() -> None:
            self._running.pop(name, None)
            serializer.abandon()

        self._running[name] = generation
        generation.when_closed(closed)
        return await respond(request, generation, serializer, asked.stream)

    async def retrieve(self, response_id: str) -> Response:
        """GET /v1/responses/ID: a stored response."""
        return Response(self._find(response_id).response, media_type="application/json")

    async def input_items(
        self,
        response_id: str,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """GET /v1/responses/ID/input_items: a page of the items before the output."""
        items = _ITEMS.validate_python(json.loads(self._find(response_id).inputs))
        is_ascending = order == "asc"
        return json_response(
            page_of(items, response_id, after=after, limit=limit, is_ascending=is_ascending)
        )

    async def delete(self, response_id: str) -> Response:
        """DELETE /v1/responses/ID."""
        self._find(response_id)
        assert self._store is not None
        self._store.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """POST /v1/responses/ID/cancel: ends a response in progress."""
        self._find(response_id)
        generation = self._running.get(response_id)
        if generation is None:
            reason = f"the response {response_id!r:.80} has ended; only a running one can be"
            raise ApiError(400, f"{reason} cancelled", "response_id")
        generation.cancel()
        async with asyncio.timeout(CANCEL_WAIT_S):
            while response_id in self._running:
                await asyncio.sleep(0.005)
        return await self.retrieve(response_id)

    def _read(self, sent: bytes) -> tuple[ResponsesRequest, GenerationRequest, list[Any]]:
        """Returns the request, its form for the generation, and all items of its input."""
        body, given = parse_responses(sent)
        items: list[Any] = []
        if body.previous_response_id is not None:
            items = self._previous(body.previous_response_id).items
        asked = body.to_generation(self._sealed, _ITEMS.validate_python(items))
        if self._store is None and body.store:
            asked = replace(asked, ignored=(*asked.ignored, "store"))
        return body, asked, items + given

    def _saver(self, body: ResponsesRequest, inputs: list[Any]) -> Callable[[dict[str, Any]], None]:
        store = self._store
        if store is None or body.store is False:
            return lambda response: None
        return lambda response: store.put(response, inputs)

    def _previous(self, name: str) -> StoredResponse:
        field = "previous_response_id"
        if self._store is None:
            reason = f"{field} requires a server that was started with {FLAG}"
            raise ApiError(400, f"{reason}; send the whole conversation as input", field)
        found = self._store.get(name)
        if found is None or json.loads(found.response)["status"] == "in_progress":
            reason = f"{field}: no ended response {name!r:.80} is stored; the server deletes one"
            reason = f"{reason} after {MAX_STORED_S:g} s or when the store is full"
            raise ApiError(400, reason, field, "previous_response_not_found")
        return found

    def _find(self, name: str) -> StoredResponse:
        if self._store is None:
            reason = f"stored responses require a server that was started with {FLAG}"
            raise ApiError(400, reason, "response_id", "responses_not_stored")
        found = self._store.get(name)
        if found is None:
            reason = f"no response {name!r:.80} is stored; the server deletes one after"
            reason = f"{reason} {MAX_STORED_S:g} s or when the store is full"
            raise ApiError(404, reason, "response_id", "response_not_found")
        return found
