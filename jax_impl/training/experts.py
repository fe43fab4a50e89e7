"""MoE blocks in training: every expert runs over all rows, as one wide gated MLP.

Its inner activations are multiplied by the routing weight of their expert. The weight is 0 for
experts outside the row's top k, so no gradient reaches them. This suits small models only, because
the GEMMs have the size of all experts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Float32, Int

from jax_impl.ops.gemm import layers as ops
from jax_impl.ops.moe.experts import choose
from jax_impl.training.layers import Rows, linear, linear_float32
from jax_impl.training.nnx_modules import ExpertsStack
from shared.models.mlp import MoEConfig


class Routed(NamedTuple):
    """Router outputs of one layer.

    Attributes:
      logits: Router logits of all experts.
      ids: The row's top-k experts.
    """

    logits: Float32[jax.Array, "R experts"]
    ids: Int[jax.Array, "R chosen"]


def mixed(sizes: MoEConfig, weights: ExpertsStack, layer: int, x: Rows) -> tuple[Rows, Routed]:
    """Computes the weighted sum of each row's experts; also returns the router outputs.

    Args:
      sizes: Sizes of the MoE block.
      weights: MoE blocks of the stack.
      layer: Index of the layer among the MoE layers.
      x: The normed rows.
    """
    logits = linear_float32(x, weights.router[layer])
    chosen = choose(logits, sizes, None)
    is_chosen = chosen.ids[..., None] == jnp.arange(sizes.num_experts)
    shares = jnp.where(is_chosen, chosen.weights[..., None], 0).sum(axis=1)  # [R, experts]
    gate_up, down = weights.gate_up[layer], weights.down[layer]
    wide = linear(x, gate_up.reshape(-1, gate_up.shape[-1])).reshape(len(x), *gate_up.shape[:2])
    gate, up = jnp.split(wide, 2, axis=-1)
    inner = ops.silu(gate) * up * shares[..., None].astype(x.dtype)
    joined = jnp.swapaxes(down, 0, 1).reshape(down.shape[1], -1)  # [hidden, experts * inner]
    return linear(inner.reshape(len(x), -1), joined), Routed(logits, chosen.ids)


def balance(
    routed: Sequence[Routed], is_real: Bool[jax.Array, " R"]
) -> tuple[Float[jax.Array, ""], Float[jax.Array, ""]]:
    """Computes the load-balancing loss of the router, and the load of the least used expert.

    The loss of a layer is the number of experts times a sum over the experts. Each term is the
    share of rows routed to the expert times its mean router probability. An even load gives k, the
    number of experts per row.

    Args:
      routed: Router outputs of each MoE layer.
      is_real: True for rows that count.

    Returns:
      The mean loss over the layers, and the load of the least used expert of any layer, relative
      to an even load.

    Source: Switch Transformers, Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6;
      its weight is `router_aux_loss_coef` in Qwen3-MoE.
    """
    count = jnp.maximum(is_real.sum(), 1)
    losses, least = [], []
    for logits, ids in routed:
        num_experts, num_chosen = logits.shape[1], ids.shape[1]
        is_chosen = (ids[..., None] == jnp.arange(num_experts)).any(axis=1)
        loads = (is_chosen & is_real[:, None]).sum(axis=0) / count
        probabilities = jnp.where(is_real[:, None], jax.nn.softmax(logits, axis=-1), 0)
        losses.append(num_experts * (loads * probabilities.sum(axis=0) / count).sum())
        least.append(loads.min() * num_experts / num_chosen)
    return jnp.stack(losses).mean(), jnp.stack(least).min()
