"""Symmetric memory of ranks that are devices of one process (JAX)."""

from collections.abc import Sequence

import jax
import numpy as np

from kernels.peer_buffers import BufferLayout, PeerTimeout


class SymmetricBuffer:
    """Symmetric buffers of all ranks, which are devices of one process.

    Attributes:
      boxes: Layout of the buffers.
    """

    def __init__(self, boxes: BufferLayout, devices: Sequence[jax.Device]) -> None:
        """Allocates a buffer of zeros on each device.

        Raises:
          ValueError: The number of devices is not the number of ranks.
        """
        if len(devices) != boxes.ranks:
            raise ValueError(
                f"{boxes.ranks} ranks require {boxes.ranks} devices, got {len(devices)}"
            )
        self.boxes, self._devices = boxes, list(devices)
        zeros = np.zeros(boxes.bytes // 4, np.int32)
        # Never an argument of a program, so XLA neither moves nor reads them while ranks store.
        self._memory = [jax.block_until_ready(jax.device_put(zeros, x)) for x in devices]

    def places(self, max_polls: int) -> list[np.ndarray]:
        """Returns `AllGatherArgs.place` of each rank.

        Args:
          max_polls: Polls for missing data; with 0 nothing waits.
        """
        addresses = [x.unsafe_buffer_pointer() for x in self._memory]
        words = [(x >> shift) & 0xFFFFFFFF for x in addresses for shift in (0, 32)]
        return [
            np.array([*words, rank, max_polls], np.uint32).view(np.int32)
            for rank in range(len(self._devices))
        ]

    def missing(self) -> list[PeerTimeout | None]:
        """Returns the timeout of each rank, or None; no program may be running."""
        # JAX caches the host value of a whole array, but reads a slice again.
        return [PeerTimeout.read(int(np.asarray(x[:1])[0])) for x in self._memory]
