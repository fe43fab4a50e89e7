"""Products of rows with the weights of each head in latent attention (Pallas, Triton backend).

`kv_b` has the rows of W_UK and then of W_UV of each head. A program computes one tile of rows and
outputs of a head, and accumulates along the inputs in one chain. It continues the chain of a row
over the row's own LoRA adapter, and computes the inputs `round(s * (A x))` for it. The bits of a
row depend neither on the tiles nor on the number of rows and heads, nor on other rows' adapters.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float32, Int

from kernels.latent_tiles import HeadProductTiles
from kernels.pallas_gpu.gemm.linear_mainloop import let_next_start
from kernels.pallas_gpu.gemm.lora_shrink import EXACT, any_of
from kernels.pallas_gpu.gemm.rope import store_rotated
from kernels.shrink_tiles import block_of_ranks


class HeadAdapters(NamedTuple):
    """LoRA adapters of the weights of all heads, or references to them.

    Attributes:
      slots: Adapter slot of each row, 0 for none.
      layer: Index into the stacks.
      a, b, scales: Stacked adapters by slot, see `shared.spec.lora.AdapterWeights`.
    """

    slots: Int[jax.Array, " R"]
    layer: Int[jax.Array, " 1"]
    a: Float[jax.Array, "slots L rank r"]
    b: Float[jax.Array, "slots L Hq_stored rank"]
    scales: Float32[jax.Array, "slots L rank"]


class HeadProductSizes(NamedTuple):
    """Sizes of a call.

    Attributes:
      K, N: Inputs and outputs of a head.
      x_head: Elements of a head of the inputs.
      stored, first: Rows of a head in the weight, and the first of the product.
      is_key: Whether the inputs are rows of the weight (W_UK); otherwise the outputs are (W_UV).
      out_head: Elements of a head of the result.
      is_interleaved: Rotation of the inputs after the first K; unused if there are none.
    """

    K: int
    N: int
    x_head: int
    stored: int
    first: int
    is_key: bool
    out_head: int
    is_interleaved: bool


class HeadProductBlock(NamedTuple):
    """Tile of a program: rows, outputs, inputs per step."""

    rows: int
    columns: int
    depth: int


def latent_queries(
    q: Float[jax.Array, "R columns"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    kv_b: Float[jax.Array, "L Hq stored r"],
    layer: Int[jax.Array, " 1"],
    nope_size: int,
    *,
    is_interleaved: bool,
    tiles: HeadProductTiles,
    lora: HeadAdapters | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "R Hq latent_and_rope"]:
    """Multiplies the nope part of each query head by W_UK, and rotates its rope part.

    Args:
      q: Rows that begin with the query heads, each its nope part and then its rope part.
      cos, sin: RoPE cosine and sine of each row.
      kv_b, layer: Stacked weights of each head, `nope_size` rows of W_UK, then those of W_UV; and
        the index into the stack.
      nope_size: Elements of a nope part.
      is_interleaved: Whether adjacent elements are rotated together; otherwise the halves are.
      tiles: Tile config.
      lora: Adapters of the rows.
      interpret: Run on a CPU.
    """
    (*_, stored, rank), rope = kv_b.shape, 2 * cos.shape[1]
    sizes = HeadProductSizes(
        K=nope_size,
        N=rank,
        x_head=nope_size + rope,
        stored=stored,
        first=0,
        is_key=True,
        out_head=rank + rope,
        is_interleaved=is_interleaved,
    )
    return _product(q, cos, sin, kv_b, layer, lora, sizes, tiles, interpret)


def value_heads(
    x: Float[jax.Array, "R Hq r"],
    kv_b: Float[jax.Array, "L Hq stored r"],
    layer: Int[jax.Array, " 1"],
    nope_size: int,
    *,
    tiles: HeadProductTiles,
    lora: HeadAdapters | None = None,
    interpret: bool = False,
) -> Float[jax.Array, "R Hq dv"]:
    """Multiplies each head by its W_UV.

    Args:
      x: Attention outputs in the latent space.
      kv_b, layer, nope_size, tiles, lora, interpret: See `latent_queries`.
    """
    *_, stored, rank = kv_b.shape
    sizes = HeadProductSizes(
        K=rank,
        N=stored - nope_size,
        x_head=rank,
        stored=stored,
        first=nope_size,
        is_key=False,
        out_head=stored - nope_size,
        is_interleaved=False,
    )
    rows = x.reshape(len(x), -1)
    return _product(rows, None, None, kv_b, layer, lora, sizes, tiles, interpret)


def _product(x, cos, sin, kv_b, layer, lora, sizes, tiles, interpret):
    R, heads = len(x), kv_b.shape[1]
    block = HeadProductBlock(*tiles.block_of(R, sizes.N, sizes.K))
    blocks = pl.cdiv(sizes.N, block.columns)
    return pl.pallas_call(
        functools.partial(
            _head_product_kernel, sizes=sizes, block=block, is_compiled=not interpret
        ),
        grid=(pl.cdiv(R, block.rows), blocks + (cos is not None), heads),
        out_shape=jax.ShapeDtypeStruct((R, heads, sizes.out_head), x.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="head_product",
    )(x, kv_b, layer, cos, sin, lora)


def _head_product_kernel(
    x_ref, kv_b_ref, layer_ref, cos_ref, sin_ref, adapters, out_ref, *, sizes, block, is_compiled
):
    """One program per block of rows, block of outputs and head; the last block of outputs is the
    rope part, if there is one.
    """
    R, head = x_ref.shape[0], pl.program_id(2)
    row = pl.program_id(0) * block.rows + lax.iota(jnp.int32, block.rows)
    first, is_row = pl.program_id(1) * block.columns, (row < R)[:, None]

    def store(column, x, keep):
        # Elements that are not stored get an index out of bounds, for the interpreter.
        at = jnp.where(keep, row[:, None], R)
        pltriton.store(out_ref.at[at, head, column], x.astype(out_ref.dtype), mask=keep)

    def multiply():
        column = first + lax.iota(jnp.int32, block.columns)
        acc = _accumulated(x_ref, kv_b_ref, layer_ref[0], head, row, column, sizes, block)
        if adapters is not None:
            acc = _adapted(acc, x_ref, head, row, column, adapters, sizes, block)
        acc = let_next_start(acc) if is_compiled else acc
        store(column[None, :], acc, is_row & (column < sizes.N)[None, :])

    def rotate():
        store_rotated(
            x_ref,
            cos_ref,
            sin_ref,
            row[:, None],
            head * sizes.x_head + sizes.K,
            is_row,
            lambda column, x, keep: store(sizes.N + column, x, keep),
            is_interleaved=sizes.is_interleaved,
        )

    if cos_ref is None:
        multiply()
    else:
        pl.when(first < sizes.N)(multiply)
        pl.when(first >= sizes.N)(rotate)


def _accumulated(x_ref, kv_b_ref, layer, head, row, column, sizes, block):
    """Returns the products of a tile, in float32."""
    lane = lax.iota(jnp.int32, block.depth)
    is_row, is_column = row < x_ref.shape[0], column < sizes.N
    is_even, has_all = sizes.K % block.depth == 0, sizes.N % block.columns == 0

    def load(ref, at, sides):
        """Loads a block; `sides` are the masks of its rows and columns, None for all in bounds."""
        masks = [x[:, None] if i == 0 else x[None, :] for i, x in enumerate(sides) if x is not None]
        if not masks:
            return pltriton.load(ref.at[at])
        shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in at))
        keep = functools.reduce(jnp.logical_and, [jnp.broadcast_to(x, shape) for x in masks])
        return pltriton.load(ref.at[at], mask=keep, other=0.0)

    def add(step, acc):
        at = step * block.depth + lane
        is_input = None if is_even else at < sizes.K
        columns = head * sizes.x_head + at
        x = load(x_ref, (row[:, None], columns[None, :]), (is_row, is_input))
        is_output = None if has_all else is_column
        if sizes.is_key:
            place = (sizes.first + at[:, None], column[None, :])
            weight = load(kv_b_ref, (layer, head, *place), (is_input, is_output))
        else:
            place = (sizes.first + column[:, None], at[None, :])
            weight = load(kv_b_ref, (layer, head, *place), (is_output, is_input)).T
        return acc + pltriton.dot(x, weight, **EXACT)

    zeros = jnp.zeros((block.rows, block.columns), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(sizes.K, block.depth), add, zeros)


def _adapted(acc, x_ref, head, row, column, adapters, sizes, block):
    """Continues an accumulator over the inputs of the adapters, each row over its own."""
    R, (num_slots, *_, all_ranks) = x_ref.shape[0], adapters.b.shape
    slots = pltriton.load(adapters.slots.at[row], mask=row < R, other=0)
    first, width = jnp.min(jnp.where(slots > 0, slots, num_slots + 1)), block_of_ranks(all_ranks)

    def add(slot, acc):
        is_own = slots == slot

        def multiply(acc):
            sums = acc
            for begin in range(0, all_ranks, width):
                at = _AdapterPart(slot - 1, begin + lax.iota(jnp.int32, width), head, is_own)
                inputs = _inputs_of(x_ref, row, at, adapters, sizes, block)
                weight = _to_output(column, at, adapters, sizes)
                sums = sums + pltriton.dot(inputs, weight, **EXACT)
            return jnp.where(is_own[:, None], sums, acc)

        return lax.cond(any_of(is_own), multiply, lambda acc: acc, acc)

    return lax.fori_loop(first, jnp.max(slots) + 1, add, acc)


class _AdapterPart(NamedTuple):
    """Some ranks of an adapter of a head, by index, and the mask of the rows with it."""

    index: Any
    rank: Any
    head: Any
    is_own: Any


def _inputs_of(x_ref, row, at, adapters, sizes, block):
    """Returns `round(s * (A x))` of the rows of one adapter for some ranks."""
    lane, layer = lax.iota(jnp.int32, block.depth), adapters.layer[0]

    def add(step, acc):
        inputs = step * block.depth + lane
        is_input = inputs < sizes.K
        keep = at.is_own[:, None] & is_input[None, :]
        columns = at.head * sizes.x_head + inputs
        x = pltriton.load(x_ref.at[row[:, None], columns[None, :]], mask=keep, other=0.0)
        keep = jnp.broadcast_to(is_input[:, None], (block.depth, len(at.rank)))
        if sizes.is_key:
            stored = at.head * sizes.stored + sizes.first + inputs
            place = adapters.b.at[at.index, layer, stored[:, None], at.rank[None, :]]
        else:
            place = adapters.a.at[at.index, layer, at.rank[None, :], inputs[:, None]]
        weight = pltriton.load(place, mask=keep, other=0.0)
        return acc + pltriton.dot(x, weight, **EXACT)

    zeros = jnp.zeros((len(row), len(at.rank)), jnp.float32)
    total = lax.fori_loop(0, pl.cdiv(sizes.K, block.depth), add, zeros)
    scale = pltriton.load(adapters.scales.at[at.index, layer, at.rank])
    return (total * scale[None, :]).astype(x_ref.dtype)


def _to_output(column, at, adapters, sizes):
    """Returns the weights `[ranks, outputs]` of one adapter from some ranks to some outputs.

    Rows of B are the inputs of the product with W_UK, and the outputs of the product with W_UV.
    """
    layer, keep = adapters.layer[0], (column < sizes.N)[None, :]
    if sizes.is_key:
        place = adapters.a.at[at.index, layer, at.rank[:, None], column[None, :]]
    else:
        stored = at.head * sizes.stored + sizes.first + column
        place = adapters.b.at[at.index, layer, stored[None, :], at.rank[:, None]]
    keep = jnp.broadcast_to(keep, (len(at.rank), len(column)))
    return pltriton.load(place, mask=keep, other=0.0)
