"""Routes of Anthropic's Messages API."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from shared.server.api.request_parsing import parse_messages
from shared.server.api.streaming import json_response, respond
from shared.server.api.transport import read_json
from shared.server.completions.generation import Generator
from shared.server.completions.messages_serializer import MessagesSerializer
from shared.server.completions.prompts import PromptReader, adapter_of
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.protocol.generation_request import ChatInput, GenerationRequest
from shared.server.protocol.messages_types import MessagesRequest, TokenCountRequest
from shared.server.protocol.sealed_text import SealedText


class MessagesRoutes:
    """Handlers of `/v1/messages` and `/v1/messages/count_tokens`."""

    def __init__(self, generator: Generator, reader: PromptReader, work: BodyParsingThread) -> None:
        facts = generator.client.facts
        self._generator, self._reader, self._work = generator, reader, work
        self._facts, self._sealed = facts, SealedText(facts.model_name, facts.api_key)

    async def create(self, request: Request) -> Response:
        """POST /v1/messages."""
        sent = await read_json(request)
        body, asked = await self._work.do(len(sent), self._read, sent)
        generation = await self._generator.start(asked, request.headers, len(sent))
        serializer = MessagesSerializer(
            asked, generation.output, self._sealed, body.has_hidden_thinking
        )
        return await respond(request, generation, serializer, asked.stream)

    async def count_tokens(self, request: Request) -> Response:
        """POST /v1/messages/count_tokens: number of prompt tokens of a message."""
        sent = await read_json(request)
        model, chat = await self._work.do(len(sent), self._read_count, sent)
        adapter_of(model, self._facts)
        prompt = await self._reader.read_chat(self._generator.settle_tools(chat), len(sent))
        return json_response({"input_tokens": len(prompt.tokens)})

    def _read(self, sent: bytes) -> tuple[MessagesRequest, GenerationRequest]:
        body = parse_messages(sent, MessagesRequest)
        return body, body.to_generation(self._sealed)

    def _read_count(self, sent: bytes) -> tuple[str, ChatInput]:
        body = parse_messages(sent, TokenCountRequest)
        return body.model, body.to_chat(self._sealed)
