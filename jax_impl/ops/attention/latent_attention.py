"""Latent attention (MLA) in absorbed form; same as `shared.spec.latent_attention`.

On a GPU its parts are kernels; see `jax_impl.ops`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jax_impl.ops import Kernels, Place, kernel_or_reference, operand
from jax_impl.ops.attention.attention import AttentionRows, attend, write
from jax_impl.ops.attention.attention_layer import Angles
from jax_impl.ops.gemm import layers, linear
from jax_impl.ops.gemm.linear import Matrix
from jax_impl.ops.gemm.lora import AdapterWeights, continued
from shared.models.mixers import LatentAttentionConfig
from shared.spec.reduction_order import LATENT_ATTENTION, SQUARES


class LatentWeights(NamedTuple):
    """Weights of a layer between its input and output projections; as in the specification.

    Norms are of one layer, or stacked in the order of the layers' pools.
    """

    latent_norm: Float[jax.Array, "*L r"]
    query_norm: Float[jax.Array, "*L rq"] | None
    queries: Matrix | None
    kv_b: Matrix


def latent_attention(
    inputs: Float[jax.Array, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
    rows: AttentionRows,
    pools: Float[jax.Array, "L 1 P page 1 r_dr"],
    layer: Place,
) -> tuple[Float[jax.Array, "R values"], Float[jax.Array, "L 1 P page 1 r_dr"]]:
    """Computes a layer between its two projections; returns the outputs, and the pools after the
    writes.
    """
    query, pools = latent_rows(inputs, config, weights, angles, rows, pools, layer)
    if weights.queries is not None:
        query = linear.product(query, weights.queries)
    out = attend_latent(
        latent_queries(query, config, weights.kv_b, angles),
        pools,
        layer,
        rows,
        config.scale,
        config.latent_rank,
    )
    return value_heads(out, config, weights.kv_b).reshape(len(inputs), -1), pools


def plain_latent_rows(
    inputs: Float[jax.Array, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
    rows: AttentionRows,
    pools: Float[jax.Array, "L 1 P page 1 r_dr"],
    layer: Place,
) -> tuple[Float[jax.Array, "R queries"], Float[jax.Array, "L 1 P page 1 r_dr"]]:
    """Writes the rows' latents and rope keys to a layer's pool.

    Returns:
      The query latents after their norm, or the inputs if they begin with query heads; and the
      pools.
    """
    columns = inputs.shape[1]
    ends = [columns - config.head_size, columns - config.rope_size]
    query, latent, key = jnp.split(inputs, ends, axis=1)
    if weights.query_norm is None:
        query = inputs
    else:
        norm = _of_layer(weights.query_norm, layer)
        query = layers.rms_norm(query, norm, config.latent_eps)
    norm = _of_layer(weights.latent_norm, layer)
    latent = layers.rms_norm(latent, norm, config.latent_eps)
    key = rotate(key[:, None], config, angles)
    pool, num_pages = pools.reshape(-1, *pools.shape[3:]), pools.shape[2]
    cached = jnp.concatenate([latent[:, None], key], axis=2)
    table = rows.page_table + layer * num_pages
    pool = write(pool, table, rows.request, rows.places, rows.is_real, cached)
    return query, pool.reshape(pools.shape)


def kernel_latent_rows(
    kernels: Kernels,
    inputs: Float[jax.Array, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
    rows: AttentionRows,
    pools: Float[jax.Array, "L 1 P page 1 r_dr"],
    layer: Place,
) -> tuple[Float[jax.Array, "R queries"], Float[jax.Array, "L 1 P page 1 r_dr"]]:
    query, pools = kernels.latent_rows.latent_rows(
        inputs,
        _in_stack(weights.query_norm, len(pools)),
        _in_stack(weights.latent_norm, len(pools)),
        angles.cos,
        angles.sin,
        pools,
        operand(layer),
        rows.page_table,
        rows.request,
        rows.places,
        rows.is_real,
        eps=config.latent_eps,
        is_interleaved=config.rotary.interleaved,
        order=SQUARES,
    )
    return inputs if query is None else query, pools


latent_rows = kernel_or_reference(kernel_latent_rows, plain_latent_rows)


def plain_latent_queries(
    query: Float[jax.Array, "R columns"],
    config: LatentAttentionConfig,
    kv_b: Matrix,
    angles: Angles,
) -> Float[jax.Array, "R Hq r_dr"]:
    """Computes the queries in absorbed form: `[q W_UK | rotated rope part]` of each head."""
    size, heads = config.nope_size + config.rope_size, kv_b.num_outputs // config.head_rows
    q = query[:, : heads * size].reshape(len(query), heads, size)
    nope, rope = q[..., : config.nope_size], q[..., config.nope_size :]
    parts = absorb_queries(nope, config, kv_b), rotate(rope, config, angles)
    return jnp.concatenate(parts, axis=2)


def kernel_latent_queries(
    kernels: Kernels,
    query: Float[jax.Array, "R columns"],
    config: LatentAttentionConfig,
    kv_b: Matrix,
    angles: Angles,
) -> Float[jax.Array, "R Hq r_dr"]:
    stack, place = _stacked(kv_b, config)
    sizes = {"item_bytes": query.dtype.itemsize, "rows": len(query), "heads": stack.shape[1]}
    return kernels.head_product.latent_queries(
        query,
        angles.cos,
        angles.sin,
        stack,
        place,
        config.nope_size,
        is_interleaved=config.rotary.interleaved,
        tiles=kernels.tiles.head_product.of(**sizes, outputs=config.latent_rank),
        lora=_head_adapters(kernels, kv_b),
    )


latent_queries = kernel_or_reference(kernel_latent_queries, plain_latent_queries)


def rotate(
    x: Float[jax.Array, "R H dr"], config: LatentAttentionConfig, angles: Angles
) -> Float[jax.Array, "R H dr"]:
    """Applies RoPE to rope parts, in interleaved pairs if the model has them."""
    apply = layers.apply_rotary_interleaved if config.rotary.interleaved else layers.apply_rotary
    return apply(x, angles.cos, angles.sin)


def of_heads(
    x: Float[jax.Array, "outputs inputs"], config: LatentAttentionConfig
) -> Float[jax.Array, "Hq dn_dv inputs"]:
    """Returns the outputs of `kv_b` by head, of which a TP rank has some."""
    return x.reshape(-1, config.head_rows, x.shape[1])


def absorb_queries(
    q: Float[jax.Array, "R Hq dn"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[jax.Array, "R Hq r"]:
    """Multiplies each head's query with its key rows."""
    keys = of_heads(kv_b.alone.values, config)[:, : config.nope_size]
    return _multiplied(q, keys.swapaxes(1, 2), config, kv_b, is_key=True)


