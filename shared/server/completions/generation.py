"""Generation of one HTTP request: from the validated body to updates of its choices."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from shared.engine.checks import check
from shared.engine.request import Event, FinishReason, InvalidRequestError, SamplingParams
from shared.options.unsupported_fields import CHAT, COMPLETIONS
from shared.server.completions.choice import Choice, ChoiceUpdate, Speculation, StopStringMatcher
from shared.server.completions.grammars import GrammarChecks
from shared.server.completions.logprobs import PromptText, TokenNames, offsets_in
from shared.server.completions.parsers import Parsers
from shared.server.completions.prompts import PromptReader, ReadPrompt, check_model
from shared.server.completions.responses import ChoiceFormat, ResponseWriter
from shared.server.completions.sampling import make_sampling
from shared.server.completions.traces import Traces
from shared.server.engine_link.engine_client import (
    MAX_UNREAD_EVENTS,
    ClientLeft,
    Draining,
    EngineClient,
    EngineLost,
    QueueFull,
    Refused,
    SlowClientError,
    Submission,
    SubmittedPrompt,
)
from shared.server.engine_link.request_end import RequestObserver, RequestSummary
from shared.server.engine_link.server_metrics import ServerMetrics, TokenTimes
from shared.server.protocol.errors import ApiError
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest
from shared.spec.gumbel_noise import derive_seed
from shared.text.tokenizer import Detokenizer, Tokenizer

TRACE_HEADERS = ("traceparent", "tracestate")
RETRY_S = 1  # of a full queue, which a step may make room in


class Generation:
    """The choices of one HTTP request while the engine works on them.

    Attributes:
      answer: Writes the response.
      request: What was asked.
    """

    def __init__(
        self,
        submission: Submission,
        answer: ResponseWriter,
        request: CompletionRequest | ChatRequest,
        arrival: RequestContext,
        watchers: Sequence[RequestObserver],
    ) -> None:
        self.answer = answer
        self.request = request
        self._submission = submission
        self._arrival, self._watchers = arrival, watchers
        self._has_failed, self._is_closed = False, False

    def client_left(self) -> None:
        """Ends the generation: nobody reads it."""
        self._submission.put(ClientLeft())

    def close(self) -> None:
        """Ends what the engine still does for it, and tells once what became of it."""
        self._submission.close()
        self.answer.close("abort")
        if not self._is_closed:
            self._is_closed = True
            end = self._end()
            for watcher in self._watchers:
                watcher.on_request_end(end)

    def _end(self) -> RequestSummary:
        answer, arrival = self.answer, self._arrival
        speculation, cut_short = answer.speculation, "error" if self._has_failed else "abort"
        return RequestSummary(
            request_id=answer.name,
            endpoint=CHAT if isinstance(self.request, ChatRequest) else COMPLETIONS,
            model=answer.model,
            prompt_tokens=answer.num_prompt_tokens,
            cached_tokens=answer.num_cached_tokens,
            image_tokens=answer.num_image_tokens,
            output_tokens=answer.num_output_tokens,
            verify_steps=speculation.verify_steps,
            accept_length=speculation.accept_length,
            finish_reasons=tuple(choice.finish_reason or cut_short for choice in answer.choices),
            began_ns=arrival.began_ns,
            first_token_s=arrival.times.first_token_s,
            total_s=time.monotonic() - arrival.times.began,
            headers=arrival.headers,
            asked=self.request,
            outputs=[choice.tokens for choice in answer.choices],
            ignored=answer.ignored,
        )

    async def next(self) -> tuple[int, ChoiceUpdate]:
        """The number of a choice and what its next event adds.

        Raises:
          ApiError: The engine is gone, or failed at or refused the request.
          ClientLeft: The client is gone.
        """
        try:
            index, event = await self._next_event()
            if event.finish_reason is FinishReason.REFUSED:
                raise ApiError(400, event.error or "refused", self.request.grammar_field)
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise ApiError(500, event.error or "the engine aborted the request")
        except (EngineLost, Refused, SlowClientError, ApiError) as error:
            self._has_failed = True
            self.answer.close("error")
            raise self._refusal_of(error) from error
        return index, self._take(index, event)

    def _refusal_of(self, error: Exception) -> ApiError:
        """Returns the API error of an engine failure."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineLost):
            return ApiError(503, str(error), code="engine_lost")
        if isinstance(error, Refused):
            names = self.request.names
            return ApiError(400, str(error), error.field and names.get(error.field, error.field))
        most = f"{MAX_UNREAD_EVENTS} steps of each choice"
        return ApiError(408, f"the client has more than {most} unread", code="slow_reader")

    async def _next_event(self) -> tuple[int, Event]:
        """Returns the next event of a running choice; stop strings end a choice here first."""
        while True:
            index, event = await self._submission.next()
            if self.answer.choices[index].finish_reason is None:
                return index, event

    def _take(self, index: int, event: Event) -> ChoiceUpdate:
        piece = self.answer.take(index, event)
        was_cut = len(piece.tokens) < len(event.tokens)
        if piece.finish_reason and (was_cut or not event.finish_reason):
            self._submission.finish(index, len(self.answer.choices[index].tokens))
        return piece

    async def pieces(self) -> AsyncIterator[tuple[int, ChoiceUpdate]]:
        """All pieces until every choice has ended; errors as `next`."""
        while not self.answer.ended:
            yield await self.next()


