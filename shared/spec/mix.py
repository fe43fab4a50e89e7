"""What an attention layer does between its two products."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from shared.models.layers import AttentionConfig
from shared.spec import layers
from shared.spec.attention import Rows, attend, write


@dataclass(frozen=True)
class Heads:
    """How a layer's projection is made of heads.

    Attributes:
      num_kv_heads: Hk.
      head_size: D.
      gated: Each query head is followed by rows of its output gate.
      scale: What scores are multiplied by.
    """

    num_kv_heads: int
    head_size: int
    gated: bool
    scale: float

    @classmethod
    def of(cls, config: AttentionConfig) -> "Heads":
        """Those of attention layers."""
        scale = config.head_size**-0.5 if config.scale is None else config.scale
        return cls(config.num_kv_heads, config.head_size, config.has_gate, scale)


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each query and key head, which some models have; scales as in `linear`.

    Or of all query heads of a row, and of all its key heads, as `normed_rows` takes them.
    """

    q: Float[np.ndarray, " queries"]
    k: Float[np.ndarray, " keys"]
    eps: float


@dataclass(frozen=True)
class Angles:
    """Cosine and sine of the rotation at each row's position."""

    cos: Float[np.ndarray, "R half"]
    sin: Float[np.ndarray, "R half"]


def mix(
    qkv: Float[np.ndarray, "R outputs"],
    heads: Heads,
    norms: HeadNorms | None,
    angles: Angles,
    rows: Rows,
    k_pages: Float[np.ndarray, "P page Hk D"],
    v_pages: Float[np.ndarray, "P page Hk D"],
) -> tuple[
    Float[np.ndarray, "R outputs_of_heads"],
    Float[np.ndarray, "P page Hk D"],
    Float[np.ndarray, "P page Hk D"],
]:
    """All that an attention layer does between its two products.

    Head norms, rotation, the rows' own keys and values written, attention, the output gate.

    Args:
      qkv: The projection: query heads (each with its gate's rows behind it), key heads, values.

    Returns:
      The heads' outputs side by side, and the pools after the writes.
    """
    q, k, v, gate = _heads_of(qkv, heads)
    if norms is not None:
        q = layers.rms_norm(q, norms.q, norms.eps)
        k = layers.rms_norm(k, norms.k, norms.eps)
    q = layers.apply_rotary(q, angles.cos, angles.sin)
    k = layers.apply_rotary(k, angles.cos, angles.sin)
    k_pages = write(k_pages, rows.page_table, rows.request, rows.places, rows.is_real, k)
    v_pages = write(v_pages, rows.page_table, rows.request, rows.places, rows.is_real, v)
    sees = (rows.first, rows.until, rows.window)
    out = attend(q, k_pages, v_pages, rows.page_table, rows.request, *sees, heads.scale)
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return out.reshape(len(qkv), -1), k_pages, v_pages


def normed_rows(
    qkv: Float[np.ndarray, "R outputs"], heads: Heads, norms: HeadNorms
) -> Float[np.ndarray, "R outputs"]:
    """A projection whose queries, and whose keys, are normed over all heads of a row.

    Args:
      norms: Their scales are those of all heads side by side.
    """
    keys = heads.num_kv_heads * heads.head_size
    q, k, v = np.split(qkv, [qkv.shape[1] - 2 * keys, qkv.shape[1] - keys], axis=1)
    normed = layers.rms_norm(q, norms.q, norms.eps), layers.rms_norm(k, norms.k, norms.eps)
    return np.concatenate([*normed, v], axis=1)


def grown_rows(
    qkv: Float[np.ndarray, "R outputs"], heads: Heads, growth: Float[np.ndarray, " R"]
) -> Float[np.ndarray, "R outputs"]:
    """A projection whose queries are multiplied by what each row's have grown by."""
    keys = 2 * heads.num_kv_heads * heads.head_size
    q, kv = np.split(qkv, [qkv.shape[1] - keys], axis=1)
    return np.concatenate([q * growth[:, None], kv], axis=1)


class Bounds(NamedTuple):
    """What the rows of a request see and write; of a request without rows they mean nothing.

    Attributes:
      low: Where any row sees from, or where its window begins if that is before.
      seen_from: Where any sees from without its window.
      seen_until: Until where any sees without it.
      new_from, new_until: Where the first row is written, and where the last is and one more;
        nothing is between them where none is.
    """

    low: Any
    seen_from: Any
    seen_until: Any
    new_from: Any
    new_until: Any


BOUNDS = len(Bounds._fields)


def reach(rows: Rows, row_starts: Int[np.ndarray, " B1"]) -> Int[np.ndarray, "B bounds"]:
    """What the rows of each request see and write, as a kernel asks once for all layers.

    Those of a request are its `Bounds`.
    """
    bounds = np.zeros((len(row_starts) - 1, BOUNDS), np.int32)
    for request, (start, stop) in enumerate(pairwise(row_starts)):
        if start < stop:
            span = slice(start, stop)
            first, until = rows.first[span], rows.until[span]
            low = min(first.min(), until.min())
            places = rows.places[span][rows.is_real[span]]
            bounds[request] = Bounds(
                low=low,
                seen_from=first.min(),
                seen_until=until.max(),
                new_from=places.min() if len(places) else low,
                new_until=places.max() + 1 if len(places) else 0,
            )
    return bounds


def mix_keys(
    kv: Float[np.ndarray, "R outputs"],
    heads: Heads,
    norms: HeadNorms,
    angles: Angles,
    rows: Rows,
    k_pages: Float[np.ndarray, "P page Hk D"],
    v_pages: Float[np.ndarray, "P page Hk D"],
) -> tuple[Float[np.ndarray, "P page Hk D"], Float[np.ndarray, "P page Hk D"]]:
    """The part of `mix` that writes, of rows that nothing queries.

    Args:
      kv: Their projection without the queries: key heads, then value heads.
    """
    k, v = kv.reshape(len(kv), 2, -1, heads.head_size).swapaxes(0, 1)
    k = layers.rms_norm(k, norms.k, norms.eps)
    k = layers.apply_rotary(k, angles.cos, angles.sin)
    k_pages = write(k_pages, rows.page_table, rows.request, rows.places, rows.is_real, k)
    v_pages = write(v_pages, rows.page_table, rows.request, rows.places, rows.is_real, v)
    return k_pages, v_pages


def _heads_of(
    qkv: Float[np.ndarray, "R outputs"], heads: Heads
) -> tuple[
    Float[np.ndarray, "R Hq D"],
    Float[np.ndarray, "R Hk D"],
    Float[np.ndarray, "R Hk D"],
    Float[np.ndarray, "R Hq D"] | None,
]:
    """Takes the projection apart: queries, keys, values, and the gate where there is one."""
    R, D, keys = len(qkv), heads.head_size, heads.num_kv_heads * heads.head_size
    queries = qkv.shape[1] - 2 * keys
    q, k, v = np.split(qkv, [queries, queries + keys], axis=1)
    k, v = k.reshape(R, -1, D), v.reshape(R, -1, D)
    if not heads.gated:
        return q.reshape(R, -1, D), k, v, None
    pairs = q.reshape(R, -1, 2, D)  # per head its query rows, then its gate rows
    return pairs[:, :, 0], k, v, pairs[:, :, 1]
