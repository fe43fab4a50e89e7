"""Symmetric memory of ranks that are devices of one process (JAX)."""

from collections.abc import Sequence

import jax
import numpy as np

from kernels.peer_buffers import BufferLayout, PeerTimeout


class SymmetricBuffer:
    """The mailboxes of ranks that are devices of one process.

    Attributes:
      boxes: Their sizes.
    """

    def __init__(self, boxes: BufferLayout, devices: Sequence[jax.Device]) -> None:
        """Takes the memory, which is zero, on each device.

        Raises:
          ValueError: There are not as many devices as ranks.
        """
        if len(devices) != boxes.ranks:
            raise ValueError(f"{boxes.ranks} ranks need as many devices, got {len(devices)}")
        self.boxes, self._devices = boxes, list(devices)
        zeros = np.zeros(boxes.bytes // 4, np.int32)
        # No program ever has them, so that XLA neither moves nor reads them while ranks write.
        self._memory = [jax.block_until_ready(jax.device_put(zeros, x)) for x in devices]

    def places(self, looks: int) -> list[np.ndarray]:
        """`Gather.place` of each rank, whose waits end after so many looks; 0 waits for nothing."""
        addresses = [x.unsafe_buffer_pointer() for x in self._memory]
        words = [(x >> shift) & 0xFFFFFFFF for x in addresses for shift in (0, 32)]
        return [
            np.array([*words, rank, looks], np.uint32).view(np.int32)
            for rank in range(len(self._devices))
        ]

    def missing(self) -> list[PeerTimeout | None]:
        """Of each rank, who sent it nothing in time, if so; when nothing runs."""
        # Of a slice: what JAX knows of a whole array it does not read again.
        return [PeerTimeout.read(int(np.asarray(x[:1])[0])) for x in self._memory]
