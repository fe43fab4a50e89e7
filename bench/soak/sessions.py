"""Scripts of agent sessions: what a client with tools sends in each round, drawn from a seed.

A session has one API, one tenant, some tools and a number of rounds. A round adds a user message
or continues after results of tools, and requests text, one forced call, or JSON by a schema. Some
rounds edit the conversation: they drop its last messages first. Some are sent twice, and the client
aborts the first stream. Arguments and JSON are bounded, so that every constrained output ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from models.demo.problems import draw_problem
from models.demo.tools import Tool, draw_functions, draw_request, draw_result, tool

API = Literal["chat", "responses", "messages"]
Kind = Literal["text", "call", "schema"]

APIS: tuple[API, ...] = ("chat", "responses", "messages")
TENANTS = ("north", "south")
KINDS: tuple[Kind, ...] = ("text", "call", "call", "schema")
TEXT_TOKENS, CONSTRAINED_TOKENS = 24, 160
"""Maximum output tokens of a round; a constrained output needs fewer."""

STREAM_SHARE, ABORT_SHARE, EDIT_SHARE, SAMPLED_SHARE = 0.5, 0.1, 0.1, 0.25
SYSTEM = "You are an assistant with tools. Use them."
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green", "blue"]},
        "is_done": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["color", "is_done", "count"],
    "additionalProperties": False,
}


@dataclass(frozen=True, kw_only=True)
class Round:
    """A round of a session.

    Attributes:
      kind: Requested output.
      text: User message; it is omitted if the conversation ends with results of tools and the round
        does not edit it.
      result: Result of the call of the round.
      tool: Name of the forced tool.
      dropped: Messages that are removed first, up to the preceding user message.
      is_streamed: True if the output is streamed.
      aborts_after: Events after which a first stream of the same request is aborted; 0 for none.
      max_tokens, temperature, seed: Sampling of the output.
    """

    kind: Kind
    text: str
    result: str
    tool: str
    dropped: int
    is_streamed: bool
    aborts_after: int
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Session:
    """A session of one client.

    Attributes:
      number: Index of the session.
      tenant: Namespace of the prefix cache.
    """

    number: int
    api: API
    tenant: str
    tools: list[Tool]
    rounds: list[Round]

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments by the name of the tool."""
        functions = [each["function"] for each in self.tools]
        return {each["name"]: each["parameters"] for each in functions}


def sessions(count: int, rounds: tuple[int, int], seed: int) -> list[Session]:
    """Returns sessions of `rounds[0]` to `rounds[1]` rounds; equal seeds give equal sessions.

    APIs and tenants alternate.
    """
    return [_session(number, rounds, random.Random(f"{seed}/{number}")) for number in range(count)]


def _session(number: int, rounds: tuple[int, int], rng: random.Random) -> Session:
    functions = draw_functions(rng, rng.randrange(2, 4))
    names = [each.name for each in functions]

    def round() -> Round:
        kind = rng.choice(KINDS)
        names_tool = kind == "call" or rng.random() < 0.5
        request = draw_request(rng, rng.choice(functions)).text
        return Round(
            kind=kind,
            text=request if names_tool else draw_problem(rng).text,
            result=draw_result(rng)[0],
            tool=rng.choice(names),
            dropped=rng.randrange(2, 7) if rng.random() < EDIT_SHARE else 0,
            is_streamed=rng.random() < STREAM_SHARE,
            aborts_after=rng.randrange(1, 9) if rng.random() < ABORT_SHARE else 0,
            max_tokens=TEXT_TOKENS if kind == "text" else CONSTRAINED_TOKENS,
            temperature=1.0 if rng.random() < SAMPLED_SHARE else 0.0,
            seed=rng.randrange(1 << 16),
        )

    return Session(
        number=number,
        api=APIS[number % len(APIS)],
        tenant=TENANTS[number // len(APIS) % len(TENANTS)],
        tools=[bounded(each.tool) for each in functions],
        rounds=[round() for _ in range(rng.randint(rounds[0], rounds[1]))],
    )


def bounded(of: Tool) -> Tool:
    """Returns a tool with bounded arguments and without additional ones."""
    function = of["function"]
    properties = function["parameters"]["properties"]
    limited = tool(
        function["name"],
        function["description"],
        {name: _limit(schema) for name, schema in properties.items()},
        list(properties),
    )
    limited["function"]["parameters"]["additionalProperties"] = False
    return limited


def _limit(schema: dict[str, Any]) -> dict[str, Any]:
    if "enum" in schema:
        return schema
    kind = schema["type"]
    if kind == "string":
        return {**schema, "maxLength": 12}
    if kind == "array":
        return {**schema, "items": _limit(schema["items"]), "maxItems": 3}
    if kind in ("integer", "number"):
        return {"type": "integer", "minimum": 0, "maximum": 999}
    return schema


def edited(messages: list[dict[str, Any]], dropped: int) -> list[dict[str, Any]]:
    """Returns a conversation without its last messages; it ends before a user message.

    Args:
      messages: The conversation.
      dropped: Least number of removed messages; 0 returns the conversation unchanged.
    """
    if not dropped:
        return messages
    end = max(len(messages) - dropped, 0)
    while end and messages[end]["role"] != "user":
        end -= 1
    return messages[: max(end, 1)]  # the system message stays
