"""Client of the engine process: sends requests and distributes their events."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.engine.image_inputs import PromptImage
from shared.engine.request import Event, SamplingParams
from shared.process.ipc_messages import (
    FrameReader,
    ServerInfo,
    event_from_row,
    image_to_field,
    in_parts,
    sampling_to_fields,
)
from shared.process.signals import stop_reason
from shared.server.engine_link.chunked_write import write_in_pieces
from shared.server.engine_link.server_metrics import TokenTimes

RECEIVE_BYTES = 1 << 18
METRICS_WAIT_S = 1.0  # a step may take long; the last snapshot is served then
LOOK_S = 1.0  # between two looks whether the engine still says something
MAX_OPEN_IMAGE_BYTES = 1 << 30
"""Maximum bytes of image data of all queued and running requests."""

MAX_UNREAD_EVENTS = 4096
"""Maximum unread steps per choice before a slow client's request is aborted."""


class EngineLost(Exception):
    """The engine's process has ended or is ending; the message is the reason."""


class Refused(Exception):
    """The engine cannot serve the request; the message is the reason.

    Attributes:
      field: The field of prompt and sampling parameters that is at fault, or None.
    """

    def __init__(self, reason: str, field: str | None) -> None:
        super().__init__(reason)
        self.field = field


class QueueFull(Exception):
    """More requests would wait than may."""


class Draining(Exception):
    """The server is stopping and takes no requests any more.

    Attributes:
      seconds: How long it may take until it has stopped.
    """

    def __init__(self, seconds: int) -> None:
        super().__init__("the server is shutting down and accepts no new requests")
        self.seconds = seconds


class ClientLeft(Exception):
    """The client closed its connection."""


class SlowClientError(Exception):
    """The client has left so much unread that its requests were ended."""


@dataclass(frozen=True)
class End:
    """Why the engine is gone.

    Attributes:
      reason: One sentence.
      failed: Whether that is a failure.
      is_frozen: Whether its process is still there and says nothing.
    """

    reason: str
    failed: bool
    is_frozen: bool = False


@dataclass(frozen=True)
class SubmittedPrompt:
    """A prompt with the choices that are made for it: one seed each, and whose turn they are.

    Attributes:
      images: Those whose rows stand in it.
    """

    tokens: list[int]
    sampling: SamplingParams
    seeds32: list[int]
    tenant: str
    priority: int
    images: tuple[PromptImage, ...] = ()

    @property
    def image_bytes(self) -> int:
        """Bytes of image data, which the engine keeps until the choices have finished."""
        return sum(image.pixels.nbytes for image in self.images)


class Submission:
    """All choices of one HTTP request; choices are numbered prompt by prompt.

    Args:
      client: Knows which of them the engine still works on.
      ids: The request of each choice, in their order and without gaps.
      times: Told when tokens come.
      image_bytes: Of the images that the engine keeps for it.
    """

    def __init__(
        self, client: EngineClient, ids: range, times: TokenTimes, image_bytes: int
    ) -> None:
        self._client, self._ids, self._times = client, ids, times
        self.image_bytes = image_bytes
        self._queue: asyncio.Queue[Event | Exception] = asyncio.Queue()

    async def next(self) -> tuple[int, Event]:
        """The number of a choice and its next event, which may be later than its `finish`.

        Raises:
          EngineLost, Refused, ClientLeft, SlowClientError: There will be no further event.
        """
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return self._ids.index(item.request_id), item

    def put(self, item: Event | Exception) -> None:
        """Hands over an event, or the reason why there is none."""
        self._queue.put_nowait(item)

    def came(self, event: Event) -> None:
        """An event has come from the engine."""
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
        """Ends a choice whose text has ended with its `num_tokens`-th token."""
        self._client.finish(self._ids[choice], num_tokens)

    def close(self) -> None:
        """Ends every choice that is still open."""
        for request_id in self._ids:
            self._client.abort(request_id)


