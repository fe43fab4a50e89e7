"""Waits for a state that another thread or process reaches."""

import time
from collections.abc import Callable


def wait_until(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Returns True as soon as a condition holds, False if it does not in time."""
    until = time.monotonic() + timeout_s
    while not (found := holds()) and time.monotonic() < until:
        time.sleep(0.01)
    return found
