"""Mixture of experts (MoE): router and expert GEMMs; same as `shared.spec.experts`."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Float32, Int

from jax_impl.ops import Kernels, Norm, Place, alone, is_bfloat16, kernel_or_reference, stacked
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import layers, linear
from jax_impl.ops.gemm.linear import Matrix, NormedStream
from jax_impl.ops.gemm.lora import kernel_shrink
from kernels.kernel_limits import arrivals_of_experts
from kernels.routing import routing_of
from shared.boundary.tp_group import SINGLE_RANK, TPGroup
from shared.models.activation import Activation
from shared.models.mlp import MoEConfig
from shared.spec.reduction_order import ROUTER, SHRINK, SQUARES


class ParallelMLP(NamedTuple):
    """Dense MLP in parallel to experts, and the norms of both branches."""

    gate_up: Matrix
    down: Matrix
    router_norm: Norm
    expert_norm: Norm
    mlp_end_norm: Norm
    expert_end_norm: Norm


class Experts(NamedTuple):
    """Weights of an MoE block; matrices are those of one layer or stacks of all layers."""

    router: Matrix
    gate_up: Matrix
    down: Matrix
    score_bias: Norm | None
    shared_gate_up: Matrix | None
    shared_down: Matrix | None
    latent_in: Matrix | None = None
    latent_out: Matrix | None = None
    expert_scale: Norm | None = None
    parallel: ParallelMLP | None = None


class SelectedExperts(NamedTuple):
    """Selected experts of each row, in ascending order, and their weights."""

    ids: Int[jax.Array, "R chosen"]
    weights: Float32[jax.Array, "R chosen"]


def choose(
    logits: Float32[jax.Array, "R experts"],
    config: MoEConfig,
    bias: Float32[jax.Array, " experts"] | None,
) -> SelectedExperts:
    """Selects the experts of each row, without a sort, which command buffers do not support."""
    scores = jax.nn.sigmoid(logits) if config.scores == "sigmoid" else logits
    ranked = scores if bias is None else scores + bias
    ranked = jnp.where(jnp.isnan(ranked), -jnp.inf, ranked)
    if config.num_groups > 1:
        ranked = jnp.where(_in_best_groups(ranked, config), ranked, -jnp.inf)
    is_chosen = _places(ranked) < config.top_k
    slots = jnp.cumsum(is_chosen, axis=1) - 1
    at = is_chosen[..., None] & (slots[..., None] == jnp.arange(config.top_k))
    ids = jnp.argmax(at, axis=1).astype(jnp.int32)
    of_chosen = jnp.take_along_axis(scores, ids, axis=1)
    if config.scores == "softmax":
        among = of_chosen if config.is_renormalised else logits
        largest = among.max(axis=1, keepdims=True)
        total = jnp.exp(among - largest).sum(axis=1, keepdims=True)
        weights = jnp.exp(of_chosen - largest) / total
    elif config.is_renormalised:
        weights = of_chosen / (of_chosen.sum(axis=1, keepdims=True) + 1e-20)
    else:
        weights = of_chosen
    return SelectedExperts(ids, weights * config.routed_factor)


def _in_best_groups(
    ranked: Float32[jax.Array, "R experts"], config: MoEConfig
) -> Bool[jax.Array, "R experts"]:
    grouped = ranked.reshape(len(ranked), config.num_groups, config.group_size)
    best, _ = lax.top_k(grouped, min(2, config.group_size))
    is_in = _places(best.sum(axis=-1)) < config.num_chosen_groups
    return jnp.repeat(is_in, config.group_size, axis=1)


def _places(ranked: Float32[jax.Array, "R some"]) -> Int[jax.Array, "R some"]:
    """Returns the rank of each value in its row, descending; ties go to the lower index."""
    one, other = ranked[:, :, None], ranked[:, None, :]
    number = jnp.arange(ranked.shape[1])
    is_before = (other > one) | ((other == one) & (number[None, :] < number[:, None]))
    return is_before.sum(axis=-1)


def experts(
    x: Float[jax.Array, "R hidden"],
    config: MoEConfig,
    weights: Experts,
    group: TPGroup = SINGLE_RANK,
    scored: Float[jax.Array, "R hidden"] | None = None,
) -> Float32[jax.Array, "R share"]:
    """Computes the MoE output in float32.

    Each expert runs over all rows, and rows that did not select it keep their sum. No row is
    dropped, and results do not depend on the experts of other rows. The group shards each expert,
    and the result has this rank's columns. The router reads `scored`, or `x` if that is None.
    """
    logits = linear.product_float32(x if scored is None else scored, weights.router)
    chosen = choose(logits[:, : config.num_experts], config, alone(weights.score_bias))
    if (scale := alone(weights.expert_scale)) is not None:
        chosen = chosen._replace(weights=chosen.weights * scale[chosen.ids])

    inputs = x
    if weights.latent_in is not None:
        latents = linear.product_float32(x, weights.latent_in).astype(x.dtype)
        inputs = all_gather.all_gather(group, latents)

    def add(out: jax.Array, expert: jax.Array) -> tuple[jax.Array, None]:
        is_chosen = chosen.ids == expert
        share = jnp.where(is_chosen, chosen.weights, 0).sum(axis=1, keepdims=True)
        more = out + share * _of_expert(inputs, config, weights, expert, group)
        return jnp.where(is_chosen.any(axis=1, keepdims=True), more, out), None

    nothing = jnp.zeros((len(x), weights.down.num_outputs), jnp.float32)
    out, _ = lax.scan(add, nothing, jnp.arange(config.num_experts))
    if weights.latent_out is not None:
        latents = all_gather.all_gather(group, out.astype(x.dtype))
        out = linear.product_float32(latents, weights.latent_out)
    if config.shared_intermediate:
        shared = _shared(x, config, weights, group)
        if config.shared_is_gated:
            shared = layers.sigmoid(logits[:, config.num_experts :]) * shared
        out = out + shared
    return out


def _of_expert(
    x: Float[jax.Array, "R hidden"],
    config: MoEConfig,
    weights: Experts,
    expert: Place,
    group: TPGroup,
) -> Float32[jax.Array, "R share"]:
    gate_up, down = weights.gate_up.at(expert), weights.down.at(expert)
    return _mlp(x, gate_up, down, config.activation, group)


def _shared(
    x: Float[jax.Array, "R hidden"], config: MoEConfig, weights: Experts, group: TPGroup
) -> Float32[jax.Array, "R share"]:
    if weights.shared_gate_up is None or weights.shared_down is None:
        return _of_expert(x, config, weights, config.num_experts, group)
    return _mlp(x, weights.shared_gate_up, weights.shared_down, config.activation, group)


def _mlp(
    x: Float[jax.Array, "R hidden"],
    gate_up: Matrix,
    down: Matrix,
    activation: Activation,
    group: TPGroup,
) -> Float32[jax.Array, "R share"]:
    inner = layers.activated(linear.product_float32(x, gate_up), activation).astype(x.dtype)
    inner = all_gather.all_gather(group, inner)
    return linear.product_float32(inner, down)


def plain_counted(stream: NormedStream) -> NormedStream:
    """Adds the program counters of MoE kernels to a stream."""
    return stream


def kernel_counted(kernels: Kernels, stream: NormedStream) -> NormedStream:
    return _counted_beside_kernels(stream)


def _counted_beside_kernels(stream: NormedStream) -> NormedStream:
    if stream.arrivals is not None:  # of GEMMs in segments, and enough: see `arrivals_of`
        return stream
    size = arrivals_of_experts(*stream.own.shape)
    return stream._replace(arrivals=jnp.zeros(size, jnp.int32))


counted = kernel_or_reference(kernel_counted, plain_counted, is_bfloat16, _counted_beside_kernels)


def plain_added_experts(
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Norm | None = None,
) -> NormedStream:
    """Adds the MoE output of the normed rows to the residual stream; the sum is rounded once."""
    rows = stream.whole
    normed = layers.rms_norm(rows, alone(stream.norm), eps)
    added = experts(normed, config, weights, stream.group)
    if config.output_factor != 1:
        added = added * config.output_factor
    own = (all_gather.local_columns(stream.group, rows) + added).astype(rows.dtype)
    return stream.with_next_norm(all_gather.all_gather(stream.group, own), norm)


def kernel_added_experts(
    kernels: Kernels,
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Norm | None = None,
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
    norm: Norm | None,
) -> NormedStream:
    stream, group = linear.completed(kernels, stream), stream.group
    own = stream.own
    if stream.arrivals is None:  # a partial pass
        stream = kernel_counted(kernels, stream)
    added, arrivals = run_experts(
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
    stream = stream._replace(arrivals=arrivals)
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
    norm: Norm | None,
) -> NormedStream:
    """Adds the experts between the two projections of the latent; their sum is rounded once."""
    stream, group = linear.completed(kernels, stream), stream.group
    if stream.arrivals is None:  # a partial pass
        stream = kernel_counted(kernels, stream)
    assert weights.latent_in is not None  # experts with latents have both
    assert weights.latent_out is not None
    latents = linear.kernel_rmsnorm_linear(kernels, stream, eps, weights.latent_in)
    latents = all_gather.all_gather(group, latents)
    added, arrivals = run_experts(
        kernels,
        stream,
        eps,
        config,
        weights,
        rows=jnp.zeros((len(latents), weights.down.num_outputs), latents.dtype),
        scaled=stream.factors,
        squares=stream.squares,
        scored=None,
        latents=latents,
        next_norm=None,
    )
    stream = stream._replace(arrivals=arrivals)
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
    rows: Float[jax.Array, "R columns"],
    scaled: Float[jax.Array, "R hidden"],
    squares: Float[jax.Array, "R chunks"] | None,
    scored: Float[jax.Array, "R hidden"] | None,
    latents: Float[jax.Array, "R latent"] | None,
    next_norm: Norm | None,
) -> tuple[Any, Int[jax.Array, " counters"]]:
    """Runs the kernels of an MoE block; the stream has their counters."""
    count = stream.count
    if count is None:
        count = jnp.full((1,), len(rows), jnp.int32)
    bias, _ = stacked(weights.score_bias)
    expert_scale, _ = stacked(weights.expert_scale)
    scale, norm_layer = stacked(next_norm)
    gate_up, down, layer = weights.gate_up, weights.down, weights.router.layer
    read, lora = scaled if scored is None else scored, weights.router.lora
    return kernels.experts.experts(
        rows=rows,
        scaled=scaled,
        squares=squares,
        scored=scored,
        latents=latents,
        router=_stacked(weights.router.values, 2),
        router_bias=_stacked(weights.router.bias, 1),
        bias=bias,
        expert_scale=expert_scale,
        gate_up=_stacked(gate_up.values, 3),
        gate_up_scales=_stacked(gate_up.scales, 3),
        gate_up_bias=_stacked(gate_up.bias, 2),
        down=_stacked(down.values, 3),
        down_scales=_stacked(down.scales, 3),
        down_bias=_stacked(down.bias, 2),
        next_norm=scale,
        live=count,
        arrivals=stream.arrivals,
        layer=jnp.asarray(0 if layer is None else layer, jnp.int32),
        norm_layer=norm_layer,
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
        tiles=kernels.tiles.experts.of(
            item_bytes=gate_up.format.item_bytes, rows=len(rows), inner=config.intermediate
        ),
    )


def _added_beside_kernels(
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    norm: Norm | None = None,
) -> NormedStream:
    added = plain_added_experts(stream, eps, config, weights, norm)
    if added.arrivals is None:
        added = _counted_beside_kernels(added)
    return linear.beside_kernels(added)


added_experts = kernel_or_reference(
    kernel_added_experts, plain_added_experts, is_bfloat16, _added_beside_kernels
)


def _stacked(weight: jax.Array | None, rank: int) -> jax.Array | None:
    """Returns a weight in the form of kernels: a stack, possibly of one."""
    return None if weight is None else weight.reshape(-1, *weight.shape[-rank:])


def _adapters(kernels: Kernels, matrix: Matrix) -> Any:
    """Returns the adapters of a matrix of experts as its kernels read them: stacks."""
    if matrix.lora is None:
        return None
    own, slots, layer, *_ = matrix.lora
    a, b, scales, factors = own[:-1] if layer is not None else (x[:, None] for x in own[:-1])
    return kernels.experts.ExpertAdapters(a, b, scales, factors, slots, own.parts)
