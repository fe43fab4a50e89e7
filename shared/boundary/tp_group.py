"""Tensor-parallel group of a backend."""

from dataclasses import dataclass, replace
from typing import Any

from shared.boundary.shm_allgather import ShmAllGather


@dataclass(frozen=True)
class TPGroup:
    """Tensor-parallel (TP) group and the rank of a backend in it. Each rank computes a shard of
    every product's outputs.

    Attributes:
      rank: TP rank; rank 0 runs the engine. It is 0 if the ranks are devices of one process.
      count: World size.
      shm_all_gather: All-gather of processes on one CPU host; None with one rank, or if the ranks
        are devices of one process.
      meeting: Rendezvous address (host:port) of ranks on hosts without shared memory; else None.
      on_device: All-gather object that a backend created on this rank's GPU.

    Raises:
      ValueError: The rank is out of range, or `shm_all_gather` has another world size.
    """

    rank: int
    count: int
    shm_all_gather: ShmAllGather | None
    meeting: str | None = None
    on_device: Any = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"rank must be in 0..{self.count - 1}, got {self.rank}")
        if self.shm_all_gather is not None and (given := self.shm_all_gather.count) != self.count:
            raise ValueError(f"shm_all_gather must be created for {self.count} ranks, got {given}")

    def on(self, device: Any) -> "TPGroup":
        """Returns the same group with the all-gather object of a GPU."""
        return replace(self, on_device=device)

    @property
    def is_single(self) -> bool:
        """True if there is no other rank."""
        return self.count == 1


SINGLE_RANK = TPGroup(0, 1, None)
"""The group of a model that runs on one device."""
