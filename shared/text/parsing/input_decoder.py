"""Decoder of the input of custom tools, which a model writes as the only argument of a function."""

from __future__ import annotations

import json

INPUT = "input"
"""Name of the argument."""

_HEAD = f'{{"{INPUT}":"'
_NO_SPACE = range(_HEAD.index(INPUT), _HEAD.index(":"))  # places within the quotes of the name


class InputDecoder:
    """Incremental decoder of the text in `{"input": "..."}`.

    Arguments that begin otherwise pass unchanged. Text after the string other than the closing
    brace follows it, so that nothing that a model wrote is lost.
    """

    def __init__(self) -> None:
        self._read = self._head
        self._place = 0
        self._held = ""
        self._surrogate = ""  # first half of a pair

    def push(self, text: str) -> str:
        """Returns the next part of the input.

        Args:
          text: Next part of the arguments, JSON text.
        """
        return "".join(self._read(char) for char in text)

    def flush(self) -> str:
        """Returns the text after the string; "" if the arguments are complete, or end before it."""
        return self._held if self._read == self._end and self._held.strip() != "}" else ""

    def _head(self, char: str) -> str:
        self._held += char
        if char == _HEAD[self._place]:
            self._place += 1
        elif not char.isspace() or self._place in _NO_SPACE:
            self._read = self._unchanged
            return self._held
        if self._place == len(_HEAD):
            self._read = self._string
        return ""

    def _unchanged(self, char: str) -> str:
        return char

    def _string(self, char: str) -> str:
        if char == "\\":
            self._read, self._held = self._escape, char
            return ""
        if char == '"':
            self._read, self._held = self._end, ""
            return self._joined("")
        return self._joined(char)

    def _escape(self, char: str) -> str:
        self._held += char
        if len(self._held) < (6 if self._held[1] == "u" else 2):
            return ""
        self._read = self._string
        text = json.loads(f'"{self._held}"')
        if "\ud800" <= text < "\udc00":
            before, self._surrogate = self._joined(""), text
            return before
        return self._joined(text)

    def _joined(self, text: str) -> str:
        """Returns a text after the first half of a surrogate pair; a lone half becomes U+FFFD."""
        pair, self._surrogate = self._surrogate + text, ""
        return pair.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _end(self, char: str) -> str:
        self._held += char
        return ""
