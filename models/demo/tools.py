"""Tools of the demo model's data: functions with schemas, requests in words, and their results."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from models.demo.copying import SENTENCES, field_value, record
from models.demo.words import COLORS, DAYS, GOODS, code_number, words

Tool = dict[str, Any]
"""A tool in the format of chat completions."""

VERBS = words("create find update cancel send check add book close print")
NOUNS = words("order parcel ticket invoice note event room report alarm task contract payment")
OPENINGS = (
    "{verb} the {noun}.",
    "Please {verb} the {noun}.",
    "Can you {verb} the {noun}?",
    "I need you to {verb} the {noun}.",
    "{verb} the {noun} for me.",
)
CAMEL_SHARE = 0.2
MENTIONED_SHARE = 0.6
"""Share of the optional parameters that a request mentions."""

ERRORS = ("not found", "not allowed", "no connection", "too late")
ERROR_SHARE = 0.1
OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}


class Value(NamedTuple):
    """An argument: its schema, its JSON value, and a sentence that states it."""

    schema: dict[str, Any]
    value: Any
    sentence: str


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function."""

    key: str
    schema: dict[str, Any]
    is_required: bool


@dataclass(frozen=True)
class Function:
    """A function that a request may call.

    Attributes:
      verb, noun: The words of its name.
      name: For example `create_order` or `createOrder`.
      parameters: At least one of them is required.
    """

    verb: str
    noun: str
    name: str
    parameters: tuple[Parameter, ...]

    @property
    def tool(self) -> Tool:
        """The function in the format of chat completions."""
        return tool(
            self.name,
            f"{self.verb.capitalize()} the {self.noun}.",
            {each.key: each.schema for each in self.parameters},
            [each.key for each in self.parameters if each.is_required],
        )


@dataclass(frozen=True)
class Request:
    """A request in words for one call.

    Attributes:
      opening: The sentence that names the function.
      sentences: The sentence of each argument.
      name, arguments: The call.
    """

    opening: str
    sentences: dict[str, str]
    name: str
    arguments: dict[str, Any]

    @property
    def text(self) -> str:
        """The whole request."""
        return " ".join((self.opening, *self.sentences.values()))

    @property
    def key(self) -> str:
        """The call; equal for requests that differ in wording only."""
        return f"{self.name}({json.dumps(self.arguments)})"


def tool(name: str, purpose: str, properties: dict[str, Any], required: Sequence[str]) -> Tool:
    """Returns a function tool in the format of chat completions."""
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    function = {"name": name, "description": purpose, "parameters": parameters}
    return {"type": "function", "function": function}


CALCULATORS = tuple(
    tool(
        name,
        f"Returns a {sign} b.",
        {"a": {"type": "number"}, "b": {"type": "number"}},
        ("a", "b"),
    )
    for sign, name in OPERATIONS.items()
)


def _listed(entries: Sequence[Any]) -> str:
    *first, last = map(str, entries)
    return f"{', '.join(first)} and {last}"


def _choice(key: str, values: Sequence[str]) -> Callable[[random.Random], Value]:
    def draw(rng: random.Random) -> Value:
        allowed = rng.sample(list(values), min(len(values), rng.randrange(2, 5)))
        value = rng.choice(allowed)
        schema = {"type": "string", "enum": allowed}
        return Value(schema, value, f"The {key} is {value}.")

    return draw


def _field(key: str) -> Callable[[random.Random], Value]:
    def draw(rng: random.Random) -> Value:
        value = field_value(rng, key)
        schema = {"type": "integer" if isinstance(value, int) else "string"}
        return Value(schema, value, rng.choice(SENTENCES[key]).format(value))

    return draw


def _switch(key: str) -> Callable[[random.Random], Value]:
    def draw(rng: random.Random) -> Value:
        value = rng.random() < 0.5
        return Value({"type": "boolean"}, value, f"It is {'' if value else 'not '}{key}.")

    return draw


def _weight(rng: random.Random) -> Value:
    value = rng.randrange(1, 60) + rng.choice((0.25, 0.5, 0.75))
    return Value({"type": "number"}, value, f"The weight is {value}.")


