"""Latent attention (MLA) in absorbed form, between its input and output projections.

The cached row of a position is `[latent | rope key]`: the normed latent, and one rotated key for
all heads. A head's key is `[W_UK latent | rope key]` and its value `W_UV latent`. In absorbed form
`W_UK` is applied to the query and `W_UV` to the output, so attention reads the cached rows alone:
multi-query attention, with the first columns of the keys as values. Every row takes this form,
in prefill, decode and verify, so that its bits do not depend on the kind of step.

With an adapter `s B A` of `kv_b`, a head's products continue over further inputs as those of other
weights do (`shared.spec.lora`), where B_UK and B_UV are the rows of B of the head:

    q W_UK:  a = round(s * (q B_UK)),  then + a A
    W_UV x:  a = round(s * (A x)),     then + B_UV a

Source: DeepSeek-V2, DeepSeek-AI 2024, arXiv:2405.04434.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from shared.models.mixers import LatentAttentionConfig
from shared.spec import layers, linear
from shared.spec.attention import AttentionRows, attend, write
from shared.spec.attention_layer import Angles
from shared.spec.linear import Matrix
from shared.spec.lora import RowAdapters, adapted


@dataclass(frozen=True)
class LatentWeights:
    """Weights of a layer between its input and output projections.

    Attributes:
      latent_norm, query_norm: Norms of the latents of keys and of queries.
      queries: Projection of the query latent. It and its norm are None if queries are a part of the
        input projection.
      kv_b: Rows of each head: key rows W_UK, then value rows W_UV.
    """

    latent_norm: Float[np.ndarray, " r"]
    query_norm: Float[np.ndarray, " rq"] | None
    queries: Matrix | None
    kv_b: Matrix


def latent_attention(
    inputs: Float[np.ndarray, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
    rows: AttentionRows,
    pages: Float[np.ndarray, "P page 1 r_dr"],
) -> tuple[Float[np.ndarray, "R values"], Float[np.ndarray, "P page 1 r_dr"]]:
    """Computes a layer between its two projections.

    Args:
      inputs: The input projection: query latent or query heads, then latent and rope key.
      config, weights: Sizes and weights of the layer.
      angles: Rotary cos and sin of each row.
      rows: Positions and visibility of the rows.
      pages: Pool of the layer.

    Returns:
      The concatenated outputs of the heads, and the pool after the writes.
    """
    query, latents = latent_rows(inputs, config, weights, angles)
    if weights.queries is not None:
        query = linear.product(query, weights.queries)
    q = latent_queries(query, config, weights.kv_b, angles)
    pages = write(pages, rows.page_table, rows.request, rows.places, rows.is_real, latents[:, None])
    out = attend_latent(q, pages, rows, config.scale, config.latent_rank)
    return value_heads(out, config, weights.kv_b).reshape(len(inputs), -1), pages


def latent_rows(
    inputs: Float[np.ndarray, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
) -> tuple[Float[np.ndarray, "R queries"], Float[np.ndarray, "R r_dr"]]:
    """Computes the rows of a layer that precede its products over heads.

    Args:
      inputs, config, weights, angles: See `latent_attention`.

    Returns:
      The query latent after its norm, or the input projection if it begins with query heads; and
      the rows to cache: the latent after its norm, and the rope key after its rotation.
    """
    query, latent, key = np.split(
        inputs, [inputs.shape[1] - config.head_size, inputs.shape[1] - config.rope_size], axis=1
    )
    query = (
        inputs
        if weights.query_norm is None
        else layers.rms_norm(query, weights.query_norm, config.latent_eps)
    )
    latent = layers.rms_norm(latent, weights.latent_norm, config.latent_eps)
    return query, np.concatenate([latent, rotate(key[:, None], config, angles)[:, 0]], axis=1)


def latent_queries(
    query: Float[np.ndarray, "R columns"],
    config: LatentAttentionConfig,
    kv_b: Matrix,
    angles: Angles,
) -> Float[np.ndarray, "R Hq r_dr"]:
    """Computes the queries in absorbed form: `[q W_UK | rotated rope part]` of each head.

    Args:
      query: Rows that begin with the query heads.
      config, kv_b, angles: See `latent_attention`.
    """
    size = config.nope_size + config.rope_size
    heads = kv_b.num_outputs // config.head_rows
    q = query[:, : heads * size].reshape(len(query), heads, size)
    nope, rope = q[..., : config.nope_size], q[..., config.nope_size :]
    parts = absorb_queries(nope, config, kv_b), rotate(rope, config, angles)
    return np.concatenate(parts, axis=-1)


def rotate(
    x: Float[np.ndarray, "R H dr"], config: LatentAttentionConfig, angles: Angles
) -> Float[np.ndarray, "R H dr"]:
    """Applies the rotary embedding to rope parts, in interleaved pairs if the model has them."""
    apply = layers.apply_rotary_interleaved if config.rotary.interleaved else layers.apply_rotary
    return apply(x, angles.cos, angles.sin)


def of_heads(
    x: Float[np.ndarray, "outputs inputs"], config: LatentAttentionConfig
) -> Float[np.ndarray, "Hq dn_dv inputs"]:
    """Returns the outputs of `kv_b` by head, of which a TP rank has some."""
    return x.reshape(-1, config.head_rows, x.shape[1])


def absorb_queries(
    q: Float[np.ndarray, "R Hq dn"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[np.ndarray, "R Hq r"]:
    """Multiplies each head's query with its key rows: `q_h W_UK_h`, a sum over dn."""
    keys = of_heads(kv_b.values, config)[:, : config.nope_size]
    out = np.einsum("rhn,hnc->rhc", q, keys, optimize=True)
    return out if kv_b.lora is None else _adapted(out, q, config, kv_b.lora, is_key=True)


