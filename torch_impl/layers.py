"""The layers of a model over flat rows: attention on paged KV, the MLP, gated-delta layers."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.models.config import GatedDeltaConfig, ModelConfig
from shared.spec import layers as layers_spec
from torch_impl.ops import layers, linear, mamba_state, mix
from torch_impl.ops.attention import Rows
from torch_impl.ops.linear import Stream
from torch_impl.ops.mamba_state import DeltaState, DeltaWeights, Kept
from torch_impl.ops.mix import Angles, HeadNorms, Heads, PagedKV
from torch_impl.weights import Attention, GatedDelta, Layer

Hidden = Float[Tensor, "R hidden"]
Pools = Float[Tensor, "L 2 pages page H D"]

DeltaMixer = Callable[[int, GatedDelta, Float[Tensor, "R outputs"]], Float[Tensor, "R values"]]
"""How a pass runs a gated-delta layer: from its place among its kind, its weights and its projected
inputs to the heads' outputs after the gated norm."""


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Float[Tensor, " half"]:
    """The rotary frequencies of a model or a head, which `angles` reads."""
    return torch.from_numpy(layers_spec.rotary_frequencies(config.rotary)).to(device)


def angles(config: ModelConfig, frequencies: Float[Tensor, " half"], rows: Rows) -> Angles:
    """The rotation at each row's position, once for all layers of a pass."""
    factor = config.rotary.attention_factor
    return Angles(*layers.rotary_angles(rows.positions, frequencies, factor))


def head_norms(config: ModelConfig, weights: Attention) -> HeadNorms | None:
    """The norms of a layer's heads, where the model has them."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    return HeadNorms(weights.q_norm, weights.k_norm, config.rms_eps)


def attention_layer(
    config: ModelConfig,
    layer: Layer,
    qkv: Float[Tensor, "R outputs"],
    stream: Stream,
    turn: Angles,
    rows: Rows,
    kv: PagedKV,
    place: int,
) -> Stream:
    """A decoder layer with attention, from its projection on; writes the pools at `place`."""
    assert isinstance(layer.mixer, Attention)
    norms = head_norms(config, layer.mixer)
    mixed = mix.mix(qkv, Heads.of(config), norms, turn, rows, kv, place)
    return mlp(config, layer, linear.added_product(mixed, layer.mixer.out, stream))


def gated_delta_layer(
    config: ModelConfig,
    layer: Layer,
    inputs: Float[Tensor, "R outputs"],
    stream: Stream,
    mixer: DeltaMixer,
    place: int,
) -> Stream:
    """A decoder layer with the gated delta rule, from its projection on."""
    assert isinstance(layer.mixer, GatedDelta)
    mixed = mixer(place, layer.mixer, inputs)
    return mlp(config, layer, linear.added_product(mixed, layer.mixer.out, stream))


def mlp(config: ModelConfig, layer: Layer, stream: Stream) -> Stream:
    """The gated MLP with its norm before and the residual behind."""
    x = linear.gated_product(stream, layer.post_norm, config.rms_eps, layer.mlp.gate_up)
    return linear.added_product(x, layer.mlp.down, stream)


def write_keys(
    config: ModelConfig,
    layer: Layer,
    x: Float[Tensor, "R inputs"],
    turn: Angles,
    rows: Rows,
    kv: Pools,
    place: int,
) -> None:
    """Writes the keys and values of one layer's rows, which nothing queries.

    For a model with norms of its keys.
    """
    assert isinstance(layer.mixer, Attention)
    keys, norms = config.num_kv_heads * config.head_size, head_norms(config, layer.mixer)
    assert norms is not None  # the model has them
    inputs = layer.mixer.inputs
    projected = linear.product(x, inputs, len(inputs.values) - 2 * keys)
    mix.mix_keys(projected, Heads.of(config), norms, turn, rows, kv, place)


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


class Chunks:
    """Gated-delta layers of a prefill: each request's rows in chunks, the states carried on."""

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
        self._new: list[DeltaState] = []
        self._saved: list[DeltaState] = []

    def __call__(
        self, place: int, weights: GatedDelta, inputs: Float[Tensor, "R outputs"]
    ) -> Float[Tensor, "R values"]:
        out, *new, saved = mamba_state.mix_chunks(
            inputs,
            delta_weights(self._config, weights),
            _sizes(self._config),
            self._state.recurrent[place],
            self._state.window[place],
            self._row_starts,
            self._rows.request,
            self._save_after,
        )
        self._new.append(DeltaState(*(x[None] for x in new)))
        self._saved.append(DeltaState(*(x[None] for x in saved)))
        return out

    @property
    def new(self) -> DeltaState:
        """The states of all layers after the rows."""
        return mamba_state.joined(self._new)

    @property
    def saved(self) -> DeltaState:
        """The states of all layers after `save_after` of each request's rows."""
        return mamba_state.joined(self._saved)


class OneToken:
    """Gated-delta layers of plain decoding: one token a request, and the state moves with it."""

    def __init__(self, config: ModelConfig, state: DeltaState) -> None:
        self._config, self._state = config, state
        self._new: list[DeltaState] = []

    def __call__(
        self, place: int, weights: GatedDelta, inputs: Float[Tensor, "R outputs"]
    ) -> Float[Tensor, "R values"]:
        out, *new = mamba_state.mix_step(
            inputs,
            delta_weights(self._config, weights),
            _sizes(self._config),
            self._state.recurrent[place],
            self._state.window[place],
        )
        self._new.append(DeltaState(*(x[None] for x in new)))
        return out

    @property
    def new(self) -> DeltaState:
        """The states of all layers after the token."""
        return mamba_state.joined(self._new)


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
        self._kept: list[Kept] = []

    def __call__(
        self, place: int, weights: GatedDelta, inputs: Float[Tensor, "R outputs"]
    ) -> Float[Tensor, "R values"]:
        out, kept = mamba_state.mix_tree(
            inputs,
            delta_weights(self._config, weights),
            _sizes(self._config),
            self._state.recurrent[place],
            self._state.window[place],
            self._parents,
            self._row_of,
            self._request,
            self._node,
        )
        self._kept.append(kept)
        return out

    def kept(self) -> Kept:
        """The kept inputs of all layers."""
        return mamba_state.joined(self._kept)
