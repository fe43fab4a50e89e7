"""File descriptors: standard streams and the limit of open files."""

from __future__ import annotations

import os
import resource
import sys

MOST = 1 << 16
RESERVED = 16  # for files, and for the pipes to processes that are started later
STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def open_standard_streams() -> None:
    """Opens /dev/null for each closed standard stream, as for processes started by daemons.

    Otherwise the next socket would get its number, and the server process would use it as a stream.
    """
    for number, (name, mode) in enumerate(STREAMS):
        if not _is_open(number):
            taken = os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(taken, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def raise_limit() -> None:
    """Raises this process's limit of open files as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def num_free() -> int:
    """Returns the number of descriptors available for connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
    return max(0, most - len(os.listdir("/dev/fd")) - RESERVED)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
