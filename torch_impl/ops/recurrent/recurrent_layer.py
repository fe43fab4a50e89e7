"""Recurrent layer between its two projections, on the states of slots.

Same as `shared.spec.recurrent_layer`.

States are written in place. On a GPU these are kernels (prefill: bfloat16 only); see
`torch_impl.ops`.
"""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels.gdn_tiles import MOST_TREE_GROUPS
from shared.models.mixers import RecurrentConfig
from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, any_row_set, is_bfloat16, kernel_or_reference
from torch_impl.ops.recurrent.recurrent_mixer import (
    RecurrentWeights,
    recurrent_decode,
    recurrent_prefill,
    recurrent_verify_tree,
    split_inputs,
)
from torch_impl.ops.recurrent.recurrent_state import (
    RecurrentState,
    ReplayInputs,
    path_window,
    replay,
)


@dataclass(frozen=True)
class TreeNodes:
    """Nodes of a step's draft trees and their flat rows.

    Attributes:
      parents: Parent of each node; None if all trees are chains.
      row_starts: First flat row of each request, and the end.
      row_of: Flat row of each node.
      request, node: Request and node of each row.
    """

    parents: Int[Tensor, "B N"] | None
    row_starts: Int[Tensor, " B1"]
    row_of: Int[Tensor, "B N"]
    request: Int[Tensor, " R"]
    node: Int[Tensor, " R"]


@dataclass(frozen=True)
class VerifyScratch:
    """Scratch memory of a verify until its commit.

    Attributes:
      kept: Replay inputs of all nodes; only convolution inputs in plain decoding, which advances
        the states itself.
      arrivals: Zeros, in which a kernel counts its programs; it resets them to zero.
    """

    kept: ReplayInputs | Float[Tensor, "L B one C"]
    arrivals: Int[Tensor, "B H groups"]


def verify_scratch(
    states: RecurrentState, sizes: RecurrentConfig, requests: int, nodes: int, advances: bool
) -> VerifyScratch:
    """Allocates the scratch memory for `nodes` nodes of each request."""
    (L, _, H, K, V), C = states.recurrent.shape, states.window.shape[3]
    inputs = states.window.new_empty((L, requests, nodes, C))
    arrivals = states.recurrent.new_zeros((requests, H, MOST_TREE_GROUPS), dtype=torch.int32)
    if advances:
        return VerifyScratch(inputs, arrivals)
    shapes = ((H, K), (H, V), (H,), *([(H,)] if sizes.has_delta else []))
    k, v, log_decay, *beta = (
        states.recurrent.new_empty((L, requests, nodes, *shape)) for shape in shapes
    )
    kept = ReplayInputs(k, v, log_decay, beta[0] if beta else None, inputs)
    return VerifyScratch(kept, arrivals)


def take(states: RecurrentState, index: Int[Tensor, " B"]) -> RecurrentState:
    """Reads the states of some slots or snapshots."""
    return RecurrentState(states.recurrent[:, index], states.window[:, index])


def put(states: RecurrentState, index: Int[Tensor, " B"], rows: RecurrentState) -> None:
    """Replaces the states of some slots or snapshots."""
    states.recurrent[:, index] = rows.recurrent
    states.window[:, index] = rows.window


def followed(states: RecurrentState, inputs: Float[Tensor, "L B one C"]) -> RecurrentState:
    """Adds the new convolution windows to advanced states."""
    return RecurrentState(states.recurrent, torch.cat([states.window[:, :, 1:], inputs], dim=2))


def plain_prefill(
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    snapshots: RecurrentState,
    layer: int,
    slots: Int[Tensor, " B"],
    row_starts: Int[Tensor, " B1"],
    request: Int[Tensor, " R"],
    save_after: Int[Tensor, " B"],
    save: Int[Tensor, " B"],
) -> Float[Tensor, "R values"]:
    """Runs `recurrent_prefill` on a layer's states in their slots.

    Args:
      states, snapshots: States of all slots and of all snapshots.
      save: Snapshot to which the state after `save_after` rows is written; 0 for none.
    """
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    out, *new, saved = recurrent_prefill(
        inputs, weights, sizes, *held, row_starts, request, save_after
    )
    states.recurrent[layer, slots], states.window[layer, slots] = new
    if snapshots.recurrent.shape[1] > 1:  # the first is reserved for padding
        snapshots.recurrent[layer, save], snapshots.window[layer, save] = saved
    return out


def kernel_prefill(
    kernels: Kernels,
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    snapshots: RecurrentState,
    layer: int,
    slots: Int[Tensor, " B"],
    row_starts: Int[Tensor, " B1"],
    request: Int[Tensor, " R"],
    save_after: Int[Tensor, " B"],
    save: Int[Tensor, " B"],
) -> Float[Tensor, "R values"]:
    if sizes.has_delta:
        settings = {"norm": weights.norm, "eps": weights.eps, "digits": SQUARES.digits}
        launch = partial(kernels.gdn_prefill.prefill, **settings)
    else:
        settings = {"conv_bias": weights.conv_bias, "skip": weights.skip}
        launch = partial(kernels.mamba2_prefill.prefill, **settings)
    return launch(
        inputs,
        conv=weights.conv,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        recurrent=states.recurrent,
        window=states.window,
        saved_recurrent=snapshots.recurrent,
        saved_window=snapshots.window,
        layer=layer,
        slots=slots,
        row_starts=row_starts,
        save_after=save_after,
        save=save,
        tiles=kernels.tiles.gdn_prefill.of(requests=len(slots)),
    )


