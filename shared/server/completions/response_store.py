"""Store of responses for later requests, bounded in bytes and age."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

MAX_STORED_BYTES = 64 << 20
"""Maximum JSON bytes of all stored responses and their conversations."""

MAX_STORED_S = 3600.0
"""Seconds after which a response is deleted."""


@dataclass(frozen=True)
class StoredResponse:
    """Response with its conversation.

    Attributes:
      response: JSON of the response.
      inputs: JSON of the items before the output, with those of earlier responses.
      until: Time of the deletion, by `time.monotonic`.
    """

    response: bytes
    inputs: bytes
    until: float

    @property
    def num_bytes(self) -> int:
        """Bytes that count towards the limit."""
        return len(self.response) + len(self.inputs)

    @property
    def items(self) -> list[Any]:
        """Items that a following request continues: inputs and outputs."""
        return [*json.loads(self.inputs), *json.loads(self.response)["output"]]


class ResponseStore:
    """Stored responses by id; the oldest are deleted above the limits.

    Args:
      max_bytes: Maximum JSON bytes.
      max_age_s: Seconds after which a response is deleted.
    """

    def __init__(self, max_bytes: int = MAX_STORED_BYTES, max_age_s: float = MAX_STORED_S) -> None:
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """JSON bytes of all responses."""
        return self._num_bytes

    def put(self, response: dict[str, Any], inputs: Sequence[Any]) -> None:
        """Stores a response, and replaces an earlier state of it."""
        name = response["id"]
        self.delete(name)
        until = time.monotonic() + self._max_age_s
        made = StoredResponse(json.dumps(response).encode(), json.dumps(inputs).encode(), until)
        self._stored[name] = made
        self._num_bytes += made.num_bytes
        self._evict()

    def get(self, name: str) -> StoredResponse | None:
        """Returns a response; None if it is not stored any more."""
        self._evict()
        return self._stored.get(name)

    def delete(self, name: str) -> bool:
        """Deletes a response; returns False if it is not stored."""
        found = self._stored.pop(name, None)
        self._num_bytes -= found.num_bytes if found else 0
        return found is not None

    def _evict(self) -> None:
        now = time.monotonic()
        while self._stored:
            name, oldest = next(iter(self._stored.items()))
            if self._num_bytes <= self._max_bytes and now < oldest.until:
                return
            self.delete(name)
