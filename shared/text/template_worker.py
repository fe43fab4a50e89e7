"""Renders a chat template in a process of its own: a template is a program, and may not end.

The process that starts it writes frames to its input and reads frames from its output; the first
one is the template. A rendering that takes too long ends the process by a signal, which no loop and
no call within Python's own C code can hold up, and which needs nobody to send it.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from shared.text.chat_template import ChatTemplate, Conversation, TemplateFailed

DEADLINE_S = 2.0
MAX_BYTES = 1 << 24
"""Of a text that a template writes; requests have half of it."""

MAX_MEMORY = 1 << 30
LENGTH = struct.Struct("<I")
TEXT, REFUSAL = b"+", b"-"
"""The first byte of an answer: a text in UTF-8 follows, or a JSON list of reason and part."""


def frame(body: bytes) -> bytes:
    """A message as both sides write it."""
    return LENGTH.pack(len(body)) + body


def pack_template(template: ChatTemplate) -> bytes:
    """The first message."""
    return frame(json.dumps([template.source, template.names]).encode())


def pack_conversation(conversation: Conversation) -> bytes:
    """Every other message."""
    return frame(json.dumps(vars(conversation)).encode())


def _read(stream: BinaryIO) -> Any:
    """The next message; None at the end."""
    head = stream.read(LENGTH.size)
    return json.loads(stream.read(LENGTH.unpack(head)[0])) if head else None


def _answer(template: ChatTemplate, asked: dict[str, Any]) -> bytes:
    try:
        text = template.render(Conversation(**asked)).encode()
        if len(text) > MAX_BYTES:
            raise TemplateFailed(f"the chat template wrote more than {MAX_BYTES} bytes")
    except TemplateFailed as error:
        return REFUSAL + json.dumps([str(error), error.part]).encode()
    return TEXT + text


def main() -> None:
    """Entry of `python -m shared.text.template_worker`; ends with its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who has started it
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    template = ChatTemplate(*_read(asked))
    while (conversation := _read(asked)) is not None:
        signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
        answer = _answer(template, conversation)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(frame(answer))
        answers.flush()


if __name__ == "__main__":
    main()
