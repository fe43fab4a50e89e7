"""The HTTP server's own routes over an engine of this process: from a body to its answer.

Only the socket between the two processes is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx

from shared.engine.checks import RequestLimits
from shared.engine.engine import Engine
from shared.engine.request import Request
from shared.models.sampling import SamplingDefaults
from shared.process.frames import ModelFacts, sampling_from_fields, sampling_to_fields
from shared.server.app import make_app
from shared.server.engine_client import Prompt, Submission
from shared.text.chat_template import ChatTemplate, Conversation
from shared.text.tokenizer import Tokenizer
from tests.support.driving import checked_step

Body = dict[str, Any]


class Renders:
    """A chat template without a process of its own."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template

    async def render(self, conversation: Conversation) -> str:
        return self._template.render(conversation)


class InProcess:
    """An engine as the server's client of it, which steps while answers are waited for."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> None:
        limits = engine.allocator.limits
        self.engine = engine
        self.facts = ModelFacts(
            model_name="tiny",
            model_folder="",
            limits=RequestLimits.of(limits, limits.context_length),
            eos_ids=eos_ids,
            sampling_defaults=SamplingDefaults(),
            max_open_requests=None,
            max_draft_depth=limits.max_depth,
            host_names=None,
        )
        self.alive = True
        self._submissions: dict[int, Submission] = {}
        self._next_id = 0
        assert tokenizer.template is not None
        self._app = make_app(self, tokenizer, Renders(tokenizer.template))

    def submit(self, prompts: list[Prompt]) -> Submission:
        count = sum(len(prompt.seeds32) for prompt in prompts)
        ids = range(self._next_id, self._next_id + count)
        self._next_id, following = ids.stop, iter(ids)
        submission = Submission(self, ids)
        for prompt in prompts:
            fields = sampling_to_fields(prompt.sampling)
            for seed32 in prompt.seeds32:
                request = Request(
                    request_id=next(following),
                    prompt=tuple(prompt.tokens),
                    sampling=sampling_from_fields(fields, seed32),
                    tenant=prompt.tenant,
                    priority=prompt.priority,
                )
                self.engine.add(request)
                self._submissions[request.request_id] = submission
        return submission

    def finish(self, request_id: int, num_tokens: int) -> None:
        self._submissions.pop(request_id, None)
        self.engine.finish(request_id, num_tokens)

    def abort(self, request_id: int) -> None:
        if self._submissions.pop(request_id, None):
            self.engine.abort(request_id)

    def answers(self, path: str, bodies: Sequence[Body]) -> list[Body]:
        """The answers of a route, asked for at the same time; each must be served."""
        return asyncio.run(self._answers(path, bodies))

    async def _answers(self, path: str, bodies: Sequence[Body]) -> list[Body]:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://tiny") as client:
            tasks = [asyncio.create_task(client.post(path, json=body)) for body in bodies]
            while not all(task.done() for task in tasks):
                self._step()
                await asyncio.sleep(0)
        answers = [task.result() for task in tasks]
        refused = [answer.text for answer in answers if answer.status_code != httpx.codes.OK]
        assert not refused, refused
        return [answer.json() for answer in answers]

    def _step(self) -> None:
        if not self.engine.busy:
            return
        for event in checked_step(self.engine):
            submission = self._submissions.get(event.request_id)
            if event.finish_reason:
                self._submissions.pop(event.request_id, None)
            if submission is not None:
                submission.put(event)
