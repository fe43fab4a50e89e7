"""Cost of the Responses and Messages APIs relative to chat completions.

    python -m bench.serving.api_cost --rounds 9 --out FILE

`events` is the CPU time per token of a serializer, from the update of a choice to the bytes of its
events, with one token an update: text, reasoning, and the arguments of a call. A round measures
every API. The result is the median of the rounds, with the lowest and the highest.

With `--base-url` the streams of a running server are measured too: `--streams` requests of one API
at the same time. `tokens_per_s` is the median over rounds, and `share` the
median of the rounds' rates relative to chat.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.common.environment import write_results
from bench.common.server import headers_of, no_answer, server_options, url_of
from shared.server.api.request_parsing import parse_messages, parse_request, parse_responses
from shared.server.completions.choice import Choice, ChoiceUpdate, Speculation, StopStringMatcher
from shared.server.completions.logprobs import TokenNames
from shared.server.completions.messages_serializer import MessagesSerializer
from shared.server.completions.openai_serializer import ChatForm, OpenAISerializer
from shared.server.completions.output import GenerationOutput
from shared.server.completions.responses_serializer import ResponsesSerializer
from shared.server.completions.serializer import Serializer
from shared.server.protocol.generation_request import GenerationRequest
from shared.server.protocol.messages_types import MessagesRequest
from shared.server.protocol.openai_types import ChatRequest
from shared.server.protocol.sealed_text import SealedText
from shared.text.parsing.delta import Delta, PassthroughParser, ToolCallDelta

CHAT, RESPONSES, MESSAGES = APIS = ("chat", "responses", "messages")
PATHS = {CHAT: "/v1/chat/completions", RESPONSES: "/v1/responses", MESSAGES: "/v1/messages"}
QUESTION = [{"role": "user", "content": "A cinema has 6 rows of 13 seats. How many seats?"}]
US = 1e6
KINDS: dict[str, tuple[Delta, Delta]] = {
    "text": (Delta(" token"), Delta(" token")),
    "reasoning": (Delta(reasoning=" token"), Delta(reasoning=" token")),
    "arguments": (
        Delta(tool_calls=(ToolCallDelta(0, "call_1", "look", "{"),)),
        Delta(tool_calls=(ToolCallDelta(0, "", "", " token"),)),
    ),
}
"""First update and later updates by kind of output."""


def body_of(api: str, max_tokens: int) -> dict[str, Any]:
    """Returns the body of a streamed request."""
    common = {"model": "default", "temperature": 0, "stream": True}
    if api == RESPONSES:
        return {**common, "input": QUESTION, "max_output_tokens": max_tokens}
    body = {**common, "messages": QUESTION, "max_tokens": max_tokens}
    usage = {"stream_options": {"include_usage": True}}
    return {**body, **(usage if api == CHAT else {})}


def serializer_of(api: str) -> tuple[Serializer, GenerationOutput]:
    """Returns the serializer of a new request, and its output."""
    body, sealed = json.dumps(body_of(api, 1000)).encode(), SealedText("model", None)
    if api == CHAT:
        asked = parse_request(body, ChatRequest)
        output = _output(asked)
        return OpenAISerializer(ChatForm(), asked, output), output
    if api == MESSAGES:
        asked = parse_messages(body, MessagesRequest).to_generation(sealed)
        output = _output(asked)
        return MessagesSerializer(asked, output, sealed, hides_thinking=False), output
    given, _ = parse_responses(body)
    asked = given.to_generation(sealed, [])
    output = _output(asked)
    return ResponsesSerializer(asked, given, output, sealed, lambda response: None), output


def _output(request: GenerationRequest) -> GenerationOutput:
    parser, stops = PassthroughParser(), StopStringMatcher(())
    choice = Choice(None, stops, parser, 0, Speculation.empty(1), "", frozenset(), None)
    return GenerationOutput(
        id_prefix=request.id_prefix,
        model="model",
        num_prompt_tokens=len(QUESTION),
        num_image_tokens=0,
        choices=[choice],
        choices_of_prompt=1,
        names=TokenNames(None),
    )


def event_cost(api: str, kind: str, num_tokens: int) -> float:
    """Returns the CPU microseconds per token of a stream, without its first and last events."""
    serializer, output = serializer_of(api)
    first, later = (ChoiceUpdate(delta, [1], [], None) for delta in KINDS[kind])
    (choice,) = output.choices
    serializer.begin()
    serializer.update(0, first)
    begun = time.process_time()
    for _ in range(num_tokens):
        choice.tokens.append(1)
        b"".join([event.encode() for event in serializer.update(0, later)])
    return (time.process_time() - begun) / num_tokens * US


def tokens_of(api: str, event: Mapping[str, Any]) -> int:
    """Returns the number of output tokens that an event reports; 0 for other events."""
    holder = event.get("response") or event if api == RESPONSES else event
    usage = holder.get("usage") or {}
    return usage.get("completion_tokens" if api == CHAT else "output_tokens", 0)


async def _stream(client: httpx.AsyncClient, api: str, max_tokens: int) -> int:
    found = 0
    body = body_of(api, max_tokens)
    async with client.stream("POST", PATHS[api], json=body) as answer:
        if answer.is_error:
            await answer.aread()
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if '"usage"' in line:
                found = tokens_of(api, json.loads(line.removeprefix("data: "))) or found
    return found


async def stream_rate(options: argparse.Namespace, api: str) -> float:
    """Returns the output tokens per second of concurrent streams."""
    limits = httpx.Limits(max_connections=options.streams)
    named: dict[str, Any] = {"base_url": url_of(options), "headers": headers_of(options.api_key)}
    async with httpx.AsyncClient(timeout=options.timeout, limits=limits, **named) as client:
        begun = time.perf_counter()
        streams = [_stream(client, api, options.max_tokens) for _ in range(options.streams)]
        tokens = sum(await asyncio.gather(*streams))
    return tokens / (time.perf_counter() - begun)


def _interleaved(rounds: int, measure: Callable[[str], float]) -> dict[str, list[float]]:
    """Returns a value of each API per round; the order changes between rounds."""
    found: dict[str, list[float]] = {api: [] for api in APIS}
    for number in range(rounds):
        for api in APIS if number % 2 == 0 else APIS[::-1]:
            found[api].append(measure(api))
    return found


def _spread(values: Sequence[float]) -> dict[str, float]:
    found = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measures serializers, and the streams of a server if one is given."""
    found: dict[str, Any] = {"events_us_per_token": {}}
    for kind in KINDS:
        measure = partial(event_cost, kind=kind, num_tokens=options.num_tokens)
        costs = _interleaved(options.rounds, measure)
        found["events_us_per_token"][kind] = {api: _spread(costs[api]) for api in APIS}
    if options.base_url is None:
        return found
    rates = _interleaved(options.rounds, lambda api: asyncio.run(stream_rate(options, api)))
    shares = {
        api: [each / chat for each, chat in zip(rates[api], rates[CHAT], strict=True)]
        for api in APIS
    }
    found["streams"] = options.streams
    found["tokens_per_s"] = {api: _spread(rates[api]) for api in APIS}
    found["share"] = {api: _spread(shares[api]) for api in APIS}
    return found


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    server_options(parser)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each API")
    parser.add_argument("--num-tokens", type=int, default=20_000, help="tokens of a serializer")
    parser.add_argument("--streams", type=int, default=32, help="concurrent streams")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of a stream")
    parser.add_argument("--out", type=Path, help="result file")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Prints the costs; returns 1 if the server does not respond."""
    options = arguments().parse_args(words)
    try:
        found = measured(options)
    except httpx.HTTPError as error:
        print(no_answer(url_of(options), error), file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1))
    if options.out is not None:
        write_results(options.out, found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
