"""Command and environment of a child process that runs a module of this project."""

import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
FOLDER = Path(__file__).resolve().parents[__name__.count(".")]
"""Folder from which the project's packages are imported: the checkout, or `site-packages`."""


def command(module: str, *words: str) -> list[str]:
    """Returns the command line; without `-P`, files of the working folder would hide modules."""
    return [sys.executable, "-P", "-m", module, *words]


def environment() -> dict[str, str]:
    """Returns this process's environment, in which a child finds the modules that it finds."""
    folders = [str(Path(folder).absolute()) for folder in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}


def set_parent_death_signal() -> None:
    """Requests SIGKILL for this process when the thread that started it ends
    (`PR_SET_PDEATHSIG`).
    """
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)
