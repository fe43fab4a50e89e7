"""Shared memory of the ranks: broadcast of step plans, and all-gather buffers of a host."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits
from shared.boundary.buffers import plan_layout
from shared.boundary.shm_allgather import ShmAllGather, path_in
from shared.boundary.tp_group import TPGroup
from shared.process.tp.shm_ring_buffer import Ring, RingFullError
from shared.process.tp.worker_connection import boot
from shared.process.tp.workers import RankError, Worker, Workers

EXCHANGE_S = 10.0
"""Timeout of an all-gather, after which the step fails."""

START_EXCHANGE_S = 300.0
"""Timeout of an all-gather during the start, where ranks may load or compile at different speeds;
lost ranks are detected by other means."""


class PlanBroadcast:
    """Rank 0's side. Plans reach ranks of this host by a ring, ranks of other hosts by their
    sockets.

    Attributes:
      ranks: Rank and communication of this process.
      written: Plans so far.
    """

    def __init__(self, followers: Workers, capacity: BackendLimits) -> None:
        """Allocates the memory and sends its location to every rank."""
        here = [each for each in followers.ranks if each.device and each.device[0] == boot()]
        self._far = [each for each in followers.ranks if each not in here]
        self._here, self.written = here, 0
        most = max(plan_layout(program, capacity).size for program in capacity.programs)
        self._message = np.zeros(1 + most, np.int32)
        self._ring = Ring(len(here), 1 + most, capacity.overlap + 4) if here else None
        count = followers.count
        self._shm_all_gather = (
            None if self._far else ShmAllGather.create(count, wait_s=START_EXCHANGE_S)
        )
        meeting = f"{followers.address}:{_free_port(followers.address)}" if self._far else None
        self.ranks = TPGroup(0, count, self._shm_all_gather, meeting)
        self._send_locations()

    def write(self, program: int, plan: Int32[np.ndarray, " words"], timeout_s: float) -> None:
        """Broadcasts a plan to the worker ranks.

        Args:
          program: Index of its program, which is sent first.
          plan: The plan.
          timeout_s: Time that a rank may take to free a slot.

        Raises:
          RankError: A rank exceeded it.
        """
        message = self._message[: 1 + len(plan)]
        message[0], message[1:] = program, plan
        self.written += 1
        if self._ring is not None:
            try:
                waiting = self._ring.write(message, timeout_s)
            except RingFullError as error:
                late = self._here[error.reader]
                raise RankError(
                    f"{late.name} received no plan for {timeout_s:g} s while {late.at()}"
                ) from error
            for reader in waiting:
                self._here[reader].link.send("wake")
        for each in self._far:
            each.link.send("step", message.tobytes())

    def wait_at_most(self, seconds: float) -> None:
        """Sets the timeout of rank 0 in collectives from here on."""
        if self._shm_all_gather is not None:
            self._shm_all_gather.wait_s = seconds

    def opened(self) -> None:
        """Removes the name of the memory, once every rank has mapped it."""
        if self._shm_all_gather is not None:
            self._shm_all_gather.remove()

    def close(self) -> None:
        """Releases the shared memory."""
        self.opened()
        if self._ring is not None:
            self._ring.close()

    def _send_locations(self) -> None:
        boxes = None if self._shm_all_gather is None else [*self._shm_all_gather.__reduce__()[1]]
        ring = None if self._ring is None else path_in(self._ring.descriptor)
        for reader, each in enumerate(self._here):
            each.link.send("share", ring, reader, boxes, self.ranks.meeting)
        for each in self._far:
            each.link.send("share", None, 0, None, self.ranks.meeting)


def _free_port(address: str) -> int:
    """Returns an unused port."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


def hosts_of(ranks: Sequence[Worker]) -> dict[str, int]:
    """Counts the ranks per host, by boot id, rank 0 included."""
    hosts = {boot(): 1}
    for each in ranks:
        if each.device is not None:
            hosts[each.device[0]] = hosts.get(each.device[0], 0) + 1
    return hosts
