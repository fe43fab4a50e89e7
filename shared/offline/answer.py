"""An answer as it grows: what the engine's thread tells of a request, read by who asked for it."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shared.engine.request import Event, FinishReason, Request
from shared.offline.engine_thread import EngineThread
from shared.offline.results import Output, Part, RequestOutput
from shared.server.choice import Choice, Piece
from shared.server.delta import Delta
from shared.server.logprobs import TokenNames
from shared.server.traces import step_json


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt.

    Attributes:
      tokens: What the engine is given.
      text: What the tokens are of; "" of a prompt that came as tokens.
      reasoning: How the answer marks its reasoning; None: it is not looked for.
      functions: What the answer may call.
    """

    tokens: list[int]
    text: str
    reasoning: str | None
    functions: Sequence[dict[str, Any]] = ()


@dataclass
class Answer:
    """One answer of a prompt.

    Attributes:
      index: Its number among the prompt's answers.
      request: In the engine.
      choice: Follows its events.
      names: Writes tokens in its steps.
    """

    index: int
    request: Request
    choice: Choice
    names: TokenNames
    _said: Delta = field(default_factory=Delta)
    _steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether it is whole."""
        return self.choice.finish_reason is not None

    def take(self, item: Event | Exception, engine: EngineThread) -> Part:
        """Adds an event.

        Raises:
          ValueError: The request was refused.
          RuntimeError: The engine failed.
        """
        if isinstance(item, Exception):
            raise item
        if item.finish_reason is FinishReason.REFUSED:
            raise ValueError(item.error)
        if item.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise RuntimeError(item.error or "the engine aborted the request")
        piece = self.choice.take(item)
        if piece.finish_reason and (len(piece.tokens) < len(item.tokens) or not item.finish_reason):
            engine.finish(self.request.request_id, len(self.choice.tokens))
        self._said += piece.delta
        step = None
        if item.step is not None:
            step = step_json(item.step, piece.tokens, piece.texts, self.names)
            self._steps.append(step)
        return self._part(piece, step)

    def _part(self, piece: Piece, step: dict[str, Any] | None) -> Part:
        return Part(
            index=self.index,
            text=piece.delta.text,
            reasoning=piece.delta.reasoning,
            tool_calls=piece.delta.tool_calls,
            token_ids=piece.tokens,
            logprobs=piece.logprobs,
            step=step,
            finish_reason=piece.finish_reason,
        )

    def output(self) -> Output:
        """All of it."""
        speculation = self.choice.speculation
        return Output(
            index=self.index,
            text=self._said.text,
            reasoning=self._said.reasoning,
            tool_calls=self._said.tool_calls,
            token_ids=self.choice.tokens,
            finish_reason=self.choice.finish_reason or "",
            logprobs=self.choice.logprobs,
            accept_length=speculation.accept_length,
            accepted_histogram=speculation.histogram,
            steps=self._steps,
        )


class Stream:
    """The answers of one prompt, part by part as their steps end.

    A `for` waits on its own thread, an `async for` lets other tasks run meanwhile. A loop that is
    left ends the request.

    Args:
      prompt: What is answered.
      answers: One for each choice.
      engine: Is given their requests.
    """

    def __init__(self, prompt: ReadPrompt, answers: Sequence[Answer], engine: EngineThread) -> None:
        self._prompt, self._answers, self._engine = prompt, answers, engine
        self._events: queue.SimpleQueue[tuple[Answer, Event | Exception] | None]
        self._events = queue.SimpleQueue()
        for answer in answers:
            engine.add(answer.request, partial(self._heard, answer))

    def __iter__(self) -> Iterator[Part]:
        """Waits on the caller's thread."""
        try:
            while not all(answer.has_ended for answer in self._answers):
                self._engine.check_process()
                heard = self._events.get()
                if heard is None:
                    return
                answer, item = heard
                if not answer.has_ended:  # the engine hears of a stop string a step later
                    yield answer.take(item, self._engine)
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[Part]:
        """Lets other tasks of the event loop run meanwhile."""
        parts = iter(self)
        try:
            while (part := await self._next_of(parts)) is not None:
                yield part
        finally:
            self.close()

    async def _next_of(self, parts: Iterator[Part]) -> Part | None:
        """Waits for the next part; a forked process has no thread that could wait."""
        self._engine.check_process()
        return await asyncio.to_thread(next, parts, None)

    def result(self) -> RequestOutput:
        """Waits until every answer is whole."""
        for _ in self:
            pass
        first = self._answers[0].choice
        return RequestOutput(
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.tokens,
            prompt_logprobs=first.prompt,
            cached_tokens=first.cached_tokens,
            outputs=[answer.output() for answer in self._answers],
        )

    def close(self) -> None:
        """Ends what is not whole yet."""
        for answer in self._answers:
            if not answer.has_ended:
                self._engine.abort(answer.request.request_id)
        self._events.put(None)  # nobody waits for an event that will not come

    def _heard(self, answer: Answer, item: Event | Exception) -> None:
        self._events.put((answer, item))
