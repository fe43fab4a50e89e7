"""Layer half of a dense MLP and experts in parallel; same as `shared.spec.parallel_experts`."""

import torch
from jaxtyping import Float
from torch import Tensor

from shared.models.mlp import MoEConfig
from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import layers, linear
from torch_impl.ops.gemm.added_norm import added_norm
from torch_impl.ops.gemm.linear import NormedStream
from torch_impl.ops.moe.experts import Experts, ParallelMLP, counted, experts, run_experts


def added_parallel_experts(
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    parallel: ParallelMLP,
    end_norm: Float[Tensor, " hidden"],
    scalar: Float[Tensor, " 1"] | None,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    """Adds the normed sum of both branches to the residual stream."""
    assert config.parallel is not None  # the caller checks it
    inner = linear.act_and_mul_linear(stream, eps, parallel.gate_up, config.parallel.activation)
    dense = all_gather.all_gather(stream.group, linear.product(inner, parallel.down))
    dense = layers.rms_norm(dense, parallel.mlp_end_norm, eps)
    routed = routed_experts(stream, eps, config, weights, parallel)
    routed = layers.rms_norm(routed, parallel.expert_end_norm, eps)
    return added_norm(dense + routed, end_norm, eps, stream, scalar, norm)


def plain_routed_experts(
    stream: NormedStream, eps: float, config: MoEConfig, weights: Experts, parallel: ParallelMLP
) -> Float[Tensor, "R hidden"]:
    """Computes the experts of each row without the residual."""
    rows = stream.whole
    x = layers.rms_norm(rows, parallel.expert_norm, eps)
    scored = layers.rms_norm(rows, parallel.router_norm, eps)
    out = experts(x, config, weights, stream.group, scored).to(rows.dtype)
    return all_gather.all_gather(stream.group, out)


def kernel_routed_experts(
    kernels: Kernels,
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    parallel: ParallelMLP,
) -> Float[Tensor, "R hidden"]:
    """Same as `plain_routed_experts`; the kernels add the experts to rows of zeros."""
    stream = counted(stream)
    rows = stream.whole
    own = all_gather.local_columns(stream.group, rows).contiguous()
    scaled, squares = kernels.layers.beside(rows, parallel.expert_norm, order=SQUARES)
    scored, _ = kernels.layers.beside(rows, parallel.router_norm, order=SQUARES)
    added = run_experts(
        kernels,
        stream,
        eps,
        config,
        weights,
        rows=torch.zeros_like(own),
        scaled=scaled,
        squares=squares,
        scored=scored,
        latents=None,
        next_norm=None,
    )
    return all_gather.all_gather(stream.group, added.rows)


routed_experts = kernel_or_reference(kernel_routed_experts, plain_routed_experts, is_bfloat16)
