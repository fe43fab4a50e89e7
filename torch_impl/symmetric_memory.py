"""All-gather between processes with a GPU each through symmetric memory."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Shaped
from torch import Tensor

from kernels.peer_buffers import BLOCK_BYTES, MAX_POLLS, BufferLayout, PeerTimeout
from shared.boundary.shm_allgather import AllGatherTimeout
from shared.boundary.tp_group import TPGroup
from torch_impl.ops import Kernels


class AllGather:
    """All-gathers of a rank's steps through the symmetric buffers of all GPUs.

    All ranks run the same steps in the same order, each in one stream.
    """

    def __init__(self, kernels: Kernels, group: TPGroup, device: torch.device) -> None:
        """Allocates the symmetric buffer and opens the buffers of the other ranks.

        Raises:
          RuntimeError: GPU memory is insufficient, or a GPU has no peer access to another one.
          AllGatherTimeout: A rank did not join in time.
        """
        assert group.shm_all_gather is not None  # set for ranks in processes of their own
        self._kernels, self._group, self._calls = kernels, group, 0
        boxes = BufferLayout(group.count, BLOCK_BYTES)
        self._buffer = kernels.symmetric_memory.SymmetricBuffer(boxes, group.rank, device)
        handle = np.frombuffer(self._buffer.handle, np.uint8)
        handles = group.shm_all_gather.all_gather(group.rank, handle)
        self._buffer.connect([each.tobytes() for each in handles])
        self._buffer.wait(MAX_POLLS)
        torch.cuda.synchronize(device)

    @property
    def error(self) -> Int32[Tensor, "1"]:
        """Returns the error word of the steps so far, on the GPU, for `check`."""
        return self._buffer.mail.error

    def check(self, word: int) -> None:
        """Raises the error that an error word encodes.

        Raises:
          AllGatherTimeout: A rank did not join an all-gather in time.
        """
        missing = PeerTimeout.read(word)
        if missing is not None:
            raise AllGatherTimeout(
                f"rank {missing.rank} of {self._group.count} did not join all-gather "
                f"{missing.call} of a step in time; rank {self._group.rank} waited for it; see the "
                "log of that rank"
            )

    def meet(self) -> None:
        """Barrier of all ranks on the host.

        Raises:
          AllGatherTimeout: A rank did not join in time.
        """
        assert self._group.shm_all_gather is not None
        self._group.shm_all_gather.all_gather(self._group.rank, np.zeros(1, np.uint8))

    def begin(self) -> None:
        """Begins a step; the previous step may have failed after its begin."""
        self._calls = 0

    def end(self) -> None:
        """Ends a step, after all its all-gathers."""
        self._kernels.all_gather.advance_sequence(self._buffer.mail, self._calls)

    def next(self) -> Any:
        """Returns the arguments of the step's next all-gather, for a kernel with a fused gather."""
        self._calls += 1
        return self._kernels.all_gather.AllGatherArgs(
            self._buffer.mail, self._calls - 1, self._buffer.boxes
        )

    def fits(self, rows: int, share: int, item_bytes: int) -> bool:
        """Returns True if rows and their squares fit in one all-gather."""
        return self._buffer.boxes.fits(rows, share, item_bytes)

    def gathered(self, values: Shaped[Tensor, "... share"]) -> Shaped[Tensor, "... size"]:
        """Returns the columns of all ranks, concatenated in rank order."""
        share = values.shape[-1]
        rows = values.reshape(-1, share).contiguous()
        most = self._buffer.boxes.max_rows(share * rows.element_size())
        parts = [self._gathered(part) for part in rows.split(most)]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(*values.shape[:-1], self._group.count * share)

    def gathered_rows(
        self, values: Float[Tensor, "R share"], rows: Int[Tensor, " R_and_1"]
    ) -> Float[Tensor, "R size"]:
        """Same as `gathered`, for the listed rows; the last entry of `rows` is their number."""
        most = self._buffer.boxes.max_rows(values.shape[1] * values.element_size())
        gathers = [self.next() for _ in range(0, len(values), most)]
        return self._kernels.vocab_parallel.gathered_rows(values, rows, gathers)

    def all_gather_with_squares(
        self, scaled: Shaped[Tensor, "R share"], squares: Shaped[Tensor, "R chunks"]
    ) -> tuple[Shaped[Tensor, "R size"], Shaped[Tensor, "R chunks_of_all"]]:
        """Same as `gathered`, for both arrays at once; `fits` must be True."""
        gather = self.next()
        return self._kernels.all_gather.all_gather(
            scaled, squares, gather.mail, gather.call, boxes=gather.boxes
        )

    def close(self) -> None:
        """Frees the memory after a barrier of all ranks."""
        self.meet()
        self._buffer.close()

    def _gathered(self, rows: Shaped[Tensor, "R share"]) -> Shaped[Tensor, "R size"]:
        gather = self.next()
        found, _ = self._kernels.all_gather.all_gather(
            rows, None, gather.mail, gather.call, boxes=gather.boxes
        )
        return found


def connect(group: TPGroup, kernels: Kernels | None, device: torch.device) -> TPGroup:
    """Returns the TP group, connected through symmetric memory if each rank has a GPU.

    Every rank must call it.
    """
    if group.shm_all_gather is None or kernels is None:
        return group
    return group.on(AllGather(kernels, group, device))
