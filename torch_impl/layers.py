"""The layers of a model over flat rows: attention on paged KV, the MLP, gated-delta layers."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.models.config import ModelConfig
from shared.spec import layers as layers_spec
from torch_impl.ops import attention, gated_delta, layers, mamba_state
from torch_impl.ops.attention import Rows
from torch_impl.ops.linear import linear
from torch_impl.ops.mamba_state import DeltaState, Kept
from torch_impl.weights import Attention, GatedDelta, Layer

Hidden = Float[Tensor, "R hidden"]
Pools = Float[Tensor, "2 pages page H D"]


@dataclass(frozen=True)
class Turned:
    """The rows of a pass with the cosines and sines of their positions."""

    rows: Rows
    cos: Float[Tensor, "R half"]
    sin: Float[Tensor, "R half"]


DeltaMixer = Callable[[int, GatedDelta, Hidden], Float[Tensor, "R H V"]]
"""How a pass runs a gated-delta layer: its place among its kind, its weights and the normed input;
gives the outputs before the norm."""


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Float[Tensor, " half"]:
    """The rotary frequencies of a model or a head, which `turn` reads."""
    return torch.from_numpy(layers_spec.rotary_frequencies(config.rotary)).to(device)


def turn(config: ModelConfig, frequencies: Float[Tensor, " half"], rows: Rows) -> Turned:
    """Computes the angles of a pass once for all its layers."""
    factor = config.rotary.attention_factor
    return Turned(rows, *layers.rotary_angles(rows.positions, frequencies, factor))


def attention_layer(
    config: ModelConfig,
    weights: Attention,
    x: Float[Tensor, "R inputs"],
    turned: Turned,
    pools: Pools,
) -> Hidden:
    """One attention layer, from the normed input to the output projection; writes the pools."""
    rows = turned.rows
    q, k, v, gate = _project(config, linear(x, weights.qkv))
    if weights.q_norm is not None:
        q = layers.rms_norm(q, weights.q_norm, config.rms_eps)
        k = layers.rms_norm(k, weights.k_norm, config.rms_eps)
    q = layers.apply_rotary(q, turned.cos, turned.sin)
    k = layers.apply_rotary(k, turned.cos, turned.sin)
    _write(pools, rows, k, v)
    out = attention.attend(
        q,
        pools[0],
        pools[1],
        rows.page_table,
        rows.request,
        rows.row_starts,
        rows.first,
        rows.until,
        rows.window,
        rows.most_rows,
    )
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return linear(out.flatten(1), weights.out)


def write_keys(
    config: ModelConfig,
    weights: Attention,
    x: Float[Tensor, "R inputs"],
    turned: Turned,
    pools: Pools,
) -> None:
    """Writes the keys and values of one layer's rows, which nothing queries; see `attention_layer`.

    For a model with norms of its keys.
    """
    rows, keys = turned.rows, config.num_kv_heads * config.head_size
    k, v = linear(x, weights.qkv[-2 * keys :]).unflatten(1, (2, -1, config.head_size)).unbind(1)
    k = layers.rms_norm(k, weights.k_norm, config.rms_eps)
    _write(pools, rows, layers.apply_rotary(k, turned.cos, turned.sin), v)


def _write(
    pools: Pools, rows: Rows, k: Float[Tensor, "R Hk D"], v: Float[Tensor, "R Hk D"]
) -> None:
    for pool, values in zip(pools, (k, v), strict=True):
        attention.write(pool, rows.page_table, rows.request, rows.places, rows.is_real, values)


def _project(
    config: ModelConfig, qkv: Float[Tensor, "R out"]
) -> tuple[
    Float[Tensor, "R Hq D"],
    Float[Tensor, "R Hk D"],
    Float[Tensor, "R Hk D"],
    Float[Tensor, "R Hq D"] | None,
]:
    """Takes the fused projection apart: queries, keys, values, and the gate where there is one."""
    D, keys = config.head_size, config.num_kv_heads * config.head_size
    q, k, v = qkv.split([qkv.shape[1] - 2 * keys, keys, keys], dim=1)
    k, v = k.unflatten(1, (-1, D)), v.unflatten(1, (-1, D))
    if not config.attention_gate:
        return q.unflatten(1, (-1, D)), k, v, None
    pairs = q.unflatten(1, (-1, 2, D))  # per head its query rows, then its gate rows
    return pairs[:, :, 0], k, v, pairs[:, :, 1]


def feed_forward(config: ModelConfig, weights: Layer, x: Hidden) -> Hidden:
    """The second half of a decoder layer, the residual included."""
    normed = layers.rms_norm(x, weights.post_attention_norm, config.rms_eps)
    return x + layers.gated_mlp(normed, weights.gate_up, weights.down)


def gated_delta_layer(
    config: ModelConfig, weights: GatedDelta, place: int, x: Hidden, mixer: DeltaMixer
) -> Hidden:
    """One gated-delta layer, from the normed input to the output projection."""
    out = mixer(place, weights, x)
    z = linear(x, weights.z).view(out.shape)
    gated = gated_delta.gated_norm(out, z, weights.norm, config.rms_eps)
    return linear(gated.flatten(1), weights.out)


def _gates(weights: GatedDelta, x: Hidden) -> tuple[Float[Tensor, "R H"], Float[Tensor, "R H"]]:
    b, a = linear(x, weights.ba).chunk(2, dim=1)
    return gated_delta.gates(b, a, weights.a_log, weights.dt_bias)


def _qkv(
    config: ModelConfig,
    weights: GatedDelta,
    windows: Float[Tensor, "R 3 C"],
    inputs: Float[Tensor, "R C"],
) -> tuple[Float[Tensor, "R H K"], Float[Tensor, "R H K"], Float[Tensor, "R H V"]]:
    sizes = config.gated_delta
    channels = mamba_state.conv(windows, inputs, weights.conv)
    return gated_delta.split(channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size)


class Chunks:
    """Gated-delta layers of a prefill: each request's rows in chunks, the states carried on.

    Attributes:
      new, saved: Per layer the state after the rows, and after `save_after` of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        state: DeltaState,
        row_starts: Int[Tensor, " B1"],
        rows: Rows,
        save_after: Int[Tensor, " B"],
    ) -> None:
        self._config, self._state, self._rows = config, state, rows
        self._row_starts, self._save_after = row_starts, save_after
        self._row = torch.arange(len(rows.request), dtype=torch.int32, device=row_starts.device)
        self._place = self._row - row_starts[rows.request]
        self.new: list[tuple[Tensor, Tensor]] = []
        self.saved: list[tuple[Tensor, Tensor]] = []

    def __call__(self, place: int, weights: GatedDelta, x: Hidden) -> Float[Tensor, "R H V"]:
        """See `DeltaMixer`."""
        window, inputs = self._state.window[place], linear(x, weights.qkv)
        windows = mamba_state.chain_windows(window, inputs, self._rows.request, self._place)
        tokens = (*_qkv(self._config, weights, windows, inputs), *_gates(weights, x))
        recurrent, out, saved = gated_delta.chunked(
            self._state.recurrent[place], *tokens, self._row_starts, self._save_after
        )
        taken = self._row_starts[1:] - self._row_starts[:-1]
        ends = (
            mamba_state.chain_end(window, inputs, self._row_starts, count)
            for count in (taken, torch.minimum(self._save_after.clamp(min=0), taken))
        )
        self.new.append((recurrent, next(ends)))
        self.saved.append((saved, next(ends)))
        return out


