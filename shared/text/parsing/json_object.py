"""Incremental scanner of a JSON object."""

from __future__ import annotations

import re
from collections.abc import Callable

_SPACE = " \t\r\n"
_CLOSING = {"{": "}", "[": "]"}
_ESCAPED = set('"\\/bfnrtu')
_HEX = set("0123456789abcdefABCDEF")
_WORD_CHARS = set("+-.0123456789eEtrufalsn")
_WORD = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)


class JsonObject:
    """State machine that checks text for a JSON object, one character at a time."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self._state: Callable[[str], bool] = self._start
        self._after_string: Callable[[str], bool] = self._colon
        self._word = ""
        self._num_hex = 0

    @property
    def depth(self) -> int:
        """Number of open objects and lists."""
        return len(self._open)

    @property
    def ended(self) -> bool:
        """True if the object is complete."""
        return self._state == self._end

    def take(self, char: str) -> bool:
        """Adds a character; returns False if it is invalid, after which nothing may be added."""
        return self._state(char)

    def _go(self, state: Callable[[str], bool]) -> bool:
        self._state = state
        return True

    def _start(self, char: str) -> bool:
        return char == "{" and self._begin(char)

    def _end(self, char: str) -> bool:
        return False

    def _begin(self, char: str) -> bool:
        self._open.append(char)
        return self._go(self._first_key if char == "{" else self._first_value)

    def _close(self, char: str) -> bool:
        if _CLOSING[self._open[-1]] != char:
            return False
        self._open.pop()
        return self._go(self._comma if self._open else self._end)

    def _first_key(self, char: str) -> bool:
        return self._close(char) if char == "}" else self._key(char)

    def _key(self, char: str) -> bool:
        self._after_string = self._colon
        return char in _SPACE or (char == '"' and self._go(self._string))

    def _colon(self, char: str) -> bool:
        return char in _SPACE or (char == ":" and self._go(self._value))

    def _first_value(self, char: str) -> bool:
        return self._close(char) if char == "]" else self._value(char)

    def _value(self, char: str) -> bool:
        if char in _SPACE:
            return True
        if char in _CLOSING:
            return self._begin(char)
        if char == '"':
            self._after_string = self._comma
            return self._go(self._string)
        self._word = char
        return char in _WORD_CHARS and self._go(self._in_word)

    def _in_word(self, char: str) -> bool:
        if char in _WORD_CHARS:
            self._word += char
            return True
        return _WORD.fullmatch(self._word) is not None and self._comma(char)

    def _comma(self, char: str) -> bool:
        if char == ",":
            return self._go(self._key if self._open[-1] == "{" else self._value)
        return self._go(self._comma) if char in _SPACE else char in "}]" and self._close(char)

    def _string(self, char: str) -> bool:
        if char == "\\":
            return self._go(self._escape)
        return self._go(self._after_string) if char == '"' else char >= " "

    def _escape(self, char: str) -> bool:
        self._num_hex = 0
        return char in _ESCAPED and self._go(self._hex if char == "u" else self._string)

    def _hex(self, char: str) -> bool:
        self._num_hex += 1
        return char in _HEX and self._go(self._string if self._num_hex == 4 else self._hex)
