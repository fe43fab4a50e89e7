"""The layers of a model over flat rows: attention on paged KV, gated delta, and the MLP."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import attention, gated_delta, layers, mamba_state
from jax_impl.ops.attention import KV, Rows
from jax_impl.ops.linear import linear
from jax_impl.ops.mamba_state import DeltaState, Kept
from jax_impl.weights import Attention, GatedDelta, Layers
from shared.models.config import ModelConfig
from shared.spec.layers import rotary_frequencies

Hidden = Float[jax.Array, "R hidden"]
Angles = tuple[Float[jax.Array, "R half"], Float[jax.Array, "R half"]]
DeltaMixer = Callable[[int, GatedDelta, Hidden], Float[jax.Array, "R H V"]]
"""How a pass runs a gated-delta layer: its place among its kind, the stack's weights and the normed
input; gives the outputs before the norm."""


def angles(config: ModelConfig, positions: Int[jax.Array, " R"]) -> Angles:
    """Cosine and sine of the rotation at each row's position."""
    frequencies = jnp.asarray(rotary_frequencies(config.rotary))
    return layers.rotary_angles(positions, frequencies, config.rotary.attention_factor)


def attention_layer(
    config: ModelConfig,
    weights: Attention,
    layer: int,
    x: Float[jax.Array, "R inputs"],
    rows: Rows,
    turn: Angles,
    kv: KV,
) -> tuple[Hidden, KV]:
    """One attention layer, from the normed input to the output projection.

    Args:
      layer: Place in the stack of weights and of pools.
      turn: See `angles`.
      kv: The pools of the stack.
    """
    q, k, v, gate = _project(config, linear(x, weights.qkv[layer]))
    if config.qk_norm:
        q = layers.rms_norm(q, weights.q_norm[layer], config.rms_eps)
        k = layers.rms_norm(k, weights.k_norm[layer], config.rms_eps)
    q, k = layers.apply_rotary(q, *turn), layers.apply_rotary(k, *turn)
    kv = _write(kv, layer, rows, k, v)
    out = _attend(q, kv, layer, rows)
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return linear(out.reshape(len(x), -1), weights.out[layer]), kv


def write_keys(
    config: ModelConfig,
    weights: Attention,
    layer: int,
    x: Float[jax.Array, "R inputs"],
    rows: Rows,
    turn: Angles,
    kv: KV,
) -> KV:
    """Writes the keys and values of one layer's rows, which nothing queries; see `attention_layer`.

    For a model with norms of its keys.
    """
    keys = config.num_kv_heads * config.head_size
    k, v = jnp.split(linear(x, weights.qkv[layer][-2 * keys :]), 2, axis=1)
    k, v = (part.reshape(len(x), -1, config.head_size) for part in (k, v))
    k = layers.rms_norm(k, weights.k_norm[layer], config.rms_eps)
    return _write(kv, layer, rows, layers.apply_rotary(k, *turn), v)


def _project(
    config: ModelConfig, qkv: Float[jax.Array, "R out"]
) -> tuple[
    Float[jax.Array, "R Hq D"],
    Float[jax.Array, "R Hk D"],
    Float[jax.Array, "R Hk D"],
    Float[jax.Array, "R Hq D"] | None,
]:
    """Takes the fused projection apart: queries, keys, values, and the gate where there is one."""
    R, D, keys = len(qkv), config.head_size, config.num_kv_heads * config.head_size
    queries = qkv.shape[1] - 2 * keys
    q, k, v = jnp.split(qkv, [queries, queries + keys], axis=1)
    k, v = k.reshape(R, -1, D), v.reshape(R, -1, D)
    if not config.attention_gate:
        return q.reshape(R, -1, D), k, v, None
    pairs = q.reshape(R, config.num_heads, 2, D)  # per head its query rows, then its gate rows
    return pairs[:, :, 0], k, v, pairs[:, :, 1]


def _write(
    kv: KV, layer: int, rows: Rows, k: Float[jax.Array, "R Hk D"], v: Float[jax.Array, "R Hk D"]
) -> KV:
    """Writes into the stack as one long pool, so that no layer's pool is copied out and back."""
    num_pages = kv.shape[2]
    pool = kv.reshape(-1, *kv.shape[3:])
    for i, new in enumerate((k, v)):
        table = rows.page_table + (2 * layer + i) * num_pages
        pool = attention.write(pool, table, rows.request, rows.places, rows.is_real, new)
    return pool.reshape(kv.shape)


def _attend(
    q: Float[jax.Array, "R Hq D"], kv: KV, layer: int, rows: Rows
) -> Float[jax.Array, "R Hq D"]:
    """Reads the stack as one long pool, so that no layer's pool is copied for a kernel."""
    pool, num_pages = kv.reshape(-1, *kv.shape[3:]), kv.shape[2]
    return attention.attend(
        q=q,
        k_pages=pool,
        v_pages=pool,
        page_table=rows.page_table,
        request=rows.request,
        row_starts=rows.row_starts,
        first=rows.first,
        until=rows.until,
        window=rows.window,
        most_rows=rows.most_rows,
        k_offset=2 * layer * num_pages,
        v_offset=(2 * layer + 1) * num_pages,
    )


def mlp(weights: Layers, layer: int, x: Hidden) -> Hidden:
    """The gated MLP of one layer of a stack."""
    return layers.gated_mlp(x, weights.gate_up[layer], weights.down[layer])


def gated_delta_layer(
    config: ModelConfig, weights: GatedDelta, place: int, x: Hidden, mixer: DeltaMixer
) -> Hidden:
    """One gated-delta layer, from the normed input to the output projection."""
    out = mixer(place, weights, x)
    z = linear(x, weights.z[place]).reshape(out.shape)
    gated = gated_delta.gated_norm(out, z, weights.norm[place], config.rms_eps)
    return linear(gated.reshape(len(x), -1), weights.out[place])


