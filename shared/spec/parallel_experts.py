"""Layer half of a dense MLP and experts in parallel, with a norm after each and after their sum.

Source: Gemma 4 26B-A4B (transformers, `modeling_gemma4`).
"""

import numpy as np
from jaxtyping import Float

from shared.models.mlp import MoEConfig
from shared.spec import layers, linear
from shared.spec.added_norm import added_norm
from shared.spec.experts import Experts, ParallelMLP, experts
from shared.spec.linear import NormedStream


def added_parallel_experts(
    stream: NormedStream,
    eps: float,
    config: MoEConfig,
    weights: Experts,
    parallel: ParallelMLP,
    end_norm: Float[np.ndarray, " hidden"],
    scalar: Float[np.ndarray, " 1"] | None,
    norm: Float[np.ndarray, " hidden"] | None,
) -> NormedStream:
    """Adds the normed sum of both branches to the residual stream.

    The MLP reads the rows with the norm of the stream; router and experts read the rows with norms
    of their own.

    Args:
      stream: Residual stream.
      eps: Epsilon of all norms.
      config, weights: Config and weights of the MoE block.
      parallel: The dense MLP, and the norms of both branches.
      end_norm: Scale of the norm after the sum.
      scalar, norm: Layer scalar, and scale of the next norm; see `added_norm`.
    """
    assert config.parallel is not None  # the caller checks it
    inner = linear.act_and_mul_linear(stream, eps, parallel.gate_up, config.parallel.activation)
    dense = linear.product(inner, parallel.down)
    dense = layers.rms_norm(dense, parallel.mlp_end_norm, eps)
    routed = routed_experts(stream, eps, config, weights, parallel)
    routed = layers.rms_norm(routed, parallel.expert_end_norm, eps)
    return added_norm(dense + routed, end_norm, eps, stream, scalar, norm)


def routed_experts(
    stream: NormedStream, eps: float, config: MoEConfig, weights: Experts, parallel: ParallelMLP
) -> Float[np.ndarray, "R hidden"]:
    """Computes the experts of each row without the residual; see `added_parallel_experts`."""
    rows = stream.rows
    x, scored = (
        layers.rms_norm(rows, scale, eps) for scale in (parallel.expert_norm, parallel.router_norm)
    )
    return experts(x, config, weights, scored).astype(rows.dtype)
