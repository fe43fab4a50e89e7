"""Conversations with tools: calls, their results, and replies, as in the loop of an agent.

A conversation has some tools and one to four parts. A part is a request with one call or with
parallel calls, a request with a missing argument, a word problem that is solved by one calculator
call after another, or a request without a call. Calls of the assistant are text in the form of the
chat template (`tools.call_text`), so that training learns all of them.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from models.demo.copying import draw_copying
from models.demo.example import Example, Message, Split, assistant, drawn, split_of, user
from models.demo.problems import draw_problem
from models.demo.tools import (
    CALCULATORS,
    OPERATIONS,
    Function,
    Request,
    Tool,
    call_text,
    calls_of,
    draw_functions,
    draw_request,
    draw_result,
)

SMALL_TALK = (
    ("Hi!", "Hello! What can I do for you?"),
    ("Hello", "Hello! What can I do for you?"),
    ("Thanks!", "You are welcome!"),
    ("Thank you.", "You are welcome!"),
)
ALSO = ("Also: ", "And then: ", "Second: ")
NUM_PARTS = (1, 1, 1, 2, 2, 3, 4)
CALCULATOR_SHARE = 0.3
TRIALS = 500
MAX_CHARACTERS = 1650
"""Longest text of a conversation with its tools; its tokens with the template are about 1,000."""


@dataclass(frozen=True)
class Part:
    """A user's request and everything up to the reply, and the keys of its content."""

    messages: list[Message]
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Toolbox:
    """The functions of a conversation, and True if it has the calculators."""

    functions: list[Function]
    calculates: bool

    @property
    def tools(self) -> list[Tool]:
        """All tools in the format of chat completions."""
        return [*(each.tool for each in self.functions), *(CALCULATORS if self.calculates else ())]


def _result(content: str) -> Message:
    return {"role": "tool", "content": content}


def _call(request: Request) -> str:
    return call_text(request.name, request.arguments)


def _single(rng: random.Random, toolbox: Toolbox) -> Part:
    """Samples a request with one call."""
    request = draw_request(rng, rng.choice(toolbox.functions))
    result, reply = draw_result(rng)
    turns = [user(request.text), assistant(_call(request)), _result(result), assistant(reply)]
    return Part(turns, (request.key,))


def _parallel(rng: random.Random, toolbox: Toolbox) -> Part:
    """Samples a request with two or three calls at once."""
    count = rng.choice((2, 2, 3))
    requests = [draw_request(rng, rng.choice(toolbox.functions)) for _ in range(count)]
    texts = [requests[0].text, *(rng.choice(ALSO) + each.text for each in requests[1:])]
    found = [draw_result(rng) for _ in requests]
    turns = [
        user("\n".join(texts)),
        assistant("\n".join(map(_call, requests))),
        *(_result(result) for result, _ in found),
        assistant("\n".join(reply for _, reply in found)),
    ]
    return Part(turns, tuple(each.key for each in requests))


def _incomplete(rng: random.Random, toolbox: Toolbox) -> Part:
    """Samples a request without a required argument, which the user then adds."""
    function = rng.choice(toolbox.functions)
    request = draw_request(rng, function)
    missing = rng.choice([each.key for each in function.parameters if each.is_required])
    said = [text for key, text in request.sentences.items() if key != missing]
    result, reply = draw_result(rng)
    turns = [
        user(" ".join((request.opening, *said))),
        assistant(f"Please give me the {missing}."),
        user(request.sentences[missing]),
        assistant(_call(request)),
        _result(result),
        assistant(reply),
    ]
    return Part(turns, (request.key,))


def _calculation(rng: random.Random, toolbox: Toolbox) -> Part:
    """Samples a word problem that one calculator call after another solves."""
    problem = draw_problem(rng)
    turns = [user(f"{problem.text} Use the tools.")]
    for step in problem.steps:
        call = call_text(OPERATIONS[step.op], {"a": step.left, "b": step.right})
        turns += [assistant(call), _result(f"{step.result}")]
    turns.append(assistant(f"The answer is {problem.result}.\n#### {problem.result}"))
    return Part(turns, (problem.key,))


