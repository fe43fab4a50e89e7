"""Open request of an HTTP client: its prompts, and the queue of its events."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from shared.engine.image_inputs import PromptImage
from shared.engine.request import Event, SamplingParams
from shared.server.engine_link.engine_errors import ClientLeft, SlowClientError
from shared.server.engine_link.server_metrics import TokenTimes

MAX_UNREAD_EVENTS = 4096
"""Maximum unread steps per choice before a slow client's request is aborted."""

Ticket = dict[str, Any]
"""Ticket of a KV cache record, as its fields."""


class RequestEnds(Protocol):
    """Part of `EngineClient` that ends requests."""

    def finish(self, request_id: int, num_tokens: int) -> None:
        """See `EngineClient`."""
        ...

    def abort(self, request_id: int) -> None:
        """See `EngineClient`."""
        ...


@dataclass(frozen=True)
class SubmittedPrompt:
    """Prompt with its sampling parameters and one seed per choice.

    Attributes:
      seeds32: Seed of each choice.
      tenant: User name, for fair scheduling and n-gram storage.
      images: Images with their positions in the prompt.
    """

    tokens: list[int]
    sampling: SamplingParams
    seeds32: list[int]
    tenant: str
    priority: int
    images: tuple[PromptImage, ...] = ()

    @property
    def image_bytes(self) -> int:
        """Bytes of image data, which the engine holds until the choices have finished."""
        return sum(image.pixels.nbytes for image in self.images)


class Submission:
    """All choices of one HTTP request; choices are numbered prompt by prompt.

    Args:
      client: Connection to the engine.
      ids: Request id of each choice, consecutive.
      times: Recorder of token times.
      image_bytes: Bytes of image data that the engine holds.
    """

    def __init__(
        self, client: RequestEnds, ids: range, times: TokenTimes, image_bytes: int
    ) -> None:
        self._client, self._ids, self._times = client, ids, times
        self.image_bytes = image_bytes
        self._queue: asyncio.Queue[Event | Ticket | Exception] = asyncio.Queue()

    async def next(self) -> tuple[int, Event]:
        """Returns the number of a choice and its next event, which may arrive after `finish`.

        Raises:
          EngineLost, RequestRejected, ClientLeft, SlowClientError: No further event will follow.
        """
        event = await self._next_item()
        assert isinstance(event, Event)
        return self._ids.index(event.request_id), event

    async def ticket(self) -> Ticket:
        """Returns the next ticket of `EngineClient.submit_transfer`; the last one is marked.

        Raises:
          EngineLost, RequestRejected, NoRecordError, ClientLeft: There will be none.
        """
        ticket = await self._next_item()
        assert isinstance(ticket, dict)
        return ticket

    async def _next_item(self) -> Event | Ticket:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def client_left(self) -> None:
        """Ends the events because the client disconnected."""
        self.put(ClientLeft())

    def put(self, item: Event | Ticket | Exception) -> None:
        """Queues an event, a ticket, or the exception that ends the events."""
        self._queue.put_nowait(item)

    def came(self, event: Event) -> None:
        """Handles an event of the engine."""
        if event.tokens:
            self._times.came(event.request_id)
        if self._queue.qsize() >= MAX_UNREAD_EVENTS * len(self._ids):
            self._drop_reader()
        else:
            self.put(event)

    def _drop_reader(self) -> None:
        """Aborts the request of a slow client, so that its queue stays bounded."""
        self.close()
        while not self._queue.empty():
            self._queue.get_nowait()
        self.put(SlowClientError())

    def finish(self, choice: int, num_tokens: int) -> None:
        """Ends a choice after `num_tokens` tokens, because a stop string ended its text."""
        self._client.finish(self._ids[choice], num_tokens)

    def close(self) -> None:
        """Aborts every open choice."""
        for request_id in self._ids:
            self._client.abort(request_id)
