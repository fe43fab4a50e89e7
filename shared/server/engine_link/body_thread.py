"""Worker thread for large request bodies, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from shared.server.protocol.errors import ApiError

SHORT_BYTES = 1 << 14
"""A body up to this long is read at once: a millisecond, whatever its parts are."""

SWITCH_S = 0.0005
"""After which a thread lets another one have the interpreter, if it is within Python's own code.

The event loop gives it away whenever it asks the kernel for something, several times for an event
of a stream, and waits as long each time.
"""

Args = ParamSpec("Args")
Result = TypeVar("Result")


class BodyParsingThread:
    """One thread: of several, each would have the interpreter in turn, and the loop seldom."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "long work")
        sys.setswitchinterval(SWITCH_S)

    async def do(
        self,
        num_bytes: int,
        work: Callable[Args, Result],
        *args: Args.args,
        **fields: Args.kwargs,
    ) -> Result:
        """Returns or raises the result of `work`; short bodies are handled on the event loop.

        Args:
          num_bytes: Of the body that the request came with.
        """
        if num_bytes <= SHORT_BYTES:
            return work(*args, **fields)

        def done() -> Result | ApiError:
            try:
                return work(*args, **fields)
            except ApiError as error:
                # What it comes from holds all that was read, which the loop would have to free.
                error.__cause__ = error.__context__ = None
                return error.with_traceback(None)

        found = await asyncio.get_running_loop().run_in_executor(self._thread, done)
        if isinstance(found, ApiError):
            raise found
        return found
