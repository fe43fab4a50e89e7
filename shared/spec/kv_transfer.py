"""Words of cached entries that servers transfer: pages, and layers of a state snapshot.

An entry is `[rows, columns]` for each of its arrays, with the columns of all TP ranks: those from
the sharded axis on. Its words are its arrays one after another, bit-cast to int32.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int32, Shaped

from shared.models.cache_spec import ColumnSection
from shared.spec import all_gather
from shared.spec.cache_pools import KV


def page_words(kv: KV, pages: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, "n words"]:
    """Returns the words of pages: for each page all layers, cache arrays and positions."""
    return _words(np.moveaxis(kv[:, :, pages], 2, 0))


def with_pages(kv: KV, pages: Int32[np.ndarray, " n"], words: Int32[np.ndarray, "n words"]) -> KV:
    """Returns the pages of a pool with some of them replaced by `page_words` of another pool."""
    shape = (len(pages), *kv.shape[:2], *kv.shape[3:])
    result = kv.copy()
    result[:, :, pages] = np.moveaxis(words.view(kv.dtype).reshape(shape), 0, 2)
    return result


def layer_words(
    states: Float[np.ndarray, "n snapshots ..."], snapshot: int
) -> Int32[np.ndarray, "n words"]:
    """Returns the words of one snapshot in some layers."""
    return _words(states[:, snapshot])


def with_layers(
    states: Float[np.ndarray, "n snapshots ..."],
    snapshot: int,
    words: Int32[np.ndarray, "n words"],
) -> Float[np.ndarray, "n snapshots ..."]:
    """Returns the states with one snapshot replaced by `layer_words`."""
    result = states.copy()
    result[:, snapshot] = words.view(states.dtype).reshape(result[:, snapshot].shape)
    return result


def joined(
    shares: Sequence[Shaped[np.ndarray, "... share"]], sections: Sequence[ColumnSection]
) -> Shaped[np.ndarray, "... columns"]:
    """Returns the columns of all TP ranks from those of each rank."""
    count = len(shares)
    parts = [_split(share, [each.share(count) for each in sections]) for share in shares]
    return np.concatenate(
        [
            all_gather.all_gather_kv_heads([part[i] for part in parts], each.copies(count))
            for i, each in enumerate(sections)
        ],
        axis=-1,
    )


def own_columns(
    columns: Shaped[np.ndarray, "... columns"],
    sections: Sequence[ColumnSection],
    rank: int,
    count: int,
) -> Shaped[np.ndarray, "... share"]:
    """Returns the columns of one of `count` TP ranks."""
    parts = _split(columns, [each.size for each in sections])
    return np.concatenate(
        [
            all_gather.own_keys(part, rank, count, each.copies(count))
            for part, each in zip(parts, sections, strict=True)
        ],
        axis=-1,
    )


def _split(
    columns: Shaped[np.ndarray, "... columns"], sizes: Sequence[int]
) -> list[Shaped[np.ndarray, "... size"]]:
    return np.split(columns, np.cumsum(sizes)[:-1], axis=-1)


def _words(entries: Shaped[np.ndarray, "n ..."]) -> Int32[np.ndarray, "n words"]:
    flat = np.ascontiguousarray(entries).reshape(len(entries), -1)
    return flat.view(np.int32)
