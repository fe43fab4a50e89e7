"""Products of rows with the weights of each head in latent attention (Pallas, Triton backend).

`kv_b` has the rows of W_UK and then of W_UV of each head. A program computes one tile of rows and
outputs of a head, and accumulates along the inputs in one chain. The bits of a row depend neither
on the tiles nor on the number of rows and heads.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.latent_tiles import HeadProductTiles
from kernels.pallas_gpu.gemm.linear_mainloop import let_next_start
from kernels.pallas_gpu.gemm.rope import store_rotated


class HeadProductSizes(NamedTuple):
    """Sizes of a call.

    Attributes:
      K, N: Inputs and outputs of a head.
      x_head: Elements of a head of the inputs.
      first: First row of a head in the weight that is multiplied.
      is_key: Whether the inputs are rows of the weight (W_UK); otherwise the outputs are (W_UV).
      out_head: Elements of a head of the result.
      is_interleaved: Rotation of the inputs after the first K; unused if there are none.
    """

    K: int
    N: int
    x_head: int
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
      interpret: Run on a CPU.
    """
    rank, rope = kv_b.shape[3], 2 * cos.shape[1]
    sizes = HeadProductSizes(
        K=nope_size,
        N=rank,
        x_head=nope_size + rope,
        first=0,
        is_key=True,
        out_head=rank + rope,
        is_interleaved=is_interleaved,
    )
    return _product(q, cos, sin, kv_b, layer, sizes, tiles, interpret)


def value_heads(
    x: Float[jax.Array, "R Hq r"],
    kv_b: Float[jax.Array, "L Hq stored r"],
    layer: Int[jax.Array, " 1"],
    nope_size: int,
    *,
    tiles: HeadProductTiles,
    interpret: bool = False,
) -> Float[jax.Array, "R Hq dv"]:
    """Multiplies each head by its W_UV.

    Args:
      x: Attention outputs in the latent space.
      kv_b, layer, nope_size, tiles, interpret: See `latent_queries`.
    """
    _, _, stored, rank = kv_b.shape
    sizes = HeadProductSizes(
        K=rank,
        N=stored - nope_size,
        x_head=rank,
        first=nope_size,
        is_key=False,
        out_head=stored - nope_size,
        is_interleaved=False,
    )
    return _product(x.reshape(len(x), -1), None, None, kv_b, layer, sizes, tiles, interpret)


def _product(x, cos, sin, kv_b, layer, sizes, tiles, interpret):
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
    )(x, kv_b, layer, cos, sin)


def _head_product_kernel(
    x_ref, kv_b_ref, layer_ref, cos_ref, sin_ref, out_ref, *, sizes, block, is_compiled
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
        return acc + pltriton.dot(x, weight, precision=lax.Precision.HIGHEST)

    zeros = jnp.zeros((block.rows, block.columns), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(sizes.K, block.depth), add, zeros)
