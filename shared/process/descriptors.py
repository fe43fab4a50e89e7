"""File descriptors: the first three, which are the standard streams' whatever a start was given."""

from __future__ import annotations

import os
import sys

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


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
