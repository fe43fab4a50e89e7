"""The log of both processes: lines on stderr, as text or as JSON objects.

A line has a time, a level, a message and fields. No field contains prompts or outputs, unless the
server was started with `--log-requests`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from typing import Any

from shared.options.observing import ObservingOptions

REPEAT_S = 10.0
MAX_KINDS = 256

log = logging.getLogger("tandem")
"""Logger of the project; lines of libraries are logged from level `warning` on."""


def set_up(observing: ObservingOptions) -> None:
    """Configures level and format of the log."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(RateLimitFilter())
    handler.setFormatter(JsonLines() if observing.log_format == "json" else TextLines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    log.setLevel(observing.log_level.upper())


def set_level(level: str) -> None:
    """Sets the level in a process that may have its own log; adds a handler if it has none."""
    log.setLevel(level.upper())
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(TextLines())
        log.addHandler(handler)


def info(message: str, **fields: Any) -> None:
    """Logs a line with fields at level `info`."""
    log.info(message, extra={"fields": fields}, stacklevel=2)


def report(sentence: str, **facts: Any) -> None:
    """Logs a sentence; a JSON line also has its numbers as fields."""
    log.info(sentence, extra={"facts": facts}, stacklevel=2)


def log_always(message: str, **fields: Any) -> None:
    """Logs a line at every level, such as the address of the server."""
    level = log.level
    try:
        log.setLevel(logging.INFO)
        info(message, **fields)
    finally:
        log.setLevel(level)


class RateLimitFilter(logging.Filter):
    """Filter that passes equal warnings and errors once per `REPEAT_S`, to bound the log's size.

    The next equal line reports the number of suppressed lines. Lines are equal if they have the
    same text, or an exception of the same type from the same line of code.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[object, tuple[float, int]] = {}  # time of the last line, suppressed since

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns True if the line is written."""
        if record.levelno < logging.WARNING:
            return True
        now, kind = time.monotonic(), _kind(record)
        since, left_out = self._seen.get(kind, (-math.inf, 0))
        if now - since < REPEAT_S:
            self._seen[kind] = since, left_out + 1
            return False
        self._seen.pop(kind, None)
        if len(self._seen) == MAX_KINDS:
            del self._seen[next(iter(self._seen))]  # the oldest
        self._seen[kind] = now, 0
        if left_out:
            record.msg, record.args = (
                (f"{record.getMessage()} ({left_out} similar lines suppressed)"),
                (),
            )
        return True


def _kind(record: logging.LogRecord) -> object:
    if not record.exc_info or not (trace := record.exc_info[2]):
        return record.name, record.getMessage()
    while trace.tb_next:
        trace = trace.tb_next
    return record.exc_info[0], trace.tb_frame.f_code.co_filename, trace.tb_lineno


class JsonLines(logging.Formatter):
    """One JSON object per line: `time`, `level`, `message`, fields, facts, and any `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns a line of JSON; values without a JSON form are written as their `str`."""
        line = {**_head(record), "message": record.getMessage(), **_fields(record)}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextLines(logging.Formatter):
    """Text lines; values of fields are escaped, so that they cannot start a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line, followed by the traceback of an exception."""
        fields = (f"{name}={json.dumps(v, default=str)}" for name, v in _fields(record).items())
        line = " ".join([*_head(record).values(), record.getMessage(), *fields])
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _head(record: logging.LogRecord) -> dict[str, str]:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return {"time": f"{seconds}.{record.msecs:03.0f}Z", "level": record.levelname.lower()}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})
