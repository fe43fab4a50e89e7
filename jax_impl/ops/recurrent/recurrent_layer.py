"""Recurrent layer between its two projections, on the states of slots.

Same as `shared.spec.recurrent_layer`.

On a GPU these are kernels (prefill: bfloat16 only); see `jax_impl.ops`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jax_impl.ops import Kernels, Place, is_bfloat16, kernel_or_reference, operand
from jax_impl.ops.recurrent.recurrent_mixer import (
    RecurrentWeights,
    recurrent_decode,
    recurrent_prefill,
    recurrent_verify_tree,
    split_inputs,
)
from jax_impl.ops.recurrent.recurrent_state import RecurrentState, ReplayInputs, path_window, replay
from kernels.gdn_tiles import MOST_TREE_GROUPS
from shared.models.mixers import RecurrentConfig
from shared.spec.reduction_order import SQUARES


class TreeNodes(NamedTuple):
    """Nodes of a step's draft trees and their flat rows.

    Attributes:
      parents: Parent of each node; None if all trees are chains.
      row_starts: First flat row of each request, and the end.
      row_of: Flat row of each node.
      request, node: Request and node of each row.
    """

    parents: Int[jax.Array, "B N"] | None
    row_starts: Int[jax.Array, " B1"]
    row_of: Int[jax.Array, "B N"]
    request: Int[jax.Array, " R"]
    node: Int[jax.Array, " R"]


class VerifyScratch(NamedTuple):
    """Scratch memory of a verify until its commit.

    Attributes:
      kept: Replay inputs of all nodes; only convolution inputs in plain decoding, which advances
        the states itself.
      arrivals: Zeros, in which a kernel counts its programs; it resets them to zero.
    """

    kept: ReplayInputs | Float[jax.Array, "L B one C"]
    arrivals: Int[jax.Array, "B H groups"]


def verify_scratch(
    states: RecurrentState, sizes: RecurrentConfig, requests: int, nodes: int, advances: bool
) -> VerifyScratch:
    """Allocates the scratch memory for `nodes` nodes of each request."""
    (L, _, H, K, V), C = states.recurrent.shape, states.window.shape[3]
    inputs = lax.empty((L, requests, nodes, C), states.window.dtype)
    arrivals = jnp.zeros((requests, H, MOST_TREE_GROUPS), jnp.int32)
    if advances:
        return VerifyScratch(inputs, arrivals)
    shapes = ((H, K), (H, V), (H,), *([(H,)] if sizes.has_delta else []))
    k, v, log_decay, *beta = (
        lax.empty((L, requests, nodes, *shape), jnp.float32) for shape in shapes
    )
    kept = ReplayInputs(k, v, log_decay, beta[0] if beta else None, inputs)
    return VerifyScratch(kept, arrivals)


def take(states: RecurrentState, index: Int[jax.Array, " B"]) -> RecurrentState:
    """Reads the states of some slots or snapshots."""
    return RecurrentState(states.recurrent[:, index], states.window[:, index])


def put(
    states: RecurrentState, index: Int[jax.Array, " B"], rows: RecurrentState
) -> RecurrentState:
    """Replaces the states of some slots or snapshots."""
    return RecurrentState(
        states.recurrent.at[:, index].set(rows.recurrent),
        states.window.at[:, index].set(rows.window),
    )


def followed(states: RecurrentState, inputs: Float[jax.Array, "L B one C"]) -> RecurrentState:
    """Adds the new convolution windows to advanced states."""
    window = jnp.concatenate([states.window[:, :, 1:], inputs], axis=2)
    return RecurrentState(states.recurrent, window)


def plain_prefill(
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    snapshots: RecurrentState,
    layer: Place,
    slots: Int[jax.Array, " B"],
    row_starts: Int[jax.Array, " B1"],
    request: Int[jax.Array, " R"],
    save_after: Int[jax.Array, " B"],
    save: Int[jax.Array, " B"],
) -> tuple[Float[jax.Array, "R values"], RecurrentState, RecurrentState]:
    """Runs `recurrent_prefill` on a layer's states in their slots.

    Args:
      states, snapshots: States of all slots and of all snapshots.
      save: Snapshot to which the state after `save_after` rows is written; 0 for none.
    """
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    out, *new, saved = recurrent_prefill(
        inputs, weights.alone(layer), sizes, *held, row_starts, request, save_after
    )
    states = RecurrentState(*(x.at[layer, slots].set(y) for x, y in zip(states, new, strict=True)))
    parts = zip(snapshots, saved, strict=True)
    return out, states, RecurrentState(*(x.at[layer, save].set(y) for x, y in parts))


def kernel_prefill(
    kernels: Kernels,
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    snapshots: RecurrentState,
    layer: Place,
    slots: Int[jax.Array, " B"],
    row_starts: Int[jax.Array, " B1"],
    request: Int[jax.Array, " R"],
    save_after: Int[jax.Array, " B"],
    save: Int[jax.Array, " B"],
) -> tuple[Float[jax.Array, "R values"], RecurrentState, RecurrentState]:
    if sizes.has_delta:
        settings = {"norm": weights.norm, "eps": weights.eps, "digits": SQUARES.digits}
        launch = partial(kernels.gdn_prefill.prefill, **settings)
    else:
        settings = {"conv_bias": weights.conv_bias, "skip": weights.skip}
        launch = partial(kernels.mamba2_prefill.prefill, **settings)
    out, recurrent, window, *saved = launch(
        inputs,
        conv=weights.conv,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        recurrent=states.recurrent,
        window=states.window,
        saved_recurrent=snapshots.recurrent,
        saved_window=snapshots.window,
        layer=operand(layer),
        slots=slots,
        row_starts=row_starts,
        save_after=save_after,
        save=save,
        tiles=kernels.tiles.gdn_prefill.of(requests=len(slots)),
    )
    return out, RecurrentState(recurrent, window), RecurrentState(*saved)


prefill = kernel_or_reference(kernel_prefill, plain_prefill, takes=is_bfloat16)


def plain_verify(
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: Place,
    slots: Int[jax.Array, " B"],
    nodes: TreeNodes,
    scratch: VerifyScratch,
) -> tuple[Float[jax.Array, "R values"], RecurrentState, VerifyScratch]:
    """Runs `recurrent_verify_tree` on a layer's states in their slots, which are not changed.

    Args:
      states: States of all slots and layers.
      slots: Slots of the requests.
      scratch: Receives the replay inputs.
    """
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    where = (nodes.parents, nodes.row_of, nodes.request, nodes.node)
    out, kept_nodes = recurrent_verify_tree(inputs, weights.alone(layer), sizes, *held, *where)
    kept = jax.tree.map(lambda x, y: x.at[layer].set(y[0]), scratch.kept, kept_nodes)
    return out, states, scratch._replace(kept=kept)


def kernel_verify(
    kernels: Kernels,
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: Place,
    slots: Int[jax.Array, " B"],
    nodes: TreeNodes,
    scratch: VerifyScratch,
) -> tuple[Float[jax.Array, "R values"], RecurrentState, VerifyScratch]:
    """Same as `plain_verify`, or as `plain_decode` if the scratch is for plain decoding."""
    B, N = nodes.row_of.shape
    out, recurrent, kept, arrivals = kernels.gdn_layer.verify(
        inputs,
        conv=weights.conv,
        conv_bias=weights.conv_bias,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        skip=weights.skip,
        norm=weights.norm if sizes.has_delta else None,
        recurrent=states.recurrent,
        window=states.window,
        layer=operand(layer),
        slots=slots,
        row_starts=nodes.row_starts,
        parents=nodes.parents,
        kept=_arrays_of(scratch.kept),
        arrivals=scratch.arrivals,
        eps=weights.eps,
        digits=SQUARES.digits,
        tiles=kernels.tiles.gdn_layer.of(nodes=N, requests=B, delta=int(sizes.has_delta)),
    )
    kept = jax.tree.unflatten(jax.tree.structure(scratch.kept), kept)
    return out, RecurrentState(recurrent, states.window), VerifyScratch(kept, arrivals)


verify = kernel_or_reference(kernel_verify, plain_verify)


def plain_decode(
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: Place,
    slots: Int[jax.Array, " B"],
    nodes: TreeNodes,
    scratch: VerifyScratch,
) -> tuple[Float[jax.Array, "R values"], RecurrentState, VerifyScratch]:
    """Runs `recurrent_decode` on a layer's states in their slots; `commit` advances their windows.

    Args:
      nodes: One node per request.
    """
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    out, new, _ = recurrent_decode(inputs, weights.alone(layer), sizes, *held)
    recurrent = states.recurrent.at[layer, slots].set(new)
    assert not isinstance(scratch.kept, ReplayInputs)  # plain decoding
    channels, *_ = split_inputs(inputs, sizes)
    kept = scratch.kept.at[layer, :, 0].set(channels)
    return out, RecurrentState(recurrent, states.window), scratch._replace(kept=kept)


kernel_decode = kernel_verify
decode = kernel_or_reference(kernel_decode, plain_decode)


def plain_commit(
    states: RecurrentState,
    snapshots: RecurrentState,
    kept: ReplayInputs | Float[jax.Array, "L B one C"],
    slots: Int[jax.Array, " B"],
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    save_after: Int[jax.Array, " B"],
    save: Int[jax.Array, " B"],
) -> tuple[RecurrentState, RecurrentState]:
    """Replays accepted paths on the slots' states; in plain decoding advances only the windows.

    Args:
      states, snapshots: States of all slots and of all snapshots.
      save: Snapshot to which a request's state is written; 0 for none.
    """
    before = take(states, slots)
    places = jnp.where((save_after >= 1) & (save_after <= counts), save, 0)
    if isinstance(kept, ReplayInputs):
        new, saved, _ = replay(before, kept, path, counts, save_after)
        return put(states, slots, new), put(snapshots, places, saved)
    taken = jnp.where(save_after == 1, counts, 0)
    new, saved = (path_window(before.window, kept, x) for x in (counts, taken))
    states = RecurrentState(states.recurrent, states.window.at[:, slots].set(new))
    return states, put(snapshots, places, RecurrentState(before.recurrent, saved))


def kernel_commit(
    kernels: Kernels,
    states: RecurrentState,
    snapshots: RecurrentState,
    kept: ReplayInputs | Float[jax.Array, "L B one C"],
    slots: Int[jax.Array, " B"],
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    save_after: Int[jax.Array, " B"],
    save: Int[jax.Array, " B"],
) -> tuple[RecurrentState, RecurrentState]:
    delta = int(not isinstance(kept, ReplayInputs) or kept.beta is not None)
    *new, recurrent, window = kernels.gdn_commit.commit(
        *(*states, *snapshots, _arrays_of(kept), slots, path, counts, save_after, save),
        tiles=kernels.tiles.gdn_layer.of(nodes=path.shape[1], requests=len(slots), delta=delta),
    )
    return RecurrentState(*new), RecurrentState(recurrent, window)


commit = kernel_or_reference(kernel_commit, plain_commit)


def _arrays_of(kept: ReplayInputs | jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jax.tree.leaves(kept))