prefill = kernel_or_reference(kernel_prefill, plain_prefill, takes=is_bfloat16)


def plain_verify(
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: int,
    slots: Int[Tensor, " B"],
    nodes: TreeNodes,
    scratch: VerifyScratch,
) -> Float[Tensor, "R values"]:
    """Runs `recurrent_verify_tree` on a layer's states in their slots, which are not changed.

    Args:
      states: States of all slots and layers.
      slots: Slots of the requests.
      scratch: Receives the replay inputs.
    """
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    where = (nodes.parents, nodes.row_of, nodes.request, nodes.node)
    out, kept_nodes = recurrent_verify_tree(inputs, weights, sizes, *held, *where)
    for memory, new in zip(_arrays_of(scratch.kept), _arrays_of(kept_nodes), strict=True):
        memory[layer] = new[0]
    return out


def kernel_verify(
    kernels: Kernels,
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: int,
    slots: Int[Tensor, " B"],
    nodes: TreeNodes,
    scratch: VerifyScratch,
) -> Float[Tensor, "R values"]:
    """Same as `plain_verify`, or as `plain_decode` if the scratch is for plain decoding."""
    B, N = nodes.row_of.shape
    return kernels.gdn_layer.verify(
        inputs,
        conv=weights.conv,
        conv_bias=weights.conv_bias,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        skip=weights.skip,
        norm=weights.norm if sizes.has_delta else None,
        recurrent=states.recurrent,
        window=states.window,
        layer=layer,
        slots=slots,
        row_starts=nodes.row_starts,
        parents=nodes.parents,
        kept=_arrays_of(scratch.kept),
        arrivals=scratch.arrivals,
        eps=weights.eps,
        digits=SQUARES.digits,
        tiles=kernels.tiles.gdn_layer.of(nodes=N, requests=B, delta=int(sizes.has_delta)),
    )


verify = kernel_or_reference(kernel_verify, plain_verify)


def plain_decode(
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: int,
    slots: Int[Tensor, " B"],
    nodes: TreeNodes,
    scratch: VerifyScratch,
) -> Float[Tensor, "R values"]:
    """Runs `recurrent_decode` on a layer's states in their slots; `commit` advances their windows.

    Args:
      nodes: One node per request.
    """
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    out, states.recurrent[layer, slots], _ = recurrent_decode(inputs, weights, sizes, *held)
    (memory,) = _arrays_of(scratch.kept)
    memory[layer, :, 0], *_ = split_inputs(inputs, sizes)
    return out


kernel_decode = kernel_verify
decode = kernel_or_reference(kernel_decode, plain_decode)


def plain_commit(
    states: RecurrentState,
    snapshots: RecurrentState,
    kept: ReplayInputs | Float[Tensor, "L B one C"],
    slots: Int[Tensor, " B"],
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    save_after: Int[Tensor, " B"],
    save: Int[Tensor, " B"],
) -> tuple[RecurrentState, RecurrentState]:
    """Replays accepted paths on the slots' states; in plain decoding advances only the windows.

    Args:
      states, snapshots: States of all slots and of all snapshots.
      save: Snapshot to which a request's state is written; 0 for none.
    """
    is_saved = (save_after >= 1) & (save_after <= counts) & (save != 0)
    if isinstance(kept, ReplayInputs):
        new, saved, _ = replay(take(states, slots), kept, path, counts, save_after)
        put(states, slots, new)
        saved_window = saved.window
    else:
        saved, window = None, states.window[:, slots]
        states.window[:, slots] = path_window(window, kept, counts)
        saved_window = path_window(window, kept, torch.where(is_saved, counts, 0))
    if any_row_set(is_saved):
        recurrent = states.recurrent[:, slots] if saved is None else saved.recurrent
        places = torch.where(is_saved, save, 0)  # 0 for all others
        put(snapshots, places, RecurrentState(recurrent, saved_window))
    return states, snapshots


def kernel_commit(
    kernels: Kernels,
    states: RecurrentState,
    snapshots: RecurrentState,
    kept: ReplayInputs | Float[Tensor, "L B one C"],
    slots: Int[Tensor, " B"],
    path: Int[Tensor, "B W"],
    counts: Int[Tensor, " B"],
    save_after: Int[Tensor, " B"],
    save: Int[Tensor, " B"],
) -> tuple[RecurrentState, RecurrentState]:
    delta = int(not isinstance(kept, ReplayInputs) or kept.beta is not None)
    kernels.gdn_commit.commit(
        *(states.recurrent, states.window, snapshots.recurrent, snapshots.window),
        *(_arrays_of(kept), slots, path, counts, save_after, save),
        tiles=kernels.tiles.gdn_layer.of(nodes=path.shape[1], requests=len(slots), delta=delta),
    )
    return states, snapshots


commit = kernel_or_reference(kernel_commit, plain_commit)


def _arrays_of(kept: ReplayInputs | Tensor) -> tuple[Tensor, ...]:
    if isinstance(kept, Tensor):
        return (kept,)
    beta = () if kept.beta is None else (kept.beta,)
    return kept.k, kept.v, kept.log_decay, *beta, kept.inputs
