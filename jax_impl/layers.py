"""The layers of a model over flat rows: attention on paged KV, the MLP, gated-delta layers."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import layers, linear, mamba_state, mix
from jax_impl.ops.attention import KV, Rows
from jax_impl.ops.linear import Stream
from jax_impl.ops.mamba_state import DeltaState, DeltaWeights, Kept
from jax_impl.ops.mix import Angles, HeadNorms, Heads, PagedKV
from jax_impl.weights import Attention, GatedDelta, Layer
from shared.models.config import GatedDeltaConfig, ModelConfig
from shared.spec.layers import rotary_frequencies

Hidden = Float[jax.Array, "R hidden"]
Place = int | Int[jax.Array, ""]
"""A layer's number among its kind."""

Left = Any
"""What one gated-delta layer leaves: its states, or what a replay needs of its nodes."""


class DeltaMixer(Protocol):
    """How a pass runs its gated-delta layers.

    Attributes:
      left: What each layer left, in their order; a pass adds to it layer by layer.
    """

    left: list[Left]

    def __call__(
        self, place: Place, weights: GatedDelta, inputs: Float[jax.Array, "R outputs"]
    ) -> tuple[Float[jax.Array, "R values"], Left]:
        """From a layer's projected inputs to the heads' outputs after the gated norm."""
        ...


def angles(config: ModelConfig, positions: Int[jax.Array, " R"]) -> Angles:
    """The rotation at each row's position, once for all layers of a pass."""
    frequencies = jnp.asarray(rotary_frequencies(config.rotary))
    factor = config.rotary.attention_factor
    return Angles(*layers.rotary_angles(positions, frequencies, factor))


def head_norms(config: ModelConfig, weights: Attention) -> HeadNorms | None:
    """The norms of a layer's heads, where the model has them."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    return HeadNorms(weights.q_norm, weights.k_norm, config.rms_eps)


def attention_layer(
    config: ModelConfig,
    layer: Layer,
    qkv: Float[jax.Array, "R outputs"],
    stream: Stream,
    turn: Angles,
    rows: Rows,
    kv: PagedKV,
    place: Place,
) -> tuple[Stream, PagedKV]:
    """A decoder layer with attention, from its projection on; its pools are those at `place`."""
    assert isinstance(layer.mixer, Attention)
    norms = head_norms(config, layer.mixer)
    mixed, kv = mix.mix(qkv, Heads.of(config), norms, turn, rows, kv, place)
    return mlp(config, layer, linear.added_product(mixed, layer.mixer.out, stream)), kv


def gated_delta_layer(
    config: ModelConfig,
    layer: Layer,
    inputs: Float[jax.Array, "R outputs"],
    stream: Stream,
    mixer: DeltaMixer,
    place: Place,
) -> tuple[Stream, Left]:
    """A decoder layer with the gated delta rule, from its projection on."""
    assert isinstance(layer.mixer, GatedDelta)
    mixed, left = mixer(place, layer.mixer, inputs)
    return mlp(config, layer, linear.added_product(mixed, layer.mixer.out, stream)), left


def mlp(config: ModelConfig, layer: Layer, stream: Stream) -> Stream:
    """The gated MLP with its norm before and the residual behind."""
    x = linear.gated_product(stream, layer.post_norm, config.rms_eps, layer.mlp.gate_up)
    return linear.added_product(x, layer.mlp.down, stream)


def write_keys(
    config: ModelConfig,
    layer: Layer,
    x: Float[jax.Array, "R inputs"],
    turn: Angles,
    rows: Rows,
    kv: KV,
    place: Place,
) -> KV:
    """Writes the keys and values of one layer's rows, which nothing queries.

    For a model with norms of its keys.
    """
    assert isinstance(layer.mixer, Attention)
    keys, norms = config.num_kv_heads * config.head_size, head_norms(config, layer.mixer)
    inputs = layer.mixer.inputs
    assert norms is not None  # the model has them
    projected = linear.product(x, inputs, inputs.values.shape[-2] - 2 * keys)
    return mix.mix_keys(projected, Heads.of(config), norms, turn, rows, kv, place)


def delta_weights(config: ModelConfig, weights: GatedDelta) -> DeltaWeights:
    """What a gated-delta layer holds besides its two matrices."""
    return DeltaWeights(
        conv=weights.conv,
        a_log=weights.a_log,
        dt_bias=weights.dt_bias,
        norm=weights.norm,
        eps=config.rms_eps,
    )


def _sizes(config: ModelConfig) -> GatedDeltaConfig:
    assert config.gated_delta is not None  # a model with such layers has their sizes
    return config.gated_delta


def _of_layer(
    recurrent: Float[jax.Array, "B H K V"], window: Float[jax.Array, "B 3 C"]
) -> DeltaState:
    """The states of one layer, as a stack of one."""
    return DeltaState(recurrent[None], window[None])


class Chunks:
    """Gated-delta layers of a prefill: each request's rows in chunks, the states carried on."""

    def __init__(
        self,
        config: ModelConfig,
        state: DeltaState,
        row_starts: Int[jax.Array, " B1"],
        rows: Rows,
        save_after: Int[jax.Array, " B"],
    ) -> None:
        self._config, self._state, self._rows = config, state, rows
        self._row_starts, self._save_after = row_starts, save_after
        self.left: list[tuple[DeltaState, DeltaState]] = []

    def __call__(
        self, place: Place, weights: GatedDelta, inputs: Float[jax.Array, "R outputs"]
    ) -> tuple[Float[jax.Array, "R values"], Left]:
        out, recurrent, window, saved = mamba_state.mix_chunks(
            inputs=inputs,
            weights=delta_weights(self._config, weights),
            sizes=_sizes(self._config),
            recurrent=self._state.recurrent[place],
            window=self._state.window[place],
            row_starts=self._row_starts,
            request=self._rows.request,
            save_after=self._save_after,
        )
        return out, (_of_layer(recurrent, window), _of_layer(*saved))

    @property
    def new(self) -> DeltaState:
        """The states of all layers after the rows."""
        return mamba_state.joined([new for new, _ in self.left])

    @property
    def saved(self) -> DeltaState:
        """The states of all layers after `save_after` rows, where that is the end of a chunk."""
        return mamba_state.joined([saved for _, saved in self.left])


