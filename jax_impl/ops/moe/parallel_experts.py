"""Layer half of a dense MLP and experts in parallel; same as `shared.spec.parallel_experts`."""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jax_impl.ops import Kernels, Norm, alone, is_bfloat16, kernel_or_reference, stacked
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import layers, linear
from jax_impl.ops.gemm.added_norm import added_norm
from jax_impl.ops.gemm.linear import NormedStream
from jax_impl.ops.moe.experts import Experts, ParallelMLP, counted, experts, run_experts
from shared.models.mlp import MoEConfig
from shared.spec.reduction_order import SQUARES


def added_parallel_experts(
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    parallel: ParallelMLP,
    end_norm: Norm,
    scalar: Norm | None,
    norm: Norm | None,
) -> NormedStream:
    """Adds the normed sum of both branches to the residual stream."""
    assert config.parallel is not None  # the caller checks it
    inner = linear.act_and_mul_linear(stream, eps, parallel.gate_up, config.parallel.activation)
    dense = all_gather.all_gather(stream.group, linear.product(inner, parallel.down))
    dense = layers.rms_norm(dense, alone(parallel.mlp_end_norm), eps)
    routed, stream = routed_experts(stream, eps, config, weights, parallel)
    routed = layers.rms_norm(routed, alone(parallel.expert_end_norm), eps)
    return added_norm(dense + routed, end_norm, eps, stream, scalar, norm)


def plain_routed_experts(
    stream: NormedStream, eps: float, config: MoEConfig, weights: Experts, parallel: ParallelMLP
) -> tuple[Float[jax.Array, "R hidden"], NormedStream]:
    """Computes the experts of each row without the residual."""
    rows = stream.whole
    x = layers.rms_norm(rows, alone(parallel.expert_norm), eps)
    scored = layers.rms_norm(rows, alone(parallel.router_norm), eps)
    out = experts(x, config, weights, stream.group, scored).astype(rows.dtype)
    return all_gather.all_gather(stream.group, out), stream


def kernel_routed_experts(
    kernels: Kernels,
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    parallel: ParallelMLP,
) -> tuple[Float[jax.Array, "R hidden"], NormedStream]:
    """Same as `plain_routed_experts`; the kernels add the experts to rows of zeros."""
    if stream.arrivals is None:  # a partial pass
        stream = counted(stream)
    rows = stream.whole
    own = all_gather.local_columns(stream.group, rows)
    scaled, squares = kernels.layers.beside(rows, *stacked(parallel.expert_norm), order=SQUARES)
    scored, _ = kernels.layers.beside(rows, *stacked(parallel.router_norm), order=SQUARES)
    added, arrivals = run_experts(
        kernels,
        stream,
        eps,
        config,
        weights,
        rows=jnp.zeros_like(own),
        scaled=scaled,
        squares=squares,
        scored=scored,
        latents=None,
        next_norm=None,
    )
    return all_gather.all_gather(stream.group, added.rows), stream._replace(arrivals=arrivals)


routed_experts = kernel_or_reference(kernel_routed_experts, plain_routed_experts, is_bfloat16)
