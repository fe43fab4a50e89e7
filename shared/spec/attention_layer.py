"""Attention layer between QKV and output projection: QK norm, RoPE, KV write, paged attention,
gate.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from shared.models.mixers import AttentionConfig
from shared.spec import layers
from shared.spec.attention import AttentionRows, attend, write


@dataclass(frozen=True)
class Heads:
    """Layout of the heads in a layer's QKV projection.

    Attributes:
      num_kv_heads: Hk.
      head_size: D.
      gated: True if each query head is followed by the rows of its output gate.
      scale: Multiplier of attention scores.
      has_kv: False if the projection has queries only, because the layer reads the KV of another
        layer.
      softcap: Soft cap of attention scores; None for none.
    """

    num_kv_heads: int
    head_size: int
    gated: bool
    scale: float
    has_kv: bool
    softcap: float | None = None

    @classmethod
    def of(cls, config: AttentionConfig) -> "Heads":
        """Returns the layout of an attention config."""
        scale = config.head_size**-0.5 if config.scale is None else config.scale
        sizes = (config.num_kv_heads, config.head_size, config.has_gate)
        return cls(*sizes, scale, config.has_kv, config.softcap)

    @property
    def key_columns(self) -> int:
        """Columns of the keys in a projection, and of the values."""
        return self.num_kv_heads * self.head_size * self.has_kv

    def group(self, columns: int) -> int:
        """Returns the query heads of each KV head for a projection with `columns` columns."""
        num_heads = (columns - 2 * self.key_columns) // self.head_size // (1 + self.gated)
        return num_heads // self.num_kv_heads


@dataclass(frozen=True)
class HeadNorms:
    """QK norm: RMS norms of each query and key head; scales include a zero-centred norm's 1.

    Alternatively norms over all query heads of a row, and over all its key heads, see
    `full_width_qk_norm`. `k` is None for a projection without keys.
    """

    q: Float[np.ndarray, " queries"]
    k: Float[np.ndarray, " keys"] | None
    eps: float


@dataclass(frozen=True)
class Angles:
    """Rotary cosine and sine of each row."""

    cos: Float[np.ndarray, "R half"]
    sin: Float[np.ndarray, "R half"]


def attention_layer(
    qkv: Float[np.ndarray, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    k_pages: Float[np.ndarray, "P page Hk D"],
    v_pages: Float[np.ndarray, "P page Hk D"],
    sinks: Float[np.ndarray, " Hq"] | None = None,
) -> tuple[
    Float[np.ndarray, "R outputs_of_heads"],
    Float[np.ndarray, "P page Hk D"],
    Float[np.ndarray, "P page Hk D"],
]:
    """Computes an attention layer between its two projections.

    QK norm, rotary embedding, KV write of the rows, attention, output gate. A layer that reads the
    KV of another layer writes none: the other layer has written that of the same rows.

    Args:
      qkv: The projection: query heads (each followed by its gate's rows), key heads, value heads;
        without `heads.has_kv` query heads only.
      heads: Layout of the projection.
      norms: QK norms; None without.
      angles: Rotary cos and sin of each row.
      rows: Positions and visibility of the rows.
      k_pages, v_pages: Pools of the layer, or of the other layer.
      sinks: Attention sink of each query head; None without.

    Returns:
      The concatenated outputs of the heads, and the pools after the writes.
    """
    q, kv, gate = _heads_of(qkv, heads)
    if norms is not None:
        q = layers.rms_norm(q, norms.q, norms.eps)
    q = layers.apply_rotary(q, angles.cos, angles.sin)
    if heads.has_kv:
        k_pages, v_pages = write_kv(kv, heads, norms, angles, rows, k_pages, v_pages)
    out = attend(
        q,
        k_pages,
        v_pages,
        rows.page_table,
        rows.request,
        rows.first,
        rows.until,
        rows.window,
        heads.scale,
        heads.softcap,
        sinks,
    )
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return out.reshape(len(qkv), -1), k_pages, v_pages


def full_width_qk_norm(
    qkv: Float[np.ndarray, "R outputs"], heads: Heads, norms: HeadNorms
) -> Float[np.ndarray, "R outputs"]:
    """Applies QK norms over all heads of a row.

    Args:
      qkv: The projection.
      heads: Layout of the projection.
      norms: Norms whose scales cover all heads, concatenated.
    """
    keys = heads.key_columns
    q, k, v = np.split(qkv, [qkv.shape[1] - 2 * keys, qkv.shape[1] - keys], axis=1)
    q = layers.rms_norm(q, norms.q, norms.eps)
    if norms.k is not None:
        k = layers.rms_norm(k, norms.k, norms.eps)
    return np.concatenate([q, k, v], axis=1)


def norm_values(
    qkv: Float[np.ndarray, "R outputs"], heads: Heads, eps: float, are_keys: bool
) -> Float[np.ndarray, "R with_values"]:
    """Applies the RMS norm of values to each value head; it has no learned scale.

    Args:
      qkv: The projection.
      heads: Layout of the projection.
      eps: Epsilon of the norm.
      are_keys: True if the values are the projected keys, and the projection has no values (K = V).

    Source: Gemma 4.
    """
    stored = qkv.shape[1] - heads.key_columns
    values = layers.rms_norm(qkv[:, stored:].reshape(len(qkv), -1, heads.head_size), None, eps)
    others = qkv if are_keys else qkv[:, :stored]
    return np.concatenate([others, values.reshape(len(qkv), -1)], axis=1)


def scale_queries(
    qkv: Float[np.ndarray, "R outputs"], heads: Heads, growth: Float[np.ndarray, " R"]
) -> Float[np.ndarray, "R outputs"]:
    """Multiplies queries by the factor of each row (long-context query scaling)."""
    q, kv = np.split(qkv, [qkv.shape[1] - 2 * heads.key_columns], axis=1)
    return np.concatenate([q * growth[:, None], kv], axis=1)


class RowBounds(NamedTuple):
    """Bounds of the KV positions that a request's rows read and write; undefined for a request
    without rows.

    Attributes:
      low: Lowest visible position of any row, or the start of its window if that is lower.
      seen_from: Lowest visible position outside the windows.
      seen_until: End of the visible positions outside the windows.
      new_from, new_until: First position written, and the end of those written; an empty range if
        none are.
      path_until: End of the visible positions in the order of `tree_paths`.
    """

    low: Any
    seen_from: Any
    seen_until: Any
    new_from: Any
    new_until: Any
    path_until: Any


BOUNDS = len(RowBounds._fields)


def row_bounds(
    rows: AttentionRows, row_starts: Int[np.ndarray, " B1"]
) -> Int[np.ndarray, "B bounds"]:
    """Computes the `RowBounds` of each request, once per step for all layers' kernels."""
    bounds = np.zeros((len(row_starts) - 1, BOUNDS), np.int32)
    for request, (start, stop) in enumerate(pairwise(row_starts)):
        if start < stop:
            span = slice(start, stop)
            first, until = rows.first[span], rows.until[span]
            low = min(first.min(), until.min())
            places = rows.places[span][rows.is_real[span]]
            num_nodes = rows.window[span].sum(axis=1)
            path_until = np.where(num_nodes > 0, np.maximum(first, until) + num_nodes, until)
            bounds[request] = RowBounds(
                low=low,
                seen_from=first.min(),
                seen_until=until.max(),
                new_from=places.min() if len(places) else low,
                new_until=places.max() + 1 if len(places) else 0,
                path_until=path_until.max(),
            )
    return bounds


def tree_paths(rows: AttentionRows) -> Int[np.ndarray, "R N"]:
    """Computes the order in which each row of a tree adds the nodes of its window.

    Entry `i` of a row is the node at position `until + i` in plain decoding, where the row's
    ancestors are consecutive; N for none. Nodes that a sliding window cuts have no entry.
    """
    R, N = rows.window.shape
    paths = np.full((R, N), N, np.int32)
    for row, is_visible in enumerate(rows.window):
        nodes = np.flatnonzero(is_visible)
        begin = max(rows.first[row] - rows.until[row], 0)
        paths[row, begin : begin + len(nodes)] = nodes
    return paths


def write_kv(
    kv: Float[np.ndarray, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: AttentionRows,
    k_pages: Float[np.ndarray, "P page Hk D"],
    v_pages: Float[np.ndarray, "P page Hk D"],
) -> tuple[Float[np.ndarray, "P page Hk D"], Float[np.ndarray, "P page Hk D"]]:
    """Computes the KV-write part of `attention_layer`, for rows without queries.

    Args:
      kv: Their projection without the queries: key heads, then value heads.
      heads, norms, angles, rows, k_pages, v_pages: See `attention_layer`.
    """
    k, v = kv.reshape(len(kv), 2, -1, heads.head_size).swapaxes(0, 1)
    if norms is not None and norms.k is not None:
        k = layers.rms_norm(k, norms.k, norms.eps)
    k = layers.apply_rotary(k, angles.cos, angles.sin)
    k_pages = write(k_pages, rows.page_table, rows.request, rows.places, rows.is_real, k)
    v_pages = write(v_pages, rows.page_table, rows.request, rows.places, rows.is_real, v)
    return k_pages, v_pages


def _heads_of(
    qkv: Float[np.ndarray, "R outputs"], heads: Heads
) -> tuple[
    Float[np.ndarray, "R Hq D"],
    Float[np.ndarray, "R kv_columns"],
    Float[np.ndarray, "R Hq D"] | None,
]:
    """Splits the projection into queries, keys with values, and the gate if there is one."""
    R, D = len(qkv), heads.head_size
    q, kv = np.split(qkv, [qkv.shape[1] - 2 * heads.key_columns], axis=1)
    if not heads.gated:
        return q.reshape(R, -1, D), kv, None
    pairs = q.reshape(R, -1, 2, D)  # per head its query rows, then its gate rows
    return pairs[:, :, 0], kv, pairs[:, :, 1]
