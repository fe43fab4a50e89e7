"""Rounds of an agent session as requests of each API, by the SDKs, and their answers in one form.

A conversation is kept in the format of chat completions and converted to the API of its session.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
from anthropic.lib.streaming._messages import accumulate_event
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from bench.soak.sessions import SCHEMA, Round, Session
from shared.server.protocol.chat_messages import read_arguments

Messages = list[dict[str, Any]]
MODEL = "default"
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Call:
    """A tool call of an answer."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """Answer of a round.

    Attributes:
      text: Text of the answer.
      calls: Its calls; the token limit may have truncated the last one.
      prompt_tokens: All tokens of the prompt.
      cached_tokens: Those that the prefix cache had.
      is_complete: False if the token limit ended it.
    """

    text: str
    calls: tuple[Call, ...]
    prompt_tokens: int
    cached_tokens: int
    is_complete: bool

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in self.calls
        ]
        message = {"role": "assistant", "content": self.text}
        return {**message, "tool_calls": calls} if calls else message


class Clients:
    """SDK clients of one server; `send` and `abort` take the API of the session."""

    def __init__(self, url: str) -> None:
        how: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S}
        self._openai = openai.AsyncOpenAI(base_url=f"{url}/v1", **how)
        self._anthropic = anthropic.AsyncAnthropic(base_url=url, **how)

    async def close(self) -> None:
        """Closes the connections."""
        await self._openai.close()
        await self._anthropic.close()

    async def send(self, session: Session, messages: Messages, round: Round) -> Answer:
        """Sends a round and returns its answer.

        Raises:
          openai.APIError, anthropic.APIError: The request failed.
        """
        make, read = self._route(session)
        body = BODIES[session.api](session, messages, round)
        if not round.is_streamed:
            return read(await make(**body))
        last, accumulated = None, Accumulated()
        async for event in await make(stream=True, **_with_usage(session, body)):
            last = accumulated.take(event) or last
        return read(last)

    async def abort(self, session: Session, messages: Messages, round: Round) -> None:
        """Sends a round as a stream and disconnects after `round.aborts_after` events."""
        make, _ = self._route(session)
        stream = await make(stream=True, **BODIES[session.api](session, messages, round))
        left = round.aborts_after
        async for _ in stream:
            left -= 1
            if not left:
                break
        await stream.close()

    def _route(self, session: Session) -> tuple[Callable[..., Any], Callable[[Any], Answer]]:
        return {
            "chat": (self._openai.chat.completions.create, _of_chat),
            "responses": (self._openai.responses.create, _of_responses),
            "messages": (self._anthropic.messages.create, _of_messages),
        }[session.api]


def _with_usage(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    if session.api != "chat":
        return body
    return {**body, "stream_options": {"include_usage": True}}


def _chat_body(session: Session, messages: Messages, round: Round) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": messages,
        "tools": session.tools,
        "max_tokens": round.max_tokens,
        "temperature": round.temperature,
        "seed": round.seed,
        "user": session.tenant,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
    }
    if round.kind == "call":
        body["tool_choice"] = {"type": "function", "function": {"name": round.tool}}
    if round.kind == "schema":
        schema = {"name": "answer", "schema": SCHEMA, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
        body["tool_choice"] = "none"
    return body


def _responses_body(session: Session, messages: Messages, round: Round) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "input": [item for message in messages for item in _items(message)],
        "tools": [{"type": "function", **each["function"]} for each in session.tools],
        "max_output_tokens": round.max_tokens,
        "temperature": round.temperature,
        "user": session.tenant,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "extra_body": {"seed": round.seed},
    }
    if round.kind == "call":
        body["tool_choice"] = {"type": "function", "name": round.tool}
    if round.kind == "schema":
        body["text"] = {
            "format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}
        }
        body["tool_choice"] = "none"
    return body


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a message of a chat as items of a response."""
    if message["role"] == "tool":
        call_id, output = message["tool_call_id"], message["content"]
        return [{"type": "function_call_output", "call_id": call_id, "output": output}]
    calls = [
        {"type": "function_call", "call_id": call["id"], **call["function"]}
        for call in message.get("tool_calls", ())
    ]
    has_text = bool(message["content"]) or not calls
    text = [{"role": message["role"], "content": message["content"]}] if has_text else []
    return [*text, *calls]


