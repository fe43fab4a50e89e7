"""Latent attention (MLA) in absorbed form; same as `shared.spec.latent_attention`.

Pools are written in place. On a GPU its parts are kernels; see `torch_impl.ops`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shared.models.mixers import LatentAttentionConfig
from shared.spec.reduction_order import LATENT_ATTENTION, SQUARES
from torch_impl.ops import Kernels, kernel_or_reference
from torch_impl.ops.attention.attention import AttentionRows, attend, write
from torch_impl.ops.attention.attention_layer import Angles
from torch_impl.ops.gemm import layers, linear
from torch_impl.ops.gemm.linear import Matrix
from torch_impl.ops.gemm.lora import AdapterWeights, continued


@dataclass(frozen=True)
class LatentWeights:
    """Weights of a layer between its input and output projections; as in the specification."""

    latent_norm: Float[Tensor, " r"]
    query_norm: Float[Tensor, " rq"] | None
    queries: Matrix | None
    kv_b: Matrix


def latent_attention(
    inputs: Float[Tensor, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
    rows: AttentionRows,
    pools: Float[Tensor, "L 1 P page 1 r_dr"],
    layer: int,
) -> Float[Tensor, "R values"]:
    """Computes a layer between its two projections; writes its pool in place."""
    query = latent_rows(inputs, config, weights, angles, rows, pools, layer)
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
    return value_heads(out, config, weights.kv_b).flatten(1)


def plain_latent_rows(
    inputs: Float[Tensor, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
    rows: AttentionRows,
    pools: Float[Tensor, "L 1 P page 1 r_dr"],
    layer: int,
) -> Float[Tensor, "R queries"]:
    """Writes the rows' latents and rope keys to a layer's pool, in place.

    Returns:
      The query latents after their norm, or the inputs if they begin with query heads.
    """
    widths = [inputs.shape[1] - config.head_size, config.latent_rank, config.rope_size]
    query, latent, key = inputs.split(widths, dim=1)
    if weights.query_norm is None:
        query = inputs
    else:
        query = layers.rms_norm(query, weights.query_norm, config.latent_eps)
    latent = layers.rms_norm(latent, weights.latent_norm, config.latent_eps)
    key = rotate(key[:, None], config, angles)
    cached = torch.cat([latent[:, None], key], dim=2)
    write(pools[layer, 0], rows.page_table, rows.request, rows.places, rows.is_real, cached)
    return query


def kernel_latent_rows(
    kernels: Kernels,
    inputs: Float[Tensor, "R outputs"],
    config: LatentAttentionConfig,
    weights: LatentWeights,
    angles: Angles,
    rows: AttentionRows,
    pools: Float[Tensor, "L 1 P page 1 r_dr"],
    layer: int,
) -> Float[Tensor, "R queries"]:
    query = kernels.latent_rows.latent_rows(
        inputs,
        weights.query_norm,
        weights.latent_norm,
        angles.cos,
        angles.sin,
        pools,
        layer,
        rows.page_table,
        rows.request,
        rows.places,
        rows.is_real,
        eps=config.latent_eps,
        is_interleaved=config.rotary.interleaved,
        order=SQUARES,
    )
    return inputs if query is None else query


latent_rows = kernel_or_reference(kernel_latent_rows, plain_latent_rows)


def plain_latent_queries(
    query: Float[Tensor, "R columns"],
    config: LatentAttentionConfig,
    kv_b: Matrix,
    angles: Angles,
) -> Float[Tensor, "R Hq r_dr"]:
    """Computes the queries in absorbed form: `[q W_UK | rotated rope part]` of each head."""
    sizes = [config.nope_size, config.rope_size]
    heads = kv_b.num_outputs // config.head_rows
    q = query[:, : heads * sum(sizes)].unflatten(1, (heads, sum(sizes)))
    nope, rope = q.split(sizes, dim=2)
    return torch.cat([absorb_queries(nope, config, kv_b), rotate(rope, config, angles)], dim=2)


def kernel_latent_queries(
    kernels: Kernels,
    query: Float[Tensor, "R columns"],
    config: LatentAttentionConfig,
    kv_b: Matrix,
    angles: Angles,
) -> Float[Tensor, "R Hq r_dr"]:
    weight = of_heads(kv_b.values, config)
    sizes = {"item_bytes": query.element_size(), "rows": len(query), "heads": len(weight)}
    return kernels.head_product.latent_queries(
        query,
        angles.cos,
        angles.sin,
        weight,
        config.nope_size,
        is_interleaved=config.rotary.interleaved,
        tiles=kernels.tiles.head_product.of(**sizes, outputs=config.latent_rank),
        lora=_head_adapters(kernels, kv_b),
    )


latent_queries = kernel_or_reference(kernel_latent_queries, plain_latent_queries)


def rotate(
    x: Float[Tensor, "R H dr"], config: LatentAttentionConfig, angles: Angles
) -> Float[Tensor, "R H dr"]:
    """Applies RoPE to rope parts, in interleaved pairs if the model has them."""
    apply = layers.apply_rotary_interleaved if config.rotary.interleaved else layers.apply_rotary
    return apply(x, angles.cos, angles.sin)


def of_heads(
    x: Float[Tensor, "outputs inputs"], config: LatentAttentionConfig
) -> Float[Tensor, "Hq dn_dv inputs"]:
    """Returns the outputs of `kv_b` by head, of which a TP rank has some."""
    return x.unflatten(0, (-1, config.head_rows))


def absorb_queries(
    q: Float[Tensor, "R Hq dn"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[Tensor, "R Hq r"]:
    """Multiplies each head's query with its key rows."""
    keys = of_heads(kv_b.values, config)[:, : config.nope_size]
    return _multiplied(q, keys.mT, config, kv_b, is_key=True)