def _items(rng: random.Random) -> Value:
    value = rng.sample(GOODS, rng.randrange(2, 5))
    schema = {"type": "array", "items": {"type": "string"}}
    return Value(schema, value, f"The items are {_listed(value)}.")


def _codes(rng: random.Random) -> Value:
    value = [code_number(rng) for _ in range(rng.randrange(2, 4))]
    schema = {"type": "array", "items": {"type": "string"}}
    return Value(schema, value, f"The codes are {_listed(value)}.")


def _scores(rng: random.Random) -> Value:
    value = [rng.randrange(1, 100) for _ in range(rng.randrange(2, 5))]
    schema = {"type": "array", "items": {"type": "integer"}}
    return Value(schema, value, f"The scores are {_listed(value)}.")


VALUES: dict[str, Callable[[random.Random], Value]] = {
    **{key: _field(key) for key in SENTENCES if key != "color"},
    "color": _choice("color", COLORS),
    "day": _choice("day", DAYS),
    "size": _choice("size", words("tiny small medium large huge")),
    "unit": _choice("unit", words("meter inch mile yard")),
    "urgent": _switch("urgent"),
    "free": _switch("free"),
    "weight": _weight,
    "items": _items,
    "codes": _codes,
    "scores": _scores,
}
"""Samplers of arguments by the name of the parameter: strings, enums, numbers, switches, lists."""


def draw_functions(rng: random.Random, count: int) -> list[Function]:
    """Samples functions with distinct names."""
    pairs = rng.sample([(verb, noun) for verb in VERBS for noun in NOUNS], count)
    return [_function(rng, verb, noun) for verb, noun in pairs]


def _function(rng: random.Random, verb: str, noun: str) -> Function:
    is_camel = rng.random() < CAMEL_SHARE
    name = f"{verb}{noun.capitalize()}" if is_camel else f"{verb}_{noun}"
    keys = rng.sample(list(VALUES), rng.randrange(1, 5))
    num_required = rng.randrange(1, len(keys) + 1)
    parameters = tuple(
        Parameter(key, VALUES[key](rng).schema, i < num_required) for i, key in enumerate(keys)
    )
    return Function(verb, noun, name, parameters)


def draw_request(rng: random.Random, function: Function) -> Request:
    """Samples a request for a call; it mentions all required parameters and some others."""
    sentences: dict[str, str] = {}
    arguments: dict[str, Any] = {}
    for each in function.parameters:
        if each.is_required or rng.random() < MENTIONED_SHARE:
            drawn = _drawn(rng, each)
            sentences[each.key], arguments[each.key] = drawn.sentence, drawn.value
    opening = rng.choice(OPENINGS).format(verb=function.verb, noun=function.noun)
    opening = opening[0].upper() + opening[1:]
    shuffled = dict(rng.sample(list(sentences.items()), len(sentences)))
    return Request(opening, shuffled, function.name, arguments)


def _drawn(rng: random.Random, parameter: Parameter) -> Value:
    """Samples an argument that its schema allows."""
    drawn = VALUES[parameter.key](rng)
    allowed = parameter.schema.get("enum")
    if allowed is None:
        return drawn
    value = rng.choice(allowed)
    return Value(parameter.schema, value, f"The {parameter.key} is {value}.")


def draw_result(rng: random.Random) -> tuple[str, str]:
    """Samples the result of a call as JSON, and the reply that reports it."""
    if rng.random() < ERROR_SHARE:
        error = rng.choice(ERRORS)
        return json.dumps({"error": error}), f"The call failed: {error}."
    found = record(rng, 1, 3)
    reply = " ".join(f"The {key} is {value}." for key, value in found.items())
    return json.dumps(found), reply


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Returns a call in the form of the chat template."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calls_of(text: str) -> list[dict[str, Any]] | None:
    """Returns the calls of an answer that consists of calls only; None for any other answer."""
    blocks = text.strip().split("</tool_call>")
    if blocks.pop().strip() or not blocks:
        return None
    try:
        calls = [json.loads(block.strip().removeprefix("<tool_call>")) for block in blocks]
    except ValueError:
        return None
    has_form = all(
        isinstance(call, dict) and {"name", "arguments"} == call.keys() for call in calls
    )
    has_tags = all(block.strip().startswith("<tool_call>") for block in blocks)
    return calls if has_form and has_tags else None