class OneToken:
    """Gated-delta layers of plain decoding: one token a request, and the state moves with it."""

    def __init__(self, config: ModelConfig, state: DeltaState) -> None:
        self._config, self._state = config, state
        self.left: list[DeltaState] = []

    def __call__(
        self, place: Place, weights: GatedDelta, inputs: Float[jax.Array, "R outputs"]
    ) -> tuple[Float[jax.Array, "R values"], Left]:
        out, recurrent, window = mamba_state.mix_step(
            inputs=inputs,
            weights=delta_weights(self._config, weights),
            sizes=_sizes(self._config),
            recurrent=self._state.recurrent[place],
            window=self._state.window[place],
        )
        return out, _of_layer(recurrent, window)

    @property
    def new(self) -> DeltaState:
        """The states of all layers after the token."""
        return mamba_state.joined(self.left)


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
        """`parents` is None where all trees are chains."""
        self._config, self._state, self._parents = config, state, parents
        self._row_of, self._request, self._node = row_of, request, node
        self.left: list[Kept] = []

    def __call__(
        self, place: Place, weights: GatedDelta, inputs: Float[jax.Array, "R outputs"]
    ) -> tuple[Float[jax.Array, "R values"], Left]:
        return mamba_state.mix_tree(
            inputs=inputs,
            weights=delta_weights(self._config, weights),
            sizes=_sizes(self._config),
            recurrent=self._state.recurrent[place],
            window=self._state.window[place],
            parents=self._parents,
            row_of=self._row_of,
            request=self._request,
            node=self._node,
        )

    def kept(self) -> Kept:
        """The kept inputs of all layers."""
        return mamba_state.joined(self.left)
