"""Generation of one HTTP request: from the validated body to updates of its choices."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from shared.engine.checks import OWN_NAMES, check
from shared.engine.request import Event, FinishReason, InvalidRequestError, SamplingParams
from shared.server.completions.choice import Choice, ChoiceUpdate, Speculation, StopStringMatcher
from shared.server.completions.grammars import GrammarChecks
from shared.server.completions.logprobs import PromptText, TokenNames, offsets_in
from shared.server.completions.output import GenerationOutput
from shared.server.completions.parsers import Parsers
from shared.server.completions.prompts import PromptReader, ReadPrompt, adapter_of
from shared.server.completions.sampling import make_sampling
from shared.server.completions.traces import Traces
from shared.server.engine_link.engine_client import EngineClient
from shared.server.engine_link.engine_errors import (
    Draining,
    EngineLost,
    QueueFull,
    RequestRejected,
    SlowClientError,
)
from shared.server.engine_link.request_end import RequestObserver, RequestSummary
from shared.server.engine_link.server_metrics import ServerMetrics, TokenTimes
from shared.server.engine_link.submission import (
    MAX_UNREAD_EVENTS,
    Submission,
    SubmittedPrompt,
)
from shared.server.protocol.errors import ApiError
from shared.server.protocol.generation_request import ChatInput, GenerationRequest
from shared.spec.gumbel_noise import derive_seed
from shared.text.tokenizer import Detokenizer, Tokenizer

TRACE_HEADERS = ("traceparent", "tracestate")
RETRY_S = 1  # Retry-After of a full queue


class Generation:
    """Generation of all choices of one HTTP request.

    Attributes:
      output: Output so far.
      request: Validated request.
    """

    def __init__(
        self,
        submission: Submission,
        output: GenerationOutput,
        request: GenerationRequest,
        arrival: RequestContext,
        watchers: Sequence[RequestObserver],
    ) -> None:
        self.output = output
        self.request = request
        self._submission = submission
        self._arrival, self._watchers = arrival, watchers
        self._has_failed, self._is_closed = False, False
        self._on_close: Callable[[], None] = lambda: None

    def client_left(self) -> None:
        """Ends the generation because the client disconnected."""
        self._submission.client_left()

    def cancel(self) -> None:
        """Ends the generation with an error, on behalf of another request."""
        self._submission.put(ApiError(409, "the response was cancelled", code="cancelled"))

    def when_closed(self, call: Callable[[], None]) -> None:
        """Calls a function when the generation is closed."""
        self._on_close = call

    def close(self) -> None:
        """Aborts running choices, and reports the end of the request once."""
        self._submission.close()
        self.output.close("abort")
        if not self._is_closed:
            self._is_closed = True
            self._on_close()
            end = self._end()
            for watcher in self._watchers:
                watcher.on_request_end(end)

    def _end(self) -> RequestSummary:
        output, arrival = self.output, self._arrival
        speculation, cut_short = output.speculation, "error" if self._has_failed else "abort"
        return RequestSummary(
            request_id=output.name,
            endpoint=self.request.endpoint,
            model=output.model,
            prompt_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            image_tokens=output.num_image_tokens,
            output_tokens=output.num_output_tokens,
            verify_steps=speculation.verify_steps,
            accept_length=speculation.accept_length,
            finish_reasons=tuple(choice.finish_reason or cut_short for choice in output.choices),
            began_ns=arrival.began_ns,
            first_token_s=arrival.times.first_token_s,
            total_s=time.monotonic() - arrival.times.began,
            headers=arrival.headers,
            request=self.request.body,
            outputs=[choice.tokens for choice in output.choices],
            ignored=output.ignored,
            tool_call_format=arrival.tool_call_format,
            malformed_tool_calls=sum(each.parser.num_malformed_calls for each in output.choices),
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
                raise ApiError(400, reason, self.request.name("grammar"))
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise ApiError(500, event.error or "the engine aborted the request")
        except (EngineLost, RequestRejected, SlowClientError, ApiError) as error:
            self._has_failed = True
            self.output.close("error")
            raise self._api_error(error) from error
        return index, self._take(index, event)

    def _api_error(self, error: Exception) -> ApiError:
        """Returns the API error of an engine failure."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, EngineLost):
            return ApiError(503, str(error), code="engine_lost")
        if isinstance(error, RequestRejected):
            return ApiError(400, str(error), error.field and self.request.name(error.field))
        most = f"{MAX_UNREAD_EVENTS} steps of each choice"
        message = f"the client is too slow: more than {most} are unread"
        return ApiError(408, message, code="slow_reader")

    async def _next_event(self) -> tuple[int, Event]:
        """Returns the next event of a running choice.

        Events of choices that a stop string has ended here are skipped.
        """
        while True:
            index, event = await self._submission.next()
            if self.output.choices[index].finish_reason is None:
                return index, event

    def _take(self, index: int, event: Event) -> ChoiceUpdate:
        piece = self.output.take(index, event)
        was_cut = len(piece.tokens) < len(event.tokens)
        if piece.finish_reason and (was_cut or not event.finish_reason):
            self._submission.finish(index, len(self.output.choices[index].tokens))
        return piece

    async def pieces(self) -> AsyncIterator[tuple[int, ChoiceUpdate]]:
        """Yields all updates until every choice has ended; raises the errors of `next`."""
        while not self.output.ended:
            yield await self.next()


