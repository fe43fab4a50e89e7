"""Decoder layers of named tensors: one record per layer, of a model or a draft head."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shared.models.groups import LayerPlace, places
from shared.models.layers import LayerConfig
from shared.models.stacks import BIAS
from torch_impl.model_weights import Attention, LatentAttention, Layer, Mlp, Recurrent
from torch_impl.ops.attention.latent_attention import LatentWeights
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.gemm.per_layer import PerLayerInput
from torch_impl.ops.moe.experts import Experts, ParallelMLP

Tensors = Mapping[str, Any]
"""Tensors by name; a stack that stays quantised is a `Matrix`."""


def layers_of(tensors: Tensors, prefix: str, like: Sequence[LayerConfig]) -> tuple[Layer, ...]:
    """Returns the decoder layers with parameters of a prefix."""
    layers, mixers = [], {"attention": _attention, "gated_delta": _recurrent, "mamba2": _recurrent}
    mixers |= {"latent_attention": _latent_attention, "no_mixer": _nothing}
    feeds = {"mlp": _mlp, "experts": _experts, "no_mlp": _nothing}
    for i, (each, at) in enumerate(zip(like, places(like), strict=True)):

        def norm(name: str, i: int = i) -> Tensor | None:
            stack = tensors.get(f"{prefix}{name}")
            return None if stack is None else stack[i]

        def parallel(at: LayerPlace) -> Recurrent | None:
            if at.parallel is None:
                return None
            return _recurrent(tensors, f"{prefix}{at.parallel}.", at.parallel_index)

        layer = Layer(
            input_norm=norm("input_norm"),
            mixer=mixers[each.mixer.kind](tensors, f"{prefix}{at.mixer}.", at.mixer_index),
            parallel=parallel(at),
            post_norm=norm("post_attention_norm"),
            mixer_end_norm=norm("mixer_end_norm"),
            feed_end_norm=norm("feed_end_norm"),
            feed=feeds[each.mlp.kind](tensors, f"{prefix}{at.mlp}.", at.mlp_index),
            per_layer=_per_layer(tensors, f"{prefix}per_layer.", i),
            scalar=norm("layer_scalar"),
        )
        layers.append(layer)
    return tuple(layers)


def _per_layer(tensors: Tensors, prefix: str, place: int) -> PerLayerInput | None:
    norms = tensors.get(f"{prefix}end_norm")
    if norms is None:
        return None
    gate, out = (matrix_of(tensors, f"{prefix}{x}", place) for x in ("gate", "out"))
    return PerLayerInput(gate, out, norms[place])


def _nothing(tensors: Tensors, prefix: str, place: int) -> Any:
    """Returns the weights of a sublayer that the layer does not have."""
    del tensors, prefix, place


def _mlp(tensors: Tensors, prefix: str, place: int) -> Mlp:
    return Mlp(*(matrix_of(tensors, f"{prefix}{x}", place) for x in ("gate_up", "down")))


def _experts(tensors: Tensors, prefix: str, place: int) -> Experts:
    bias, has_own = tensors.get(f"{prefix}score_bias"), f"{prefix}shared_down" in tensors
    expert_scale = tensors.get(f"{prefix}expert_scale")
    router, gate_up, down = (
        matrix_of(tensors, f"{prefix}{x}", place) for x in ("router", "gate_up", "down")
    )

    def latent(name: str) -> Matrix | None:
        whole = f"{prefix}{name}"
        return matrix_of(tensors, whole, place) if whole in tensors else None

    return Experts(
        router=router,
        gate_up=gate_up,
        down=down,
        score_bias=None if bias is None else bias[place],
        shared_gate_up=matrix_of(tensors, f"{prefix}shared_gate_up", place) if has_own else None,
        shared_down=matrix_of(tensors, f"{prefix}shared_down", place) if has_own else None,
        latent_in=latent("latent_in"),
        latent_out=latent("latent_out"),
        expert_scale=None if expert_scale is None else expert_scale[place],
        parallel=_parallel_mlp(tensors, prefix, place),
    )


def _parallel_mlp(tensors: Tensors, prefix: str, place: int) -> ParallelMLP | None:
    if f"{prefix}router_norm" not in tensors:
        return None

    def norm(name: str) -> Tensor:
        return tensors[f"{prefix}{name}"][place]

    gate_up, down = (
        matrix_of(tensors, f"{prefix}parallel_{x}", place) for x in ("gate_up", "down")
    )
    router_norm = norm("router_norm")
    return ParallelMLP(
        gate_up=gate_up,
        down=down,
        router_norm=router_norm * router_norm.shape[-1] ** -0.5,
        expert_norm=norm("expert_norm"),
        mlp_end_norm=norm("mlp_end_norm"),
        expert_end_norm=norm("expert_end_norm"),
    )


def _attention(tensors: Tensors, prefix: str, place: int) -> Attention:
    vectors = (tensors.get(f"{prefix}{x}") for x in ("q_norm", "k_norm", "sinks"))
    q_norm, k_norm, sinks = (x if x is None else x[place] for x in vectors)
    inputs, out = (matrix_of(tensors, f"{prefix}{x}", place) for x in ("inputs", "out"))
    return Attention(inputs, out, q_norm, k_norm, sinks)


def _latent_attention(tensors: Tensors, prefix: str, place: int) -> LatentAttention:
    inputs, out = (matrix_of(tensors, f"{prefix}{x}", place) for x in ("inputs", "out"))
    has_rank = f"{prefix}queries" in tensors
    heads = LatentWeights(
        latent_norm=tensors[f"{prefix}latent_norm"][place],
        query_norm=tensors[f"{prefix}query_norm"][place] if has_rank else None,
        queries=matrix_of(tensors, f"{prefix}queries", place) if has_rank else None,
        kv_b=matrix_of(tensors, f"{prefix}kv_b", place),
    )
    return LatentAttention(inputs, out, heads)


def matrix_of(tensors: Tensors, name: str, place: int) -> Matrix:
    """Returns the weight of one layer of a stack, with its bias."""
    stored = tensors[name]
    stack = stored if isinstance(stored, Matrix) else Matrix.plain(stored)
    return replace(stack, bias=tensors.get(f"{name}{BIAS}")).at(place)


def _recurrent(tensors: Tensors, prefix: str, place: int) -> Recurrent:
    def at(name: str) -> Any:
        stack = tensors.get(f"{prefix}{name}")
        return None if stack is None else stack[place]

    return Recurrent(
        inputs=matrix_of(tensors, f"{prefix}inputs", place),
        out=matrix_of(tensors, f"{prefix}out", place),
        conv=at("conv"),
        conv_bias=at("conv_bias"),
        a_log=at("a_log"),
        dt_bias=at("dt_bias"),
        skip=at("skip"),
        norm=at("norm"),
    )
