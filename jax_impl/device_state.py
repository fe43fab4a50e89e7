"""What a device holds between steps: KV pages, recurrent states, and a few numbers per slot."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from jax_impl.layers import KV
from jax_impl.ops.mamba_state import DeltaState
from shared.boundary.backend import Limits
from shared.drafts.config import DraftSizes
from shared.models.config import ModelConfig
from shared.spec.mamba_state import WINDOW


class Relay(NamedTuple):
    """What a slot carries from one step's extend to the next step's draft.

    Attributes:
      tokens, weights: The best candidates for the token after the newest, and their log weights.
      hidden: The head's hidden state of the last extended row.
    """

    tokens: Int[jax.Array, "B k"]
    weights: Float[jax.Array, "B k"]
    hidden: Float[jax.Array, "B hidden"]


class DraftState(NamedTuple):
    """What a drafter holds.

    Attributes:
      start: `draft_from`: where the slot's whole draft KV begins.
      relay: By slot; None where the drafter carries none.
      kv: The drafter's own pools; page numbers are the target's.
      delta, snapshots: Its recurrent states by slot and by snapshot; None without such layers.
    """

    start: Int[jax.Array, " slots"]
    relay: Relay | None
    kv: KV
    delta: DeltaState | None
    snapshots: DeltaState | None


class DeviceState(NamedTuple):
    """The donated state of all slots; slot, page and snapshot 0 are sinks.

    Attributes:
      lengths: Committed tokens, whose KV is in the pages.
      newest: The token after them, which has no KV yet.
      seen: Twice the count in the output, plus 1 where the prompt has the token.
      kv: The target's pools.
      delta, snapshots: Recurrent states by slot and by snapshot; None without such layers.
      draft: None without a drafter.
    """

    lengths: Int[jax.Array, " slots"]
    newest: Int[jax.Array, " slots"]
    seen: Int[jax.Array, "slots vocab"]
    kv: KV
    delta: DeltaState | None
    snapshots: DeltaState | None
    draft: DraftState | None


class Held(NamedTuple):
    """What the slots of a step's rows hold when it begins.

    Attributes:
      seen: See `DeviceState`.
      delta: Recurrent states; None without such layers.
      start: Where whole draft KV begins; None without a drafter.
      draft_delta: The drafter's recurrent states; None where it has no such layers.
    """

    seen: Int[jax.Array, "B vocab"]
    delta: DeltaState | None
    start: Int[jax.Array, " B"] | None
    draft_delta: DeltaState | None


def new_states(
    config: ModelConfig, count: int, dtype: np.dtype | type, device: jax.Device
) -> DeltaState | None:
    """Recurrent states before the first token; None where the model has no such layers."""
    sizes, num_layers = config.gated_delta, config.num_gated_delta_layers
    if sizes is None:
        return None
    heads = (sizes.num_value_heads, sizes.key_size, sizes.value_size)
    return DeltaState(
        jnp.zeros((num_layers, count, *heads), np.float32, device=device),
        jnp.zeros((num_layers, count, WINDOW, sizes.channels), dtype, device=device),
    )


def new_kv(
    config: ModelConfig,
    num_layers: int,
    pool: tuple[int, int],
    dtype: np.dtype | type,
    device: jax.Device,
) -> KV:
    """Empty pools of some attention layers; `pool` is the number of pages and their size."""
    heads = (config.num_kv_heads, config.head_size)
    return jnp.zeros((num_layers, 2, *pool, *heads), dtype, device=device)


def allocate(
    config: ModelConfig,
    limits: Limits,
    drafter: DraftSizes | None,
    dtype: np.dtype | type,
    device: jax.Device,
) -> DeviceState:
    """The state before the first step, all zeros.

    Args:
      drafter: What the drafter keeps; None without one.
    """
    slots, pool = limits.num_slots, (limits.num_pages, limits.page_size)

    def zeros(*shape: int, dtype: np.dtype | type = np.int32) -> jax.Array:
        return jnp.zeros(shape, dtype, device=device)

    def relay(kept: DraftSizes) -> Relay | None:
        if not kept.has_relay:
            return None
        width = limits.max_width
        weights = zeros(slots, width, dtype=np.float32)
        return Relay(zeros(slots, width), weights, zeros(slots, kept.model.hidden, dtype=dtype))

    draft = None
    if drafter is not None:
        kv = new_kv(drafter.model, drafter.num_attention_layers, pool, dtype, device)
        states = [None, None]
        if drafter.num_gated_delta_layers:
            counts = (slots, limits.num_snapshots)
            states = [new_states(drafter.model, count, dtype, device) for count in counts]
        draft = DraftState(zeros(slots), relay(drafter), kv, *states)
    return DeviceState(
        lengths=zeros(slots),
        newest=zeros(slots),
        seen=zeros(slots, limits.vocab),
        kv=new_kv(config, config.num_attention_layers, pool, dtype, device),
        delta=new_states(config, slots, dtype, device),
        snapshots=new_states(config, limits.num_snapshots, dtype, device),
        draft=draft,
    )


def take(state: DeltaState, index: Int[jax.Array, " B"]) -> DeltaState:
    """The states of some slots or snapshots."""
    return DeltaState(state.recurrent[:, index], state.window[:, index])


def put(state: DeltaState, index: Int[jax.Array, " B"], rows: DeltaState) -> DeltaState:
    """Replaces the states of some slots or snapshots."""
    return DeltaState(
        state.recurrent.at[:, index].set(rows.recurrent),
        state.window.at[:, index].set(rows.window),
    )


def select(is_first: Bool[jax.Array, " B"], first: DeltaState, second: DeltaState) -> DeltaState:
    """Per row the first states or the second; a NaN in the others does not matter."""

    def pick(first: jax.Array, second: jax.Array) -> jax.Array:
        mask = is_first.reshape(1, -1, *[1] * (second.ndim - 2))
        return jnp.where(mask, first, second)

    return jax.tree.map(pick, first, second)


def begun(
    state: DeviceState,
    slots: Int[jax.Array, " B"],
    starts: Bool[jax.Array, " B"],
    restore: Int[jax.Array, " B"],
    draft_from: Int[jax.Array, " B"],
) -> Held:
    """What the rows' slots hold before the step; what a starting row finds is replaced.

    Args:
      starts: A row's first step: an earlier owner may have left anything, a NaN as well.
      restore: Snapshot that a starting row takes its state from; 0 for zeros.
      draft_from: Where a starting row's whole draft KV begins.
    """
    seen = jnp.where(starts[:, None], 0, state.seen[slots])
    start, draft_delta = None, None
    if state.draft is not None:
        start = jnp.where(starts, draft_from, state.draft.start[slots])
        draft_delta = _begun(state.draft.delta, state.draft.snapshots, slots, starts, restore)
    delta = _begun(state.delta, state.snapshots, slots, starts, restore)
    return Held(seen, delta, start, draft_delta)


def _begun(
    states: DeltaState | None,
    snapshots: DeltaState | None,
    slots: Int[jax.Array, " B"],
    starts: Bool[jax.Array, " B"],
    restore: Int[jax.Array, " B"],
) -> DeltaState | None:
    """The rows' recurrent states before the step, of a target or of a drafter."""
    if states is None or snapshots is None:
        return None
    held = take(states, slots)
    zeros = jax.tree.map(jnp.zeros_like, held)
    return select(starts, select(restore != 0, take(snapshots, restore), zeros), held)


def with_states(
    state: DeviceState,
    slots: Int[jax.Array, " B"],
    after: DeltaState,
    saved: DeltaState,
    places: Int[jax.Array, " B"],
) -> DeviceState:
    """Writes the rows' states, and snapshots to `places`, which is the sink where none is taken."""
    assert state.delta is not None  # there are states to write
    assert state.snapshots is not None
    return state._replace(
        delta=put(state.delta, slots, after), snapshots=put(state.snapshots, places, saved)
    )