class RequestContext:
    """Arrival time and trace headers of a request.

    Attributes:
      times: Recorder of token times.
      began_ns: Arrival in nanoseconds since 1970.
      headers: Headers with the caller's trace.
      tool_call_format: Format in which calls are parsed; None: no parser.
    """

    def __init__(
        self, metrics: ServerMetrics, headers: Mapping[str, str], tool_call_format: str | None
    ) -> None:
        self.tool_call_format = tool_call_format
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
        request: GenerationRequest,
        headers: Mapping[str, str],
        num_bytes: int,
    ) -> Generation:
        """Checks a request against the model and submits it.

        Args:
          request: Validated body.
          headers: HTTP headers.
          num_bytes: Length of the body.

        Raises:
          ApiError: The request is invalid or cannot be served.
        """
        arrival = RequestContext(self._metrics, headers, self._facts.tool_call_parser)
        adapter = adapter_of(request.model, self._facts)
        if request.stop and self.tokenizer is None:
            raise ApiError(
                400,
                "stop requires a tokenizer, and the model folder has none; use stop_token_ids",
                request.name("stop"),
            )
        if request.chat is not None:
            request = replace(request, chat=self._parsers.settle(request.chat))
        ignored = (*request.ignored, *self._reader.ignored(request.chat))
        if ignored and self._facts.strict_fields:
            reason = f"{ignored[0]} has no effect here and the server was started with"
            raise ApiError(400, f"{reason} --strict-fields; remove the field", ignored[0])
        texts = await self._reader.read(request, num_bytes)
        grammar = await self._grammars.settle(request, texts[0].text)
        owner, chosen = (request.user, request.priority), (grammar, adapter)
        prompts = [
            SubmittedPrompt(
                text.tokens, self._sampling(request, text, chosen), seeds, *owner, text.images
            )
            for text, seeds in zip(texts, _seeds(request, len(texts)), strict=True)
        ]
        output = GenerationOutput(
            id_prefix=request.id_prefix,
            model=adapter or self._facts.model_name,
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
            ignored=ignored,
        )
        with submission_errors():
            submission = self.client.submit(prompts, arrival.times)
        if prompts[0].sampling.traces:
            output.follow(self.traces, self._facts.drafter)
        return Generation(submission, output, request, arrival, self._watchers)

    def settle_tools(self, chat: ChatInput) -> ChatInput:
        """Returns a conversation with the tools that its prompt lists; raises as `start`."""
        return self._parsers.settle(chat)

    def _sampling(
        self, request: GenerationRequest, prompt: ReadPrompt, chosen: tuple[str | None, str]
    ) -> SamplingParams:
        """Returns the sampling parameters, with the chosen grammar and adapter."""
        limits = self._facts.limits
        sampling = make_sampling(request.sampling, len(prompt.tokens), self._facts)
        sampling = replace(sampling, grammar=chosen[0], lora=chosen[1])
        try:
            check(prompt.tokens, sampling, limits, {**OWN_NAMES, **request.names}, prompt.images)
        except InvalidRequestError as refusal:
            raise ApiError(400, str(refusal), refusal.field, refusal.code) from refusal
        return sampling

    async def _prompt_text(
        self, request: GenerationRequest, prompt: SubmittedPrompt, text: str
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
        request: GenerationRequest,
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

    def _echo(self, request: GenerationRequest, prompt: SubmittedPrompt, text: str) -> str:
        """Returns the echoed prompt of a choice."""
        if not request.echo or self.tokenizer is None:
            return ""
        return text or self.tokenizer.decode(prompt.tokens)


@contextlib.contextmanager
def submission_errors() -> Iterator[None]:
    """Converts errors of `EngineClient.submit` to error responses.

    Raises:
      ApiError: Status 503.
    """
    try:
        yield
    except EngineLost as error:
        raise ApiError(503, str(error), code="engine_lost") from error
    except Draining as error:
        raise ApiError(503, str(error), code="draining", retry_after_s=error.seconds) from error
    except QueueFull as error:
        raise ApiError(503, str(error), code="queue_full", retry_after_s=RETRY_S) from error


def _seeds(request: GenerationRequest, num_prompts: int) -> list[list[int]]:
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
