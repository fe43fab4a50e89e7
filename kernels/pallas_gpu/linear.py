"""Products of rows with a stored weight, and what stands before and after them, for Pallas.

A program has a block of rows and a block of outputs and adds along the inputs in one chain, so that
a row's bits depend neither on the blocks nor on how many rows there are.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float32, Int, Int32

from kernels.mail import is_joined
from kernels.pallas_gpu.codes import add_codes, load_codes
from kernels.pallas_gpu.fp8 import four, widened
from kernels.pallas_gpu.linear_described import described_product, is_on_hopper, takes
from kernels.pallas_gpu.ranks import Gather, Link, Tile, gathered, share_tiles
from kernels.pallas_gpu.squares import add_up, load_squares
from kernels.tiles import LinearTiles
from shared.models.fp8_words import FP8_BLOCK, shares_of
from shared.spec.numerics import SquaresOrder

_LOG2_E = 1.4426950408889634


class Given(NamedTuple):
    """What stands before and after the sums.

    Attributes:
      scales: Of a stack of weights in FP8.
      row_scales: Of rows that are codes.
      squares: Of the rows, in chunks, for their norm.
      bias, added: What is added to the sums, and to the result.
      norms, norm_layer: A stack of scales of norms, and which of it multiplies the result for its
        next reader.
      place: See `ranks.Gather`; None where ranks gather nothing, or afterwards.
    """

    scales: Any
    row_scales: Any
    squares: Any
    bias: Any
    added: Any
    norms: Any
    norm_layer: Any
    place: Any


def product(
    x: Float[jax.Array, "R inputs"],
    weights: Float[jax.Array, "L stored inputs"] | Int32[jax.Array, "L stored words"],
    scales: Float[jax.Array, "L scales scales_in"] | None,
    layer: Int[jax.Array, ""],
    row_scales: Float32[jax.Array, "blocks_in rows"] | None = None,
    *,
    num_rows: int | None = None,
    first: int,
    out_type: np.dtype | type,
    squares: Float[jax.Array, "R chunks"] | None,
    eps: float,
    is_gated: bool,
    bias: Float[jax.Array, "L stored"] | None,
    factor: float,
    added: Float[jax.Array, "R outputs"] | None,
    norm: Float[jax.Array, "L2 outputs"] | None,
    norm_layer: Int[jax.Array, ""],
    order: SquaresOrder,
    tiles: LinearTiles,
    gather: Gather | None = None,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R outputs"],
    Float[jax.Array, "R outputs"] | None,
    Float[jax.Array, "R chunks_out"] | None,
]:
    """Multiplies each row by a weight, and does what a layer does right before and after it.

    Args:
      x: The rows; or their codes, as `fp8_activations.quantised` gives them.
      weights: A stack of weights `[outputs, inputs]`; where they are gated, the gate's rows and
        then those of up. A slice of it would be copied for the kernel. Or FP8 in words of four,
        with the bits of the widened weight; or codes, where rows are codes.
      scales: Of FP8; see `shared.models.fp8_words`. Of codes, as they are stored.
      row_scales: Of rows that are codes.
      num_rows: How many rows there are, where they are codes.
      layer: Which of the stack. An operand: as a constant, each layer would be a kernel of its own.
      first: The outputs from here on.
      out_type: Of the result.
      squares: The rows' squares in chunks, where the product is that of their RMS norm; `x` are
        the rows times the norm's scale then, and the squares those of the rows without it.
      eps: Of the norm.
      is_gated: Whether the result is silu(gate) * up.
      bias: A stack as the weights are: what is added to each row of the product, before it is
        gated.
      factor: What the result is multiplied by, if it is not gated.
      added: What is added to the result; its squares in chunks are returned as well.
      norm, norm_layer: A stack of scales of norms; the sum is read next through that of the layer.
      order: How squares are summed.
      tiles: How the work is cut.
      gather: How ranks exchange their outputs, of which the weight has a rank's.
      interpret: Run on a CPU.

    Returns:
      The result; where something was added, the result times the scale of `norm`, if there is one,
      and its squares in chunks. Gathered, all is that of all ranks, but for the result where
      something was added: it is this rank's, and the second is what is read next, with a norm or
      without.

    Raises:
      ValueError: The tiles are none for a kernel here; or rows are codes, which only a Hopper's
        matrix units add in the bits that are meant.
    """
    if tiles.persistent and not tiles.described:
        raise ValueError("in Pallas only what descriptors copy is persistent")
    is_quantised = row_scales is not None
    if scales is not None and tiles.widens and not is_quantised:
        weights, scales = widened(weights, scales, layer, interpret=interpret)[None], None
        bias, layer = None if bias is None else bias[layer][None], jnp.zeros_like(layer)
    R, N = num_rows or x.shape[0], (weights.shape[1] - first) // (2 if is_gated else 1)
    # Mosaic GPU's interpreter knows neither loads in a layout nor instructions of PTX, and jax 0.10
    # has none to call.
    if (
        tiles.described
        and not interpret
        and takes(
            x,
            weights,
            outputs=N,
            first=first,
            out_type=out_type,
            is_normed=squares is not None,
            added=added,
        )
    ):
        found = described_product(
            x,
            weights,
            layer,
            scales,
            row_scales,
            num_rows=R,
            first=first,
            out_type=out_type,
            squares=squares,
            eps=eps,
            is_gated=is_gated,
            bias=bias,
            factor=factor,
            added=added,
            norm=norm,
            norm_layer=norm_layer,
            order=order,
            tiles=tiles,
        )
        return found if gather is None else _gathered(*found, gather)
    if is_quantised and not (interpret or is_on_hopper()):
        raise ValueError("rows in FP8 are multiplied on a Hopper alone")
    rows = min(tiles.rows, max(16, pl.next_power_of_2(R)))
    if is_quantised:
        rows = tiles.rows_of_codes(rows)
        tiles = replace(tiles, depth=tiles.depth_of_codes(x.shape[1]))
    elif scales is None:
        tiles = replace(tiles, depth=tiles.depth_of(x.shape[1]))
    blocks = (pl.cdiv(R, rows), pl.cdiv(N, tiles.columns))
    shape, out = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((R, N), out_type)
    scaled = sums = None
    chunks = 0 if added is None else pl.cdiv(N, order.chunk)
    if added is not None:
        scaled = None if norm is None else out
        sums = shape((R, chunks), jnp.float32)
    joins = gather is not None and is_joined(R, N, out.dtype.itemsize, chunks)
    if gather is not None and joins:
        scaled = shape((R, gather.boxes.ranks * N), out_type)
        sums = None if sums is None else shape((R, gather.boxes.ranks * chunks), jnp.float32)
        out = None if added is None else out
    found = pl.pallas_call(
        functools.partial(
            _product_kernel,
            outputs=N,
            first=first,
            eps=eps,
            is_gated=is_gated,
            factor=factor,
            num_rows=R,
            row_blocks=blocks[0],
            rows=rows,
            order=order,
            tiles=tiles,
            boxes=gather.boxes if gather is not None and joins else None,
            is_compiled=not interpret,
        ),
        grid=(blocks[0] * blocks[1],),
        out_shape=(out, scaled, sums),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="product",
    )(
        x,
        weights,
        layer.reshape(1),
        Given(
            scales,
            row_scales,
            squares,
            bias,
            added,
            norm,
            norm_layer.reshape(1),
            gather.place if gather is not None and joins else None,
        ),
    )
    if gather is None:
        return found
    if not joins:
        return _gathered(*found, gather)
    return (found[1], None, None) if added is None else found


def _gathered(out, scaled, sums, gather):
    """As a product that gathers gives it, by a kernel of its own."""
    values = out if scaled is None else scaled
    every, all_sums = gathered(values, sums, gather)
    return (every, None, None) if sums is None else (out, every, all_sums)


def let_next_start(x):
    """Lets the next kernel begin its launch; every kernel waits for those before it anyway.

    The assembly counts as free of effects, so a value that is needed must pass through it.
    """
    kind = "f" if x.dtype == jnp.float32 else "r"
    (same,) = pltriton.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[x],
        constraints=f"={kind},{kind}",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return same


def _product_kernel(
    x_ref, weights_ref, layer_ref, given, out_ref, scaled_ref, sums_ref, *, outputs, first, eps,
    is_gated, factor, num_rows, row_blocks, rows, order, tiles, boxes, is_compiled,
):  # fmt: skip
    """One program per block of outputs and block of rows, the rows first: they share the weight."""
    is_normed, is_added = given.squares is not None, given.added is not None
    R, K = num_rows, x_ref.shape[1]
    block = lax.div(pl.program_id(0), row_blocks)
    row = lax.rem(pl.program_id(0), row_blocks) * rows + lax.iota(jnp.int32, rows)
    column = block * tiles.columns + lax.iota(jnp.int32, tiles.columns)
    step, layer = lax.iota(jnp.int32, tiles.depth), layer_ref[0]
    is_row, is_column = row < R, column < outputs
    is_inside = is_row[:, None] & is_column[None, :]
    # A row that is not written gets an index outside, for the interpreter.
    at_row, at_column = jnp.where(is_row, row, R), jnp.where(is_column, column, outputs)
    of_result = (at_row[:, None], at_column[None, :])
    link = None
    if boxes is not None:
        link = Link.read(given.place, boxes, row_blocks * pl.cdiv(outputs, tiles.columns))
    # Asked for before the loop where they are few, so that nothing waits for them after it.
    is_early = rows <= 32
    squares = load_squares(given.squares, row, is_row) if is_normed and is_early else None
    added = None
    if is_added and is_early:
        added = pltriton.load(given.added.at[of_result], mask=is_inside, other=0.0)
    norm = None
    if given.norms is not None and is_early:
        norm = _norm_of(given, at_column, is_column)

    def tile(ref, at, is_one, has_all):
        inside = (at + step)[None, :] < K
        masks = [] if has_all else [is_one[:, None]]
        masks += [] if K % tiles.depth == 0 else [inside]
        shape = (is_one.shape[0], tiles.depth)
        mask = functools.reduce(jnp.logical_and, [jnp.broadcast_to(m, shape) for m in masks], True)
        masked = {"mask": mask, "other": 0.0} if masks else {}
        return lambda *where: pltriton.load(ref.at[(*where, (at + step)[None, :])], **masked)

    def add(i, sums):
        at = i * tiles.depth
        x = tile(x_ref, at, is_row, R % rows == 0)(row[:, None])
        part = tile(weights_ref, at, is_column, outputs % tiles.columns == 0)
        sums_after = [
            _add_product(sums[0], x, part(layer, (first + column)[:, None]), tiles.swapped)
        ]
        if is_gated:
            weight = part(layer, (first + outputs + column)[:, None])
            sums_after.append(_add_product(sums[1], x, weight, tiles.swapped))
        return tuple(sums_after)

    # Blocks of gate and up in words are multiplied as one: the rows are read once.
    is_in_words = given.scales is not None and given.row_scales is None
    is_joined = is_gated and is_in_words
    width = 2 * tiles.columns if is_joined else tiles.columns
    both = lax.iota(jnp.int32, width)
    in_result = block * tiles.columns + lax.rem(both, tiles.columns)
    output = (first + lax.div(both, tiles.columns) * outputs + in_result)[:, None]
    is_output = None if outputs % tiles.columns == 0 else in_result < outputs

    def scale_at(i):
        share, _ = shares_of(weights_ref.shape, given.scales.shape)
        at = (layer, lax.div(output, share), jnp.full(output.shape, i))
        return _load(given.scales, at, is_output)

    def add_words(i, sums):
        lane = lax.iota(jnp.int32, FP8_BLOCK // 4)[None, :]
        words = _load(weights_ref, (layer, output, i * lane.size + lane), is_output)
        scale = scale_at(i) if only_scale is None else only_scale
        is_real = None if R % rows == 0 else is_row
        total = sums[0]
        for number, weight in enumerate(four(words, scale, is_compiled)):
            at = i * FP8_BLOCK + number * lane.size + lane
            x = _load(x_ref, (row[:, None], at), is_real)
            total = _add_product(total, x, weight.astype(x.dtype), is_swapped=True)
        return (total,)

    def scales_of(number):
        """Those of a block of the rows, and of a block of each weight."""
        number = jnp.minimum(number, blocks - 1)
        at = [first + i * outputs + block * tiles.columns for i in range(len(nothing))]
        of_weights = [
            pltriton.load(given.scales.at[layer, lax.div(x, FP8_BLOCK), number]) for x in at
        ]
        return pltriton.load(given.row_scales.at[jnp.full(row.shape, number), row]), of_weights

    def add_blocks(i, carried):
        sums, (scale, of_weights) = carried
        for number in range(tiles.depth // FP8_BLOCK):
            number += i * (tiles.depth // FP8_BLOCK)
            after = scales_of(number + 1)  # asked for ahead: they come from memory
            at = (number * FP8_BLOCK + lax.iota(jnp.int32, FP8_BLOCK))[None, :]
            x = _load(x_ref, (at_row[:, None], at), None if R % rows == 0 else is_row)
            added = []
            for weight, total in enumerate(sums):
                output = first + weight * outputs + block * tiles.columns
                codes = load_codes(weights_ref, layer, output, tiles.columns, number, is_compiled)
                both = scale * of_weights[weight]
                added.append(add_codes(total, x, codes, both, tiles.swapped, is_compiled))
            sums, (scale, of_weights) = tuple(added), after
        return sums, (scale, of_weights)

    only_scale = None
    if is_in_words and given.scales.shape[-1] == 1:  # read once for all inputs
        only_scale = scale_at(0)
    shape = (width, rows) if tiles.swapped else (rows, width)
    nothing = (jnp.zeros(shape, jnp.float32),) * (2 if is_gated and not is_joined else 1)
    steps, blocks = pl.cdiv(K, tiles.depth), K // FP8_BLOCK
    if given.row_scales is not None:
        sums, _ = lax.fori_loop(0, steps, add_blocks, (nothing, scales_of(0)))
    else:
        sums = lax.fori_loop(0, steps, add if given.scales is None else add_words, nothing)
    sums = list(sums)
    if is_compiled:
        sums[0] = let_next_start(sums[0])
    if tiles.swapped:
        sums = [x.T for x in sums]
    if is_joined:
        sums = list(lax.split(sums[0], (tiles.columns, tiles.columns), axis=1))

    if is_normed:
        if squares is None:
            squares = load_squares(given.squares, row, is_row)
        scale = lax.rsqrt(add_up(squares, order.digits_of_chunks) * (1.0 / K) + eps)
        sums = [x * scale[:, None] for x in sums]
    if given.bias is not None:
        for number, x in enumerate(sums):
            at = jnp.where(is_column, first + number * outputs + column, given.bias.shape[1])
            bias = pltriton.load(given.bias.at[layer, at], mask=is_column, other=0.0)
            sums[number] = x + bias.astype(jnp.float32)[None, :]
    out = sums[0]
    if is_gated:
        out = out / (1.0 + jnp.exp2(-out * _LOG2_E)) * sums[1]
    if factor != 1:
        out = out * factor
    if is_added:
        if added is None:
            added = pltriton.load(given.added.at[of_result], mask=is_inside, other=0.0)
        out += added.astype(jnp.float32)
    out = out.astype((scaled_ref if out_ref is None else out_ref).dtype)
    read = out
    if given.norms is not None:
        if norm is None:
            norm = _norm_of(given, at_column, is_column)
        read = (out.astype(jnp.float32) * norm[None, :]).astype(out.dtype)
    if link is not None:
        words = R * outputs * out.dtype.itemsize // 4
        shared = [Tile(read, block * tiles.columns, outputs, 0, scaled_ref)]
        if is_added:
            parts, chunks = tiles.columns // order.chunk, pl.cdiv(outputs, order.chunk)
            for place, sums in enumerate(_squares(out, at_column, block, outputs, parts, order)):
                shared.append(Tile(sums[:, None], block * parts + place, chunks, words, sums_ref))
            pltriton.store(out_ref.at[of_result], out, mask=is_inside)
        share_tiles(shared, row, is_row, link, 32 * tiles.warps)
        return
    pltriton.store(out_ref.at[of_result], out, mask=is_inside)
    if scaled_ref is not None:
        pltriton.store(scaled_ref.at[of_result], read, mask=is_inside)
    if is_added:
        parts = tiles.columns // order.chunk
        for place, sums in enumerate(_squares(out, at_column, block, outputs, parts, order)):
            place += block * parts
            at = jnp.full(row.shape, jnp.minimum(place, sums_ref.shape[1] - 1))
            is_inside = is_row & (place < sums_ref.shape[1])
            pltriton.store(sums_ref.at[at_row, at], sums, mask=is_inside)


def _load(ref, at, is_one):
    """Some rows of a reference, zero where none is; all are where `is_one` is None."""
    if is_one is None:
        return pltriton.load(ref.at[at])
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in at))
    other = 0 if ref.dtype == jnp.int32 else 0.0
    return pltriton.load(ref.at[at], mask=jnp.broadcast_to(is_one[:, None], shape), other=other)


def _norm_of(given, at_column, is_column):
    """The scale of the next norm of some columns."""
    at = given.norms.at[given.norm_layer[0], at_column]
    return pltriton.load(at, mask=is_column, other=0.0)


def _add_product(total, x, weight, is_swapped):
    exact = {"precision": lax.Precision.HIGHEST}
    if is_swapped:  # the outputs are the wide side of the matrix unit, the rows its narrow one
        return total + pltriton.dot(weight, x.T, **exact)
    return total + pltriton.dot(x, weight.T, **exact)


def _squares(out, column, block, outputs, parts, order):
    """The squares of a block of the result, chunk by chunk."""
    terms = out.astype(jnp.float32)
    terms = jnp.where((column < outputs)[None, :], terms * terms, 0.0)
    for place in range(parts):
        is_part = lax.div(column, order.chunk) == block * parts + place
        yield add_up(jnp.where(is_part[None, :], terms, 0.0), order.digits)
