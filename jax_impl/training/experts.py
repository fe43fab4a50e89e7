"""Mixtures of experts in training: every expert runs over all rows, as one wide gated MLP.

Its inner values are multiplied by the weight that a row gives to their expert, which is 0 where the
row has not chosen it, so that no gradient reaches that expert. It suits small models: the products
are those of all experts.
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
from shared.models.layers import MoEConfig


class Routed(NamedTuple):
    """What the router of one layer said of each row.

    Attributes:
      logits: Of all experts.
      ids: Of the chosen ones.
    """

    logits: Float32[jax.Array, "R experts"]
    ids: Int[jax.Array, "R chosen"]


def mixed(sizes: MoEConfig, weights: ExpertsStack, place: int, x: Rows) -> tuple[Rows, Routed]:
    """What the experts of each row give, and how they were chosen.

    Args:
      place: Of the layer among those with experts.
      x: The normed rows.
    """
    logits = linear_float32(x, weights.router[place])
    chosen = choose(logits, sizes, None)
    is_chosen = chosen.ids[..., None] == jnp.arange(sizes.num_experts)
    shares = jnp.where(is_chosen, chosen.weights[..., None], 0).sum(axis=1)  # [R, experts]
    gate_up, down = weights.gate_up[place], weights.down[place]
    wide = linear(x, gate_up.reshape(-1, gate_up.shape[-1])).reshape(len(x), *gate_up.shape[:2])
    gate, up = jnp.split(wide, 2, axis=-1)
    inner = ops.silu(gate) * up * shares[..., None].astype(x.dtype)
    joined = jnp.swapaxes(down, 0, 1).reshape(down.shape[1], -1)  # [hidden, experts * inner]
    return linear(inner.reshape(len(x), -1), joined), Routed(logits, chosen.ids)


def balance(
    routed: Sequence[Routed], is_real: Bool[jax.Array, " R"]
) -> tuple[Float[jax.Array, ""], Float[jax.Array, ""]]:
    """How evenly the rows choose among the experts, as a loss and as a number to look at.

    Of each layer it is the number of experts times the sum, over them, of the share of rows that
    chose one and the mean probability that the router gave it. Even use gives the number of experts
    that a row chooses, and nothing gives less.

    Args:
      routed: Of each layer with experts.
      is_real: Rows that count.

    Returns:
      The mean over the layers, and what the least used expert of any layer has of an even share.

    Source: Switch Transformers, Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6;
      `router_aux_loss_coef` of Qwen3-MoE weighs it.
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
