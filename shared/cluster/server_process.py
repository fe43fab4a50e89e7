"""Process of one complete server, on a reserved port."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

from shared import children

LOOK_S = 0.05


def reserve_port(host: str) -> socket.socket:
    """Returns a socket that reserves a free port of an address, for servers one after the other.

    The socket does not listen. A server can listen on the same port, because both sockets have
    SO_REUSEADDR.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved


class ServerProcess:
    """Process group of one server; it is killed when the thread that started it ends.

    Args:
      module: Module with the command line of a server, such as `torch_impl.serve`.
      words: Its command line. A process list does not contain it, because it may contain a key.
      environment: Variables besides those of this process.
    """

    def __init__(self, module: str, words: Sequence[str], environment: Mapping[str, str]) -> None:
        flags = os.memfd_create("flags", os.MFD_CLOEXEC)
        try:
            os.write(flags, shlex.join(words).encode())
            os.lseek(flags, 0, os.SEEK_SET)
            self._process = subprocess.Popen(
                children.command(module, f"@/dev/fd/{flags}"),
                pass_fds=[flags],
                stdin=subprocess.DEVNULL,
                env={**children.environment(), **environment},
                preexec_fn=children.set_parent_death_signal,
                start_new_session=True,  # a signal of the terminal reaches only the router
            )
        finally:
            os.close(flags)

    @property
    def pid(self) -> int:
        """Process id of the engine's process, and id of the group."""
        return self._process.pid

    def ending(self) -> str | None:
        """Returns a description of its end, as "exited with code 1"; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    @property
    def exit_code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the engine's process, which ends the others."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills all processes of the group, also stopped ones."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self, timeout_s: float) -> None:
        """Drains the server, and kills it after this time."""
        self.signal(signal.SIGTERM)
        until = time.monotonic() + timeout_s
        while self.ending() is None and time.monotonic() < until:
            time.sleep(LOOK_S)
        self.kill()
