"""Recurrent state of a slot, and its replay over accepted paths.

Same as `shared.spec.recurrent_state`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.ops import scan
from jax_impl.ops.gemm import layers
from jax_impl.ops.recurrent import gated_delta
from shared.spec.gated_delta import CHUNK
from shared.spec.recurrent_state import WINDOW


class RecurrentState(NamedTuple):
    """States of rows (or slots) in all recurrent layers."""

    recurrent: Float[jax.Array, "L B H K V"]
    window: Float[jax.Array, "L B 3 C"]


class ReplayInputs(NamedTuple):
    """Replay inputs: the inputs of a verify's nodes in all layers, exactly as it used them."""

    k: Float[jax.Array, "L B N H K"]
    v: Float[jax.Array, "L B N H V"]
    log_decay: Float[jax.Array, "L B N H"]
    beta: Float[jax.Array, "L B N H"] | None
    inputs: Float[jax.Array, "L B N C"]


def conv(
    windows: Float[jax.Array, "*rows 3 C"],
    inputs: Float[jax.Array, "*rows C"],
    weight: Float[jax.Array, "C 4"],
    bias: Float[jax.Array, " C"] | None,
) -> Float[jax.Array, "*rows C"]:
    """Computes the depthwise causal convolution of width 4 and silu, in float32."""
    # Tap by tap: a sum over an axis that is not the last takes four times as long on a CPU. And in
    # steps: XLA's other operations, and so the TP size, would determine which of two products is
    # rounded before the addition.
    taps = jnp.stack([*(windows[..., i, :] for i in range(WINDOW)), inputs]).astype(jnp.float32)

    def add(total: jax.Array, tap: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + tap[0] * tap[1], None

    total, _ = scan(add, jnp.zeros(inputs.shape, jnp.float32), (taps, weight.T.astype(jnp.float32)))
    return layers.silu(total if bias is None else total + bias.astype(jnp.float32))


def chain_windows(
    window: Float[jax.Array, "B 3 C"],
    inputs: Float[jax.Array, "T C"],
    request: Int[jax.Array, " T"],
    places: Int[jax.Array, " T"],
) -> Float[jax.Array, "T 3 C"]:
    """Returns the convolution window before each token of many requests.

    Args:
      window: Each request's last inputs before its tokens.
      inputs: Inputs of the tokens of all requests, concatenated.
      request: Request of each token.
      places: Index of each token among its request's tokens.
    """
    back = jnp.arange(WINDOW, 0, -1, dtype=jnp.int32)
    number = jnp.arange(len(inputs), dtype=jnp.int32)[:, None]
    from_inputs = inputs[jnp.maximum(number - back, 0)]
    place = places[:, None] - back  # below 0: in the old window
    from_window = window[request[:, None], jnp.clip(place + WINDOW, 0, WINDOW - 1)]
    return jnp.where((place >= 0)[..., None], from_inputs, from_window)


def chain_end(
    window: Float[jax.Array, "B 3 C"],
    inputs: Float[jax.Array, "T C"],
    row_starts: Int[jax.Array, " B1"],
    taken: Int[jax.Array, " B"],
) -> Float[jax.Array, "B 3 C"]:
    """Returns the convolution window after the first `taken` tokens of each request."""
    place = taken[:, None] + jnp.arange(-WINDOW, 0, dtype=jnp.int32)
    from_inputs = inputs[jnp.clip(row_starts[:-1, None] + place, 0, len(inputs) - 1)]
    request = jnp.arange(len(window))[:, None]
    from_window = window[request, jnp.clip(place + WINDOW, 0, WINDOW - 1)]
    return jnp.where((place >= 0)[..., None], from_inputs, from_window)


def tree_windows(
    window: Float[jax.Array, "B 3 C"],
    inputs: Float[jax.Array, "B N C"],
    parents: Int[jax.Array, "B N"] | None,
) -> Float[jax.Array, "B N 3 C"]:
    """Returns the window before each node of a draft tree; `parents` is None for chains."""
    N, rows = inputs.shape[1], jnp.arange(len(window))[:, None]
    if parents is None:
        parents = jnp.broadcast_to(jnp.arange(-1, N - 1, dtype=jnp.int32), inputs.shape[:2])
    else:
        parents = parents.at[:, 0].set(-1)
    # Indices into window + inputs: node i is WINDOW + i, the root's parent is WINDOW - 1.
    place, taps = parents + WINDOW, []
    for _ in range(WINDOW):
        taps.append(place)
        node = jnp.maximum(place - WINDOW, 0)
        place = jnp.where(place >= WINDOW, parents[rows, node] + WINDOW, place - 1)
    together = jnp.concatenate([window, inputs], axis=1)
    return together[rows[..., None], jnp.stack(taps[::-1], axis=-1)]


def path_window(
    window: Float[jax.Array, "L B 3 C"],
    inputs: Float[jax.Array, "L B W C"],
    taken: Int[jax.Array, " B"],
) -> Float[jax.Array, "L B 3 C"]:
    """Returns the window after `taken` inputs of a path: rows `[taken, taken + 3)` of both."""
    rows = jnp.concatenate([window, inputs], axis=2)
    index = taken[:, None] + jnp.arange(WINDOW, dtype=jnp.int32)
    return rows[:, jnp.arange(len(taken))[:, None], index]


def ends_chunk(
    save_after: Int[jax.Array, " B"], num_tokens: Int[jax.Array, " B"]
) -> Bool[jax.Array, " B"]:
    """Returns True if a prefill has a chunk that ends after `save_after` tokens."""
    is_end = (save_after % CHUNK == 0) | (save_after == num_tokens)
    return is_end & (save_after > 0) & (save_after <= num_tokens)


def replay(
    state: RecurrentState,
    kept: ReplayInputs,
    path: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    save_after: Int[jax.Array, " B"],
) -> tuple[RecurrentState, RecurrentState, Bool[jax.Array, " B"]]:
    """Advances each row's state along its accepted path, in all layers at once.

    Returns the states after the path, the snapshots, and the mask of rows with a snapshot.
    """
    rows = jnp.arange(len(path))[:, None]
    *steps, inputs = jax.tree.map(lambda x: x[:, rows, path], kept)
    tokens = tuple(jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), steps))

    def advance(
        carry: tuple[jax.Array, jax.Array], token: tuple[jax.Array, tuple[jax.Array, ...]]
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        recurrent, saved = carry
        number, kept_inputs = token
        after = gated_delta.update(recurrent, *kept_inputs)
        recurrent = jnp.where(_per_row(number < counts), after, recurrent)
        return (recurrent, jnp.where(_per_row(number + 1 == save_after), recurrent, saved)), None

    numbers = jnp.arange(path.shape[1])
    carry = (state.recurrent, state.recurrent)
    (recurrent, saved), _ = scan(advance, carry, (numbers, tokens))
    passed = (save_after >= 1) & (save_after <= counts)
    save_window = path_window(state.window, inputs, jnp.where(passed, save_after, 0))
    new_window = path_window(state.window, inputs, counts)
    return RecurrentState(recurrent, new_window), RecurrentState(saved, save_window), passed


def _per_row(flags: Bool[jax.Array, " B"]) -> Bool[jax.Array, "1 B 1 1 1"]:
    return flags[None, :, None, None, None]
