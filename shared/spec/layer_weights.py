"""Weights of one layer, from the stacks of a model's parameters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Float

from shared.models.config import ModelConfig
from shared.models.stacks import BIAS
from shared.spec.experts import Experts, ParallelMLP
from shared.spec.linear import Matrix
from shared.spec.lora import LORA
from shared.spec.per_layer import PerLayerInput, PerLayerTable

Weights = Mapping[str, Any]
"""Arrays of a model by name; a stack that stays quantised is a `Matrix`."""


def matrix(weights: Weights, name: str, layer: int) -> Matrix:
    """Returns the weight of one layer of a stack, with its bias and the adapters of the rows."""
    stack = stored if isinstance(stored := weights[name], Matrix) else Matrix.plain(stored)
    bias, lora = (weights.get(f"{name}{suffix}") for suffix in (BIAS, LORA))
    return replace(stack, bias=bias, lora=lora).at(layer)


def scale(config: ModelConfig, weight: Float[np.ndarray, " size"]) -> Float[np.ndarray, " size"]:
    """Returns the multiplier of a norm; zero-centred norms store its difference from 1."""
    return 1 + weight if config.zero_centered_norms else weight


def end_norm_of(
    config: ModelConfig, weights: Weights, name: str, layer: int
) -> Float[np.ndarray, " hidden"] | None:
    """Returns the scale of a norm after a layer's mixer or MLP; None for a model without them."""
    return scale(config, weights[name][layer]) if config.ends_with_norms else None


def layer_scalar(
    config: ModelConfig, weights: Weights, prefix: str, layer: int
) -> Float[np.ndarray, " 1"] | None:
    """Returns the number that multiplies a layer's output; None for a model without them."""
    return weights[f"{prefix}layer_scalar"][layer] if config.has_layer_scalars else None


def per_layer_table(config: ModelConfig, weights: Weights) -> PerLayerTable:
    """Returns the weights that compute the per-layer embeddings."""
    projection = Matrix.plain(weights["per_layer.projection"])
    scales = scale(config, weights["per_layer.norm"])
    return PerLayerTable(weights["per_layer.embed"], projection, scales)


def per_layer_input(config: ModelConfig, weights: Weights, layer: int) -> PerLayerInput:
    """Returns the weights with which one layer adds its part of the per-layer embeddings."""
    gate, out = (matrix(weights, f"per_layer.{x}", layer) for x in ("gate", "out"))
    return PerLayerInput(gate, out, scale(config, weights["per_layer.end_norm"][layer]))


def experts_of(config: ModelConfig, weights: Weights, prefix: str, place: int) -> Experts:
    """Returns the MoE weights of one layer."""

    def at(name: str) -> Matrix:
        return matrix(weights, f"{prefix}{name}", place)

    bias, has_own = weights.get(f"{prefix}score_bias"), f"{prefix}shared_down" in weights
    expert_scale = weights.get(f"{prefix}expert_scale")
    return Experts(
        router=at("router"),
        gate_up=at("gate_up"),
        down=at("down"),
        score_bias=None if bias is None else bias[place],
        shared_gate_up=at("shared_gate_up") if has_own else None,
        shared_down=at("shared_down") if has_own else None,
        latent_in=at("latent_in") if f"{prefix}latent_in" in weights else None,
        latent_out=at("latent_out") if f"{prefix}latent_out" in weights else None,
        expert_scale=None if expert_scale is None else expert_scale[place],
        parallel=_parallel_mlp(config, weights, prefix, place),
    )


def _parallel_mlp(
    config: ModelConfig, weights: Weights, prefix: str, place: int
) -> ParallelMLP | None:
    if f"{prefix}router_norm" not in weights:
        return None

    def norm(name: str) -> Float[np.ndarray, " hidden"]:
        return scale(config, weights[f"{prefix}{name}"][place])

    gate_up, down = (matrix(weights, f"{prefix}parallel_{x}", place) for x in ("gate_up", "down"))
    return ParallelMLP(
        gate_up=gate_up,
        down=down,
        router_norm=norm("router_norm") * np.float32(config.hidden**-0.5),
        expert_norm=norm("expert_norm"),
        mlp_end_norm=norm("mlp_end_norm"),
        expert_end_norm=norm("expert_end_norm"),
    )
