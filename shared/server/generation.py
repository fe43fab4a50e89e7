"""One HTTP request on its way through the engine: from a checked body to pieces of text."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from shared.engine.checks import check
from shared.engine.request import Event, FinishReason, Refusal, SamplingParams
from shared.process.frames import ModelFacts
from shared.server.choice import Choice, Piece, Speculation, StopFinder
from shared.server.engine_client import (
    ClientLeft,
    EngineClient,
    EngineLost,
    Prompt,
    QueueFull,
    Refused,
    Submission,
)
from shared.server.errors import ApiError
from shared.server.grammars import Grammars
from shared.server.logprobs import TokenNames
from shared.server.openai_types import ChatRequest, CompletionRequest
from shared.server.parsers import Parsers
from shared.server.prompts import PromptReader, check_model
from shared.server.responses import Answer, Form
from shared.server.sampling import make_sampling
from shared.server.server_metrics import ServerMetrics
from shared.server.traces import Traces
from shared.spec.sampling import derive_seed
from shared.text.tokenizer import Detokenizer, Tokenizer


class Generation:
    """The choices of one HTTP request while the engine works on them.

    Attributes:
      answer: Writes the response.
      request: What was asked.
    """

    def __init__(
        self,
        submission: Submission,
        answer: Answer,
        request: CompletionRequest | ChatRequest,
        metrics: ServerMetrics,
    ) -> None:
        self.answer = answer
        self.request = request
        self._submission = submission
        self._metrics = metrics
        self._started = time.monotonic()
        self._waits_for_first = True

    def client_left(self) -> None:
        """Ends the generation: nobody reads it."""
        self._submission.put(ClientLeft())

    def close(self) -> None:
        """Ends what the engine still does for it."""
        self._submission.close()
        self.answer.close("abort")

    async def next(self) -> tuple[int, Piece]:
        """The number of a choice and what its next event adds.

        Raises:
          ApiError: The engine is gone, or failed at or refused the request.
          ClientLeft: The client is gone.
        """
        try:
            index, event = await self._next_event()
        except EngineLost as error:
            raise ApiError(503, str(error), code="engine_lost") from error
        except Refused as error:
            names = self.request.names
            field = error.field and names.get(error.field, error.field)
            raise ApiError(400, str(error), field) from error
        if event.finish_reason is FinishReason.REFUSED:
            raise ApiError(400, event.error or "refused", self.request.grammar_field)
        if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self.answer.close("error")
            raise ApiError(500, event.error or "the engine aborted the request")
        return index, self._take(index, event)

    async def _next_event(self) -> tuple[int, Event]:
        """Of a choice that has not ended here: the engine hears of a stop string later."""
        while True:
            index, event = await self._submission.next()
            if self.answer.choices[index].finish_reason is None:
                return index, event

    def _take(self, index: int, event: Event) -> Piece:
        piece = self.answer.take(index, event)
        was_cut = len(piece.tokens) < len(event.tokens)
        if piece.finish_reason and (was_cut or not event.finish_reason):
            self._submission.finish(index, len(self.answer.choices[index].tokens))
        self._observe()
        return piece

    def _observe(self) -> None:
        elapsed = time.monotonic() - self._started
        if self._waits_for_first:
            self._metrics.time_to_first_token.observe(elapsed)
            self._waits_for_first = False
        if self.answer.ended:
            self._metrics.request_latency.observe(elapsed)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """All pieces until every choice has ended; errors as `next`."""
        while not self.answer.ended:
            yield await self.next()


class Generator:
    """Starts generations.

    Attributes:
      client: The engine.
      tokenizer: None where the checkpoint has none: prompts are token ids then.
      traces: Of the requests that asked, or of all.
    """

    def __init__(
        self,
        client: EngineClient,
        reader: PromptReader,
        grammars: Grammars,
        tokenizer: Tokenizer | None,
        metrics: ServerMetrics,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self._facts = _with_end(client.facts, tokenizer)
        self._reader, self._grammars = reader, grammars
        self._parsers = Parsers(client.facts)
        self._names = TokenNames(tokenizer)
        self._metrics = metrics
        self.traces = Traces()

    async def start(self, request: CompletionRequest | ChatRequest, form: Form) -> Generation:
        """Checks a request against the model and submits it.

        Raises:
          ApiError: It cannot be served.
        """
        check_model(request.model, self._facts.model_name)
        if request.stop and self.tokenizer is None:
            raise ApiError(400, "stop needs a tokenizer, and the model folder has none", "stop")
        self._parsers.check(request)
        texts = await self._reader.read(request)
        grammar = await self._grammars.settle(request, texts[0].text)
        whose = (request.user or "", request.priority or 0)
        prompts = [
            Prompt(text.tokens, self._sampling(request, text.tokens, grammar), seeds, *whose)
            for text, seeds in zip(texts, _seeds(request, len(texts)), strict=True)
        ]
        answer = Answer(
            form=form,
            model=self._facts.model_name,
            num_prompt_tokens=sum(len(text.tokens) for text in texts),
            choices=[
                self._choice(request, prompt, text.text)
                for prompt, text in zip(prompts, texts, strict=True)
                for _ in prompt.seeds32
            ],
            choices_of_prompt=request.num_choices,
            names=self._names,
            shows_tokens=bool(request.return_token_ids),
            shows_logprobs=request.asked_logprobs[1] is not None,
            shows_trace=bool(request.trace),
        )
        try:
            submission = self.client.submit(prompts)
        except EngineLost as error:
            raise ApiError(503, str(error), code="engine_lost") from error
        except QueueFull as error:
            raise ApiError(503, str(error), code="queue_full") from error
        if prompts[0].sampling.traces:
            answer.follow(self.traces, self._facts.drafter)
        return Generation(submission, answer, request, self._metrics)

    def _sampling(
        self, request: CompletionRequest | ChatRequest, prompt: list[int], grammar: str | None
    ) -> SamplingParams:
        limits = self._facts.limits
        sampling = make_sampling(request, len(prompt), self._facts)
        sampling = replace(sampling, grammar=grammar)
        try:
            check(prompt, sampling, limits, request.names)
        except Refusal as refusal:
            raise ApiError(400, str(refusal), refusal.field, refusal.code) from refusal
        return sampling

    def _choice(
        self, request: CompletionRequest | ChatRequest, prompt: Prompt, text: str
    ) -> Choice:
        return Choice(
            Detokenizer(self.tokenizer, prompt.tokens) if self.tokenizer else None,
            StopFinder(tuple(request.stop)),
            self._parsers.new(request, text),
            prompt.sampling.min_tokens,
            Speculation.empty(self._facts.max_draft_depth),
            self._echo(request, prompt, text),
            prompt.sampling.stop_token_ids,
        )

    def _echo(self, request: CompletionRequest | ChatRequest, prompt: Prompt, text: str) -> str:
        """What a choice says before its own text."""
        if isinstance(request, ChatRequest) or not request.echo or self.tokenizer is None:
            return ""
        return text or self.tokenizer.decode(prompt.tokens)


def _with_end(facts: ModelFacts, tokenizer: Tokenizer | None) -> ModelFacts:
    """With the tokenizer's end token among those that end a text.

    A fine-tuned chat model's own end often stands in tokenizer_config.json alone, and config.json
    still names the base model's. Only this process reads the tokenizer; the engine gets all ends of
    a text with each request.
    """
    end = tokenizer.end_id if tokenizer else None
    if end is None or end >= facts.limits.vocab or end in facts.eos_ids:
        return facts
    return replace(facts, eos_ids=(*facts.eos_ids, end))


def _seeds(request: CompletionRequest | ChatRequest, num_prompts: int) -> list[list[int]]:
    """A seed for each choice of each prompt.

    A request's own seed belongs to every prompt alike, so that a prompt gives the same text in a
    list as alone. Without one nothing may be shared: equal prompts of a list are to give different
    texts, and different ones independent texts.
    """
    count = request.num_choices
    if request.seed is not None:
        return [[derive_seed(request.seed % 2**64, j) for j in range(count)]] * num_prompts
    drawn = secrets.randbits(64)
    firsts = range(0, num_prompts * count, count)
    return [[derive_seed(drawn, first + j) for j in range(count)] for first in firsts]
