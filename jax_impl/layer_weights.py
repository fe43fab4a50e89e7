"""Decoder layers of named arrays: one record per layer, of a model or a draft head."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jax_impl.model_weights import Attention, LatentAttention, Layer, Mlp, Recurrent
from jax_impl.ops import Norm, Scale
from jax_impl.ops.attention.latent_attention import LatentWeights
from jax_impl.ops.gemm.linear import Matrix
from jax_impl.ops.gemm.per_layer import PerLayerInput
from jax_impl.ops.moe.experts import Experts, ParallelMLP
from shared.models.groups import LayerPlace, places
from shared.models.layers import LayerConfig
from shared.models.stacks import BIAS


def layers_of(
    stacks: Mapping[str, Any], prefix: str, like: Sequence[LayerConfig], in_stacks: bool
) -> tuple[Layer, ...]:
    """Returns the decoder layers with parameters of a prefix; `in_stacks`: see
    `jax_impl.weights.are_read_in_stacks`.
    """
    layers, ats = [], places(like)
    feeds = {"mlp": _mlp, "experts": _experts, "no_mlp": _nothing}
    # Kernels take QK norms from a stack by the layer's index in its pool. There, the later layers
    # of a head follow its first one, and layers that read the target's KV have its indices.
    alone = {
        f"{prefix}{x.mixer}."
        for x, each in zip(ats, like, strict=True)
        if x.mixer_index != x.pool_index or each.reads_target_kv
    }
    attention = partial(_attention, alone={*alone, "later.attention."})
    mixers = {"attention": attention, "gated_delta": _recurrent, "mamba2": _recurrent}
    mixers |= {"latent_attention": _latent_attention, "no_mixer": _nothing}
    for i, (x, at) in enumerate(zip(like, ats, strict=True)):

        def norm(name: str, i: int = i) -> Norm | None:
            return _vector(stacks.get(f"{prefix}{name}"), i, in_stacks)

        def parallel(at: LayerPlace) -> Recurrent | None:
            if at.parallel is None:
                return None
            return _recurrent(stacks, f"{prefix}{at.parallel}.", at.parallel_index, in_stacks)

        layer = Layer(
            input_norm=norm("input_norm"),
            mixer=mixers[x.mixer.kind](stacks, f"{prefix}{at.mixer}.", at.mixer_index, in_stacks),
            parallel=parallel(at),
            post_norm=norm("post_attention_norm"),
            feed=feeds[x.mlp.kind](stacks, f"{prefix}{at.mlp}.", at.mlp_index, in_stacks),
            mixer_end_norm=norm("mixer_end_norm"),
            feed_end_norm=norm("feed_end_norm"),
            per_layer=_per_layer(stacks, f"{prefix}per_layer.", i, in_stacks),
            scalar=norm("layer_scalar"),
        )
        layers.append(layer)
    return tuple(layers)


def _nothing(stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool) -> Any:
    """Returns the weights of a sublayer that the layer does not have."""
    del stacks, prefix, place, in_stacks


def _per_layer(
    stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool
) -> PerLayerInput | None:
    norm = _vector(stacks.get(f"{prefix}end_norm"), place, in_stacks)
    if norm is None:
        return None
    gate, out = (matrix_of(stacks, f"{prefix}{x}", place, in_stacks) for x in ("gate", "out"))
    return PerLayerInput(gate, out, norm)


def _mlp(stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool) -> Mlp:
    return Mlp(*(matrix_of(stacks, f"{prefix}{x}", place, in_stacks) for x in ("gate_up", "down")))


def _experts(stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool) -> Experts:
    def at(name: str) -> Matrix:
        return matrix_of(stacks, f"{prefix}{name}", place, in_stacks)

    bias, has_own = stacks.get(f"{prefix}score_bias"), f"{prefix}shared_down" in stacks
    return Experts(
        router=at("router"),
        gate_up=at("gate_up"),
        down=at("down"),
        score_bias=_vector(bias, place, in_stacks),
        shared_gate_up=at("shared_gate_up") if has_own else None,
        shared_down=at("shared_down") if has_own else None,
        latent_in=at("latent_in") if f"{prefix}latent_in" in stacks else None,
        latent_out=at("latent_out") if f"{prefix}latent_out" in stacks else None,
        expert_scale=_vector(stacks.get(f"{prefix}expert_scale"), place, in_stacks),
        parallel=_parallel_mlp(stacks, prefix, place, in_stacks),
    )


def _parallel_mlp(
    stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool
) -> ParallelMLP | None:
    if (router_norm := stacks.get(f"{prefix}router_norm")) is None:
        return None

    def norm(stack: jax.Array) -> Norm:
        found = _vector(stack, place, in_stacks)
        assert found is not None  # the stack exists
        return found

    gate_up, down = (
        matrix_of(stacks, f"{prefix}parallel_{x}", place, in_stacks) for x in ("gate_up", "down")
    )
    return ParallelMLP(
        gate_up=gate_up,
        down=down,
        router_norm=norm(router_norm * router_norm.shape[-1] ** -0.5),
        expert_norm=norm(stacks[f"{prefix}expert_norm"]),
        mlp_end_norm=norm(stacks[f"{prefix}mlp_end_norm"]),
        expert_end_norm=norm(stacks[f"{prefix}expert_end_norm"]),
    )


def _attention(
    stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool, alone: set[str]
) -> Attention:
    norms = [stacks.get(f"{prefix}{x}_norm") for x in "qk"]
    sinks = _vector(stacks.get(f"{prefix}sinks"), place, in_stacks)
    are_alone = not in_stacks or prefix in alone
    q_norm, k_norm = (x if x is None or not are_alone else x[place] for x in norms)
    inputs, out = (matrix_of(stacks, f"{prefix}{x}", place, in_stacks) for x in ("inputs", "out"))
    return Attention(inputs, out, q_norm, k_norm, sinks)


def _recurrent(stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool) -> Recurrent:
    def at(name: str) -> Any:
        stack = stacks.get(f"{prefix}{name}")
        return stack if stack is None or in_stacks else stack[place]

    return Recurrent(
        inputs=matrix_of(stacks, f"{prefix}inputs", place, in_stacks),
        out=matrix_of(stacks, f"{prefix}out", place, in_stacks),
        conv=at("conv"),
        conv_bias=at("conv_bias"),
        a_log=at("a_log"),
        dt_bias=at("dt_bias"),
        skip=at("skip"),
        norm=at("norm"),
    )


def _latent_attention(
    stacks: Mapping[str, Any], prefix: str, place: int, in_stacks: bool
) -> LatentAttention:
    def at(name: str) -> jax.Array:
        return stacks[f"{prefix}{name}"] if in_stacks else stacks[f"{prefix}{name}"][place]

    def matrix(name: str) -> Matrix:
        return matrix_of(stacks, f"{prefix}{name}", place, in_stacks)

    has_rank = f"{prefix}queries" in stacks
    heads = LatentWeights(
        latent_norm=at("latent_norm"),
        query_norm=at("query_norm") if has_rank else None,
        queries=matrix("queries") if has_rank else None,
        kv_b=matrix("kv_b"),
    )
    return LatentAttention(matrix("inputs"), matrix("out"), heads)


def matrix_of(stacks: Mapping[str, Any], name: str, place: int, in_stacks: bool) -> Matrix:
    """Returns the weight of one layer of a stack, with its bias."""
    stored, bias = stacks[name], stacks.get(f"{name}{BIAS}")
    stack = stored if isinstance(stored, Matrix) else Matrix.plain(stored)
    stack = stack._replace(bias=bias)
    return stack._replace(layer=place) if in_stacks else stack.at(place)


def _vector(stack: jax.Array | None, place: int, in_stacks: bool) -> Norm | None:
    """Returns the vector of one layer of a stack, or None if the model has none."""
    if stack is None:
        return None
    return Scale(stack, jnp.asarray(place, jnp.int32)) if in_stacks else stack[place]