def plain_value_heads(
    x: Float[jax.Array, "R Hq r"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[jax.Array, "R Hq dv"]:
    """Multiplies each head's mean latent with its value rows."""
    values = of_heads(kv_b.alone.values, config)[:, config.nope_size :]
    return _multiplied(x, values, config, kv_b, is_key=False)


def kernel_value_heads(
    kernels: Kernels, x: Float[jax.Array, "R Hq r"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[jax.Array, "R Hq dv"]:
    sizes = {"item_bytes": x.dtype.itemsize, "rows": len(x), "heads": x.shape[1]}
    tiles = kernels.tiles.head_product.of(**sizes, outputs=config.value_size)
    stack, place = _stacked(kv_b, config)
    return kernels.head_product.value_heads(
        x,
        stack,
        place,
        config.nope_size,
        tiles=tiles,
        lora=_head_adapters(kernels, kv_b),
    )


value_heads = kernel_or_reference(kernel_value_heads, plain_value_heads)


def plain_attend_latent(
    q: Float[jax.Array, "R Hq r_dr"],
    pool: Float[jax.Array, "L 1 P page 1 r_dr"],
    layer: Place,
    rows: AttentionRows,
    scale: float,
    rank: int,
) -> Float[jax.Array, "R Hq r"]:
    """Computes multi-query attention over the latent rows of a layer; padding rows are undefined.

    Args:
      q, rows, scale, rank: See the specification.
      pool, layer: Latent pools of all layers, and the index of the layer to read.
    """
    pages, num_pages = pool.reshape(-1, *pool.shape[3:]), pool.shape[2]
    table = rows.page_table + layer * num_pages
    visible = (rows.row_starts, rows.first, rows.until, rows.window, rows.max_rows)
    return attend(q, pages, pages, table, rows.request, *visible, scale)[..., :rank]


def kernel_attend_latent(
    kernels: Kernels,
    q: Float[jax.Array, "R Hq r_dr"],
    pool: Float[jax.Array, "L 1 P page 1 r_dr"],
    layer: Place,
    rows: AttentionRows,
    scale: float,
    rank: int,
) -> Float[jax.Array, "R Hq r"]:
    item_bytes, pairs = q.dtype.itemsize, rows.max_rows * q.shape[1]
    requests = len(rows.page_table)
    sizes = {"item_bytes": item_bytes, "rows": pairs, "requests": requests, "rank": rank}
    return kernels.latent_attention.attend_latent(
        q,
        pool,
        operand(layer),
        rows.page_table,
        rows.row_starts,
        rows.first,
        rows.until,
        rows.window,
        rank=rank,
        max_rows=rows.max_rows,
        scale=scale,
        tiles=kernels.tiles.latent_attention.of(**sizes),
        **LATENT_ATTENTION.sizes_for(item_bytes),
    )


attend_latent = kernel_or_reference(kernel_attend_latent, plain_attend_latent)


def _multiplied(
    x: Float[jax.Array, "R Hq inputs"],
    weight: Float[jax.Array, "Hq outputs inputs"],
    config: LatentAttentionConfig,
    kv_b: Matrix,
    is_key: bool,
) -> Float[jax.Array, "R Hq outputs"]:
    """Multiplies the rows of each head with its own weight, a part of `kv_b`, and its adapters."""
    sums, lora = _by_head(x, weight), kv_b.lora
    if lora is None:
        return sums.astype(x.dtype)
    own = lora.alone

    def more(slot: jax.Array) -> jax.Array:
        a, b = adapter_heads(own, slot, config, is_key)
        inputs = _by_head(x, a.astype(x.dtype)) * own.scales[slot - 1]
        return sums + _by_head(inputs.astype(x.dtype), b.astype(x.dtype))

    return continued(sums, lora, more).astype(x.dtype)


def adapter_heads(
    weights: AdapterWeights, slot: Place, config: LatentAttentionConfig, is_key: bool
) -> tuple[Float[jax.Array, "Hq rank inputs"], Float[jax.Array, "Hq outputs rank"]]:
    """Returns A and B of each head's product; see `of_head` of the specification."""
    a, b = weights.a[slot - 1], of_heads(weights.b[slot - 1], config)
    a = jnp.broadcast_to(a, (len(b), *a.shape))
    keys, values = b[:, : config.nope_size], b[:, config.nope_size :]
    return (keys.swapaxes(1, 2), a.swapaxes(1, 2)) if is_key else (a, values)


def _head_adapters(kernels: Kernels, kv_b: Matrix) -> Any:
    """Returns the adapters of the rows in the form of kernels; None without."""
    if kv_b.lora is None:
        return None
    own, layer = kv_b.lora.weights, kv_b.lora.layer
    if layer is None:
        own, layer = jax.tree.map(lambda array: array[:, None], own), 0
    slots = kv_b.lora.slots
    return kernels.head_product.HeadAdapters(slots, operand(layer), own.a, own.b, own.scales)


def _by_head(
    x: Float[jax.Array, "R H inputs"], weight: Float[jax.Array, "H outputs inputs"]
) -> Float[jax.Array, "R H outputs"]:
    """Multiplies the rows of each head with its own weight, in float32."""
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    out = lax.dot_general(x, weight, (((2,), (2,)), ((1,), (0,))), **options)  # [H, R, outputs]
    return out.swapaxes(0, 1)


def _of_layer(norm: Float[jax.Array, "*L size"], layer: Place) -> Float[jax.Array, " size"]:
    """Returns the norm of a layer, which may be stacked."""
    return norm[layer] if norm.ndim > 1 else norm


def _in_stack(
    norm: Float[jax.Array, "*L size"] | None, num_layers: int
) -> Float[jax.Array, "L size"] | None:
    """Returns a norm in the form of kernels, which index it like the pools of the layers."""
    if norm is None or norm.ndim == 2:
        return norm
    return jnp.broadcast_to(norm, (num_layers, *norm.shape))


def _stacked(
    kv_b: Matrix, config: LatentAttentionConfig
) -> tuple[Float[jax.Array, "L Hq dn_dv r"], Int[jax.Array, " 1"]]:
    """Returns weights in the form of kernels: a stack (possibly of one) and the index in it."""
    heads = kv_b.num_outputs // config.head_rows
    stack = kv_b.values.reshape(-1, heads, config.head_rows, kv_b.values.shape[-1])
    return stack, operand(0 if kv_b.layer is None else kv_b.layer)
