"""The HTTP server's own routes over an engine of this process: from a body to its answer."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import httpx

from shared.engine.engine import Engine
from shared.engine.request_limits import request_limits
from shared.models.sampling import SamplingDefaults
from shared.process.ipc_messages import (
    FrameReader,
    ServerInfo,
    event_to_row,
    pack,
    requests_of,
)
from shared.server.api import app
from shared.server.completions.grammars import GrammarChecks
from shared.server.engine_link.engine_client import RECEIVE_BYTES, EngineClient
from shared.text.chat_template import Conversation
from shared.text.chat_templates import ChatTemplates
from shared.text.tokenizer import Tokenizer
from shared.text.worker import LENGTH
from tests.support.run_engine import checked_step

Body = dict[str, Any]


class Renders:
    """Chat templates without a process of its own."""

    def __init__(self, templates: ChatTemplates) -> None:
        self.templates = templates

    async def render(self, asked: bytes) -> str:
        fields = json.loads(asked[LENGTH.size :])
        return self.templates.render(Conversation(**fields))


class InProcess:
    """An engine that steps while answers of the server's routes are waited for."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> None:
        capacity = engine.allocator.capacity
        self.facts = ServerInfo(
            model_name="tiny",
            model_folder="",
            limits=request_limits(capacity, capacity.context_length),
            eos_ids=eos_ids,
            sampling_defaults=SamplingDefaults(),
            max_open_requests=None,
            max_draft_depth=capacity.max_depth,
            host_names=None,
        )
        self._engine, self._tokenizer = engine, tokenizer

    def answers(self, path: str, bodies: Sequence[Body]) -> list[Body]:
        """The answers of a route to simultaneous requests; each must be served."""
        return asyncio.run(self._answers(path, bodies))

    async def _answers(self, path: str, bodies: Sequence[Body]) -> list[Body]:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack(self.facts.to_message()))
        client = await EngineClient.connect(theirs)
        serving = asyncio.create_task(_Steps(self._engine, reader, writer).run())
        transport = httpx.ASGITransport(self._app(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as asking:
            answers = await asyncio.gather(*(asking.post(path, json=body) for body in bodies))
        if serving.done():  # it failed, and every answer is an error
            await serving
        serving.cancel()
        await client.ended
        refused = [answer.text for answer in answers if answer.status_code != httpx.codes.OK]
        assert not refused, refused
        return [answer.json() for answer in answers]

    def _app(self, client: EngineClient) -> Any:
        templates = self._tokenizer.templates
        renders = templates and Renders(templates)
        made = (client, self._tokenizer, renders, None, GrammarChecks(client.facts))
        # Each call makes an application, and none of them serves its OpenAPI document.
        with patch.object(app, "document", return_value={}):
            return app.make_apps(*made, (), has_admin_listener=False).clients


class _Steps:
    """The engine's side of the socket, as `shared.process.loop` serves it."""

    def __init__(
        self, engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine, self._reader, self._writer = engine, reader, writer
        self._handlers = {"add": self._add, "abort": engine.abort, "finish": engine.finish}

    async def run(self) -> None:
        """Runs until it is cancelled or fails; then the server receives the end of the socket."""
        listening = asyncio.create_task(self._listen())
        try:
            while not listening.done():
                if self._engine.busy:
                    rows = [event_to_row(event) for event in checked_step(self._engine)]
                    self._writer.write(pack(["step", rows]))
                await asyncio.sleep(0)
            await listening
        finally:
            listening.cancel()
            self._writer.close()

    async def _listen(self) -> None:
        frames = FrameReader()
        while received := await self._reader.read(RECEIVE_BYTES):
            for kind, *fields in frames.feed(received):
                self._handlers[kind](*fields)

    def _add(self, *fields: Any) -> None:
        for request in requests_of(*fields):
            self._engine.add(request)
