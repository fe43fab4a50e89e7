"""Worker thread for large request bodies, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from shared.server.protocol.errors import ApiError

SHORT_BYTES = 1 << 14
"""Longest body that is parsed on the event loop; this takes at most about a millisecond."""

SWITCH_S = 0.0005
"""Interval after which a thread releases the interpreter to a waiting one.

The event loop releases the interpreter at each system call, several times per stream event, and
waits for up to this interval each time.
"""

Args = ParamSpec("Args")
Result = TypeVar("Result")


class BodyParsingThread:
    """Single worker thread; with several, the event loop would seldom get the interpreter."""

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
          num_bytes: Length of the request's body.
          work: Function to call.
          args, fields: Its arguments.
        """
        if num_bytes <= SHORT_BYTES:
            return work(*args, **fields)

        def done() -> Result | ApiError:
            try:
                return work(*args, **fields)
            except ApiError as error:
                # The cause refers to the parsed body, which the event loop would have to free.
                error.__cause__ = error.__context__ = None
                return error.with_traceback(None)

        found = await asyncio.get_running_loop().run_in_executor(self._thread, done)
        if isinstance(found, ApiError):
            raise found
        return found