def value_heads(
    x: Float[np.ndarray, "R Hq r"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[np.ndarray, "R Hq dv"]:
    """Multiplies each head's mean latent with its value rows: `W_UV_h x_h`, a sum over r.

    Args:
      x: Output of `attend_latent`.
      config, kv_b: See `latent_attention`.
    """
    values = of_heads(kv_b.values, config)[:, config.nope_size :]
    out = np.einsum("rhc,hvc->rhv", x, values, optimize=True)
    return out if kv_b.lora is None else _adapted(out, x, config, kv_b.lora, is_key=False)


def _adapted(
    acc: Float[np.ndarray, "R Hq outputs"],
    x: Float[np.ndarray, "R Hq inputs"],
    config: LatentAttentionConfig,
    operand: RowAdapters,
    is_key: bool,
) -> Float[np.ndarray, "R Hq outputs"]:
    """Continues the products of each row that has an adapter."""
    out = np.copy(acc)  # in the same memory order, on which bits of products depend
    for head in range(acc.shape[1]):
        own = of_head(operand, config, head, is_key)
        out[:, head] = adapted(acc[:, head], x[:, head], own)
    return out


def of_head(
    operand: RowAdapters, config: LatentAttentionConfig, head: int, is_key: bool
) -> RowAdapters:
    """Returns the adapters of a head's product as those of a weight `[outputs, inputs]`.

    Factors are 1, as DoRA is not supported for `kv_b`.

    Args:
      operand: Adapters of `kv_b`.
      config: Config of the layer.
      head: The head.
      is_key: True for the product with the key rows, of which A is B_UK^T and B is A^T.
    """
    own, first = operand.weights, head * config.head_rows
    end, middle = first + config.head_rows, first + config.nope_size
    a, b = own.a, own.b[:, middle:end]
    if is_key:
        a, b = own.b[:, first:middle].swapaxes(1, 2), own.a.swapaxes(1, 2)
    factors = np.ones(b.shape[:2], np.float32)
    weights = replace(own, a=a, b=b, factors=factors, parts=(b.shape[1],))
    return replace(operand, weights=weights)


def attend_latent(
    q: Float[np.ndarray, "R Hq r_dr"],
    pages: Float[np.ndarray, "P page 1 r_dr"],
    rows: AttentionRows,
    scale: float,
    rank: int,
) -> Float[np.ndarray, "R Hq r"]:
    """Computes multi-query attention over cached rows; values are the first `rank` columns of keys.

    Args:
      q: Queries in absorbed form, not scaled.
      pages: Pool of one layer, which contains the rows' own latents already.
      rows: Positions and visibility of the rows.
      scale: Multiplier of the scores.
      rank: r, the columns of the latent.
    """
    out = attend(
        q,
        pages,
        pages,
        rows.page_table,
        rows.request,
        rows.first,
        rows.until,
        rows.window,
        scale,
    )
    return out[..., :rank]
