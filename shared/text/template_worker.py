"""Process that renders chat templates; see `shared.text.worker`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from shared.text import worker
from shared.text.chat_template import Conversation, TemplateError
from shared.text.chat_templates import ChatTemplates

DEADLINE_S = 2.0
MAX_BYTES = 1 << 24
"""Limit of a rendered prompt, twice that of a request."""

MAX_MEMORY = 1 << 30


def pack_templates(templates: ChatTemplates) -> bytes:
    """Packs the first message: the templates."""
    return worker.pack([templates.sources, templates.names, templates.call_format])


def pack_conversation(conversation: Conversation) -> bytes:
    """Packs a conversation to render.

    Messages are serialised one by one, so that other threads can run between them.
    """
    rest = {name: value for name, value in vars(conversation).items() if name != "messages"}
    messages = ", ".join(map(json.dumps, conversation.messages))
    return worker.frame(f'{{"messages": [{messages}], {json.dumps(rest)[1:]}'.encode())


def begin(given: Any) -> Callable[[Any], str]:
    """Returns the renderer for the templates of the first message."""
    templates = ChatTemplates(*given)

    def render(asked: Any) -> str:
        text = templates.render(Conversation(**asked))
        if len(text.encode()) > MAX_BYTES:
            raise TemplateError(f"the chat template wrote more than {MAX_BYTES} bytes")
        return text

    return render


if __name__ == "__main__":
    worker.run(begin, read=json.loads, deadline_s=DEADLINE_S, max_memory=MAX_MEMORY)
