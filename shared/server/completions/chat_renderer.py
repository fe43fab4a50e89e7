"""Renderer of the chat template, in a worker process with a time limit."""

from __future__ import annotations

from shared.server.engine_link.workers import WorkerPool
from shared.text.chat_templates import ChatTemplates
from shared.text.template_worker import DEADLINE_S, pack_templates


class Renderer(WorkerPool):
    """Renders conversations, each within a deadline.

    Attributes:
      templates: Chat templates of the model.
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

    async def render(self, conversation: bytes) -> str:
        """Returns the prompt of a conversation.

        Args:
          conversation: Result of `pack_conversation`.

        Raises:
          WorkerError: Same as `ChatTemplates.render`, or the deadline passes.
        """
        return await self.ask(conversation)
