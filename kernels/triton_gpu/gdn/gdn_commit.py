"""State commit of GDN and Mamba2 layers: replay of accepted paths (Triton)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.gdn_tiles import GDNLayerTiles
from kernels.recurrent_sizes import columns_of, sizes_of
from kernels.triton_gpu.gdn.gdn_rows import WINDOW, States, check_contiguous
from kernels.triton_gpu.gdn.gdn_tree import advanced, kept_of
from kernels.triton_gpu.gemm.linear import launching


class Paths(NamedTuple):
    """Accepted path of each request, and the snapshot to write and its node count."""

    slots: Any
    nodes: Any
    counts: Any
    save_after: Any
    save: Any


def commit(
    recurrent: Float[Tensor, "L states H K V"],
    window: Float[Tensor, "L states 3 C"],
    saved_recurrent: Float[Tensor, "L snapshots H K V"],
    saved_window: Float[Tensor, "L snapshots 3 C"],
    kept: Sequence[Float[Tensor, "L B N ..."]],
    slots: Int[Tensor, " B"],
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    save_after: Int[Tensor, " B"],
    save: Int[Tensor, " B"],
    *,
    tiles: GDNLayerTiles,
) -> None:
    """Same as `shared.spec.recurrent_layer.commit`, for all layers in one launch.

    Args:
      recurrent, window, kept, slots: See `gdn_layer.verify`. If it has advanced the recurrent
        states, only the conv states are updated.
      saved_recurrent, saved_window: Snapshots of all layers.
      path, counts, save_after: See the specification.
      save: Snapshot index of each request; 0 for none.
      tiles: Tile config.

    Raises:
      ValueError: States are not contiguous.
    """
    check_contiguous(recurrent, window, saved_recurrent, saved_window, *kept)
    *fields, inputs = kept
    has = {"has_delta": len(fields) == 4, "has_bias": False}  # Mamba2 has no beta
    sizes = sizes_of(recurrent.shape, window.shape, **has)
    columns = columns_of(tiles.commit_columns, sizes)
    _commit_kernel[(sizes.H * (sizes.V // columns), len(path), len(recurrent))](
        States(recurrent=recurrent, window=window),
        States(recurrent=saved_recurrent, window=saved_window),
        kept_of(fields, inputs),
        Paths(
            slots=slots.contiguous(),
            nodes=path.contiguous(),
            counts=counts.contiguous(),
            save_after=save_after.contiguous(),
            save=save.contiguous(),
        ),
        num_requests=len(path),
        num_states=recurrent.shape[1],
        num_snapshots=saved_recurrent.shape[1],
        path_length=path.shape[1],
        nodes=inputs.shape[2],
        sizes=sizes,
        columns=columns,
        advances=bool(fields),
        num_warps=tiles.commit_warps,
        **launching(recurrent),
    )


@triton.jit(do_not_specialize=["num_requests", "num_states", "num_snapshots"])
def _commit_kernel(
    states,
    snapshots,
    kept,
    paths,
    num_requests,
    num_states,
    num_snapshots,
    path_length: tl.constexpr,
    nodes: tl.constexpr,
    sizes: tl.constexpr,
    columns: tl.constexpr,
    advances: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of state columns of a value head, request and layer."""
    H: tl.constexpr = sizes.H
    K: tl.constexpr = sizes.K
    V: tl.constexpr = sizes.V
    C: tl.constexpr = sizes.C
    parts: tl.constexpr = V // columns
    head, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    request, layer = tl.program_id(1), tl.program_id(2).to(tl.int64)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    count, save_after = tl.load(paths.counts + request), tl.load(paths.save_after + request)
    if count == 0:
        return
    slot = layer * num_states + tl.load(paths.slots + request)
    snapshot = tl.load(paths.save + request)
    save = layer * num_snapshots + snapshot
    is_saved = (save_after >= 1) & (save_after <= count) & (snapshot != 0)
    first = (layer * num_requests + request) * nodes
    path_at = paths.nodes + request * path_length
    key, column = tl.arange(0, K), part * columns + tl.arange(0, columns)
    square = key[:, None] * V + column[None, :]
    state_at = states.recurrent + ((slot * H + head) * (K * V) + square)
    saved_state_at = snapshots.recurrent + ((save * H + head) * (K * V) + square)
    if advances:
        state = tl.load(state_at)
        for i in range(0, count):
            at = (first + tl.load(path_at + i)) * H + head
            k, v = tl.load(kept.k + at * K + key), tl.load(kept.v + at * V + column)
            log_decay = tl.load(kept.log_decay + at)
            beta = tl.load(kept.beta + at) if sizes.has_delta else None
            state = advanced(state, k, v, log_decay, beta, sizes)
            if is_saved & (save_after == i + 1):
                tl.store(saved_state_at, state)
        tl.store(state_at, state)
    elif is_saved:
        tl.store(saved_state_at, tl.load(state_at))

    # Each program writes the conv state of some channels, which no other program reads.
    per_program: tl.constexpr = (C + H * parts - 1) // (H * parts)
    lane, channel = (
        tl.arange(0, 4)[:, None],
        tl.arange(0, triton.next_power_of_2(per_program))[None, :],
    )
    is_one = (lane < WINDOW) & (channel < per_program)
    channel += tl.program_id(0) * per_program
    is_one &= channel < C
    at = lane * C + channel
    window_at, inputs_at = states.window + slot * (WINDOW * C), kept.inputs + first * C
    new = _window_after(window_at, inputs_at, path_at, count, lane, channel, is_one, C)
    if is_saved:
        saved = _window_after(window_at, inputs_at, path_at, save_after, lane, channel, is_one, C)
        tl.store(snapshots.window + save * (WINDOW * C) + at, saved, mask=is_one)
    tl.debug_barrier()  # other threads may still read what this one overwrites
    tl.store(window_at + at, new, mask=is_one)


@triton.jit
def _window_after(window_at, inputs_at, path_at, taken, lane, channel, is_one, C: tl.constexpr):
    """Returns rows `taken` to `taken + 3` of the old conv state and the path's inputs."""
    place = taken + lane
    is_new, is_old = is_one & (place >= WINDOW), is_one & (place < WINDOW)
    node = tl.load(path_at + place - WINDOW, mask=(lane < WINDOW) & (place >= WINDOW), other=0)
    new = tl.load(inputs_at + node * C + channel, mask=is_new, other=0.0)
    old = tl.load(window_at + place * C + channel, mask=is_old, other=0.0)
    return tl.where(is_new, new, old)
