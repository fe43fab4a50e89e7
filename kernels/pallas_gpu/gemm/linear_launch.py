"""Tiles, constants, inputs and results of a launch of the GEMM kernel (Pallas, Triton backend)."""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from kernels.pallas_gpu.collectives.all_gather import AllGatherArgs, all_gather
from kernels.pallas_gpu.gemm import linear_packed_sm90, linear_sm90
from kernels.pallas_gpu.gemm.block_loaders import LOADERS
from kernels.pallas_gpu.gemm.lora_shrink import ShrinkSettings
from kernels.pallas_gpu.sampling.lm_head_epilogue import BlockPartials, RowOutputs, partial_shapes
from kernels.peer_buffers import is_joined
from kernels.tiles import LinearTiles
from shared.models.activation import Activation
from shared.spec.reduction_order import SquaresOrder

_MOST_WAITING = 132
"""Maximum programs of separate segments with a fused all-gather, in which the last program of a
block waits for the same block of other ranks: the multiprocessors of an H100 or H200."""


@dataclass(frozen=True, kw_only=True)
class GemmTiling:
    """Sizes of a call and its tiles.

    Attributes:
      R, N, K: Rows, outputs and inputs.
      format: Name of the weight format.
      rows: Rows of a tile.
      tiles: Tile config, with the depth of the call.
      segments: Segments of the inputs, see `LinearOrder`.
      separate: Whether each segment has programs of its own.
    """

    R: int
    N: int
    K: int
    format: str
    rows: int
    tiles: LinearTiles
    segments: int
    separate: bool

    @classmethod
    def of(
        cls,
        R: int,
        N: int,
        K: int,
        tiles: LinearTiles,
        format: str,
        *,
        is_gated: bool,
        is_adapted: bool,
        segments: int,
        counters: int,
    ) -> "GemmTiling":
        """Returns the tiles of a call.

        Args:
          R, N, K: Rows, outputs and inputs.
          tiles: Tile config.
          format: Name of the weight format.
          is_gated, is_adapted: Whether the result is gated, and whether rows have adapters.
          segments: Segments of the inputs.
          counters: Number of counters; with fewer than blocks, a program computes all segments.

        Raises:
          ValueError: The segments are no whole steps.
        """
        # Of few rows the tiles without swap-AB are faster for four bits alone.
        is_swapped = format == "fp8_w8a16" or tiles.rows > 16
        if is_gated and tiles.copies_swapped:
            tiles = replace(tiles, columns=tiles.columns // 2, stages=4)
        tiles = tiles.narrowed.loaded(swapped=is_swapped)
        rows = max(16, min(tiles.rows, pl.next_power_of_2(R)))
        tiles = tiles.adapted(rows, is_gated=is_gated) if is_adapted else tiles
        tiles, rows = LOADERS[format].sized(tiles, rows, K // segments)
        if segments > 1:
            if K % (16 * segments):
                raise ValueError(
                    f"segments must be multiples of 16 inputs, got {segments} of {K} inputs"
                )
            tiles = replace(tiles, depth=math.gcd(tiles.depth, K // segments))
        tiling = cls(
            R=R,
            N=N,
            K=K,
            format=format,
            rows=rows,
            tiles=tiles,
            segments=segments,
            separate=segments > 1 and tiles.separate,
        )
        return tiling if tiling.blocks <= counters else replace(tiling, separate=False)

    @property
    def row_blocks(self) -> int:
        """Returns the blocks of rows."""
        return pl.cdiv(self.R, self.rows)

    @property
    def blocks(self) -> int:
        """Returns the blocks of the result."""
        return self.row_blocks * pl.cdiv(self.N, self.tiles.columns)

    @property
    def programs(self) -> int:
        """Returns the programs of the blocks; those of a block are consecutive."""
        return self.blocks * (self.segments if self.separate else 1)

    @property
    def with_gather(self) -> "GemmTiling":
        """Returns the tiles with a fused all-gather: programs that wait must run at once."""
        return self if self.programs <= _MOST_WAITING else replace(self, separate=False)


class GemmInputs(NamedTuple):
    """Inputs of the prologue and the epilogue.

    Attributes:
      scales: Scales of stacked FP8 weights.
      row_scales: Scales of quantised rows.
      squares: Sums of squares of the rows per chunk, for their norm.
      bias, added: Added to the accumulators, and to the result.
      norms, norm_layer: Stacked norm scales, and the index of the one that multiplies the result
        for the next norm.
      place: See `all_gather.AllGatherArgs`; None if ranks gather nothing, or in a later kernel.
      asks, temperature, tokens: For an LM head, see `lm_head_epilogue.RowOutputs`.
      adapters: See `lora.AdapterOperands`; None without.
      arrivals: Counters of the blocks of separate segments; None without.
    """

    scales: Any
    row_scales: Any
    squares: Any
    bias: Any
    added: Any
    norms: Any
    norm_layer: Any
    place: Any
    asks: Any
    temperature: Any
    tokens: Any
    adapters: Any
    arrivals: Any


class GemmSettings(NamedTuple):
    """Compile-time constants of a call; see `product`.

    Attributes:
      parts, shrink: See `lora.RowAdapters`.
    """

    first: int
    out_type: np.dtype | type
    eps: float
    is_gated: bool
    activation: Activation
    factor: float
    order: SquaresOrder
    parts: tuple[int, ...]
    shrink: ShrinkSettings | None

    @property
    def programs_ahead(self) -> int:
        """Returns the programs before those of the result."""
        return 0 if self.shrink is None else self.shrink.programs


class GemmResults(NamedTuple):
    """Arrays that the kernel writes, or their shapes.

    Attributes:
      out, scaled, sums: The result, the result times the next norm's scale, and its squares; with a
        fused all-gather `scaled` and `sums` are of all ranks, and `scaled` is the next input.
      left: Block partials of an LM head.
      shrunk: Sums of a shrink within the GEMM, see `lora.AdapterOperands`.
      segments: Partial sums of separate segments.
    """

    out: Any
    scaled: Any
    sums: Any
    left: Any
    shrunk: Any
    segments: Any

    @classmethod
    def of(
        cls,
        tiling: GemmTiling,
        settings: GemmSettings,
        inputs: GemmInputs,
        gather: AllGatherArgs | None,
        asks: RowOutputs | None,
    ) -> "GemmResults":
        """Returns the shapes; `gather` if the kernel gathers."""
        R, N, shape = tiling.R, tiling.N, jax.ShapeDtypeStruct
        ranks, is_added = 1 if gather is None else gather.boxes.ranks, inputs.added is not None
        has_next = gather or is_added and inputs.norms is not None
        out = shape((R, N), settings.out_type)
        scaled = shape((R, ranks * N), settings.out_type) if has_next else None
        chunks = ranks * pl.cdiv(N, settings.order.chunk)
        sums = shape((R, chunks), jnp.float32) if is_added else None
        left = None if asks is None else partial_shapes(R, N, tiling.tiles.columns)
        return cls(
            out=None if gather and not is_added else out,
            scaled=scaled,
            sums=sums,
            left=None if left is None else tuple(left.values()),
            shrunk=None if settings.shrink is None else settings.shrink.sums(R),
            segments=shape((tiling.segments, R, N), jnp.float32) if tiling.separate else None,
        )

    def outputs(
        self, gather: AllGatherArgs | None, asks: RowOutputs | None, *, is_joined: bool
    ) -> tuple[Any, Any, Any, Any]:
        """Returns the results of `linear.product`, after an all-gather if none is fused."""
        if gather is None:
            partials = None if asks is None else BlockPartials(*asks, *self.left)
            return self.out, self.scaled, self.sums, partials
        if not is_joined:
            return gathered(self.out, self.scaled, self.sums, gather)
        if self.out is None:
            return self.scaled, None, None, None
        return self.out, self.scaled, self.sums, None


def copied(
    x: jax.Array,
    weights: jax.Array,
    layer: jax.Array,
    inputs: GemmInputs,
    settings: GemmSettings,
    tiles: LinearTiles,
    asks: RowOutputs | None,
    sizes: tuple[int, int, int],
    format: str,
) -> tuple[Any, Any, Any, Any] | None:
    """Returns the results of a kernel that copies blocks by TMA; None if none supports a call.

    `sizes` are rows, outputs and segments.
    """
    (R, N, segments), has_norm = sizes, inputs.squares is not None
    is_plain = inputs.bias is None and asks is None
    how = settings._asdict() | {"squares": inputs.squares, "added": inputs.added, "tiles": tiles}
    how |= {"norm": inputs.norms, "norm_layer": inputs.norm_layer}
    del how["parts"], how["shrink"]
    own = {name: how[name] for name in ("first", "out_type", "added", "order", "tiles")}
    own |= {"outputs": N, "segments": segments}
    packed = {"format": format, "squares": inputs.squares, "is_plain": is_plain}
    if linear_packed_sm90.takes(x, weights, inputs.scales, **packed, **own):
        how |= {"format": format, "segments": segments}
        return linear_packed_sm90.linear(x, weights, inputs.scales, layer, **how)
    own["is_normed"] = has_norm
    is_plain &= not has_norm and not settings.is_gated and settings.activation.is_gated
    if linear_sm90.takes(x, weights, is_plain=is_plain, **own):
        how |= {"bias": inputs.bias, "num_rows": R, "asks": asks, "segments": segments}
        return linear_sm90.linear_sm90(x, weights, layer, inputs.scales, inputs.row_scales, **how)
    return None


def joins(
    tiling: GemmTiling, settings: GemmSettings, inputs: GemmInputs, gather: AllGatherArgs | None
) -> bool:
    """Returns whether the kernel itself gathers its outputs."""
    chunks = 0 if inputs.added is None else pl.cdiv(tiling.N, settings.order.chunk)
    item_bytes = np.dtype(settings.out_type).itemsize
    return gather is not None and is_joined(tiling.R, tiling.N, item_bytes, chunks)


def gathered(
    out: jax.Array, scaled: jax.Array | None, sums: jax.Array | None, gather: AllGatherArgs
) -> tuple[Any, Any, Any, Any]:
    """All-gathers the outputs of a GEMM in a separate kernel; same results as a fused gather."""
    values = out if scaled is None else scaled
    every, all_sums = all_gather(values, sums, gather)
    return (every, None, None, None) if sums is None else (out, every, all_sums, None)
