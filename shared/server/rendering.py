"""The processes that render the chat template, so that no template holds up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from shared.text.chat_template import ChatTemplate, Conversation, TemplateFailed
from shared.text.template_worker import (
    DEADLINE_S,
    LENGTH,
    TEXT,
    pack_conversation,
    pack_template,
)

ROOT = Path(__file__).resolve().parents[2]
NUM_WORKERS = 2  # so that one conversation on which the template hangs leaves the others served
_COMMAND = (sys.executable, "-m", "shared.text.template_worker")


class Renderer:
    """Renders conversations, each within a deadline; who finds no worker free waits for one."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        # The worker used last comes first, so a second one is started only when it is needed.
        self._free: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._workers: set[Process] = set()
        for _ in range(NUM_WORKERS):
            self._free.put_nowait(None)

    async def render(self, conversation: Conversation) -> str:
        """The text of a conversation that the assistant is to answer.

        Raises:
          TemplateFailed: As of `ChatTemplate.render`, or it takes too long.
        """
        worker = await self._free.get()
        kept = None
        try:
            worker = worker or await self._start()
            answer = await _ask(worker, pack_conversation(conversation))
            kept = worker
        except asyncio.IncompleteReadError:
            raise TemplateFailed(await _end(worker)) from None
        finally:
            if worker is not kept:
                self._drop(worker)
            self._free.put_nowait(kept)
        if answer[:1] == TEXT:
            return answer[1:].decode()
        raise TemplateFailed(*json.loads(answer[1:]))

    def end(self) -> None:
        """Ends all workers, and with them what they are asked."""
        for worker in self._workers:
            _kill(worker)

    async def close(self) -> None:
        """Ends all workers and waits for that."""
        self.end()
        for worker in tuple(self._workers):
            await worker.wait()

    async def _start(self) -> Process:
        worker = await asyncio.create_subprocess_exec(*_COMMAND, cwd=ROOT, stdin=PIPE, stdout=PIPE)
        self._workers.add(worker)
        assert worker.stdin is not None
        worker.stdin.write(pack_template(self._template))
        return worker

    def _drop(self, worker: Process | None) -> None:
        if worker is not None:
            self._workers.discard(worker)
            _kill(worker)


def _kill(worker: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()


async def _ask(worker: Process, message: bytes) -> bytes:
    """The worker's answer.

    Raises:
      asyncio.IncompleteReadError: It has ended.
    """
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(message)
    with contextlib.suppress(ConnectionError):  # it has ended; reading tells
        await worker.stdin.drain()
    head = await worker.stdout.readexactly(LENGTH.size)
    return await worker.stdout.readexactly(LENGTH.unpack(head)[0])


async def _end(worker: Process | None) -> str:
    """Why a worker has ended."""
    code = await worker.wait() if worker else None
    if code == -signal.SIGALRM:
        return f"the chat template took longer than {DEADLINE_S:g} s"
    return "the process of the chat template has ended"
