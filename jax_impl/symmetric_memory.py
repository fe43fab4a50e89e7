"""All-gather between the GPUs of one process through symmetric memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, Int32, Shaped

from jax_impl.ops import Kernels
from kernels.peer_buffers import BufferLayout, PeerTimeout
from shared.boundary.shm_allgather import AllGatherTimeout


@dataclass(frozen=True)
class AllGather:
    """All-gathers of a rank's program through the symmetric buffers of all GPUs.

    All ranks run the same program, so their all-gathers have the same order however XLA schedules
    it.

    Attributes:
      place: See `AllGatherArgs` of the kernels. It is an operand of the program, because addresses
        differ between processes. Outside the program it is the array of all ranks, or its shape.
      kernels: All-gather kernels.
      vocabulary: Kernels that gather selected rows of logits.
      boxes: Layout of the symmetric buffers.
    """

    place: Any
    kernels: ModuleType
    vocabulary: ModuleType
    boxes: BufferLayout

    @property
    def rank(self) -> Int32[jax.Array, ""]:
        """Returns the rank that runs the program."""
        return self.place[2 * self.boxes.ranks]

    def error(self, after: Shaped[jax.Array, "..."]) -> Int32[jax.Array, "1"]:
        """Returns the error word, for `check`, of the gathers before `after` on any rank."""
        return self.kernels.missed(self.next(), after)

    def check(self, word: int) -> None:
        """Raises the error that an error word encodes.

        Raises:
          AllGatherTimeout: A rank did not join an all-gather in time.
        """
        missing = PeerTimeout.read(word)
        if missing is not None:
            raise AllGatherTimeout(
                f"rank {missing.rank} of {self.boxes.ranks} did not join all-gather {missing.call} "
                "(counted from startup) in time; see the log of that rank"
            )

    def next(self) -> Any:
        """Returns the arguments of the step's next all-gather, for a kernel with a fused gather."""
        return self.kernels.AllGatherArgs(self.place, self.boxes)

    def fits(self, rows: int, share: int, item_bytes: int) -> bool:
        """Returns True if rows and their squares fit in one all-gather."""
        return self.boxes.fits(rows, share, item_bytes)

    def gathered(self, values: Shaped[jax.Array, "... share"]) -> Shaped[jax.Array, "... size"]:
        """Returns the columns of all ranks, concatenated in rank order."""
        share = values.shape[-1]
        rows = values.reshape(-1, share)
        most = self.boxes.max_rows(share * rows.dtype.itemsize)
        parts = [
            self.kernels.all_gather(rows[first : first + most], None, self.next())[0]
            for first in range(0, len(rows), most)
        ]
        whole = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return whole.reshape(*values.shape[:-1], self.boxes.ranks * share)

    def gathered_rows(
        self, values: Float[jax.Array, "R share"], rows: Int[jax.Array, " R_and_1"]
    ) -> Float[jax.Array, "R size"]:
        """Same as `gathered`, for the listed rows; the last entry of `rows` is their number."""
        most = self.boxes.max_rows(values.shape[1] * values.dtype.itemsize)
        gathers = [self.next() for _ in range(0, len(values), most)]
        return self.vocabulary.gathered_rows(values, rows, gathers)

    def all_gather_with_squares(
        self, scaled: Shaped[jax.Array, "R share"], squares: Shaped[jax.Array, "R chunks"]
    ) -> tuple[Shaped[jax.Array, "R size"], Shaped[jax.Array, "R chunks_of_all"]]:
        """Same as `gathered`, for both arrays at once; `fits` must be True."""
        return self.kernels.all_gather(scaled, squares, self.next())


jax.tree_util.register_dataclass(
    AllGather, data_fields=["place"], meta_fields=["kernels", "vocabulary", "boxes"]
)


def connect(
    kernels: Kernels,
    devices: Sequence[jax.Device],
    join: Callable[[Sequence[Any]], Any],
    memory: Any,
    boxes: BufferLayout,
    looks: int,
) -> AllGather:
    """Connects the ranks of one process through the symmetric buffers of their GPUs.

    Args:
      kernels: Kernels of the GPUs.
      devices: GPU of each rank.
      join: Joins the arrays of the ranks into a global one.
      memory: The `SymmetricBuffer` of the kernels; None if the GPUs are absent.
      boxes: Layout of the symmetric buffers.
      looks: Maximum number of polls of a wait; 0 does not wait.
    """
    if memory is None:
        places = [jax.ShapeDtypeStruct((2 * boxes.ranks + 2,), np.int32)] * boxes.ranks
    else:
        placed = zip(memory.places(looks), devices, strict=True)
        places = [jax.device_put(words, device) for words, device in placed]
    return AllGather(join(places), kernels.all_gather, kernels.vocab_parallel, boxes)
