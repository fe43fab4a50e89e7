"""Reduction orders: the part of a GPU kernel's partitioning that determines the bits of its
results.

A float32 sum depends on the order of its terms. The order is therefore part of the numerics, like a
formula: it is the same in both backends, for every GPU and for every batch (batch-invariant), and
is never tuned. Everything that affects only speed is a kernel's tile config (`kernels/tiles.py`).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32


def _check_tiles(split: int, **tiles: int) -> None:
    for name, tile in tiles.items():
        if tile < 16 or tile & (tile - 1):
            raise ValueError(f"{name} must be a power of two from 16, got {tile}")
        _check_multiple("split", split, name, tile)


def _check_multiple(name: str, value: int, unit: str, least: int) -> None:
    if value < least or value % least:
        raise ValueError(f"{name} must be a multiple of {unit} {least}, got {value}")


@dataclass(frozen=True, kw_only=True)
class AttentionOrder:
    """Order of the sums over KV positions in `shared.spec.attention.attend` (split-KV).

    Positions are divided into spans, spans into splits, splits into tiles, all from position 0 on,
    so that the partition depends only on the position. The tiles of a split are summed in sequence,
    then the splits of a span, then the spans.

    Attributes:
      span: Positions of a span.
      split: Positions of a split.
      tile: Positions of a tile.
      tile_float32: Positions of a tile in float32, which serves comparisons: without tensor cores,
        large tiles take minutes to compile.
    """

    span: int
    split: int
    tile: int
    tile_float32: int

    def __post_init__(self) -> None:
        _check_tiles(self.split, tile=self.tile, tile_float32=self.tile_float32)
        _check_multiple("span", self.span, "split", self.split)

    def sizes_for(self, item_bytes: int) -> dict[str, int]:
        """Returns the positions of a span, a split and a tile for keys with elements of
        `item_bytes`.
        """
        tile = self.tile_float32 if item_bytes == 4 else self.tile
        return {"span": self.span, "split": self.split, "tile": tile}


ATTENTION = AttentionOrder(span=2048, split=128, tile=64, tile_float32=16)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionOrder:
    """Order of the sums over KV positions in `shared.spec.latent_attention.attend_latent`.

    Positions are divided into splits, splits into tiles, all from position 0 on. The tiles of a
    split are summed in sequence, then the splits. Positions from `near` on have larger splits: long
    requests have enough splits for all programs, and fewer partial results.

    Attributes:
      near: Positions with splits of `split`.
      split, far_split: Positions of a split, and of a split from `near` on.
      tile: Positions of a tile.
      tile_float32: Positions of a tile in float32; see `AttentionOrder`.
    """

    near: int
    split: int
    far_split: int
    tile: int
    tile_float32: int

    def __post_init__(self) -> None:
        _check_tiles(self.split, tile=self.tile, tile_float32=self.tile_float32)
        _check_multiple("far_split", self.far_split, "split", self.split)
        _check_multiple("near", self.near, "far_split", self.far_split)

    def sizes_for(self, item_bytes: int) -> dict[str, int]:
        """Returns `near` and the positions of splits and tiles for rows with elements of
        `item_bytes`.
        """
        return {
            "near": self.near,
            "split": self.split,
            "far_split": self.far_split,
            "tile": self.tile_float32 if item_bytes == 4 else self.tile,
        }


LATENT_ATTENTION = LatentAttentionOrder(
    near=8192, split=128, far_split=512, tile=64, tile_float32=16
)
"""A partial result of 20 heads has the bytes of 36 positions: 28 % of a near split, 7 % of a far
split. A request of 131,072 positions has 304 splits."""


@dataclass(frozen=True, kw_only=True)
class SquaresOrder:
    """Order-independent sum of the squares of a row, in fixed point.

    A row is divided into chunks. Each square of a chunk is converted to an integer number of units,
    where the unit is a power of two relative to the largest square. Integer sums do not depend on
    the order. The sums of the chunks, as float32, are added in the same way. The unit follows the
    row, so neither an embedding of 1e-3 nor a channel of 3e4 loses precision.

    Attributes:
      chunk: Columns of a chunk.
      digits: Bits of the largest square of a chunk, in units.
      digits_of_chunks: Bits of the largest chunk of a row, in units.
    """

    chunk: int
    digits: int
    digits_of_chunks: int


SQUARES = SquaresOrder(chunk=64, digits=21, digits_of_chunks=20)
"""Sizes with which an int32 holds the sum of 256 squares, and of 512 chunks."""


def sum_in_units(x: Float32[np.ndarray, "... terms"], digits: int) -> Float32[np.ndarray, "..."]:
    """Adds non-negative terms in units relative to the largest; see `SquaresOrder`."""
    exponent = np.clip(x.max(axis=-1).view(np.int32) >> 23, digits + 1, 254)
    scale = ((digits + 254 - exponent) << 23).astype(np.int32).view(np.float32)
    unit = ((exponent - digits) << 23).astype(np.int32).view(np.float32)
    units = np.floor(x * scale[..., None] + np.float32(0.5)).astype(np.int32)
    return units.sum(axis=-1, dtype=np.int32).astype(np.float32) * unit


def chunks_of_squares(x: Float32[np.ndarray, "R size"]) -> Float32[np.ndarray, "R chunks"]:
    """Returns the sum of squares of each chunk of a row; the last chunk may be shorter."""
    spare = -x.shape[1] % SQUARES.chunk
    padded = np.pad(x * x, ((0, 0), (0, spare))).reshape(len(x), -1, SQUARES.chunk)
    return sum_in_units(padded, SQUARES.digits)


def sum_of_squares(x: Float32[np.ndarray, "R size"]) -> Float32[np.ndarray, " R"]:
    """Returns the sum of squares of each row, added by chunks."""
    return sum_in_units(chunks_of_squares(x), SQUARES.digits_of_chunks)


@dataclass(frozen=True, kw_only=True)
class LinearOrder:
    """Order of the sum over the inputs of the output projection of a mixer or an MLP.

    The residual stream receives the result of such a GEMM, at once or after a norm. These GEMMs
    have few outputs and many inputs, and one chain of all inputs takes longer than to read the
    weight. The inputs are therefore divided into equal segments. Each segment is one chain from
    zero in the order of its inputs, and the segments are added in order, in float32. LoRA adapters
    continue that sum; bias, factor and residual follow. The number of segments depends on the
    inputs and the weight format, neither on rows nor on outputs or ranks. The GEMMs of MoE blocks
    and of per-layer embeddings have one segment.

    Attributes:
      segments: Segments of the inputs.
      least: Minimum inputs of a segment; GEMMs with fewer have one segment.
      unit: Inputs of a segment are a multiple of it: whole blocks of every weight format.
      packed_only: Whether weights of other formats than packed FP8 and INT4 have one segment.
    """

    segments: int
    least: int
    unit: int
    packed_only: bool = False

    def __post_init__(self) -> None:
        for name in ("segments", "least", "unit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    def segments_of(self, inputs: int, *, is_packed: bool) -> int:
        """Returns the number of segments of a GEMM of this many inputs.

        Args:
          inputs: Inputs of the GEMM.
          is_packed: Whether its weight is packed FP8 or INT4.
        """
        if self.packed_only and not is_packed:
            return 1
        is_whole = inputs % (self.segments * self.unit) == 0
        return self.segments if is_whole and inputs // self.segments >= self.least else 1


LINEAR = LinearOrder(segments=2, least=2048, unit=256, packed_only=True)
"""A program that dequantises its weight is slower than memory, so two programs per block of outputs
pay. For bfloat16 weights they do not on one GPU."""


def parts_of_inputs(inputs: int, segments: int) -> list[slice]:
    """Returns the inputs of each of some equal segments; see `LinearOrder`."""
    length = inputs // segments
    return [slice(first, first + length) for first in range(0, length * segments, length)]


@dataclass(frozen=True, kw_only=True)
class ShrinkOrder:
    """Order of the sums over inputs in `shared.spec.lora.shrink`.

    Inputs are divided into chunks from the first on. Each chunk is one chain from zero, and the
    sums of the chunks are added in sequence. One chain of all inputs would take longer than the
    product that it belongs to.

    Attributes:
      chunk: Inputs of a chunk; the last may have fewer.
    """

    chunk: int


SHRINK = ShrinkOrder(chunk=512)


@dataclass(frozen=True, kw_only=True)
class RouterOrder:
    """Order of the sums in an MoE router.

    Attributes:
      segments: Number of segments into which the inputs are divided, of equal length except for the
        last. A segment is summed in sequence, then the segments in order.
      digits: Bits of the largest weight, in the units in which weights are added; see
        `SquaresOrder`.
    """

    segments: int
    digits: int

    def segment(self, inputs: int) -> int:
        """Returns the inputs of a segment, a multiple of the K size of a tensor-core
        instruction.
        """
        return 16 * -(-inputs // (16 * self.segments))


ROUTER = RouterOrder(segments=4, digits=20)
"""Sizes with which an int32 holds the sum of 1,024 weights of at most 1."""
