"""How models write calls of tools: a reader for each format.

A reader sees one character at a time, so what it says cannot depend on how the text was cut. It
says what is certain as soon as it is, and as text whatever turns out to be no call. A call has
begun once its name and the beginning of its arguments were read; where it breaks off behind that,
its arguments end there and the rest is text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from shared.server.arguments import read_argument, to_json
from shared.server.call_reading import Reading, Said, Source, read_json_call
from shared.server.delta import Delta
from shared.server.text_schema import ParameterSchemas
from shared.text.marks import CALL, CALL_END, FUNCTION_END, PARAMETER_END, PYTHON_TAG

_FUNCTION, _PARAMETER = "<function=", "<parameter="


def read_tagged(source: Source, said: Said) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": ...}</tool_call>`, of Hermes and Qwen."""
    while lead := (yield from source.up_to(CALL, said)):
        if (yield from read_json_call(source, said, lead)):
            yield from source.expect(CALL_END)


def read_bare(source: Source, said: Said) -> Reading[None]:
    """`{"name": ..., "parameters": ...}`, of Llama 3: the whole text, or several behind `;`."""
    lead = yield from source.skip_space()
    if (yield from source.expect(PYTHON_TAG)):
        lead += PYTHON_TAG
    while (yield from read_json_call(source, said, lead)):
        lead = yield from source.skip_space()
        if not (yield from source.expect(";")):
            break
        lead += ";"
    yield from source.rest(said)


def read_elements(source: Source, said: Said) -> Reading[None]:
    """`<tool_call><function=NAME><parameter=KEY>...</parameter></function></tool_call>`, of Qwen3
    Coder and Qwen3.5.
    """
    while lead := (yield from source.up_to(CALL, said)):
        if (yield from _read_function(source, said, lead)):
            yield from source.expect(CALL_END)


def _read_function(source: Source, said: Said, lead: str) -> Reading[bool]:
    lead += yield from source.skip_space()
    name = yield from _read_tag(source, _FUNCTION)
    if not said.takes(name):
        said.say(lead + (f"{_FUNCTION}{name}>" if name else ""))
        return False
    said.begin(name)
    separator, schemas = "{", ParameterSchemas(said.tools[name])
    while key := (yield from _read_tag(source, _PARAMETER)):
        value = yield from _read_value(source)
        if value is None:
            source.put_back(f"{_PARAMETER}{key}>")
            return False
        said.argue(separator + f"{to_json(key)}: {to_json(read_argument(value, key, schemas))}")
        separator = ", "
    if (yield from source.expect(FUNCTION_END)):
        said.argue("}" if separator == ", " else "{}")
        return True
    return False


def _read_tag(source: Source, opening: str) -> Reading[str]:
    """The name in a tag such as `<function=NAME>`; reads nothing and returns "" without one."""
    read = yield from source.expect(opening)
    name = ""
    while read and (char := (yield from source.next())) != ">":
        if char in "<\n":  # or the text has ended
            source.put_back(read + name + char)
            return ""
        name += char
    return name


def _read_value(source: Source) -> Reading[str | None]:
    """The text up to where a parameter ends; reads nothing and returns None where it does not."""
    value = ""
    while not value.endswith(PARAMETER_END):
        char = yield from source.next()
        if not char:
            source.put_back(value)
            return None
        value += char
    return value.removesuffix(PARAMETER_END).removeprefix("\n").removesuffix("\n")


FORMATS: Mapping[str, Callable[[Source, Said], Reading[None]]] = {
    "hermes": read_tagged,
    "qwen": read_tagged,
    "qwen3_coder": read_elements,
    "llama3": read_bare,
}


class ToolCallParser:
    """Reads the calls of a choice in one of the formats; the rest is text."""

    def __init__(
        self, name: str, tools: Mapping[str, dict[str, Any]], most_calls: int | None
    ) -> None:
        """Args: as of `FORMATS` and `Said`."""
        self._said = Said(tools, most_calls)
        self._reading = FORMATS[name](Source(), self._said)
        next(self._reading)

    def push(self, text: str) -> Delta:
        """What is certain with this text."""
        for char in text:
            self._reading.send(char)
        return self._said.take()

    def flush(self) -> Delta:
        """What was held back: the text has ended."""
        with contextlib.suppress(StopIteration):
            self._reading.send("")
        return self._said.take()
