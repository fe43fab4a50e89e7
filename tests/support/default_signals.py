"""Servers of tests hear every signal, whatever the tests themselves were told to ignore."""

import contextlib
import signal
from collections.abc import Iterator

from shared.process.signals import STOP_SIGNALS


@contextlib.contextmanager
def heard_signals() -> Iterator[None]:
    """Lets the processes that start meanwhile hear every signal that stops a server.

    What a shell has begun in the background ignores SIGQUIT, and by `nohup` SIGHUP: so would a
    server that it starts, as it keeps to what its start was told to ignore.
    """
    ignored = [each for each in STOP_SIGNALS if signal.getsignal(each) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
