"""State commit of GDN and Mamba2 layers: replay of accepted paths (Pallas, Triton backend)."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.gdn_tiles import GDNLayerTiles
from kernels.pallas_gpu.gdn.gdn_rows import WINDOW, States
from kernels.pallas_gpu.gdn.gdn_tree import advanced, barrier, kept_of
from kernels.recurrent_sizes import columns_of, sizes_of


class Paths(NamedTuple):
    """Accepted path of each request, and the snapshot to write and its node count."""

    slots: Any
    nodes: Any
    counts: Any
    save_after: Any
    save: Any


def commit(
    recurrent: Float[jax.Array, "L states H K V"],
    window: Float[jax.Array, "L states 3 C"],
    saved_recurrent: Float[jax.Array, "L snapshots H K V"],
    saved_window: Float[jax.Array, "L snapshots 3 C"],
    kept: Sequence[Float[jax.Array, "L B N ..."]],
    slots: Int[jax.Array, " B"],
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    save_after: Int[jax.Array, " B"],
    save: Int[jax.Array, " B"],
    *,
    tiles: GDNLayerTiles,
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "L states H K V"],
    Float[jax.Array, "L states 3 C"],
    Float[jax.Array, "L snapshots H K V"],
    Float[jax.Array, "L snapshots 3 C"],
]:
    """Same as `shared.spec.recurrent_layer.commit`, for all layers in one launch.

    Args:
      recurrent, window, kept, slots: See `gdn_layer.verify`. If it has advanced the recurrent
        states, only the conv states are updated.
      saved_recurrent, saved_window: Snapshots of all layers.
      path, counts, save_after: See the specification.
      save: Snapshot index of each request; 0 for none.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The states and the snapshots after the writes.
    """
    caches = (States(recurrent, window), States(saved_recurrent, saved_window))
    *fields, inputs = kept
    has = {"has_delta": len(fields) == 4, "has_bias": False}  # Mamba2 has no beta
    columns = columns_of(tiles.commit_columns, sizes_of(recurrent.shape, window.shape, **has))
    states, snapshots = pl.pallas_call(
        partial(_commit_kernel, columns=columns, interpret=interpret),
        grid=(recurrent.shape[2] * (recurrent.shape[4] // columns), len(slots), len(recurrent)),
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), caches),
        input_output_aliases={number: number for number in range(4)},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.commit_warps, num_stages=1),
        interpret=interpret,
        name="gdn_commit",
    )(
        caches,
        Paths(slots=slots, nodes=path, counts=counts, save_after=save_after, save=save),
        kept_of(fields, inputs),
    )
    return *states, *snapshots


def _commit_kernel(_, paths, kept, states, snapshots, *, columns, interpret):
    """One program per block of state columns of a value head, request and layer."""
    (H, _, V), C = states.recurrent.shape[2:], states.window.shape[3]
    parts = V // columns
    program, request, layer = (pl.program_id(axis) for axis in range(3))
    head, part = lax.div(program, parts), lax.rem(program, parts)
    slot, save = paths.slots[request], paths.save[request]
    save_after, count = paths.save_after[request], paths.counts[request]
    is_saved = (save_after >= 1) & (save_after <= count) & (save != 0)
    column = pl.ds(part * columns, columns)
    state_at = states.recurrent.at[layer, slot, head, :, column]
    saved_at = snapshots.recurrent.at[layer, save, head, :, column]

    def replay():
        """Advances the recurrent state along the path."""

        def advance(i, state):
            at = (layer, request, paths.nodes[request, i], head)
            k, v = kept.k[(*at, slice(None))], kept.v[(*at, column)]
            log_decay = kept.log_decay[at]
            beta = None if kept.beta is None else kept.beta[at]
            state = advanced(state, k, v, log_decay, beta)

            @pl.when(is_saved & (save_after == i + 1))
            def _():
                saved_at[...] = state

            return state

        state_at[...] = lax.fori_loop(0, count, advance, state_at[...])

    def save_state():
        saved_at[...] = state_at[...]

    def move_window():
        """Writes the conv state of some channels, which no other program reads."""
        per_program = pl.cdiv(C, H * parts)
        lane = lax.iota(jnp.int32, 4)[:, None]
        channel = lax.iota(jnp.int32, pl.next_power_of_2(per_program))[None, :]
        is_one = (lane < WINDOW) & (channel < per_program)
        channel = channel + program * per_program
        is_one = is_one & (channel < C)

        def window_after(taken):
            """Returns rows `taken` to `taken + 3` of the old conv state and the path's inputs."""
            place = taken + lane
            is_new, is_old = is_one & (place >= WINDOW), is_one & (place < WINDOW)
            is_node = (lane < WINDOW) & (place >= WINDOW)
            at = paths.nodes.at[request, place - WINDOW]
            node = pltriton.load(at, mask=is_node, other=0)
            at = kept.inputs.at[layer, request, node, channel]
            new = pltriton.load(at, mask=is_new, other=0.0)
            at = states.window.at[layer, slot, place, channel]
            return jnp.where(is_new, new, pltriton.load(at, mask=is_old, other=0.0))

        new = window_after(count)

        @pl.when(is_saved)
        def _():
            at = snapshots.window.at[layer, save, lane, channel]
            pltriton.store(at, window_after(save_after), mask=is_one)

        barrier(interpret)  # other threads may still read what this one overwrites
        pltriton.store(states.window.at[layer, slot, lane, channel], new, mask=is_one)

    @pl.when(count > 0)
    def _():
        if kept.k is not None:
            replay()
        else:
            pl.when(is_saved)(save_state)
        move_window()
