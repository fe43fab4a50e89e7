"""Outputs of a prompt while they are generated: events of the engine's thread, read by callers."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shared.engine.request import Event, FinishReason, Request
from shared.offline.engine_thread import EngineThread
from shared.offline.results import CompletionOutput, RequestOutput, StreamChunk
from shared.server.completions.choice import Choice, ChoiceUpdate
from shared.server.completions.logprobs import TokenNames
from shared.server.completions.traces import step_json
from shared.text.parsing.delta import Delta


@dataclass(frozen=True)
class TokenizedPrompt:
    """A tokenized prompt.

    Attributes:
      tokens: Token ids that the engine receives.
      text: Text of the prompt; "" if the prompt was passed as token ids.
      reasoning: Name of the reasoning parser; None if reasoning is not parsed.
      functions: Functions that the output may call.
    """

    tokens: list[int]
    text: str
    reasoning: str | None
    functions: Sequence[dict[str, Any]] = ()


@dataclass
class PendingOutput:
    """One output of a prompt, collected from the events of its request.

    Attributes:
      index: Index among the outputs of the prompt.
      request: Request of the engine.
      choice: Detokenizes and parses the events.
      names: Token names for the step trace.
    """

    index: int
    request: Request
    choice: Choice
    names: TokenNames
    _said: Delta = field(default_factory=Delta)
    _steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Returns whether the output is complete."""
        return self.choice.finish_reason is not None

    def take(self, item: Event | Exception, engine: EngineThread) -> StreamChunk:
        """Adds an event and returns the new part of the output.

        Raises:
          ValueError: The engine rejected the request.
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

    def _part(self, piece: ChoiceUpdate, step: dict[str, Any] | None) -> StreamChunk:
        return StreamChunk(
            index=self.index,
            text=piece.delta.text,
            reasoning=piece.delta.reasoning,
            tool_calls=piece.delta.tool_calls,
            token_ids=piece.tokens,
            logprobs=piece.logprobs,
            step=step,
            finish_reason=piece.finish_reason,
        )

    def output(self) -> CompletionOutput:
        """Returns the complete output."""
        speculation = self.choice.speculation
        return CompletionOutput(
            index=self.index,
            text=self._said.text,
            reasoning=self._said.reasoning,
            tool_calls=self._said.tool_calls,
            token_ids=self.choice.tokens,
            finish_reason=self.choice.finish_reason or "",
            logprobs=self.choice.logprobs,
            accept_length=speculation.accept_length,
            accept_length_histogram=speculation.histogram,
            steps=self._steps,
        )


class OutputStream:
    """Outputs of one prompt, with one part for each step.

    A `for` loop blocks its thread; an `async for` loop lets other tasks run. Leaving the loop ends
    the request.

    Args:
      prompt: Prompt of all outputs.
      answers: Outputs, one for each of `SamplingParams.n`.
      engine: Engine that runs their requests.
    """

    def __init__(
        self, prompt: TokenizedPrompt, answers: Sequence[PendingOutput], engine: EngineThread
    ) -> None:
        self._prompt, self._answers, self._engine = prompt, answers, engine
        self._events: queue.SimpleQueue[tuple[PendingOutput, Event | Exception] | None]
        self._events = queue.SimpleQueue()
        for answer in answers:
            engine.add(answer.request, partial(self._heard, answer))

    def __iter__(self) -> Iterator[StreamChunk]:
        """Yields parts; blocks the caller's thread."""
        try:
            while not all(answer.has_ended for answer in self._answers):
                self._engine.check_process()
                heard = self._events.get()
                if heard is None:
                    return
                answer, item = heard
                if not answer.has_ended:  # the engine stops one step after a stop string
                    yield answer.take(item, self._engine)
        finally:
            self.close()

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Yields parts; other tasks of the event loop run meanwhile."""
        parts = iter(self)
        try:
            while (part := await self._next_of(parts)) is not None:
                yield part
        finally:
            self.close()

    async def _next_of(self, parts: Iterator[StreamChunk]) -> StreamChunk | None:
        """Waits for the next part on a worker thread, which a forked process does not have."""
        self._engine.check_process()
        return await asyncio.to_thread(next, parts, None)

    def result(self) -> RequestOutput:
        """Waits until all outputs are complete and returns them."""
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
        """Aborts the outputs that are not complete."""
        for answer in self._answers:
            if not answer.has_ended:
                self._engine.abort(answer.request.request_id)
        self._events.put(None)  # unblocks a reader: no event follows

    def _heard(self, answer: PendingOutput, item: Event | Exception) -> None:
        self._events.put((answer, item))