class EngineClient:
    """The connection to the engine's process, on the server's event loop.

    Attributes:
      facts: What the engine said of itself.
      ended: Done when the engine is gone.
      drains: Set when the server is to stop once all that is open has ended.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        facts: ServerInfo,
        frames: FrameReader,
        last_word: socket.socket | None,
    ) -> None:
        self.facts = facts
        self.ended: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self._reader = reader
        self._writer = writer
        self._frames, self._last_word = frames, last_word
        # Pixels with their requests, and what comes behind them; an `add` is of a submission.
        self._unsent: deque[tuple[Submission | None, list[bytes | memoryview]]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._drain_ends, self.drains = math.inf, asyncio.Event()
        self._has_heard = True
        self._next_id = 1
        self._submissions: dict[int, Submission] = {}  # of the requests that have not ended
        self._metrics: dict[str, float] = {}
        self._metrics_waiters: list[asyncio.Future[None]] = []
        self._tickets: dict[int, asyncio.Future[dict[str, int]]] = {}
        self._handlers = {
            "step": self._take_step,
            "refused": self._take_refusal,
            "metrics": self._take_metrics,
            "corpora": self._take_corpora,
            "drain": self._take_drain,
            "end": self._take_end,
        }
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]

    @classmethod
    async def connect(
        cls, connection: socket.socket, last_word: socket.socket | None = None
    ) -> EngineClient:
        """Waits for the engine's facts.

        Args:
          connection: To the engine.
          last_word: Holds the number of a signal where the engine may end without a word by it;
            None where no signal ends it.

        Raises:
          EngineLost: The engine ended first.
        """
        reader, writer = await asyncio.open_connection(sock=connection)
        frames = FrameReader()
        while received := await reader.read(RECEIVE_BYTES):
            # What follows the facts stays in `frames`.
            for _, fields in frames.feed(received):
                return cls(reader, writer, ServerInfo.from_fields(fields), frames, last_word)
        raise EngineLost("the engine process exited before it was ready")

    @property
    def alive(self) -> bool:
        """True if requests can be submitted."""
        return not self.ended.done()

    @property
    def is_idle(self) -> bool:
        """True if no request is open."""
        return not self._submissions

    def submit(self, prompts: list[SubmittedPrompt], times: TokenTimes) -> Submission:
        """Sends prompts to the engine.

        Raises:
          EngineLost: The engine is gone.
          Draining: The server is to stop.
          QueueFull: They would be more than may run and wait; none of them was sent.
        """
        if self.ended.done():
            raise EngineLost(self.ended.result().reason)
        if self.drains.is_set():
            left = self._drain_ends - asyncio.get_running_loop().time()
            raise Draining(max(1, math.ceil(left)))
        count, most = sum(len(prompt.seeds32) for prompt in prompts), self.facts.max_open_requests
        if most is not None and len(self._submissions) + count > most:
            raise QueueFull(
                f"the server is full: at most {most} requests may run and wait; try again later"
            )
        num_bytes = sum(prompt.image_bytes for prompt in prompts)
        self._check_images(num_bytes)
        ids = self._take_ids(count)
        submission, following = Submission(self, ids, times, num_bytes), iter(ids)
        for prompt in prompts:
            choices = [[next(following), seed32] for seed32 in prompt.seeds32]
            sampling = sampling_to_fields(prompt.sampling)
            images = list(map(image_to_field, prompt.images))
            whose = (prompt.tenant, prompt.priority)
            pixels = [image.pixels for image in prompt.images]
            message = ["add", prompt.tokens, sampling, choices, *whose, images]
            self._send(message, pixels, submission)
        self._submissions.update(dict.fromkeys(ids, submission))
        return submission

    def _check_images(self, num_bytes: int) -> None:
        """Refuses images for which there is no memory beside those of the open requests."""
        if not num_bytes:
            return
        unsent = (submission for submission, _ in self._unsent if submission is not None)
        holding = {*self._submissions.values(), *unsent}
        kept = sum(submission.image_bytes for submission in holding)
        if kept + num_bytes > MAX_OPEN_IMAGE_BYTES:
            most = f"at most {MAX_OPEN_IMAGE_BYTES} bytes of image data may be queued or running"
            raise QueueFull(f"the server is full: {most}")

    async def metrics(self) -> dict[str, float]:
        """The engine's counters now, or the last known ones while a step takes long."""
        waiter = asyncio.get_running_loop().create_future()
        self._metrics_waiters.append(waiter)
        self._send(["metrics"])
        pending = {waiter, self.ended}
        await asyncio.wait(pending, timeout=METRICS_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        return self._metrics

    async def ask(self, kind: str, *fields: Any) -> dict[str, int]:
        """Sends a message about external corpora; returns the tokens of each, by name.

        Raises:
          Refused: It cannot be done.
          EngineLost: The engine is gone.
        """
        if self.ended.done():
            raise EngineLost(self.ended.result().reason)
        (ticket,) = self._take_ids(1)
        self._tickets[ticket] = asyncio.get_running_loop().create_future()
        self._send([kind, ticket, *fields])
        return await self._tickets[ticket]

    def drained(self) -> None:
        """Tells the engine that every answer has left."""
        self._send(["drained"])

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Tells the engine where the text of a request ended, which may have ended there too."""
        self._submissions.pop(request_id, None)
        self._send(["finish", request_id, num_tokens])

    def abort(self, request_id: int) -> None:
        """Ends a request that nobody waits for."""
        if self._submissions.pop(request_id, None):
            self._send(["abort", request_id])

    def _take_ids(self, count: int) -> range:
        """Numbers that were never used."""
        ids = range(self._next_id, self._next_id + count)
        self._next_id = ids.stop
        return ids

    def _send(
        self,
        message: list[Any],
        pixels: Sequence[np.ndarray] = (),
        submission: Submission | None = None,
    ) -> None:
        if not self.alive:
            return
        parts = list(in_parts(message, pixels))
        if not (pixels or self._unsent):
            self._writer.writelines(parts)
            return
        if not self._unsent:
            self._sending = asyncio.create_task(self._send_unsent())
        self._unsent.append((submission, parts))

    async def _send_unsent(self) -> None:
        """Sends it in pieces.

        A request that was aborted before its turn is left out: nobody waits for its pixels.
        """
        with contextlib.suppress(OSError):  # who reads tells of it
            while self._unsent:
                submission, parts = self._unsent[0]
                is_closed = submission and submission not in self._submissions.values()
                if not is_closed:
                    await write_in_pieces(self._writer, parts)
                self._unsent.popleft()

    async def _read(self) -> None:
        received = b""  # the frames may hold some already
        try:
            while True:
                for kind, *fields in self._frames.feed(received):
                    self._handlers[kind](*fields)
                self._has_heard = True
                if not (received := await self._reader.read(RECEIVE_BYTES)):
                    return
        except OSError:
            pass  # a reset is an end as well
        finally:
            self._take_silent_end()

    def _take_silent_end(self) -> None:
        """The engine is gone; where it said nothing, perhaps it had no more time to."""
        number = b""
        if self._last_word is not None:
            with contextlib.suppress(BlockingIOError):
                number = self._last_word.recv(1, socket.MSG_DONTWAIT)
        if number:
            self._take_end(stop_reason(number[0]), False)
        else:
            self._take_end("the engine process exited without a message (killed or crashed)", True)

    async def _listen(self) -> None:
        """Ends the service when the engine has said nothing for too long: it is frozen.

        Looks are counted, not seconds: where this process stood still as well, it was no silence.
        """
        silent_s = 0.0
        while self.alive:
            await asyncio.sleep(LOOK_S)
            silent_s = 0.0 if self._has_heard else silent_s + LOOK_S
            self._has_heard = False
            if silent_s > self.facts.silence_s:
                reason = f"the engine process sent nothing for {silent_s:g} s"
                self._take_end(reason, True, is_frozen=True)

    def _take_drain(self, seconds: float) -> None:
        self._drain_ends = asyncio.get_running_loop().time() + seconds
        self.drains.set()

    def _take_step(self, rows: list[list[Any]]) -> None:
        for row in rows:
            event = event_from_row(row)
            submission = self._submissions.get(event.request_id)
            if submission is None:  # finished or aborted while the event was on its way
                continue
            if event.finish_reason:
                del self._submissions[event.request_id]
            submission.came(event)

    def _take_refusal(self, request_id: int, reason: str, field: str | None) -> None:
        submission = self._submissions.pop(request_id, None)
        if submission:
            submission.put(Refused(reason, field))

    def _take_corpora(
        self, ticket: int, held: dict[str, int], reason: str | None, field: str | None
    ) -> None:
        waiter = self._tickets.pop(ticket)
        if waiter.done():  # nobody waits any more
            return
        if reason is None:
            waiter.set_result(held)
        else:
            waiter.set_exception(Refused(reason, field))

    def _take_metrics(self, snapshot: dict[str, float]) -> None:
        self._metrics = snapshot
        waiters, self._metrics_waiters = self._metrics_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _take_end(self, reason: str, failed: bool, is_frozen: bool = False) -> None:
        if self.ended.done():
            return
        self.ended.set_result(End(reason, failed, is_frozen))
        for submission in set(self._submissions.values()):
            submission.put(EngineLost(reason))
        self._submissions.clear()
        for waiter in self._tickets.values():
            if not waiter.done():
                waiter.set_exception(EngineLost(reason))