def _without_call(rng: random.Random, toolbox: Toolbox) -> Part:
    """Samples small talk, a copying task, or a problem that no tool of the conversation solves."""
    kind = rng.random()
    if kind < 0.3:
        said, reply = rng.choice(SMALL_TALK)
        return Part([user(said), assistant(reply)], ())
    if kind < 0.6 or toolbox.calculates:
        example = draw_copying(rng)
        return Part([*example.messages, assistant(example.answer)], example.keys)
    problem = draw_problem(rng)
    return Part([user(problem.text), assistant(problem.answer)], (problem.key,))


PARTS: dict[Callable[[random.Random, Toolbox], Part], int] = {
    _single: 8,
    _parallel: 3,
    _incomplete: 2,
    _without_call: 3,
}
"""Samplers of parts with their weights."""


def _part(rng: random.Random, toolbox: Toolbox, split: Split) -> Part | None:
    """Samples a part with all of its content in the split; None after `TRIALS` other ones.

    A function with few possible arguments may have no call in the split.
    """
    draw = _calculation if toolbox.calculates and rng.random() < 0.5 else None
    draw = draw or rng.choices(list(PARTS), list(PARTS.values()))[0]
    for _ in range(TRIALS):
        part = draw(rng, toolbox)
        if all(split_of(key) == split for key in part.keys):
            return part
    return None


def _toolbox(rng: random.Random) -> Toolbox:
    """Samples one to three functions, or one function and the calculators."""
    calculates = rng.random() < CALCULATOR_SHARE
    return Toolbox(draw_functions(rng, 1 if calculates else rng.randrange(1, 4)), calculates)


def _draw(split: Split, rng: random.Random) -> Example:
    """Samples a conversation; it ends before a random answer of its last part."""
    count = rng.choice(NUM_PARTS)
    while True:
        toolbox = _toolbox(rng)
        drawn_parts = [_part(rng, toolbox, split) for _ in range(count)]
        parts = [part for part in drawn_parts if part is not None]
        messages = [message for part in parts for message in part.messages]
        size = len(json.dumps(toolbox.tools)) + sum(len(each["content"]) for each in messages)
        if parts and size <= MAX_CHARACTERS:
            break
    first = len(messages) - len(parts[-1].messages)
    ends = [i for i in range(first, len(messages)) if messages[i]["role"] == "assistant"]
    end = rng.choice(ends)
    keys = tuple(key for part in parts for key in part.keys)
    return Example("tools", messages[:end], messages[end]["content"], keys, tuple(toolbox.tools))


def agents(split: Split, seed: int) -> Iterator[Example]:
    """Yields conversations with tools of a split endlessly."""
    return drawn("tools", partial(_draw, split), split, seed)


def with_call_fields(messages: list[Message]) -> list[dict[str, Any]]:
    """Returns messages in which calls are fields, with ids, as clients of the server send them."""
    sent: list[dict[str, Any]] = []
    ids: list[str] = []
    for message in messages:
        calls = calls_of(message["content"]) if message["role"] == "assistant" else None
        if message["role"] == "tool":
            sent.append({**message, "tool_call_id": ids.pop(0)})
        elif calls is None:
            sent.append(dict(message))
        else:
            ids = [f"call_{len(sent)}_{i}" for i in range(len(calls))]
            sent.append({"role": "assistant", "content": None, "tool_calls": _fields(calls, ids)})
    return sent


def _fields(calls: list[dict[str, Any]], ids: list[str]) -> list[dict[str, Any]]:
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {**call, "arguments": json.dumps(call["arguments"])},
        }
        for call, call_id in zip(calls, ids, strict=True)
    ]