class RequestContext:
    """When a request came, and from which trace.

    Attributes:
      times: Those of its tokens; its clock runs.
      began_ns: Nanoseconds since 1970.
      headers: Those that name the caller's trace.
    """

    def __init__(self, metrics: ServerMetrics, headers: Mapping[str, str]) -> None:
        self.times, self.began_ns = TokenTimes(metrics), time.time_ns()
        self.headers = {name: headers[name] for name in TRACE_HEADERS if name in headers}


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
        grammars: GrammarChecks,
        tokenizer: Tokenizer | None,
        metrics: ServerMetrics,
        watchers: Sequence[RequestObserver],
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self._facts = client.facts.with_end(tokenizer.end_id if tokenizer else None)
        self._reader, self._grammars = reader, grammars
        self._parsers = Parsers(client.facts)
        self._names = TokenNames(tokenizer)
        self._metrics, self._watchers = metrics, watchers
        self.traces = Traces()

    async def start(
        self,
        request: CompletionRequest | ChatRequest,
        form: ChoiceFormat,
        headers: Mapping[str, str],
        num_bytes: int,
    ) -> Generation:
        """Checks a request against the model and submits it.

        Args:
          num_bytes: Of its body.

        Raises:
          ApiError: It cannot be served.
        """
        arrival = RequestContext(self._metrics, headers)
        check_model(request.model, self._facts.model_name)
        if request.stop and self.tokenizer is None:
            raise ApiError(
                400,
                "stop requires a tokenizer, and the model folder has none; use stop_token_ids",
                "stop",
            )
        self._parsers.check(request)
        ignored = (*request.ignored, *self._reader.ignored(request))
        if ignored and self._facts.strict_fields:
            reason = f"{ignored[0]} has no effect here and the server was started with"
            raise ApiError(400, f"{reason} --strict-fields; remove the field", ignored[0])
        texts = await self._reader.read(request, num_bytes)
        grammar = await self._grammars.settle(request, texts[0].text)
        whose = (request.user or "", request.priority or 0)
        prompts = [
            SubmittedPrompt(
                text.tokens, self._sampling(request, text, grammar), seeds, *whose, text.images
            )
            for text, seeds in zip(texts, _seeds(request, len(texts)), strict=True)
        ]
        answer = ResponseWriter(
            form=form,
            model=self._facts.model_name,
            num_prompt_tokens=sum(len(text.tokens) for text in texts),
            num_image_tokens=sum(image.count for text in texts for image in text.images),
            choices=[
                self._choice(request, prompt, text.text, prompt_text)
                for prompt, text in zip(prompts, texts, strict=True)
                for prompt_text in [await self._prompt_text(request, prompt, text.text)]
                for _ in prompt.seeds32
            ],
            choices_of_prompt=request.num_choices,
            names=self._names,
            shows_tokens=bool(request.return_token_ids),
            shows_logprobs=request.asked_logprobs[1] is not None,
            shows_trace=bool(request.trace),
            num_echoed=request.echoed_logprobs,
            num_of_prompt=request.prompt_logprobs,
            ignored=ignored,
        )
        submission = self._submit(prompts, arrival)
        if prompts[0].sampling.traces:
            answer.follow(self.traces, self._facts.drafter)
        return Generation(submission, answer, request, arrival, self._watchers)

    def _submit(self, prompts: list[SubmittedPrompt], arrival: RequestContext) -> Submission:
        try:
            return self.client.submit(prompts, arrival.times)
        except EngineLost as error:
            raise ApiError(503, str(error), code="engine_lost") from error
        except Draining as error:
            refusal = ApiError(503, str(error), code="draining", retry_after_s=error.seconds)
            raise refusal from error
        except QueueFull as error:
            refusal = ApiError(503, str(error), code="queue_full", retry_after_s=RETRY_S)
            raise refusal from error

    def _sampling(
        self, request: CompletionRequest | ChatRequest, prompt: ReadPrompt, grammar: str | None
    ) -> SamplingParams:
        limits = self._facts.limits
        sampling = make_sampling(request, len(prompt.tokens), self._facts)
        sampling = replace(sampling, grammar=grammar)
        try:
            check(prompt.tokens, sampling, limits, request.names, prompt.images)
        except InvalidRequestError as refusal:
            raise ApiError(400, str(refusal), refusal.field, refusal.code) from refusal
        return sampling

    async def _prompt_text(
        self, request: CompletionRequest | ChatRequest, prompt: SubmittedPrompt, text: str
    ) -> PromptText | None:
        """Returns the text of a prompt for prompt logprobs; None if not requested."""
        if prompt.sampling.prompt_logprobs is None:
            return None
        offsets = [0] * len(prompt.tokens)
        if self.tokenizer is not None and request.echoed_logprobs is not None:
            echo = self._echo(request, prompt, text)
            offsets = await asyncio.to_thread(offsets_in, echo, prompt.tokens, self.tokenizer)
        return PromptText(prompt.tokens, offsets)

    def _choice(
        self,
        request: CompletionRequest | ChatRequest,
        prompt: SubmittedPrompt,
        text: str,
        prompt_text: PromptText | None,
    ) -> Choice:
        return Choice(
            Detokenizer(self.tokenizer, prompt.tokens) if self.tokenizer else None,
            StopStringMatcher(tuple(request.stop)),
            self._parsers.new(request, text),
            prompt.sampling.min_tokens,
            Speculation.empty(self._facts.max_draft_depth),
            self._echo(request, prompt, text),
            prompt.sampling.stop_token_ids,
            prompt_text,
        )

    def _echo(
        self, request: CompletionRequest | ChatRequest, prompt: SubmittedPrompt, text: str
    ) -> str:
        """Returns the echoed prompt of a choice."""
        if isinstance(request, ChatRequest) or not request.echo or self.tokenizer is None:
            return ""
        return text or self.tokenizer.decode(prompt.tokens)


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