def _gates(
    weights: GatedDelta, place: int, x: Hidden
) -> tuple[Float[jax.Array, "R H"], Float[jax.Array, "R H"]]:
    b, a = jnp.split(linear(x, weights.ba[place]), 2, axis=1)
    return gated_delta.gates(b, a, weights.a_log[place], weights.dt_bias[place])


def _qkv(
    config: ModelConfig,
    weights: GatedDelta,
    place: int,
    windows: Float[jax.Array, "R 3 C"],
    inputs: Float[jax.Array, "R C"],
) -> tuple[Float[jax.Array, "R H K"], Float[jax.Array, "R H K"], Float[jax.Array, "R H V"]]:
    sizes = config.gated_delta
    assert sizes is not None  # the config has such layers
    channels = mamba_state.conv(windows, inputs, weights.conv[place])
    return gated_delta.split(channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size)


class Chunks:
    """Gated-delta layers of a prefill: each request's rows in chunks, the states carried on.

    Attributes:
      new, saved: The states after the rows, and after `save_after` of them where that is the end of
        a chunk; of all layers.
    """

    def __init__(
        self,
        config: ModelConfig,
        state: DeltaState,
        row_starts: Int[jax.Array, " B1"],
        rows: Rows,
        save_after: Int[jax.Array, " B"],
    ) -> None:
        self._config, self._state, self._request = config, state, rows.request
        self._row_starts, self._save_after = row_starts, save_after
        row = jnp.arange(len(rows.request), dtype=jnp.int32)
        self._places = row - row_starts[rows.request]
        self._new: list[DeltaState] = []
        self._saved: list[DeltaState] = []

    def __call__(self, place: int, weights: GatedDelta, x: Hidden) -> Float[jax.Array, "R H V"]:
        """As a `DeltaMixer`."""
        inputs = linear(x, weights.qkv[place])
        window, row_starts = self._state.window[place], self._row_starts
        windows = mamba_state.chain_windows(window, inputs, self._request, self._places)
        qkv = _qkv(self._config, weights, place, windows, inputs)
        gates, state = _gates(weights, place, x), self._state.recurrent[place]
        after, out, saved = gated_delta.chunked(state, *qkv, *gates, row_starts, self._save_after)
        lengths = row_starts[1:] - row_starts[:-1]
        ends = (
            mamba_state.chain_end(window, inputs, row_starts, taken)
            for taken in (lengths, jnp.clip(self._save_after, 0, lengths))
        )
        self._new.append(DeltaState(after, next(ends)))
        self._saved.append(DeltaState(saved, next(ends)))
        return out

    @property
    def new(self) -> DeltaState:
        return _stacked(self._new)

    @property
    def saved(self) -> DeltaState:
        return _stacked(self._saved)


class Tree:
    """Gated-delta layers of a verify: each node goes on from its parent, its inputs are kept."""

    def __init__(
        self,
        config: ModelConfig,
        state: DeltaState,
        parents: Int[jax.Array, "B N"] | None,
        row_of: Int[jax.Array, "B N"],
        request: Int[jax.Array, " R"],
        node: Int[jax.Array, " R"],
    ) -> None:
        self._config, self._state = config, state
        self._parents, self._row_of = parents, row_of
        self._request, self._node = request, node
        self._kept: list[Kept] = []

    def __call__(self, place: int, weights: GatedDelta, x: Hidden) -> Float[jax.Array, "R H V"]:
        """As a `DeltaMixer`."""
        inputs = linear(x, weights.qkv[place])[self._row_of]  # [B, N, C]
        windows = mamba_state.tree_windows(self._state.window[place], inputs, self._parents)
        B, N, C = inputs.shape
        flat = _qkv(
            self._config, weights, place, windows.reshape(B * N, -1, C), inputs.reshape(B * N, C)
        )
        q, k, v = (part.reshape(B, N, *part.shape[1:]) for part in flat)
        log_decay, beta = (gate[self._row_of] for gate in _gates(weights, place, x))
        self._kept.append(Kept(k, v, log_decay, beta, inputs))
        recurrent = self._state.recurrent[place]
        out = gated_delta.verify(recurrent, q, k, v, log_decay, beta, self._parents)
        return out[self._request, self._node]

    def kept(self) -> Kept:
        """The kept inputs of all layers, stacked."""
        return jax.tree.map(lambda *layers: jnp.stack(layers), *self._kept)


class OneToken:
    """Gated-delta layers of plain decoding: one token a request, and the state moves with it.

    Attributes:
      new: The states after the token, of all layers.
    """

    def __init__(self, config: ModelConfig, state: DeltaState) -> None:
        self._config, self._state = config, state
        self._new: list[DeltaState] = []

    def __call__(self, place: int, weights: GatedDelta, x: Hidden) -> Float[jax.Array, "R H V"]:
        """As a `DeltaMixer`."""
        inputs, window = linear(x, weights.qkv[place]), self._state.window[place]
        qkv = _qkv(self._config, weights, place, window, inputs)
        gates = _gates(weights, place, x)
        after, out = gated_delta.step(self._state.recurrent[place], *qkv, *gates)
        following = jnp.concatenate([window[:, 1:], inputs[:, None]], axis=1)
        self._new.append(DeltaState(after, following))
        return out

    @property
    def new(self) -> DeltaState:
        return _stacked(self._new)


def _stacked(states: list[DeltaState]) -> DeltaState:
    return jax.tree.map(lambda *layers: jnp.stack(layers), *states)
