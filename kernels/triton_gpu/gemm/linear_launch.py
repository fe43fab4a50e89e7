"""Tiles, arrays and constants of a launch of the GEMM kernels (Triton)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.kernel_limits import MOST_SEPARATE_BLOCKS
from kernels.peer_buffers import is_joined
from kernels.tiles import LinearTiles
from kernels.triton_gpu.collectives.all_gather import AllGatherArgs, all_gather
from kernels.triton_gpu.collectives.flag_protocol import PeerLayout
from kernels.triton_gpu.gemm.block_loaders import (
    FP8_W8A8,
    BlockFormat,
    TileLoads,
    format_of,
    sized,
)
from kernels.triton_gpu.gemm.fp8_w8a8 import width_of
from kernels.triton_gpu.gemm.linear_epilogue import (
    GemmOperands,
    GemmSizes,
    GemmTileConfig,
    SquaresChunks,
)
from kernels.triton_gpu.gemm.lora import RowAdapters
from kernels.triton_gpu.sampling.lm_head_epilogue import BlockPartials, RowOutputs
from shared.models.activation import Activation
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import SquaresOrder

_DESCRIBED_BYTES = 16
"""Alignment in bytes that TMA descriptors require of row strides."""
_LINE_BYTES = 128
"""Bytes of an output in a block of `linear_swap_ab`."""
_SYNC_ROWS = 8
"""Rows of an `mma.sync`."""


class FusedInputs(NamedTuple):
    """Inputs of the prologue and the epilogue, and adapters; see `linear.product`."""

    squares: Tensor | None
    eps: float
    activation: Activation
    bias: Tensor | None
    factor: float
    added: Tensor | None
    norm: Tensor | None
    lora: RowAdapters | None


@dataclass(frozen=True, kw_only=True)
class GemmTiling:
    """Sizes of a call and its tiles.

    Attributes:
      R, N, K: Rows, outputs and inputs.
      format: Format of the weight.
      rows, depth: Rows of a tile, and inputs per step.
      is_gated, is_described: Whether there is a gate, and whether TMA copies the operands.
      segments: Segments of the inputs.
    """

    R: int
    N: int
    K: int
    format: BlockFormat
    tiles: LinearTiles
    rows: int
    depth: int
    is_gated: bool
    is_described: bool
    segments: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None,
        tiles: LinearTiles,
        *,
        format: str,
        is_gated: bool,
        is_wide: bool,
        is_copied: bool,
        is_adapted: bool,
        segments: int,
    ) -> "GemmTiling":
        """Returns the tiles of a call.

        Args:
          x, weight, scales, tiles, format, is_gated, segments: See `linear.product`.
          is_wide, is_copied: Whether `linear_sm90` or `linear_swap_ab` runs the call.
          is_adapted: Whether rows have adapters.
        """
        (R, K), N = x.shape, weight.shape[0] // (2 if is_gated else 1)
        tiles = tiles if is_wide else tiles.narrowed
        if not (is_wide or is_copied):
            is_plain = format == PLAIN
            is_swapped = is_plain and not is_gated
            tiles = tiles.loaded(swapped=is_swapped, most_stages=8 if is_plain else 4)
        least = 8 if is_copied else 16
        rows = tiles.rows if is_wide else min(tiles.rows, max(least, triton.next_power_of_2(R)))
        tiles = tiles.adapted(rows, is_gated=is_gated) if is_adapted else tiles
        stored = format_of(format, 0, weight, scales)
        found, rows, depth = sized(stored, tiles, rows, K, segments)
        if is_copied:
            depth = tiles.depth
            line = _LINE_BYTES // weight.element_size() * found.packed
            parts = max(1, found.parts * line // found.inputs)
            found = found._replace(inputs=line, parts=parts)
        return cls(
            R=R,
            N=N,
            K=K,
            format=found,
            tiles=tiles,
            rows=rows,
            depth=depth,
            is_gated=is_gated,
            is_described=tiles.described
            and not is_copied
            and K * x.element_size() % _DESCRIBED_BYTES == 0,
            segments=segments,
        )

    @property
    def row_blocks(self) -> int:
        """Returns the blocks of rows."""
        return triton.cdiv(self.R, self.rows)

    @property
    def column_blocks(self) -> int:
        """Returns the blocks of outputs."""
        return triton.cdiv(self.N, self.tiles.columns)

    @property
    def blocks(self) -> int:
        """Returns the blocks of the result."""
        return self.row_blocks * self.column_blocks

    @property
    def is_pair(self) -> bool:
        """Returns whether blocks of gate and up form one tile, so that the rows are read once."""
        is_joined = self.is_described or self.format.packed > 1
        return self.is_gated and self.format.name != FP8_W8A8 and is_joined

    @property
    def width(self) -> int:
        """Returns the outputs of an accumulator."""
        columns, is_quantised = self.tiles.columns, self.format.name == FP8_W8A8
        return (
            2 * columns
            if self.is_pair
            else width_of(self.rows, columns, is_quantised, self.is_gated)
        )

    @property
    def beside(self) -> int:
        """Returns the outputs from an accumulator's to those of the second; 0: there is none."""
        if self.is_gated:
            return 0 if self.is_pair else self.N
        return self.width if self.width < self.tiles.columns else 0

    def is_separate(self, most: int | None) -> bool:
        """Returns whether each segment has programs of its own.

        Args:
          most: Maximum programs of the GEMM; None without a maximum.
        """
        is_wanted = self.tiles.separate and self.segments > 1
        is_simple = not (self.is_gated or self.beside) and self.blocks <= MOST_SEPARATE_BLOCKS
        return is_wanted and is_simple and (most is None or self.segments * self.blocks <= most)

    def described(self, x: Tensor, weight: Tensor) -> tuple[Any, Any]:
        """Returns TMA descriptors of the operands, or the operands if nothing describes them."""
        if not self.is_described:
            return x, weight
        inputs = self.format.inputs
        block = [self.width, inputs]
        if self.is_pair:
            weight, block = weight.view(2, self.N, self.K), [2, self.tiles.columns, inputs]
        x_at = TensorDescriptor.from_tensor(x, [self.rows, inputs])
        return x_at, TensorDescriptor.from_tensor(weight, block)

    def words_at_once(self, item_bytes: int) -> int:
        """Returns the words of a block that a thread polls at once."""
        words = self.rows * self.tiles.columns * item_bytes // 4
        return max(1, min(4, words // (32 * self.tiles.warps)))

    def is_sync(self, programs: int, multiprocessors: int) -> bool:
        """Returns whether `linear_swap_ab` multiplies by `mma.sync`, with the same bits.

        It needs 324 instructions a warp and 256 packed inputs, WGMMA 375, which counts if several
        programs share a multiprocessor. One alone waits for its chain of products instead, and
        that of WGMMA is faster, as it is with more rows than one `mma.sync` has.
        """
        is_few = self.format.packed > 1 and self.rows <= _SYNC_ROWS
        return is_few and programs > multiprocessors

    def config(
        self, *, is_persistent: bool, is_separate: bool, is_sync: bool, is_interpreted: bool
    ) -> GemmTileConfig:
        """Returns the constants of the kernels."""
        is_packed = self.format.packed > 1
        # TMA needs no masks, and a kernel for some rows and one for all would be the same.
        may_have_all = self.format.name == PLAIN and not self.tiles.copies_swapped
        pointers = "row" if is_packed else "step"
        loads = TileLoads.of(
            self.format,
            "descriptor" if self.is_described else pointers,
            self.K,
            has_all_rows=may_have_all and self.R % self.rows == 0,
            has_all_outputs=self.format.name == FP8_W8A8 or self.N % self.tiles.columns == 0,
            is_interpreted=is_interpreted,
            is_pair=self.is_pair and not is_packed,
        )
        return GemmTileConfig(
            rows=self.rows,
            columns=self.tiles.columns,
            width=self.width,
            beside=self.beside,
            depth=self.depth,
            stages=self.tiles.stages,
            segments=self.segments,
            is_separate=is_separate,
            is_swapped=self.tiles.swapped,
            is_persistent=is_persistent,
            is_sync=is_sync,
            loads=loads,
        )


class GemmResults(NamedTuple):
    """Arrays that the kernels write.

    Attributes:
      out, scaled, sums: The result, the result times the next norm's scale, and its squares.
      every, all_sums: All ranks' result (or `scaled`) and squares, of a fused all-gather.
      leaves: Block partials of an LM head.
      parts, arrivals: See `GemmOperands`; None without.
    """

    out: Tensor
    scaled: Tensor | None
    sums: Tensor | None
    every: Tensor | None
    all_sums: Tensor | None
    leaves: BlockPartials | None
    parts: Tensor | None = None
    arrivals: Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        tiling: GemmTiling,
        out_type: torch.dtype,
        fused: FusedInputs,
        gather: AllGatherArgs | None,
        asks: RowOutputs | None,
        order: SquaresOrder,
    ) -> "GemmResults":
        """Allocates the arrays, without those of separate segments."""
        R, N = tiling.R, tiling.N
        out = torch.empty((R, N), dtype=out_type, device=x.device)
        leaves = None if asks is None else BlockPartials.of(asks, N, tiling.tiles.columns)
        scaled = sums = every = all_sums = None
        chunks = 0 if fused.added is None else triton.cdiv(N, order.chunk)
        if gather is not None and is_joined(R, N, out.element_size(), chunks):
            ranks = gather.boxes.ranks
            every = out.new_empty((R, ranks * N))
            all_sums = torch.empty((R, ranks * chunks), dtype=torch.float32, device=x.device)
        if fused.added is not None:
            scaled = None if fused.norm is None else torch.empty_like(out)
            sums = torch.empty((R, chunks), dtype=torch.float32, device=x.device)
        return cls(out, scaled, sums, every, all_sums, leaves)

    def in_parts(self, tiling: GemmTiling, arrivals: Tensor | None) -> "GemmResults":
        """Returns the arrays with those of separate segments.

        Args:
          tiling: Tiles of the call.
          arrivals: Zeroed counters; None for some of this call.
        """
        shape, device = (tiling.segments, tiling.R, tiling.N), self.out.device
        if arrivals is None or len(arrivals) < tiling.blocks:
            arrivals = torch.zeros(tiling.blocks, dtype=torch.int32, device=device)
        parts = torch.empty(shape, dtype=torch.float32, device=device)
        return self._replace(parts=parts, arrivals=arrivals)

    def gathered(self, gather: AllGatherArgs | None) -> tuple[Any, Any, Any, Any]:
        """Returns the results of `product`, after an all-gather if the kernel has fused none."""
        if gather is None:
            return self.out, self.scaled, self.sums, self.leaves
        every, all_sums = self.every, self.all_sums
        if every is None:
            values = self.out if self.scaled is None else self.scaled
            every, all_sums = all_gather(
                values, self.sums, gather.mail, gather.call, boxes=gather.boxes
            )
        return (every, None, None, None) if self.sums is None else (self.out, every, all_sums, None)

    def operands(self, x: Tensor, fused: FusedInputs, gather: AllGatherArgs | None) -> GemmOperands:
        """Returns the kernel's arrays; Triton requires a pointer, even if nothing reads it."""
        out, leaves = self.out, self.leaves
        return GemmOperands(
            squares=x if fused.squares is None else fused.squares,
            bias=x if fused.bias is None else fused.bias,
            added=out if fused.added is None else fused.added,
            norm=out if fused.norm is None else fused.norm,
            out=out,
            scaled=out if self.scaled is None else self.scaled,
            sums=out if self.sums is None else self.sums,
            eps=fused.eps,
            **(dict.fromkeys(BlockPartials._fields, out) if leaves is None else leaves._asdict()),
            all_words=out if self.every is None else self.every.view(torch.int32),
            all_sums=out if self.all_sums is None else self.all_sums.view(torch.int32),
            mail=out if gather is None else gather.mail.place,
            clock=out if gather is None else gather.mail.clock,
            call=0 if gather is None else gather.call,
            adapters=None if fused.lora is None else fused.lora.operands,
            parts=out if self.parts is None else self.parts,
            arrivals=out if self.arrivals is None else self.arrivals,
        )

    def sizes(
        self, tiling: GemmTiling, fused: FusedInputs, gather: AllGatherArgs | None
    ) -> GemmSizes:
        """Returns the problem size."""
        boxes = None if gather is None or self.every is None else gather.boxes
        return GemmSizes(
            N=tiling.N,
            K=tiling.K,
            is_biased=fused.bias is not None,
            is_gated=tiling.is_gated,
            activation=fused.activation,
            is_added=fused.added is not None,
            is_scaled=self.scaled is not None,
            factor=fused.factor,
            leaves=0 if self.leaves is None else tiling.column_blocks,
            box=None if boxes is None else PeerLayout.of(boxes),
            pack=tiling.words_at_once(self.out.element_size()),
            adapters=None if fused.lora is None else fused.lora.sizes,
        )


def squares_chunks(squares: Tensor | None, order: SquaresOrder) -> SquaresChunks:
    """Returns the reduction order of the squares of the rows and of the result."""
    count = 0 if squares is None else squares.shape[1]
    return SquaresChunks(
        count=count,
        spread=triton.next_power_of_2(max(count, 1)),
        length=order.chunk,
        digits=order.digits,
        digits_of_chunks=order.digits_of_chunks,
    )