def _messages_body(session: Session, messages: Messages, round: Round) -> dict[str, Any]:
    system = [each["content"] for each in messages if each["role"] == "system"]
    body: dict[str, Any] = {
        "model": MODEL,
        "system": "\n".join(system),
        "messages": _blocks([each for each in messages if each["role"] != "system"]),
        "tools": [_anthropic_tool(each["function"]) for each in session.tools],
        "max_tokens": round.max_tokens,
        "metadata": {"user_id": session.tenant},
        "tool_choice": {"type": "auto"},
        "extra_body": {"seed": round.seed, "temperature": round.temperature},
    }
    if round.kind == "call":
        choice = {"type": "tool", "name": round.tool, "disable_parallel_tool_use": True}
        body["tool_choice"] = choice
    if round.kind == "schema":
        body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
        body["tool_choice"] = {"type": "none"}
    return body


def _anthropic_tool(function: dict[str, Any]) -> dict[str, Any]:
    named = {name: function[name] for name in ("name", "description")}
    return {**named, "input_schema": function["parameters"]}


def _blocks(messages: Messages) -> Messages:
    """Returns messages of a chat as blocks; results share the user message that follows them."""
    found: Messages = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if found and found[-1]["role"] == role == "user":
            found[-1]["content"] += _content(message)
        else:
            found.append({"role": role, "content": _content(message)})
    return found


def _content(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        call_id, output = message["tool_call_id"], message["content"]
        return [{"type": "tool_result", "tool_use_id": call_id, "content": output}]
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", ())
    ]
    has_text = bool(message["content"]) or not calls
    return [*([{"type": "text", "text": message["content"]}] if has_text else []), *calls]


BODIES = {"chat": _chat_body, "responses": _responses_body, "messages": _messages_body}


class Accumulated:
    """Streamed events of any API, assembled to the answer that a whole response would contain."""

    def __init__(self) -> None:
        self._chat = ChatCompletionStreamState()
        self._message: Any = None
        self._json: dict[int, bytes] = {}

    def take(self, event: Any) -> Any:
        """Adds an event and returns the answer so far; None before it is known."""
        if isinstance(event, ChatCompletionChunk):
            self._chat.handle_chunk(event)
            return self._chat.current_completion_snapshot
        if event.type.startswith("response."):
            return getattr(event, "response", None)
        if event.type != "ping":
            self._message = accumulate_event(
                event=event, current_snapshot=self._message, json_bufs=self._json
            )
        return self._message


def _of_chat(completion: Any) -> Answer:
    (choice,), usage = completion.choices, completion.usage
    calls = [
        Call(call.id, call.function.name, read_arguments(call.function.arguments))
        for call in choice.message.tool_calls or ()
    ]
    return Answer(
        text=choice.message.content or "",
        calls=tuple(calls),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.prompt_tokens_details.cached_tokens,
        is_complete=choice.finish_reason != "length",
    )


def _of_responses(response: Any) -> Answer:
    if response.error:
        raise RuntimeError(f"the response failed: {response.error.message}")
    calls = [
        Call(item.call_id, item.name, json.loads(item.arguments))
        for item in response.output
        if item.type == "function_call" and item.status == "completed"
    ]
    return Answer(
        text=response.output_text,
        calls=tuple(calls),
        prompt_tokens=response.usage.input_tokens,
        cached_tokens=response.usage.input_tokens_details.cached_tokens,
        is_complete=response.status == "completed",
    )


def _of_messages(message: Any) -> Answer:
    usage = message.usage
    cached = usage.cache_read_input_tokens or 0
    calls = [
        Call(block.id, block.name, block.input)
        for block in message.content
        if block.type == "tool_use"
    ]
    return Answer(
        text="".join(block.text for block in message.content if block.type == "text"),
        calls=tuple(calls),
        prompt_tokens=usage.input_tokens + cached,
        cached_tokens=cached,
        is_complete=message.stop_reason != "max_tokens",
    )
