"""The other ranks, as the engine's process knows them.

A thread listens to all of them, so that one that dies, stands still or fails is known by its number
and by what it was at, also while the engine's own thread compiles or waits for the device.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.options.flags import ConfigError
from shared.process.tp.launchers import REAP_S, Launcher, RankProcess
from shared.process.tp.worker_connection import BEAT_S, Link, LinkEndedError

CHECK_S = 0.5  # between two looks at which process is stopped
STOPPED_S = 3.0
"""How long a process may stand still by a signal."""

SILENCE_S = {False: 60.0, True: 10.0}
"""How long a rank may say nothing: a start may be in one call of a library for long, steps not."""

PHASE_S = 600.0
"""How long a rank may be at what rank 0 has behind it, such as loading."""

CLOSE_S = 3.0
STARTING, LOADED, PREPARING = "starting", "waiting for the others", "preparing programs"
SERVING = "serving"


class RankError(RuntimeError):
    """A rank is lost; the message names it and what it was at."""


@dataclass
class Follower:
    """One other rank; all but the first three follow from its messages.

    Attributes:
      phase: What it is at, as "loading".
      device: Host's boot, kind, name and free bytes, once it has found it.
      digest: Of its plan.
      loaded: Bytes of weights.
      begun: Programs that it has begun to make ready.
      taken, ended: Plans that it has taken, and steps that have ended.
      heard: When it last said something, by the monotonic clock.
      free_bytes: Of its device, divided among the ranks of a host where that is main memory.
      stands_since: When it was first found standing still; None while it runs.
    """

    rank: int
    link: Link
    process: RankProcess
    phase: str = STARTING
    device: tuple[str, str, str, int] | None = None
    digest: str | None = None
    loaded: int = 0
    begun: int = 0
    taken: int = 0
    ended: int = 0
    heard: float = field(default_factory=time.monotonic)
    stands_since: float | None = None
    free_bytes: int = 0

    @property
    def name(self) -> str:
        """For the reader."""
        return f"rank {self.rank}" + (f" on {self.process.host}" if self.process.host else "")

    @property
    def is_loaded(self) -> bool:
        """Whether it has its weights."""
        return self.phase in (LOADED, PREPARING, SERVING)

    def take(self, kind: str, *fields: Any) -> None:
        """Notes a message."""
        self.heard = time.monotonic()
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
        """What it is at, with the step where it serves."""
        known = f"{SERVING}, last report after step {self.ended}"
        return known if self.phase == SERVING else self.phase


class Followers:
    """All other ranks.

    Attributes:
      count: Of ranks, with rank 0.
      failure: Why one is lost, once one is; nothing goes on then.
      address: By which processes on other hosts reach this one's.
      on_failure: Gets that sentence, on a thread of its own.
    """

    def __init__(
        self, launcher: Launcher, count: int, module: str, on_failure: Callable[[str], None]
    ) -> None:
        """Starts their processes.

        Args:
          launcher: Where they run.
          count: Of ranks, with rank 0.
          module: Has the `PLATFORM` that they serve with.

        Raises:
          ConfigError: There is no place for one.
        """
        self.count, self.failure, self.on_failure = count, None, on_failure
        self.address = launcher.address
        self._refusal: str | None = None
        self._launcher, self._changed = launcher, threading.Condition()
        self._is_closing = False
        self.ranks: list[Follower] = []
        try:
            for rank in range(1, count):
                connection, process = launcher.start(rank, count, module)
                self.ranks.append(Follower(rank, Link(connection), process))
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._listen, name="ranks", daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Sends all the same message."""
        for each in self.ranks:
            each.link.send(*message)

    def wait_until(
        self,
        is_so: Callable[[Follower], bool],
        what: str,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        """Waits until it is so for every rank.

        Args:
          what: What is waited for, for the reader.
          tick: Called with each change.

        Raises:
          ConfigError: One refuses, with a sentence for the user.
          RankError: One is lost, or takes too long.
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
        """Raises what is known against going on.

        Raises:
          ConfigError: A rank has refused the start.
          RankError: A rank is lost.
        """
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        if self.failure is not None:
            raise RankError(self.failure)

    def lost_within(self, seconds: float) -> bool:
        """Whether a rank is lost, or is found to be in so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.failure is not None, seconds)

    def fail(self, sentence: str) -> None:
        """Takes note that a rank is lost; the first sentence counts."""
        with self._changed:
            if self.failure is not None or self._is_closing:
                return
            self.failure = sentence
            self._changed.notify_all()
        self.on_failure(sentence)

    def begin_close(self, plans: int) -> None:
        """Has them end once they have done all steps; it is no failure from here on.

        Args:
          plans: How many they were given.
        """
        self._is_closing = True
        self.tell("close", plans)

    def close(self) -> None:
        """Waits for their end; who does not end in time is killed."""
        until = time.monotonic() + CLOSE_S
        for each in self.ranks:
            each.process.ending(max(0.0, until - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends all at once."""
        self._is_closing = True
        for each in self.ranks:
            each.process.kill()
        self._launcher.close()

    def _listen(self) -> None:
        """Hears all ranks until none is left."""
        open_ranks, looked = list(self.ranks), time.monotonic()
        while open_ranks:
            readable, _, _ = select.select([each.link for each in open_ranks], [], [], CHECK_S)
            for each in [each for each in open_ranks if each.link in readable]:
                try:
                    self._hear(each)
                except LinkEndedError:
                    open_ranks.remove(each)
                    self._lose(each)
            if time.monotonic() - looked > CHECK_S:
                self._look(open_ranks)
                looked = time.monotonic()

    def _hear(self, follower: Follower) -> None:
        for kind, *fields in follower.link.receive(0):
            if kind == "failed":
                self.fail(f"{follower.name} failed while {follower.at()}: {fields[0]}")
            elif kind == "refused":
                with self._changed:
                    self._refusal = self._refusal or f"{follower.name}: {fields[0]}"
                    self._changed.notify_all()
            else:
                with self._changed:
                    follower.take(kind, *fields)
                    self._changed.notify_all()

    def _lose(self, follower: Follower) -> None:
        if not (self._is_closing or self._refusal):
            ending = follower.process.ending(REAP_S) or "closed its connection"
            self.fail(f"{follower.name} {ending} while {follower.at()}")

    def _look(self, open_ranks: Sequence[Follower]) -> None:
        """Finds ranks that are there and do nothing."""
        now = time.monotonic()
        for each in open_ranks:
            if not each.process.is_stopped():
                each.stands_since = None
            elif each.stands_since is None:
                each.stands_since = now
            elif now - each.stands_since > STOPPED_S:
                self.fail(f"{each.name} is stopped by a signal while {each.at()}")
            silence = now - each.heard
            if silence > BEAT_S + SILENCE_S[each.phase == SERVING]:
                self.fail(f"{each.name} sent nothing for {silence:.0f} s while {each.at()}")
