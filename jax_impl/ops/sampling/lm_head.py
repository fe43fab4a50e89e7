"""LM head fused with sampling; same as `shared.spec.lm_head`.

On a GPU the GEMM epilogue writes the partial results of each block of outputs. Logits are stored
only for blocks of rows that need more than the argmax; see `jax_impl.ops`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl import ops
from jax_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from jax_impl.ops.gemm import layers
from jax_impl.ops.gemm.linear import Matrix, kernel_products, product_float32
from jax_impl.ops.sampling import sampling, token_clusters
from jax_impl.ops.sampling.gumbel_noise import Stream
from jax_impl.ops.sampling.sampling import RankedCandidates, SampledTokens, Sampling, TokenCounts
from jax_impl.ops.sampling.token_clusters import TokenClusters
from jax_impl.ops.sampling.vocab_parallel import ALL, Vocabulary, num_tokens_of
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU


class Projection(NamedTuple):
    """Hidden rows and LM head before their GEMM; same fields as in the specification."""

    rows: Float[jax.Array, "R hidden"]
    weight: Matrix
    factor: float = 1.0
    softcap: float | None = None
    clusters: TokenClusters | None = None

    @property
    def is_linear(self) -> bool:
        """True if the logits are the outputs of the GEMM, so that its epilogue can read them."""
        return self.softcap is None and self.clusters is None


def scores(projection: Projection) -> Float[jax.Array, "R share"]:
    """Computes the logits of this rank's shard, float32."""
    found = product_float32(projection.rows, projection.weight, projection.factor)
    if projection.softcap is not None:
        found = layers.softcap(found, projection.softcap)
    if projection.clusters is None:
        return found
    return token_clusters.kept(found, projection.rows, projection.clusters)


def plain_choose(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    params: Sampling,
    request: Int[jax.Array, " R"],
    vocabulary: Vocabulary = ALL,
) -> SampledTokens:
    """Same as the specification, without a grammar mask; the head may be sharded."""
    return sampling.choose(scores(projection), seen, positions, params, request, None, vocabulary)


def kernel_fused_choose(
    kernels: Kernels,
    projection: Projection,
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    params: Sampling,
    request: Int[jax.Array, " R"],
    vocabulary: Vocabulary = ALL,
) -> SampledTokens:
    """Same as `plain_choose`."""
    rows, weight, is_alone = projection.rows, projection.weight, vocabulary.group.is_single
    tokens = weight.num_outputs if is_alone else num_tokens_of(vocabulary)
    how = {"num_tokens": tokens, "is_warm_whole": not is_alone}
    asks = kernels.lm_head_epilogue.row_outputs(seen, positions, params, request, **how)
    how = {"factor": projection.factor, "out_type": jnp.float32, "asks": asks}
    logits, _, _, left = kernel_products(kernels, rows, weight, **how)
    given = (logits, seen, positions, params, request, None)
    if not is_alone:
        return sampling.choose_parts(kernels, *given, vocabulary, left)
    chosen = kernels.sampling.choose(
        *given,
        stream=TARGET_STREAM,
        tiles=kernels.tiles.sampling.of(rows=len(rows)),
        leaves=left,
    )
    return SampledTokens(*chosen)


fused_choose = kernel_or_reference(kernel_fused_choose, plain_choose, is_bfloat16)


def _pays(rows: Float[jax.Array, "R hidden"]) -> bool:
    """Returns True if the tuned table of the GPU prefers sampling fused into the LM head."""
    assert ops.KERNELS is not None  # called only with kernels
    return is_bfloat16(rows) and ops.KERNELS.tiles.lm_head_epilogue.of(rows=len(rows)).joined


_choose_from = kernel_or_reference(kernel_fused_choose, plain_choose, _pays)


def choose(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[jax.Array, " R"],
    params: Sampling,
    request: Int[jax.Array, " R"],
    allowed: Bool[jax.Array, "R vocab"] | None,
    vocabulary: Vocabulary = ALL,
) -> SampledTokens:
    """Same as the specification; with a grammar mask the logits are computed first."""
    given = (seen, positions, params, request)
    if allowed is None and projection.is_linear:
        return _choose_from(projection, *given, vocabulary)
    return sampling.choose(scores(projection), *given, allowed, vocabulary)


def plain_fused_rank(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[jax.Array, "B ..."],
    params: Sampling,
    keys: Int[jax.Array, "B ..."],
    stream: Stream,
    width: int,
    columns: Int[jax.Array, " size"] | None,
) -> RankedCandidates:
    """Same as the specification, for an LM head that is not sharded."""
    return rank_apart(projection, seen, positions, params, keys, stream, width, False, columns)


def kernel_fused_rank(
    kernels: Kernels,
    projection: Projection,
    seen: TokenCounts,
    positions: Int[jax.Array, "B ..."],
    params: Sampling,
    keys: Int[jax.Array, "B ..."],
    stream: Stream,
    width: int,
    columns: Int[jax.Array, " size"] | None,
) -> RankedCandidates:
    """Same as `plain_fused_rank`."""
    rows, weight, k = projection.rows, projection.weight, len(projection.rows) // len(positions)
    how = {"num_tokens": weight.num_outputs, "nodes": k, "width": width, "is_warm_whole": True}
    asks = kernels.lm_head_epilogue.row_outputs(seen, positions, params, positions, **how)
    how = {"factor": projection.factor, "out_type": jnp.float32, "asks": asks}
    logits, _, _, left = kernel_products(kernels, rows, weight, **how)
    ranked = kernels.sampling.rank(
        logits.reshape(len(positions), k, -1),
        *(seen, positions, params, keys, stream, width, False, columns),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=len(rows)),
        leaves=left,
    )
    return RankedCandidates(*ranked)


fused_rank = kernel_or_reference(kernel_fused_rank, plain_fused_rank, is_bfloat16)


def _ranking_pays(rows: Float[jax.Array, "R hidden"]) -> bool:
    """Returns True if the tuned table of the GPU prefers ranking fused into the LM head."""
    assert ops.KERNELS is not None  # called only with kernels
    return is_bfloat16(rows) and ops.KERNELS.tiles.lm_head_epilogue.of(rows=len(rows)).ranked


_rank_from = kernel_or_reference(kernel_fused_rank, plain_fused_rank, _ranking_pays)


def rank(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[jax.Array, "B ..."],
    params: Sampling,
    keys: Int[jax.Array, "B ..."],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> RankedCandidates:
    """Same as the specification; not fused for a sharded LM head or for sampled drafts."""
    given = (projection, seen, positions, params, keys, stream, width)
    is_other = columns is None and projection.weight.num_outputs != seen.counts.shape[1]
    is_other |= not projection.is_linear
    if is_sampled or is_other or not vocabulary.group.is_single:
        return rank_apart(*given, is_sampled, columns, vocabulary)
    return _rank_from(*given, columns)


def rank_apart(
    projection: Projection,
    seen: TokenCounts,
    positions: Int[jax.Array, "B ..."],
    params: Sampling,
    keys: Int[jax.Array, "B ..."],
    stream: Stream,
    width: int,
    is_sampled: bool,
    columns: Int[jax.Array, " size"] | None,
    vocabulary: Vocabulary = ALL,
) -> RankedCandidates:
    """Same as `rank`, from the logits."""
    logits = scores(projection)
    by_node = logits.reshape(len(positions), -1, logits.shape[1])
    how = (keys, stream, width, is_sampled, columns, vocabulary)
    return sampling.rank(by_node, seen, positions, params, *how)
