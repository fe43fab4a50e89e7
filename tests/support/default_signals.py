"""Default signal handlers for servers of tests, whatever signals the tests ignore."""

import contextlib
import signal
from collections.abc import Iterator

from shared.process.signals import STOP_SIGNALS


@contextlib.contextmanager
def heard_signals() -> Iterator[None]:
    """Restores the default handlers of all stop signals for processes that start meanwhile.

    A background process of a shell ignores SIGQUIT, and SIGHUP under `nohup`. A server that it
    starts would inherit this.
    """
    ignored = [each for each in STOP_SIGNALS if signal.getsignal(each) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
