"""Block loaders of the GEMM kernels: one per weight format (Pallas, Triton backend).

A block is some consecutive inputs of a tile. A loader returns the weight's block as operands of the
tensor core, in one or several parts, each with the rows of the same inputs.

| loader | inputs of a block | parts | operands |
|---|---|---|---|
| `PlainLoader` | a step of the main loop | 1 | the stored numbers |
| `FP8W8A16Loader` | 128 | 4 | packed FP8, dequantised to bfloat16 |
| `Int4W4A16Loader` | 128 or 256 | 8 | packed INT4, dequantised to bfloat16 |
| `MXFP4W4A16Loader` | 128 or 256 | 8 | packed MXFP4, dequantised to bfloat16 |
| `FP8W8A8Loader` | 128 | 1 | FP8, with a scale of the block and one of each row |

Loaders fix the order of the sum. Parts are added in input order, each to the accumulator of the
part before it. Operands with scales are accumulated from zero over the block, and that sum times
both scales is added with one rounding.

A further weight-only format is one more subclass of `PackedLoader`, which yields dequantised parts,
with an entry in `LOADERS`.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.fp8_w8a8 import add_codes, load_codes
from kernels.pallas_gpu.gemm.fp8_w8a16 import four
from kernels.pallas_gpu.gemm.int4_w4a16 import int4_part, int4_scales
from kernels.pallas_gpu.gemm.mxfp4_w4a16 import mxfp4_part
from kernels.tiles import LinearTiles
from shared.models.formats.four_bit import PARTS, block_of
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, shares_of
from shared.models.formats.weight_format import PLAIN


class ResultBlock(NamedTuple):
    """Block of the result.

    Attributes:
      number: Index of the block of outputs.
      row, column: Rows and columns of the block.
      num_rows, outputs, first: Problem size.
      weights: 2 with a gate, else 1.
    """

    number: Any
    row: Any
    column: Any
    num_rows: int
    outputs: int
    first: int
    weights: int
    tiles: LinearTiles

    @property
    def has_all_rows(self) -> bool:
        """Returns whether every block of rows is full."""
        return self.num_rows % self.row.shape[0] == 0

    @property
    def has_all_columns(self) -> bool:
        """Returns whether every block of outputs is full."""
        return self.outputs % self.tiles.columns == 0

    def first_of(self, weight: int) -> Any:
        """Returns the first output of the block, of the gate or of up."""
        return self.first + weight * self.outputs + self.number * self.tiles.columns

    def column_of(self, weight: int) -> Any:
        """Returns the outputs of the block, a column."""
        return (self.first + weight * self.outputs + self.column)[:, None]


class OperandTiles(NamedTuple):
    """Rows and outputs of a tile, with the arrays that contain them.

    Attributes:
      x, row_scales: Rows `[R, inputs]`, and their scales if they are quantised.
      weights, scales: Stacked weights, and their scales if they are FP8.
      stack: Indices in the stack: of the layer, and of the expert if there are experts.
      row, scale_row: Rows of the tile, and their indices in `row_scales`.
      outputs: Functions that return the outputs of each accumulator, a column; for quantised rows,
        the first output. `PlainLoader` calls them in each step, so that no register holds them.
      columns: Outputs of an accumulator.
      is_row, is_output: Masks of the rows and outputs in bounds; unused if all are.
      has_all_rows, has_all_outputs: Whether all are in bounds.
      loads_weight_first: Whether the weight of a block is loaded before its rows, which affects
        speed only; unused for quantised rows.
    """

    x: Any
    row_scales: Any
    weights: Any
    scales: Any
    stack: tuple[Any, ...]
    row: Any
    scale_row: Any
    outputs: Sequence[Callable[[], Any]]
    columns: int
    is_row: Any
    is_output: Any
    has_all_rows: bool
    has_all_outputs: bool
    loads_weight_first: bool


class BlockLoader(ABC):
    """Loader of the blocks of a tile, for one weight format.

    Attributes:
      depth: Inputs of a step.
    """

    @classmethod
    def sized(cls, tiles: LinearTiles, rows: int, K: int) -> tuple[LinearTiles, int]:
        """Returns the tiles with the depth of a call, and their rows, at most `rows`."""
        return tiles, rows

    @classmethod
    @abstractmethod
    def of_block(cls, block: ResultBlock) -> dict[str, Any]:
        """Returns the rows and outputs of a block, fields of `OperandTiles`."""

    def __init__(self, tile: OperandTiles, depth: int, is_compiled: bool) -> None:
        self.depth, self._tile, self._is_compiled = depth, tile, is_compiled

    def blocks(self, step: Any) -> Iterable[Any]:
        """Returns the numbers of the blocks of a step."""
        return (step,)

    def start(self, step: Any) -> Any:
        """Loads values of the first block of a step that are carried from step to step."""
        return ()

    def after(self, number: Any) -> Any:
        """Loads the carried values of the block after a block."""
        return ()

    @abstractmethod
    def parts(self, number: Any, carried: Any) -> Iterator[tuple[Any, Iterable[Any]]]:
        """Yields the parts of a block: the rows, and the operands of each accumulator."""

    def add(self, total: Any, x: Any, weight: Any, is_swapped: bool) -> Any:
        """Adds the product of a part to an accumulator."""
        exact = {"precision": lax.Precision.HIGHEST}
        if is_swapped:  # swap-AB: outputs are the wide side of the tensor core, rows the narrow one
            return total + pltriton.dot(weight, x.T, **exact)
        return total + pltriton.dot(x, weight.T, **exact)


class PlainLoader(BlockLoader):
    """Loader of bfloat16 and float32 weights."""

    @classmethod
    def sized(cls, tiles: LinearTiles, rows: int, K: int) -> tuple[LinearTiles, int]:
        """Returns the tiles with a depth below all inputs."""
        return replace(tiles, depth=tiles.depth_of(K)), rows

    @classmethod
    def of_block(cls, block: ResultBlock) -> dict[str, Any]:
        """Returns an accumulator for each weight."""
        is_row, is_output = block.row < block.num_rows, block.column < block.outputs
        outputs = [functools.partial(block.column_of, i) for i in range(block.weights)]
        return {
            "row": block.row,
            "outputs": outputs,
            "columns": block.tiles.columns,
            "is_row": is_row,
            "is_output": is_output,
        }

    def __init__(self, tile: OperandTiles, depth: int, is_compiled: bool) -> None:
        super().__init__(tile, depth, is_compiled)
        self._step = lax.iota(jnp.int32, depth)

    def parts(self, number: Any, carried: Any) -> Iterator[tuple[Any, Iterable[Any]]]:
        """Yields one part."""
        at, tile = number * self.depth, self._tile
        if tile.loads_weight_first:
            weights = list(self._weights(at))
            yield self._rows(at), weights
        else:
            yield self._rows(at), self._weights(at)

    def _rows(self, at: Any) -> Any:
        tile = self._tile
        return self._loading(tile.x, at, tile.is_row, tile.has_all_rows)(tile.row[:, None])

    def _weights(self, at: Any) -> Iterator[Any]:
        """Loads the operands of the accumulators, each when it is requested."""
        tile = self._tile
        load = self._loading(tile.weights, at, tile.is_output, tile.has_all_outputs)
        return (load(*tile.stack, output()) for output in tile.outputs)

    def _loading(self, ref: Any, at: Any, is_one: Any, has_all: bool) -> Callable[..., Any]:
        """Returns a function that loads inputs of some rows of an array, zero out of bounds."""
        K, step = ref.shape[-1], self._step
        inside = (at + step)[None, :] < K
        masks = [] if has_all else [is_one[:, None]]
        masks += [] if K % self.depth == 0 else [inside]
        shape = (is_one.shape[0], self.depth)
        mask = functools.reduce(jnp.logical_and, [jnp.broadcast_to(m, shape) for m in masks], True)
        masked = {"mask": mask, "other": 0.0} if masks else {}
        return lambda *where: pltriton.load(ref.at[(*where, (at + step)[None, :])], **masked)


class PackedLoader(BlockLoader):
    """Loader of weights with several inputs in an int32, which are dequantised to bfloat16.

    All outputs have one accumulator, to read the rows once.

    Attributes:
      packed: Inputs of an int32.
      num_parts: Parts of a block.
    """

    packed: int
    num_parts: int

    @classmethod
    @abstractmethod
    def inputs_of(cls, words: int) -> int:
        """Returns the inputs of a block, from the int32 of a row."""

    @abstractmethod
    def numbers(self, number: Any) -> Iterable[Any]:
        """Loads a block and returns its dequantised parts."""

    @classmethod
    def of_block(cls, block: ResultBlock) -> dict[str, Any]:
        """Returns one accumulator, of gate and up together."""
        columns = block.tiles.columns
        both = lax.iota(jnp.int32, columns * block.weights)
        in_result = block.number * columns + lax.rem(both, columns)
        output = (block.first + lax.div(both, columns) * block.outputs + in_result)[:, None]
        return {
            "row": block.row,
            "outputs": [lambda: output],
            "columns": len(both),
            "is_output": None if block.has_all_columns else in_result < block.outputs,
            "is_row": None if block.has_all_rows else block.row < block.num_rows,
        }

    def __init__(self, tile: OperandTiles, depth: int, is_compiled: bool) -> None:
        super().__init__(tile, depth, is_compiled)
        (output,) = tile.outputs
        self._output, self.depth = output(), self.inputs_of(tile.weights.shape[-1])
        self._only_scale = self._scale_at(0) if tile.scales.shape[-1] == 1 else None

    def parts(self, number: Any, carried: Any) -> Iterator[tuple[Any, Iterable[Any]]]:
        """Yields the rows and the dequantised parts."""
        width = self.depth // self.num_parts
        firsts = (number * self.depth + part * width for part in range(self.num_parts))
        rows = (self._rows(first + lax.iota(jnp.int32, width)[None, :]) for first in firsts)
        if not self._tile.loads_weight_first:
            rows = iter(list(rows))
        for weight in self.numbers(number):
            x = next(rows)
            yield x, (weight.astype(x.dtype),)

    def _words(self, number: Any) -> Any:
        tile, lane = self._tile, lax.iota(jnp.int32, self.depth // self.packed)[None, :]
        at = (*tile.stack, self._output, number * lane.size + lane)
        return _load(tile.weights, at, tile.is_output, tile.has_all_outputs)

    def _rows(self, inputs: Any) -> Any:
        tile, K = self._tile, self._tile.x.shape[1]
        at = (tile.row[:, None], inputs)
        if K % self.depth == 0:
            return _load(tile.x, at, tile.is_row, tile.has_all_rows)
        inside = inputs < K  # packed weights have whole blocks, rows have not
        if not self._is_compiled:  # the interpreter also reads masked elements
            inputs = jnp.where(inside, inputs, K - 1)
        at = (tile.row[:, None], inputs)
        inside = inside if tile.has_all_rows else inside & tile.is_row[:, None]
        shape = (len(tile.row), inputs.shape[1])
        return pltriton.load(tile.x.at[at], mask=jnp.broadcast_to(inside, shape), other=0.0)

    def _scale_at(self, number: Any) -> Any:
        """Loads a column of scales: of a block or group, or the only one."""
        tile, output = self._tile, self._output
        share, _ = shares_of(tile.weights.shape, tile.scales.shape)
        at = (*tile.stack, lax.div(output, share), jnp.full(output.shape, number))
        return _load(tile.scales, at, tile.is_output, tile.has_all_outputs)


class FP8W8A16Loader(PackedLoader):
    """Loader of packed FP8 weights."""

    packed = num_parts = 4

    @classmethod
    def inputs_of(cls, words: int) -> int:
        """Returns the inputs of a block."""
        return FP8_BLOCK

    def numbers(self, number: Any) -> Iterable[Any]:
        """Returns four parts, with the scales of the block."""
        words = self._words(number)
        scale = self._scale_at(number) if self._only_scale is None else self._only_scale
        return four(words, scale, self._is_compiled)


class _FourBitLoader(PackedLoader):
    """Loader of packed weights of four bits."""

    packed = num_parts = PARTS

    @classmethod
    def inputs_of(cls, words: int) -> int:
        """Returns the inputs of a block."""
        return block_of(PARTS * words)

    def numbers(self, number: Any) -> Iterable[Any]:
        """Yields eight parts, each with the scales of its group."""
        tile, words = self._tile, self._words(number)
        group = PARTS * tile.weights.shape[-1] // tile.scales.shape[-1]
        width, scales = self.depth // PARTS, self._only_scale
        for part in range(PARTS):
            if self._only_scale is None and (part == 0 or part * width % group == 0):
                scales = self._scale_at(lax.div(number * self.depth + part * width, group))
            yield self._part(words, scales, part)

    @abstractmethod
    def _part(self, words: Any, scales: Any, part: int) -> Any:
        """Dequantises a part of packed codes, for a column of stored scales."""


class Int4W4A16Loader(_FourBitLoader):
    """Loader of packed INT4 weights."""

    def _part(self, words: Any, scales: Any, part: int) -> Any:
        return int4_part(words, int4_scales(scales), part, self._is_compiled)


class MXFP4W4A16Loader(_FourBitLoader):
    """Loader of packed MXFP4 weights."""

    def _part(self, words: Any, scales: Any, part: int) -> Any:
        return mxfp4_part(words, scales, part, self._is_compiled)


class FP8W8A8Loader(BlockLoader):
    """Loader of FP8 weights for quantised rows."""

    @classmethod
    def sized(cls, tiles: LinearTiles, rows: int, K: int) -> tuple[LinearTiles, int]:
        """Returns the tiles with a depth of whole blocks; see `LinearTiles.rows_of_codes`."""
        rows = tiles.rows_of_codes(rows)
        return replace(tiles, depth=tiles.depth_of_codes(K)), rows

    @classmethod
    def of_block(cls, block: ResultBlock) -> dict[str, Any]:
        """Returns an accumulator of whole blocks for each weight."""
        # Rows that are not read get an index outside the array, which the interpreter requires.
        row = jnp.where(block.row < block.num_rows, block.row, block.num_rows)
        return {
            "row": row,
            "outputs": [functools.partial(block.first_of, i) for i in range(block.weights)],
            "columns": block.tiles.columns,
            "is_row": None if block.has_all_rows else block.row < block.num_rows,
            "is_output": None,
        }

    def __init__(self, tile: OperandTiles, depth: int, is_compiled: bool) -> None:
        super().__init__(tile, depth, is_compiled)
        self._outputs = [output() for output in tile.outputs]
        self._blocks = tile.x.shape[1] // FP8_BLOCK

    def blocks(self, step: Any) -> Iterable[Any]:
        """Returns the numbers of the blocks of a step, which may be several."""
        count = self.depth // FP8_BLOCK
        return (number + step * count for number in range(count))

    def start(self, step: Any) -> Any:
        """Loads the scales of the first block of a step."""
        return self._scales_of(step * (self.depth // FP8_BLOCK))

    def after(self, number: Any) -> Any:
        """Loads the scales of the next block, one block ahead to hide the latency."""
        return self._scales_of(number + 1)

    def parts(self, number: Any, carried: Any) -> Iterator[tuple[Any, Iterable[Any]]]:
        """Yields one part, whose operands are pairs of FP8 values and scales of the rows."""
        (scale, of_weights), tile = carried, self._tile
        inputs = (number * FP8_BLOCK + lax.iota(jnp.int32, FP8_BLOCK))[None, :]
        x = _load(tile.x, (tile.row[:, None], inputs), tile.is_row, tile.has_all_rows)
        yield (
            x,
            (
                (self._codes(output, number), scale * of_weight)
                for output, of_weight in zip(self._outputs, of_weights, strict=True)
            ),
        )

    def add(self, total: Any, x: Any, weight: Any, is_swapped: bool) -> Any:
        """Adds the product of a block times its scales."""
        codes, scale = weight
        return add_codes(total, x, codes, scale, is_swapped, self._is_compiled)

    def _codes(self, output: Any, number: Any) -> Any:
        tile = self._tile
        (layer,) = tile.stack
        return load_codes(tile.weights, layer, output, tile.columns, number, self._is_compiled)

    def _scales_of(self, number: Any) -> tuple[Any, list[Any]]:
        """Loads the scales of a block of the rows and of a block of each weight."""
        tile = self._tile
        number = jnp.minimum(number, self._blocks - 1)
        of_weights = [
            pltriton.load(tile.scales.at[(*tile.stack, lax.div(output, FP8_BLOCK), number)])
            for output in self._outputs
        ]
        at = (jnp.full(tile.scale_row.shape, number), tile.scale_row)
        return pltriton.load(tile.row_scales.at[at]), of_weights


LOADERS: Mapping[str, type[BlockLoader]] = {
    PLAIN: PlainLoader,
    "fp8_w8a16": FP8W8A16Loader,
    "int4_w4a16": Int4W4A16Loader,
    "mxfp4_w4a16": MXFP4W4A16Loader,
    "fp8_w8a8": FP8W8A8Loader,
}
"""Loaders by the name of the weight format."""


def _load(ref: Any, at: tuple[Any, ...], is_one: Any, has_all: bool) -> Any:
    """Loads some rows of a reference, zero out of bounds."""
    if has_all:
        return pltriton.load(ref.at[at])
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in at))
    other = 0 if jnp.issubdtype(ref.dtype, jnp.integer) else 0.0
    return pltriton.load(ref.at[at], mask=jnp.broadcast_to(is_one[:, None], shape), other=other)
