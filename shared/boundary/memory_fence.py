"""Memory fence for memory that several processes share."""

import threading

_LOCK = threading.Lock()


def fence() -> None:
    """Orders memory accesses: no load or store of this thread moves across the call.

    Python has no fence primitive. Acquiring and releasing an uncontended lock acts as a full fence
    on every processor.
    """
    with _LOCK:
        pass
