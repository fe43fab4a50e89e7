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
from shared.server.engine_link.engine_errors import (
    Draining,
    EngineLost,
    NoRecordError,
    QueueFull,
    RequestRejected,
)
from shared.server.engine_link.server_metrics import TokenTimes
from shared.server.engine_link.submission import Submission, SubmittedPrompt, Ticket

RECEIVE_BYTES = 1 << 18
METRICS_WAIT_S = 1.0  # a step may take long; the last snapshot is served then
LOOK_S = 1.0  # interval of the check that the engine still sends messages
MAX_OPEN_IMAGE_BYTES = 1 << 30
"""Maximum bytes of image data of all queued and running requests."""


@dataclass(frozen=True)
class End:
    """Reason of the engine's end.

    Attributes:
      reason: One sentence.
      failed: The end is a failure.
      is_frozen: The process is still alive but sends nothing.
    """

    reason: str
    failed: bool
    is_frozen: bool = False


class EngineClient:
    """Connection to the engine process, on the server's event loop.

    Attributes:
      facts: Facts that the engine sent at startup.
      ended: Done when the engine has exited.
      drains: Set when the server drains: it stops once all open requests have ended.
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
        # Messages with image data and those after them, with the submission of an `add`.
        self._unsent: deque[tuple[Submission | None, list[bytes | memoryview]]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._drain_ends, self.drains = math.inf, asyncio.Event()
        self._has_heard = True
        self._next_id = 1
        self._submissions: dict[int, Submission] = {}  # of the requests that have not ended
        self._metrics: dict[str, float] = {}
        self._metrics_waiters: list[asyncio.Future[None]] = []
        self._tickets: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._handlers = {
            "step": self._take_step,
            "refused": self._take_rejection,
            "metrics": self._take_metrics,
            "reply": self._take_reply,
            "drain": self._take_drain,
            "kv_ticket": self._take_ticket,
            "end": self._take_end,
        }
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._listen())]

    @classmethod
    async def connect(
        cls, connection: socket.socket, last_word: socket.socket | None = None
    ) -> EngineClient:
        """Waits for the engine's facts.

        Args:
          connection: Socket to the engine.
          last_word: Receives the number of a signal that ends the engine; None without signals.

        Raises:
          EngineLost: The engine exited first.
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
        """Submits prompts to the engine.

        Raises:
          EngineLost, Draining, QueueFull: See `_submit`; none of the prompts was sent.
        """
        return self._submit("add", prompts, times)

    def submit_transfer(self, prompt: SubmittedPrompt, times: TokenTimes) -> Submission:
        """Requests a KV cache record of a prompt; raises the errors of `submit`."""
        return self._submit("kv_transfer", [prompt], times)

    def _submit(self, kind: str, prompts: list[SubmittedPrompt], times: TokenTimes) -> Submission:
        """Sends a message of a kind for each prompt.

        Raises:
          EngineLost: The engine has exited.
          Draining: The server is shutting down.
          QueueFull: The prompts exceed the limit of open requests; none of them was sent.
        """
        if self.ended.done():
            raise EngineLost(self.ended.result().reason)
        if self.drains.is_set():
            remaining_s = self._drain_ends - asyncio.get_running_loop().time()
            raise Draining(max(1, math.ceil(remaining_s)))
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
            owner = (prompt.tenant, prompt.priority)
            pixels = [image.pixels for image in prompt.images]
            message = [kind, prompt.tokens, sampling, choices, *owner, images]
            self._send(message, pixels, submission)
        self._submissions.update(dict.fromkeys(ids, submission))
        return submission

    def _check_images(self, num_bytes: int) -> None:
        """Rejects images that exceed the memory limit together with those of open requests."""
        if not num_bytes:
            return
        unsent = (submission for submission, _ in self._unsent if submission is not None)
        holding = {*self._submissions.values(), *unsent}
        kept = sum(submission.image_bytes for submission in holding)
        if kept + num_bytes > MAX_OPEN_IMAGE_BYTES:
            most = f"at most {MAX_OPEN_IMAGE_BYTES} bytes of image data may be queued or running"
            raise QueueFull(f"the server is full: {most}; try again later")

    async def metrics(self) -> dict[str, float]:
        """Returns the engine's counters, or the last known values while a step takes long."""
        waiter = asyncio.get_running_loop().create_future()
        self._metrics_waiters.append(waiter)
        self._send(["metrics"])
        pending = {waiter, self.ended}
        await asyncio.wait(pending, timeout=METRICS_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        return self._metrics

    async def ask(self, kind: str, *fields: Any) -> dict[str, Any]:
        """Sends a message of an admin route; returns the tokens of each named external corpus,
        or the folder of each LoRA adapter.

        Raises:
          RequestRejected: The message is invalid.
          EngineLost: The engine has exited.
        """
        if self.ended.done():
            raise EngineLost(self.ended.result().reason)
        (ticket,) = self._take_ids(1)
        self._tickets[ticket] = asyncio.get_running_loop().create_future()
        self._send([kind, ticket, *fields])
        return await self._tickets[ticket]

    def drained(self) -> None:
        """Reports to the engine that every response has been sent."""
        self._send(["drained"])

    def finish(self, request_id: int, num_tokens: int) -> None:
        """Reports to the engine that a request ended after `num_tokens` tokens."""
        self._submissions.pop(request_id, None)
        self._send(["finish", request_id, num_tokens])

    def abort(self, request_id: int) -> None:
        """Aborts a request."""
        if self._submissions.pop(request_id, None):
            self._send(["abort", request_id])

    def _take_ids(self, count: int) -> range:
        """Returns unused request ids."""
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
        """Sends queued messages in chunks.

        Requests that were aborted while queued are skipped, with their image data.
        """
        with contextlib.suppress(OSError):  # the reader reports it
            while self._unsent:
                submission, parts = self._unsent[0]
                is_closed = submission and submission not in self._submissions.values()
                if not is_closed:
                    await write_in_pieces(self._writer, parts)
                self._unsent.popleft()

    async def _read(self) -> None:
        received = b""  # `_frames` may hold bytes already
        try:
            while True:
                for kind, *fields in self._frames.feed(received):
                    self._handlers[kind](*fields)
                self._has_heard = True
                if not (received := await self._reader.read(RECEIVE_BYTES)):
                    return
        except OSError:
            pass  # a reset also means that the engine has exited
        finally:
            self._take_silent_end()

    def _take_silent_end(self) -> None:
        """Handles the end of an engine that sent no reason, for example after a signal."""
        number = b""
        if self._last_word is not None:
            with contextlib.suppress(BlockingIOError):
                number = self._last_word.recv(1, socket.MSG_DONTWAIT)
        if number:
            self._take_end(stop_reason(number[0]), False)
        else:
            self._take_end("the engine process exited without a message (killed or crashed)", True)

    async def _listen(self) -> None:
        """Ends the service when a frozen engine has sent nothing for too long.

        Intervals are counted instead of seconds, so that a pause of this process is not counted.
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
            if submission is None:  # finished or aborted while the event was in flight
                continue
            if event.finish_reason:
                del self._submissions[event.request_id]
            submission.came(event)

    def _take_rejection(self, request_id: int, reason: str, field: str | None) -> None:
        submission = self._submissions.pop(request_id, None)
        if submission:
            submission.put(RequestRejected(reason, field))

    def _take_ticket(
        self, request_id: int, ticket: Ticket | None, reason: str, message: str
    ) -> None:
        submission = self._submissions.get(request_id)
        if submission is None:  # aborted while the message was in flight
            return
        if ticket is None or ticket["header"]["is_last"]:
            del self._submissions[request_id]
        submission.put(NoRecordError(reason, message) if ticket is None else ticket)

    def _take_reply(
        self, ticket: int, held: dict[str, Any], reason: str | None, field: str | None
    ) -> None:
        waiter = self._tickets.pop(ticket)
        if waiter.done():  # the caller was cancelled
            return
        if reason is None:
            waiter.set_result(held)
        else:
            waiter.set_exception(RequestRejected(reason, field))

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
