"""Worker process for work of a request that may not end: templates, grammars, images.

The parent process writes frames to its standard input and reads frames from its standard output.
The first frame configures the worker. A timer signal ends a worker that exceeds its deadline.
Neither a loop nor a call in C code can delay the signal, and no other process has to send it.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")
DONE, REFUSAL = b"+", b"-"
"""First byte of a response, before the result (UTF-8 text or bytes) or a JSON list of reason and
part."""


class WorkerError(ValueError):
    """Error of a worker's task; one sentence.

    Attributes:
      part: Faulty part of the input.
    """

    def __init__(self, reason: str, part: str) -> None:
        super().__init__(reason)
        self.part = part


def frame(body: bytes) -> bytes:
    """Frames a message."""
    return LENGTH.pack(len(body)) + body


def pack(message: Any) -> bytes:
    """Frames a message as JSON."""
    return frame(json.dumps(message).encode())


def frames_of(data: bytes) -> Iterator[bytes]:
    """Yields the bodies of the complete messages in a byte string."""
    stream = io.BytesIO(data)
    with contextlib.suppress(struct.error):
        while (body := _read(stream)) is not None:
            yield body


def _read(stream: BinaryIO) -> bytes | None:
    """Reads the next message; returns None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if head else None


def run(
    begin: Callable[[Any], Callable[[Any], str | bytes]],
    *,
    read: Callable[[bytes], Any],
    deadline_s: float,
    max_memory: int,
) -> None:
    """Runs a worker until its input ends.

    Args:
      begin: Receives the first message, as JSON, and returns the handler of the others, which may
        raise `WorkerError`.
      read: Parses each of the other messages.
      deadline_s: Limit of each message after the first.
      max_memory: Bytes that the process may allocate beyond those at its start.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    _bound_memory(max_memory)
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    answer_to = begin(json.loads(_read(asked) or b"null"))
    while (message := _read(asked)) is not None:
        signal.setitimer(signal.ITIMER_REAL, deadline_s)
        answer = _answer(answer_to, read(message))
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(frame(answer))
        answers.flush()


def _bound_memory(num_bytes: int) -> None:
    """Limits the further allocations of the process.

    Linux limits address space, of which libraries reserve much that they never write to: numpy's
    BLAS reserves 41 MB for each CPU of the machine, 2.7 GB with 64.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + num_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(answer_to: Callable[[Any], str | bytes], message: Any) -> bytes:
    try:
        answer = answer_to(message)
        return DONE + (answer.encode() if isinstance(answer, str) else answer)
    except WorkerError as error:
        return REFUSAL + json.dumps([str(error), error.part]).encode()