class OneToken:
    """Gated-delta layers of plain decoding: one token a request, and the state moves with it.

    Attributes:
      new: Per layer the state after the token.
    """

    def __init__(self, config: ModelConfig, state: DeltaState) -> None:
        self._config, self._state = config, state
        self.new: list[tuple[Tensor, Tensor]] = []

    def __call__(self, place: int, weights: GatedDelta, x: Hidden) -> Float[Tensor, "R H V"]:
        """See `DeltaMixer`."""
        window, inputs = self._state.window[place], linear(x, weights.qkv)
        qkv = _qkv(self._config, weights, window, inputs)
        recurrent, out = gated_delta.step(self._state.recurrent[place], *qkv, *_gates(weights, x))
        self.new.append((recurrent, torch.cat([window[:, 1:], inputs[:, None]], dim=1)))
        return out


class Tree:
    """Gated-delta layers of a verify: each node goes on from its parent, its inputs are kept."""

    def __init__(
        self,
        config: ModelConfig,
        state: DeltaState,
        parents: Int[Tensor, "B N"] | None,
        row_of: Int[Tensor, "B N"],
        request: Int[Tensor, " R"],
        node: Int[Tensor, " R"],
    ) -> None:
        """`parents` is None where all trees are chains."""
        self._config, self._state, self._parents = config, state, parents
        self._row_of, self._request, self._node = row_of, request, node
        self._kept: list[tuple[Tensor, ...]] = []

    def __call__(self, place: int, weights: GatedDelta, x: Hidden) -> Float[Tensor, "R H V"]:
        """See `DeltaMixer`."""
        inputs = linear(x, weights.qkv)[self._row_of]  # [B, N, C]
        windows = mamba_state.tree_windows(self._state.window[place], inputs, self._parents)
        flat = _qkv(self._config, weights, windows.flatten(0, 1), inputs.flatten(0, 1))
        q, k, v = (part.unflatten(0, self._row_of.shape) for part in flat)
        log_decay, beta = (gate[self._row_of] for gate in _gates(weights, x))
        self._kept.append((k, v, log_decay, beta, inputs))
        recurrent = self._state.recurrent[place]
        out = gated_delta.verify(recurrent, q, k, v, log_decay, beta, self._parents)
        return out[self._request, self._node]

    def kept(self) -> Kept:
        """The kept inputs of all layers, stacked."""
        return Kept(*(torch.stack(parts) for parts in zip(*self._kept, strict=True)))
