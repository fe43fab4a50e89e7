"""Worker processes with deadlines, for work that might not terminate."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from shared import children
from shared.process.logs import log
from shared.server.engine_link.chunked_write import write_in_pieces
from shared.text.worker import DONE, LENGTH, WorkerError

NUM_WORKERS = 2  # so that one hanging task does not block other requests


class WorkerPool:
    """Pool of worker processes with a deadline per task; tasks wait for a free worker.

    Args:
      module: Module that runs `shared.text.worker.run`.
      first: First message of each worker.
      name: Name of the work in messages.
      deadline_s: Seconds after which a worker ends itself.
      part: Part of the request that is reported if a worker ends.
    """

    def __init__(
        self, module: str, first: bytes, *, name: str, deadline_s: float, part: str
    ) -> None:
        self._command = children.command(module)
        self._first, self._name, self._deadline_s, self._part = first, name, deadline_s, part
        # The worker used last comes first, so a second one is started only when it is needed.
        self._free: asyncio.LifoQueue[Process | None] = asyncio.LifoQueue()
        self._workers: set[Process] = set()
        for _ in range(NUM_WORKERS):
            self._free.put_nowait(None)

    async def ask(self, message: bytes) -> str:
        """Returns the response of a worker as text; raises the errors of `call_bytes`."""
        return str(await self.call_bytes(message), "utf-8")

    async def call_bytes(self, *message: bytes) -> memoryview:
        """Returns the response of a worker without copying it.

        Args:
          message: Parts of the message, in order.

        Raises:
          WorkerError: The work failed, or the deadline passed.
        """
        worker = await self._free.get()
        kept = None
        try:
            worker = worker or await self._start()
            answer = await _ask(worker, message)
            kept = worker
        except asyncio.IncompleteReadError:
            raise WorkerError(await self._end(worker), self._part) from None
        finally:
            if worker is not kept:
                self._drop(worker)
            self._free.put_nowait(kept)
        if answer[:1] == DONE:
            return memoryview(answer)[1:]
        raise WorkerError(*json.loads(answer[1:]))

    def end(self) -> None:
        """Kills all workers, with their tasks."""
        for worker in self._workers:
            _kill(worker)

    async def close(self) -> None:
        """Kills all workers and waits for their ends."""
        self.end()
        for worker in tuple(self._workers):
            await worker.wait()

    async def _start(self) -> Process:
        worker = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=children.FOLDER,
            env=children.environment(),
            stdin=PIPE,
            stdout=PIPE,
        )
        self._workers.add(worker)
        assert worker.stdin is not None
        worker.stdin.write(self._first)
        return worker

    def _drop(self, worker: Process | None) -> None:
        if worker is not None:
            self._workers.discard(worker)
            _kill(worker)

    async def _end(self, worker: Process | None) -> str:
        """Returns the reason of a worker's end."""
        code = await worker.wait() if worker else None
        if code == -signal.SIGALRM:
            return f"the {self._name} took longer than {self._deadline_s:g} s"
        reason = f"the {self._name} process exited"
        log.warning("%s with code %s; a new one is started on demand", reason, code)
        return reason


def _kill(worker: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        worker.kill()


async def _ask(worker: Process, message: Sequence[bytes]) -> bytes:
    """Returns the response of a worker.

    Raises:
      asyncio.IncompleteReadError: The worker has ended.
    """
    assert worker.stdin is not None
    assert worker.stdout is not None
    with contextlib.suppress(ConnectionError):  # the read below reports its end
        await write_in_pieces(worker.stdin, message)
    head = await worker.stdout.readexactly(LENGTH.size)
    return await worker.stdout.readexactly(LENGTH.unpack(head)[0])
