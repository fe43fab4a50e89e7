"""Where the processes of other ranks run, and how they are started there."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from shared import children
from shared.options.flags import ConfigError
from shared.process.device import HIDDEN
from shared.process.signals import held_back

FOLLOWER = "shared.process.tp.worker"
GPUS = "CUDA_VISIBLE_DEVICES"
PR_SET_PDEATHSIG = 1
REAP_S = 1.0  # the end of a process is seen at its socket before it can be waited for


class RankProcess(Protocol):
    """The process of one rank, as the engine's process sees it.

    Attributes:
      host: Where it runs, for the reader; empty on the engine's host.
    """

    host: str

    def ending(self, timeout_s: float) -> str | None:
        """How it has ended, as "was ended by SIGKILL"; None where it has not within this time."""
        ...

    def is_stopped(self) -> bool:
        """Whether it stands still by a signal."""
        ...

    def kill(self) -> None:
        """Ends it at once, whatever it is at; one that has ended stays so."""
        ...


class Launcher(Protocol):
    """Starts processes of ranks.

    Attributes:
      address: By which processes on other hosts reach this one's.
    """

    address: str

    def start(self, rank: int, count: int, module: str) -> tuple[socket.socket, RankProcess]:
        """Starts the process of a rank.

        Args:
          rank: From 1 on; 0 is the engine's process.
          count: Of ranks.
          module: Has the `PLATFORM` that the rank serves with.

        Raises:
          ConfigError: There is no place for it.
        """
        ...

    def close(self) -> None:
        """Gives back what was reserved; the processes have ended."""
        ...


class LocalLauncher:
    """Starts ranks as children on this host, each with a GPU of its own where there are any."""

    address = "127.0.0.1"

    def start(self, rank: int, count: int, module: str) -> tuple[socket.socket, RankProcess]:
        """See `Launcher`."""
        gpu = gpu_of(os.environ, gpus_on_host(), rank)
        environment = children.environment() | ({} if gpu is None else {GPUS: gpu})
        ours, theirs = socket.socketpair()
        command = children.command(FOLLOWER, module, str(rank), str(count))
        with held_back():
            process = subprocess.Popen(
                [*command, "--fd", str(theirs.fileno())],
                cwd=children.FOLDER,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        theirs.close()
        return ours, Child(process)

    def close(self) -> None:
        """Nothing was reserved."""


class Child:
    """A process that this one has started."""

    host = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ending(self, timeout_s: float) -> str | None:
        """See `RankProcess`."""
        try:
            return ending_of(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def is_stopped(self) -> bool:
        """See `RankProcess`."""
        return state_of(self._process.pid) in ("T", "t")

    def kill(self) -> None:
        """See `RankProcess`; one that was stopped ends too."""
        self._process.kill()
        self._process.wait()


def ending_of(code: int) -> str:
    """How a process ended, of its exit code."""
    return (
        f"was terminated by {signal.Signals(-code).name}"
        if code < 0
        else f"exited with code {code}"
    )


def state_of(pid: int) -> str:
    """The letter of a process's state, as Linux has it; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def end_with_parent() -> None:
    """Has Linux kill this process when the thread that started it ends, even if it is stopped."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended meanwhile
        os.kill(os.getpid(), signal.SIGKILL)


def gpu_of(environment: Mapping[str, str], on_host: int, rank: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES is to name for a rank, which takes the GPU of its number.

    A rank sees its own GPU alone. A handle of memory names a GPU whether a process sees it or not,
    so ranks need not see each other.

    Args:
      environment: The engine's.
      on_host: GPUs of this host.

    Returns:
      None where there is no GPU to be used.

    Raises:
      ConfigError: There are fewer than ranks.
    """
    if GPUS in environment:
        named = [name.strip() for name in environment[GPUS].split(",")]
        if named[0] in HIDDEN or named[0].startswith("-"):
            return None
    else:
        named = [str(index) for index in range(on_host)]
    if named and rank >= len(named):
        raise ConfigError(
            f"--tp-size requires one GPU per rank, and {len(named)} are available; lower "
            f"it, or add GPUs to {GPUS}"
        )
    return named[rank] if named else None


def gpus_on_host() -> int:
    """GPUs of NVIDIA that this host shows."""
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
