"""File descriptors: the first three are the standard streams', and there are only so many."""

from __future__ import annotations

import os
import resource
import sys

MOST = 1 << 16
RESERVED = 16  # for files, and for the pipes to processes that are started later
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Opens /dev/null as each standard stream that is closed, as daemons start processes.

    Else the next socket would get its number, and the server's process a stream in its place.
    """
    for number, (name, mode) in enumerate(STREAMS):
        if not _is_open(number):
            taken = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(taken, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def raise_limit() -> None:
    """Lets this process have as many descriptors as it may give itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_free() -> int:
    """Descriptors that this process may open beside those of its own work."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
    return max(0, most - len(os.listdir("/dev/fd")) - RESERVED)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
