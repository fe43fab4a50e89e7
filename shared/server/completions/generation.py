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
    RequestRejected,
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
RETRY_S = 1  # Retry-After of a full queue


class Generation:
    """Generation of all choices of one HTTP request.

    Attributes:
      answer: Writer of the response.
      request: Validated request.
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
        """Ends the generation because the client disconnected."""
        self._submission.put(ClientLeft())

    def close(self) -> None:
        """Aborts running choices, and reports the end of the request once."""
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
            request=self.request,
            outputs=[choice.tokens for choice in answer.choices],
            ignored=answer.ignored,
        )

    async def next(self) -> tuple[int, ChoiceUpdate]:
        """Returns the number of a choice and its next update.

        Raises:
          ApiError: The engine has exited, or failed on or rejected the request.
          ClientLeft: The client disconnected.
        """
        try:
            index, event = await self._next_event()
            if event.finish_reason is FinishReason.REFUSED:
                reason = event.error or "the engine rejected the request"
                raise ApiError(400, reason, self.request.grammar_field)
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise ApiError(500, event.error or "the engine aborted the request")
        except (EngineLost, RequestRejected, SlowClientError, ApiError) as error:
            self._has_failed = True
            self.answer.close("error")
            raise self._api_error(error) from error
        return index, self._take(index, event)

    def _api_error(self, error: Exception) -> ApiError:
        """Returns the API error of an engine failure."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineLost):
            return ApiError(503, str(error), code="engine_lost")
        if isinstance(error, RequestRejected):
            names = self.request.names
            return ApiError(400, str(error), error.field and names.get(error.field, error.field))
        most = f"{MAX_UNREAD_EVENTS} steps of each choice"
        message = f"the client is too slow: more than {most} are unread"
        return ApiError(408, message, code="slow_reader")

    async def _next_event(self) -> tuple[int, Event]:
        """Returns the next event of a running choice.

        Events of choices that a stop string has ended here are skipped.
        """
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
        """Yields all updates until every choice has ended; raises the errors of `next`."""
        while not self.answer.ended:
            yield await self.next()


class RequestContext:
    """Arrival time and trace headers of a request.

    Attributes:
      times: Recorder of token times.
      began_ns: Arrival in nanoseconds since 1970.
      headers: Headers with the caller's trace.
    """

    def __init__(self, metrics: ServerMetrics, headers: Mapping[str, str]) -> None:
        self.times, self.began_ns = TokenTimes(metrics), time.time_ns()
        self.headers = {name: headers[name] for name in TRACE_HEADERS if name in headers}


class Generator:
    """Factory of generations.

    Attributes:
      client: Connection to the engine.
      tokenizer: None if the checkpoint has none; prompts must then be token ids.
      traces: Store of step traces.
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
          request: Validated body.
          form: Format of the endpoint.
          headers: HTTP headers.
          num_bytes: Length of the body.

        Raises:
          ApiError: The request is invalid or cannot be served.
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
        owner = (request.user or "", request.priority or 0)
        prompts = [
            SubmittedPrompt(
                text.tokens, self._sampling(request, text, grammar), seeds, *owner, text.images
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
            shows_logprobs=request.logprobs_field[1] is not None,
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
    """Returns a seed for each choice of each prompt.

    The seed of a request applies to every prompt alike, so that a prompt has the same output in a
    list and alone. Without it all seeds differ, so that equal prompts have different outputs and
    different prompts independent ones.
    """
    count = request.num_choices
    if request.seed is not None:
        return [[derive_seed(request.seed % 2**64, j) for j in range(count)]] * num_prompts
    drawn = secrets.randbits(64)
    firsts = range(0, num_prompts * count, count)
    return [[derive_seed(drawn, first + j) for j in range(count)] for first in firsts]
