"""Launchers of worker rank processes, and control of these processes."""

from __future__ import annotations

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
from shared.process.signals import block_stop_signals

FOLLOWER = "shared.process.tp.worker"
GPUS = "CUDA_VISIBLE_DEVICES"
REAP_S = 1.0  # the end of a process is seen at its socket before it can be waited for


class WorkerProcess(Protocol):
    """Process of one rank, as controlled by the engine process.

    Attributes:
      host: Host name in messages; empty on the engine's host.
    """

    host: str

    def ending(self, timeout_s: float) -> str | None:
        """Returns a description of its end, e.g. "was ended by SIGKILL"; None if it still runs
        after this time.
        """
        ...

    def is_stopped(self) -> bool:
        """Returns True if a signal has stopped it."""
        ...

    def kill(self) -> None:
        """Kills it at once; has no effect on an ended process."""
        ...


class Launcher(Protocol):
    """Starts processes of ranks.

    Attributes:
      address: Address of this process for processes on other hosts.
    """

    address: str

    def start(self, rank: int, count: int, module: str) -> tuple[socket.socket, WorkerProcess]:
        """Starts the process of a rank.

        Args:
          rank: Rank number from 1; 0 is the engine process.
          count: Number of ranks.
          module: Module with the `PLATFORM` of the rank.

        Raises:
          ConfigError: No device is available for it.
        """
        ...

    def close(self) -> None:
        """Releases reservations; the processes have ended."""
        ...


class LocalLauncher:
    """Starts ranks as child processes on this host, each with its own GPU if there are any."""

    address = "127.0.0.1"

    def start(self, rank: int, count: int, module: str) -> tuple[socket.socket, WorkerProcess]:
        """See `Launcher`."""
        gpu = gpu_of(os.environ, gpus_on_host(), rank)
        environment = children.environment() | ({} if gpu is None else {GPUS: gpu})
        ours, theirs = socket.socketpair()
        command = children.command(FOLLOWER, module, str(rank), str(count))
        with block_stop_signals():
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
        """Does nothing, as nothing was reserved."""


class Child:
    """A child process."""

    host = ""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def ending(self, timeout_s: float) -> str | None:
        """See `WorkerProcess`."""
        try:
            return ending_of(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return None

    def is_stopped(self) -> bool:
        """See `WorkerProcess`."""
        return state_of(self._process.pid) in ("T", "t")

    def kill(self) -> None:
        """See `WorkerProcess`; a stopped process ends too."""
        self._process.kill()
        self._process.wait()


def ending_of(code: int) -> str:
    """Describes the end of a process by its exit code."""
    return (
        f"was terminated by {signal.Signals(-code).name}"
        if code < 0
        else f"exited with code {code}"
    )


def state_of(pid: int) -> str:
    """Returns the state letter of a process in /proc; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def gpu_of(environment: Mapping[str, str], on_host: int, rank: int) -> str | None:
    """Returns the value of CUDA_VISIBLE_DEVICES for a rank: the GPU at its index.

    Only its own GPU is visible to a rank. Memory handles also identify GPUs that are not visible,
    so ranks need no access to each other's.

    Args:
      environment: Environment of the engine.
      on_host: Number of GPUs of this host.
      rank: Rank number.

    Returns:
      None if no GPU is usable.

    Raises:
      ConfigError: There are fewer GPUs than ranks.
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
    """Counts the NVIDIA devices of this host."""
    return sum(path.name[6:].isdigit() for path in Path("/dev").glob("nvidia[0-9]*"))
