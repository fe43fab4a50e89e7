"""Renderer of the chat template, in a worker process with a time limit."""

from __future__ import annotations

from shared.server.engine_link.workers import WorkerPool
from shared.text.chat_templates import ChatTemplates
from shared.text.template_worker import DEADLINE_S, pack_templates


class Renderer(WorkerPool):
    """Renders conversations, each within a deadline.

    Attributes:
      templates: What it renders.
    """

    def __init__(self, templates: ChatTemplates) -> None:
        self.templates = templates
        super().__init__(
            "shared.text.template_worker",
            pack_templates(templates),
            name="chat template",
            deadline_s=DEADLINE_S,
            part="messages",
        )

    async def render(self, asked: bytes) -> str:
        """The text of a conversation that the assistant is to answer.

        Args:
          asked: What `pack_conversation` made of it.

        Raises:
          WorkRefused: As of `ChatTemplates.render`, or it takes too long.
        """
        return await self.ask(asked)
