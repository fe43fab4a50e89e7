"""KV compaction of accepted rows after verification (Pallas, Triton backend)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

_MOVED_ELEMENTS = 8192  # row elements that a program moves


def commit(
    pages: Float[jax.Array, "*pools P page H D"],
    page_table: Int[jax.Array, "B table"],
    lengths: Int[jax.Array, " B"],
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    interpret: bool = False,
) -> Float[jax.Array, "*pools P page H D"]:
    """Same as `shared.spec.attention.compact_accepted_kv`; window pages are not shared."""
    (B, W), (P, page, H, D) = path.shape, pages.shape[-4:]
    pools, lanes = pages.reshape(-1, P, page, H * D), pl.next_power_of_2(W)
    columns = min(pl.next_power_of_2(H * D), max(1, _MOVED_ELEMENTS // lanes))
    moved = pl.pallas_call(
        functools.partial(_compact_kernel, lanes=lanes, columns=columns, interpret=interpret),
        grid=(pl.cdiv(H * D, columns), len(pools), B),
        out_shape=jax.ShapeDtypeStruct(pools.shape, pools.dtype),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="kv_compaction",
    )(pools, page_table, lengths, path, counts)
    return moved.reshape(pages.shape)


def _compact_kernel(
    _, table_ref, lengths_ref, path_ref, counts_ref, pools_ref, *, lanes, columns, interpret
):
    """One program per block of columns, pool and request; rows that stay in place are skipped."""
    (_, P, page, width), steps = pools_ref.shape, path_ref.shape[1]
    pool, request = pl.program_id(1), pl.program_id(2)
    step = lax.iota(jnp.int32, lanes)
    at = path_ref.at[request, jnp.minimum(step, steps - 1)]
    node = pltriton.load(at, mask=step < steps, other=0)
    moves = (step < steps) & (step < counts_ref[request]) & (node != step)
    column = (pl.program_id(0) * columns + lax.iota(jnp.int32, columns))[None, :]
    keep = moves[:, None] & (column < width)

    def rows_at(node):
        position = lengths_ref[request] + jnp.where(moves, node, 0)
        at = table_ref.at[request, lax.div(position, page)]
        number = pltriton.load(at, mask=moves, other=0)
        # A row that is not written gets a page out of bounds, for the interpreter.
        number, place = jnp.where(moves, number, P), lax.rem(position, page)
        return pools_ref.at[pool, number[:, None], place[:, None], column]

    source, target = rows_at(node), rows_at(step)
    moved = pltriton.load(source, mask=keep)
    if not interpret:
        pltriton.debug_barrier()  # other threads may still read what this one overwrites
    pltriton.store(target, moved, mask=keep)
