"""Mixture of experts (MoE): router and expert GEMMs; same as `shared.spec.experts`."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor

from kernels.routing import routing_of
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.models.activation import Activation
from shared.models.mlp import MoEConfig
from shared.spec.reduction_order import ROUTER, SHRINK, SQUARES
from torch_impl.ops import Kernels, arrivals_of, is_bfloat16, kernel_or_reference
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import layers, linear
from torch_impl.ops.gemm.linear import Matrix, NormedStream
from torch_impl.ops.gemm.lora import kernel_shrink


@dataclass(frozen=True)
class ParallelMLP:
    """Dense MLP in parallel to experts, and the norms of both branches."""

    gate_up: Matrix
    down: Matrix
    router_norm: Float[Tensor, " hidden"]
    expert_norm: Float[Tensor, " hidden"]
    mlp_end_norm: Float[Tensor, " hidden"]
    expert_end_norm: Float[Tensor, " hidden"]


@dataclass(frozen=True)
class Experts:
    """Weights of an MoE block; matrices are those of one layer or stacks of all layers."""

    router: Matrix
    gate_up: Matrix
    down: Matrix
    score_bias: Float[Tensor, " experts"] | None
    shared_gate_up: Matrix | None
    shared_down: Matrix | None
    latent_in: Matrix | None = None
    latent_out: Matrix | None = None
    expert_scale: Float[Tensor, " experts"] | None = None
    parallel: ParallelMLP | None = None


@dataclass(frozen=True)
class SelectedExperts:
    """Selected experts of each row, in ascending order, and their weights."""

    ids: Int[Tensor, "R chosen"]
    weights: Float32[Tensor, "R chosen"]


def choose(
    logits: Float32[Tensor, "R experts"],
    config: MoEConfig,
    bias: Float32[Tensor, " experts"] | None,
) -> SelectedExperts:
    scores = torch.sigmoid(logits) if config.scores == "sigmoid" else logits
    ranked = scores if bias is None else scores + bias
    ranked = torch.where(ranked.isnan(), -torch.inf, ranked)
    if config.num_groups > 1:
        ranked = torch.where(_in_best_groups(ranked, config), ranked, -torch.inf)
    ids = _best(ranked, config.top_k).sort(dim=1).values
    of_chosen = scores.gather(1, ids)
    if config.scores == "softmax":
        among = of_chosen if config.is_renormalised else logits
        largest = among.amax(dim=1, keepdim=True)
        total = _summed(torch.exp(among - largest))
        weights = torch.exp(of_chosen - largest) / total
    elif config.is_renormalised:
        weights = of_chosen / (_summed(of_chosen) + 1e-20)
    else:
        weights = of_chosen
    return SelectedExperts(ids.int(), weights * config.routed_factor)


def _in_best_groups(
    ranked: Float32[Tensor, "R experts"], config: MoEConfig
) -> Bool[Tensor, "R experts"]:
    grouped = ranked.unflatten(1, (config.num_groups, config.group_size))
    sums = grouped.sort(dim=-1).values[..., -2:].sum(dim=-1)
    best = _best(sums, config.num_chosen_groups)
    is_in = torch.zeros_like(sums, dtype=torch.bool).scatter(1, best, True)
    return is_in.repeat_interleave(config.group_size, dim=1)


def _best(ranked: Float32[Tensor, "R some"], count: int) -> Int[Tensor, "R count"]:
    """Returns the columns of the largest values; ties go to the first, unlike `topk`."""
    return ranked.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _summed(x: Float32[Tensor, "R some"]) -> Float32[Tensor, "R 1"]:
    return x.cumsum(dim=1)[:, -1:]


def experts(
    x: Float[Tensor, "R hidden"],
    config: MoEConfig,
    weights: Experts,
    group: TPGroup = SINGLE_RANK,
    scored: Float[Tensor, "R hidden"] | None = None,
) -> Float32[Tensor, "R share"]:
    """Computes the MoE output in float32.

    Each selected expert runs over all rows, and rows that did not select it keep their sum. Results
    do not depend on the experts of other rows. The group shards each expert, and the result has
    this rank's columns. The router reads `scored`, or `x` if that is None.
    """
    logits = linear.product_float32(x if scored is None else scored, weights.router)
    chosen = choose(logits[:, : config.num_experts], config, weights.score_bias)
    if weights.expert_scale is not None:
        scale = weights.expert_scale[chosen.ids.long()]
        chosen = replace(chosen, weights=chosen.weights * scale)
    width, inputs = weights.down.num_outputs, x
    if weights.latent_in is not None:
        latents = linear.product_float32(x, weights.latent_in).to(x.dtype)
        inputs = all_gather.all_gather(group, latents)
    out = torch.zeros((len(x), width), dtype=torch.float32, device=x.device)
    for expert in _in_use(chosen, config):
        is_chosen = chosen.ids == expert
        share = torch.where(is_chosen, chosen.weights, 0).sum(dim=1, keepdim=True)
        more = out + share * _of_expert(inputs, config, weights, expert, group)
        out = torch.where(is_chosen.any(dim=1, keepdim=True), more, out)
    if weights.latent_out is not None:
        latents = all_gather.all_gather(group, out.to(x.dtype))
        out = linear.product_float32(latents, weights.latent_out)
    if config.shared_intermediate:
        shared = _shared(x, config, weights, group)
        if config.shared_is_gated:
            shared = layers.sigmoid(logits[:, config.num_experts :]) * shared
        out = out + shared
    return out


def _in_use(chosen: SelectedExperts, config: MoEConfig) -> Iterable[int]:
    """Returns the experts that any row selected, or all if reading them would synchronise."""
    if chosen.ids.is_cuda:
        return range(config.num_experts)
    return chosen.ids.unique().tolist()


def _of_expert(
    x: Float[Tensor, "R hidden"], config: MoEConfig, weights: Experts, expert: int, group: TPGroup
) -> Float32[Tensor, "R share"]:
    gate_up, down = weights.gate_up.at(expert), weights.down.at(expert)
    return _mlp(x, gate_up, down, config.activation, group)


def _shared(
    x: Float[Tensor, "R hidden"], config: MoEConfig, weights: Experts, group: TPGroup
) -> Float32[Tensor, "R share"]:
    if weights.shared_gate_up is None or weights.shared_down is None:
        return _of_expert(x, config, weights, config.num_experts, group)
    return _mlp(x, weights.shared_gate_up, weights.shared_down, config.activation, group)


def _mlp(
    x: Float[Tensor, "R hidden"],
    gate_up: Matrix,
    down: Matrix,
    activation: Activation,
    group: TPGroup,
) -> Float32[Tensor, "R share"]:
    inner = layers.activated(linear.product_float32(x, gate_up), activation).to(x.dtype)
    inner = all_gather.all_gather(group, inner)
    return linear.product_float32(inner, down)


def plain_counted(stream: NormedStream) -> NormedStream:
    return stream


def kernel_counted(kernels: Kernels, stream: NormedStream) -> NormedStream:
    if stream.arrivals is not None:
        return stream
    return replace(stream, arrivals=arrivals_of(stream.own))


counted = kernel_or_reference(kernel_counted, plain_counted, is_bfloat16)


def plain_added_experts(
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Float[Tensor, " hidden"] | None = None,
) -> NormedStream:
    rows = stream.whole
    added = experts(layers.rms_norm(rows, stream.norm, eps), config, weights, stream.group)
    if config.output_factor != 1:
        added = added * config.output_factor
    own = (all_gather.local_columns(stream.group, rows) + added).to(rows.dtype)
    return stream.with_next_norm(all_gather.all_gather(stream.group, own), norm)


def kernel_added_experts(
    kernels: Kernels,
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Float[Tensor, " hidden"] | None = None,
) -> NormedStream:
    first, last = weights.shared_gate_up, weights.shared_down
    routed = _routed if weights.latent_in is None else _routed_latents
    if first is None or last is None:
        return routed(kernels, stream, eps, config, weights, norm)
    # A shared expert of another width is a dense MLP, which adds to the rounded sum of the others.
    stream = linear.completed(kernels, stream)
    inner = linear.kernel_act_and_mul_linear(kernels, stream, eps, first, config.activation)
    stream = routed(kernels, stream, eps, config, weights, norm)
    return linear.kernel_added(kernels, inner, last, stream, config.output_factor, norm, 1)


def _routed(
    kernels: Kernels,
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    stream, group = linear.completed(kernels, stream), stream.group
    own = stream.own.contiguous()
    stream = kernel_counted(kernels, stream)
    added = run_experts(
        kernels,
        stream,
        eps,
        config,
        weights,
        rows=own,
        scaled=stream.factors,
        squares=stream.squares,
        scored=None,
        latents=None,
        next_norm=all_gather.norm_with_squares(group, own, norm),
    )
    if all_gather.gathers_with_squares(group, own):
        scaled, squares = group.on_device.all_gather_with_squares(added.scaled, added.squares)
        added = NormedStream(added.rows, norm, scaled, squares)
    return linear.ended(kernels, stream, added, norm)


def _routed_latents(
    kernels: Kernels,
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    """Adds the experts between the two projections of the latent; their sum is rounded once."""
    stream, group = linear.completed(kernels, stream), stream.group
    stream = kernel_counted(kernels, stream)
    assert weights.latent_in is not None  # experts with latents have both
    assert weights.latent_out is not None
    latents = linear.kernel_rmsnorm_linear(kernels, stream, eps, weights.latent_in)
    latents = all_gather.all_gather(group, latents)
    added = run_experts(
        kernels,
        stream,
        eps,
        config,
        weights,
        rows=latents.new_zeros((len(latents), weights.down.num_outputs)),
        scaled=stream.factors,
        squares=stream.squares,
        scored=None,
        latents=latents,
        next_norm=None,
    )
    latents = all_gather.all_gather(group, added.rows)
    factor = config.output_factor
    return linear.kernel_added(kernels, latents, weights.latent_out, stream, factor, norm, 1)


def run_experts(
    kernels: Kernels,
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    *,
    rows: Float[Tensor, "R columns"],
    scaled: Float[Tensor, "R hidden"],
    squares: Float[Tensor, "R chunks"] | None,
    scored: Float[Tensor, "R hidden"] | None,
    latents: Float[Tensor, "R latent"] | None,
    next_norm: Float[Tensor, " hidden"] | None,
) -> Any:
    """Runs the kernels of an MoE block; the stream has their counters."""
    count = stream.count
    if count is None:
        count = torch.full((1,), len(rows), dtype=torch.int32, device=rows.device)
    gate_up, down, lora = weights.gate_up, weights.down, weights.router.lora
    read = scaled if scored is None else scored
    sizes = {"rows": len(rows), "inner": config.intermediate}
    return kernels.experts.experts(
        rows=rows,
        scaled=scaled,
        squares=squares,
        scored=scored,
        latents=latents,
        router=weights.router.values,
        router_bias=weights.router.bias,
        bias=weights.score_bias,
        expert_scale=weights.expert_scale,
        gate_up=gate_up.values,
        gate_up_scales=gate_up.scales,
        gate_up_bias=gate_up.bias,
        down=down.values,
        down_scales=down.scales,
        down_bias=down.bias,
        next_norm=next_norm,
        live=count,
        arrivals=stream.arrivals,
        router_lora=lora and kernel_shrink(kernels, read, lora),
        gate_up_lora=_adapters(kernels, gate_up),
        down_lora=_adapters(kernels, down),
        formats=(gate_up.format.name, down.format.name),
        gathered=partial(all_gather.all_gather, stream.group),
        eps=eps,
        activation=config.activation,
        routing=routing_of(config),
        order=ROUTER,
        squares_order=SQUARES,
        shrink_order=SHRINK,
        tiles=kernels.tiles.experts.of(item_bytes=gate_up.format.item_bytes, **sizes),
    )


def _adapters(kernels: Kernels, matrix: Matrix) -> Any:
    """Returns the adapters of a matrix of experts as its kernels read them."""
    if matrix.lora is None:
        return None
    own = matrix.lora.weights
    return kernels.experts.ExpertAdapters(
        a=own.a,
        b=own.b,
        scales=own.scales,
        factors=own.factors,
        slots=matrix.lora.slots,
        parts=own.parts,
    )


added_experts = kernel_or_reference(kernel_added_experts, plain_added_experts, is_bfloat16)