def plain_value_heads(
    x: Float[Tensor, "R Hq r"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[Tensor, "R Hq dv"]:
    """Multiplies each head's mean latent with its value rows."""
    values = of_heads(kv_b.values, config)[:, config.nope_size :]
    return _multiplied(x, values, config, kv_b, is_key=False)


def kernel_value_heads(
    kernels: Kernels, x: Float[Tensor, "R Hq r"], config: LatentAttentionConfig, kv_b: Matrix
) -> Float[Tensor, "R Hq dv"]:
    sizes = {"item_bytes": x.element_size(), "rows": len(x), "heads": x.shape[1]}
    tiles = kernels.tiles.head_product.of(**sizes, outputs=config.value_size)
    return kernels.head_product.value_heads(
        x,
        of_heads(kv_b.values, config),
        config.nope_size,
        tiles=tiles,
        lora=_head_adapters(kernels, kv_b),
    )


value_heads = kernel_or_reference(kernel_value_heads, plain_value_heads)


def plain_attend_latent(
    q: Float[Tensor, "R Hq r_dr"],
    pool: Float[Tensor, "L 1 P page 1 r_dr"],
    layer: int,
    rows: AttentionRows,
    scale: float,
    rank: int,
) -> Float[Tensor, "R Hq r"]:
    """Computes multi-query attention over the latent rows of a layer; padding rows are undefined.

    Args:
      q, rows, scale, rank: See the specification.
      pool, layer: Latent pools of all layers, and the index of the layer to read.
    """
    pages = pool[layer, 0]
    visible = (rows.row_starts, rows.first, rows.until, rows.window, rows.max_rows)
    return attend(q, pages, pages, rows.page_table, rows.request, *visible, scale)[..., :rank]


def kernel_attend_latent(
    kernels: Kernels,
    q: Float[Tensor, "R Hq r_dr"],
    pool: Float[Tensor, "L 1 P page 1 r_dr"],
    layer: int,
    rows: AttentionRows,
    scale: float,
    rank: int,
) -> Float[Tensor, "R Hq r"]:
    item_bytes, pairs = q.dtype.itemsize, rows.max_rows * q.shape[1]
    requests = len(rows.page_table)
    sizes = {"item_bytes": item_bytes, "rows": pairs, "requests": requests, "rank": rank}
    return kernels.latent_attention.attend_latent(
        q,
        pool,
        layer,
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
    x: Float[Tensor, "R Hq inputs"],
    weight: Float[Tensor, "Hq outputs inputs"],
    config: LatentAttentionConfig,
    kv_b: Matrix,
    is_key: bool,
) -> Float[Tensor, "R Hq outputs"]:
    """Multiplies the rows of each head with its own weight, a part of `kv_b`, and its adapters."""
    out, lora = _by_head(x, weight), kv_b.lora
    if lora is None:
        return out
    sums = _by_head(x.float(), weight.float())

    def more(slot: int) -> Float[Tensor, "R Hq outputs"]:
        a, b = adapter_heads(lora.weights, slot, config, is_key)
        inputs = _by_head(x.float(), a.float()) * lora.weights.scales[slot - 1]
        return sums + _by_head(inputs.to(x.dtype).float(), b.float())

    # Base rows keep the bits of a product that is rounded at once.
    adapted = continued(sums, lora, more).to(x.dtype)
    return torch.where(lora.slots[:, None, None] == 0, out, adapted)


def _by_head(
    x: Float[Tensor, "R H inputs"], weight: Float[Tensor, "H outputs inputs"]
) -> Float[Tensor, "R H outputs"]:
    return torch.bmm(x.transpose(0, 1), weight.mT).transpose(0, 1)


def adapter_heads(
    weights: AdapterWeights, slot: int, config: LatentAttentionConfig, is_key: bool
) -> tuple[Float[Tensor, "Hq rank inputs"], Float[Tensor, "Hq outputs rank"]]:
    """Returns A and B of each head's product; see `of_head` of the specification."""
    a, b = weights.a[slot - 1], of_heads(weights.b[slot - 1], config)
    a, keys, values = a.expand(len(b), -1, -1), b[:, : config.nope_size], b[:, config.nope_size :]
    return (keys.mT, a.mT) if is_key else (a, values)


def _head_adapters(kernels: Kernels, kv_b: Matrix) -> Any:
    """Returns the adapters of the rows in the form of kernels; None without."""
    if kv_b.lora is None:
        return None
    own = kv_b.lora.weights
    return kernels.head_product.HeadAdapters(kv_b.lora.slots, own.a, own.b, own.scales)
