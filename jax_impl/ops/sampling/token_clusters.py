"""Clustered LM head; same as `shared.spec.token_clusters`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops.gemm.linear import Matrix, product_float32


class TokenClusters(NamedTuple):
    """Clusters of the tokens of an LM head, or of this rank's shard of it."""

    centroids: Matrix
    of_tokens: Int[jax.Array, " share"]
    top_k: int


def kept(
    logits: Float[jax.Array, "R share"], rows: Float[jax.Array, "R hidden"], clusters: TokenClusters
) -> Float[jax.Array, "R share"]:
    """Same as the specification, for this rank's shard of the logits.

    A cluster is selected if fewer than `top_k` precede it. Counting them needs no sort, which would
    be a step of its own in a command buffer.
    """
    scores = product_float32(rows, clusters.centroids)
    own, other = scores[:, :, None], scores[:, None, :]
    number = jnp.arange(scores.shape[1])
    precedes = (other > own) | ((other == own) & (number[None, :] < number[:, None]))
    is_best = precedes.sum(axis=2, dtype=jnp.int32) < clusters.top_k
    return jnp.where(is_best[:, clusters.of_tokens], logits, -jnp.inf)
