"""An order of loads and stores, for memory that processes share."""

import threading

_LOCK = threading.Lock()


def fence() -> None:
    """No load and no store of this thread passes it, in either direction.

    Python has no word for that; taking and giving back a lock that nobody else holds is one on
    every processor.
    """
    with _LOCK:
        pass
