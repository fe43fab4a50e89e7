"""Worker ranks as seen by the engine process (rank 0).

A thread receives from all of them, so that a rank that ends, is stopped or fails is reported by its
number and phase, also while the engine thread compiles or waits for the device.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.options.flags import ConfigError
from shared.process.tp.launchers import REAP_S, Launcher, WorkerProcess
from shared.process.tp.worker_connection import BEAT_S, Link, LinkEndedError

CHECK_S = 0.5  # interval of the check for stopped processes
STOPPED_S = 3.0
"""Time that a process may be stopped by a signal."""

SILENCE_S = {False: 60.0, True: 10.0}
"""Time without a message from a rank, by serving: a start may be in one long library call, steps
not."""

PHASE_S = 600.0
"""Time that a rank may be in a phase that rank 0 has completed, such as loading."""

CLOSE_S = 3.0
STARTING, LOADED, PREPARING = "starting", "waiting for the others", "preparing programs"
SERVING = "serving"


class RankError(RuntimeError):
    """A rank is lost; the message gives the rank and its phase."""


@dataclass
class Worker:
    """State of one worker rank; all but the first three attributes follow from its messages.

    Attributes:
      phase: Its current phase, e.g. "loading".
      device: Boot id of its host, kind, name and free bytes; None until it is found.
      digest: Digest of its plan.
      loaded: Bytes of weights loaded.
      begun: Programs whose preparation has begun.
      taken, ended: Plans received, and steps ended.
      last_message_s: Time of the last message, by the monotonic clock.
      free_bytes: Free bytes of its device; of main memory, its share among the ranks of the host.
      stopped_since_s: Time when it was first found stopped; None while it runs.
    """

    rank: int
    link: Link
    process: WorkerProcess
    phase: str = STARTING
    device: tuple[str, str, str, int] | None = None
    digest: str | None = None
    loaded: int = 0
    begun: int = 0
    taken: int = 0
    ended: int = 0
    last_message_s: float = field(default_factory=time.monotonic)
    stopped_since_s: float | None = None
    free_bytes: int = 0

    @property
    def name(self) -> str:
        """Name of the rank in messages."""
        return f"rank {self.rank}" + (f" on {self.process.host}" if self.process.host else "")

    @property
    def is_loaded(self) -> bool:
        """True if its weights are loaded."""
        return self.phase in (LOADED, PREPARING, SERVING)

    def take(self, kind: str, *fields: Any) -> None:
        """Updates the state from a message."""
        self.last_message_s = time.monotonic()
        match kind:
            case "phase":
                (self.phase,) = fields
            case "device":
                self.device = tuple(fields)
            case "planned":
                (self.digest,) = fields
            case "loaded":
                (self.loaded,) = fields
            case "began":
                (self.begun,) = fields
            case "beat":
                self.taken, self.ended = fields

    def at(self) -> str:
        """Returns its phase; while serving, with the last step that ended."""
        known = f"{SERVING}, last report after step {self.ended}"
        return known if self.phase == SERVING else self.phase


class Workers:
    """All worker ranks.

    Attributes:
      count: Ranks, rank 0 included.
      failure: Reason why a rank is lost, or None; the service ends then.
      address: Address of this process for processes on other hosts.
      on_failure: Called with that reason, on a separate thread.
    """

    def __init__(
        self, launcher: Launcher, count: int, module: str, on_failure: Callable[[str], None]
    ) -> None:
        """Starts the worker processes.

        Args:
          launcher: Launcher of the processes.
          count: Ranks, rank 0 included.
          module: Module with the `PLATFORM` of the ranks.
          on_failure: Called with the reason if a rank is lost, on a separate thread.

        Raises:
          ConfigError: A rank has no device.
        """
        self.count, self.failure, self.on_failure = count, None, on_failure
        self.address = launcher.address
        self._rejection: str | None = None
        self._launcher, self._changed = launcher, threading.Condition()
        self._is_closing = False
        self.ranks: list[Worker] = []
        try:
            for rank in range(1, count):
                connection, process = launcher.start(rank, count, module)
                self.ranks.append(Worker(rank, Link(connection), process))
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def send(self, *message: Any) -> None:
        """Sends a message to all ranks."""
        for each in self.ranks:
            each.link.send(*message)

    def wait_until(
        self,
        is_so: Callable[[Worker], bool],
        what: str,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until the condition holds for every rank.

        Args:
          is_so: The condition of one rank.
          what: Description of the condition in messages.
          tick: Called on each change.

        Raises:
          ConfigError: A rank rejects the start, with a message for the user.
          RankError: A rank is lost, or exceeds the time limit.
        """
        until = time.monotonic() + PHASE_S
        with self._changed:
            while True:
                self.check()
                tick()
                late = [each for each in self.ranks if not is_so(each)]
                if not late:
                    return
                if time.monotonic() > until:
                    raise RankError(
                        f"{late[0].name} is {late[0].at()} and not {what} after {PHASE_S:g} s"
                    )
                self._changed.wait(CHECK_S)

    def check(self) -> None:
        """Raises a known failure of a rank.

        Raises:
          ConfigError: A rank has rejected the start.
          RankError: A rank is lost.
        """
        if self._rejection is not None:
            raise ConfigError(self._rejection)
        if self.failure is not None:
            raise RankError(self.failure)

    def lost_within(self, seconds: float) -> bool:
        """Returns True if a rank is lost, or becomes lost within these seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.failure is not None, seconds)

    def fail(self, sentence: str) -> None:
        """Records that a rank is lost; only the first reason is kept."""
        with self._changed:
            if self.failure is not None or self._is_closing:
                return
            self.failure = sentence
            self._changed.notify_all()
        self.on_failure(sentence)

    def begin_close(self, plans: int) -> None:
        """Requests the end of all ranks after their last step; an ending rank is no failure from
        here on.

        Args:
          plans: Step plans sent.
        """
        self._is_closing = True
        self.send("close", plans)

    def close(self) -> None:
        """Waits for the end of all ranks, and kills those that exceed the time limit."""
        until = time.monotonic() + CLOSE_S
        for each in self.ranks:
            each.process.ending(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Kills all ranks at once."""
        self._is_closing = True
        for each in self.ranks:
            each.process.kill()
        self._launcher.close()

    def _listen(self) -> None:
        """Receives from all ranks until all have ended."""
        open_ranks, looked = list(self.ranks), time.monotonic()
        while open_ranks:
            readable, _, _ = select.select([each.link for each in open_ranks], [], [], CHECK_S)
            for each in [each for each in open_ranks if each.link in readable]:
                try:
                    self._receive(each)
                except LinkEndedError:
                    open_ranks.remove(each)
                    self._lose(each)
            if time.monotonic() - looked > CHECK_S:
                self._check_alive(open_ranks)
                looked = time.monotonic()

    def _receive(self, follower: Worker) -> None:
        for kind, *fields in follower.link.receive(0):
            if kind == "failed":
                self.fail(f"{follower.name} failed while {follower.at()}: {fields[0]}")
            elif kind == "refused":
                with self._changed:
                    self._rejection = self._rejection or f"{follower.name}: {fields[0]}"
                    self._changed.notify_all()
            else:
                with self._changed:
                    follower.take(kind, *fields)
                    self._changed.notify_all()

    def _lose(self, follower: Worker) -> None:
        if not (self._is_closing or self._rejection):
            ending = follower.process.ending(REAP_S) or "closed its connection"
            self.fail(f"{follower.name} {ending} while {follower.at()}")

    def _check_alive(self, open_ranks: Sequence[Worker]) -> None:
        """Detects ranks that are stopped or silent."""
        now = time.monotonic()
        for each in open_ranks:
            if not each.process.is_stopped():
                each.stopped_since_s = None
            elif each.stopped_since_s is None:
                each.stopped_since_s = now
            elif now - each.stopped_since_s > STOPPED_S:
                self.fail(f"{each.name} is stopped by a signal while {each.at()}")
            silence = now - each.last_message_s
            if silence > BEAT_S + SILENCE_S[each.phase == SERVING]:
                self.fail(f"{each.name} sent nothing for {silence:.0f} s while {each.at()}")
