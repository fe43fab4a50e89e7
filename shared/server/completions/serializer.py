"""Interface of serializers: from updates of choices to the response of an API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shared.server.completions.choice import ChoiceUpdate
from shared.server.protocol.errors import ApiError
from shared.text.parsing.delta import Delta


@dataclass(frozen=True)
class StreamEvent:
    """Server-sent event.

    Attributes:
      data: JSON object, or text that is sent unchanged.
      name: Name of the event; None: unnamed.
      is_comment: Clients skip the event.
    """

    data: dict[str, Any] | str
    name: str | None = None
    is_comment: bool = False

    def encode(self) -> bytes:
        """Returns the bytes of the event."""
        if self.is_comment:
            return f": {self.data}\n\n".encode()
        is_text = isinstance(self.data, str)
        data = self.data if is_text else json.dumps(self.data, separators=(",", ":"))
        name = f"event: {self.name}\n" if self.name else ""
        return f"{name}data: {data}\n\n".encode()


class Serializer(Protocol):
    """Serializer of one response; holds the state of its stream.

    Attributes:
      keep_alive: Event that is sent while the first token is computed; None: the API has none.
    """

    keep_alive: StreamEvent | None

    def begin(self) -> Sequence[StreamEvent]:
        """Returns the events before the first update."""
        ...

    def update(self, index: int, piece: ChoiceUpdate) -> Sequence[StreamEvent]:
        """Returns the events of one update of a choice."""
        ...

    def end(self) -> Sequence[StreamEvent]:
        """Returns the events after the last update."""
        ...

    def fail(self, error: ApiError) -> Sequence[StreamEvent]:
        """Returns the last events of a stream that an error ends."""
        ...

    def whole(self, messages: list[Delta]) -> dict[str, Any]:
        """Returns the body of a response without streaming, from the message of each choice."""
        ...
