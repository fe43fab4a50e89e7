"""Exceptions that end a request's events."""

from __future__ import annotations


class EngineLost(Exception):
    """The engine process has exited or is exiting; the message is the reason."""


class RequestRejected(Exception):
    """The engine cannot serve the request; the message is the reason.

    Attributes:
      field: The invalid field of prompt or sampling parameters, or None.
    """

    def __init__(self, reason: str, field: str | None) -> None:
        super().__init__(reason)
        self.field = field


class QueueFull(Exception):
    """The queue of requests is full."""


class Draining(Exception):
    """The server is shutting down and accepts no new requests.

    Attributes:
      seconds: Maximum seconds until it has stopped.
    """

    def __init__(self, seconds: int) -> None:
        super().__init__("the server is shutting down and accepts no new requests")
        self.seconds = seconds


class ClientLeft(Exception):
    """The client closed its connection."""


class SlowClientError(Exception):
    """The client has too many unread events, so its request was aborted."""


class NoRecordError(Exception):
    """The engine has no KV cache record for another server; the message is the cause.

    Attributes:
      reason: Short name of the cause (`shared.process.disaggregation.kv_export`).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
