"""A process that does what a request asks for and that may not end: a template, a grammar.

The process that starts it writes frames to its input and reads frames from its output; the first
one says what it works with. Work that takes too long ends the process by a signal, which no loop
and no call within Python's own C code can hold up, and which needs nobody to send it.
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
"""The first byte of an answer: what was asked for follows, a text in UTF-8 or bytes of any kind; or
a JSON list of reason and part."""


class WorkRefused(ValueError):
    """What cannot be done; one sentence.

    Attributes:
      part: What of the work is at fault.
    """

    def __init__(self, reason: str, part: str) -> None:
        super().__init__(reason)
        self.part = part


def frame(body: bytes) -> bytes:
    """A message as both sides write it."""
    return LENGTH.pack(len(body)) + body


def pack(message: Any) -> bytes:
    """A message of JSON."""
    return frame(json.dumps(message).encode())


def frames_of(data: bytes) -> Iterator[bytes]:
    """The bodies of the whole messages that one side has written."""
    stream = io.BytesIO(data)
    with contextlib.suppress(struct.error):
        while (body := _read(stream)) is not None:
            yield body


def _read(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    return stream.read(LENGTH.unpack(head)[0]) if head else None


def run(
    begin: Callable[[Any], Callable[[Any], str | bytes]],
    *,
    read: Callable[[bytes], Any],
    deadline_s: float,
    max_memory: int,
) -> None:
    """Works until its input ends.

    Args:
      begin: Gets the first message, of JSON, and gives what answers the others or raises
        `WorkRefused`.
      read: What each of the others says.
      deadline_s: Of each answer but for the first, before which there is `begin` to do.
      max_memory: Bytes that the process may take beside what it has begun with.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who has started it
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
    """Lets the process take so many bytes more.

    What Linux bounds is addresses, of which libraries take many that they never write to: numpy's
    BLAS 41 MB for each processor of the machine, some 2.7 GB of 64.
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
    except WorkRefused as error:
        return REFUSAL + json.dumps([str(error), error.part]).encode()
