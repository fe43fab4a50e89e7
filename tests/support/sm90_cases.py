"""Sizes, pools and comparisons shared by the tests of the sm90 attention kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.support.attention_layer_kernels import Found, run_pallas, run_triton
from tests.support.cases.attention.attention_layer import MixCase

RUN = {"pallas": run_pallas, "triton": run_triton}
_MODEL = {"heads": (32, 8), "D": 128, "page": 64, "half": True}
_HYBRID = {"heads": (16, 4), "D": 256, "page": 64, "turned": 64, "gated": True, "half": True}
SIZES = {
    "model": _MODEL,
    "hybrid": _HYBRID,
    # Of these the lines of the projection are no multiple of a copy's.
    "hybrid, a group of eight": _HYBRID | {"heads": (8, 1)},
    "hybrid, groups of eight": _HYBRID | {"heads": (16, 2)},
    "hybrid, a group of six": _HYBRID | {"heads": (6, 1)},
    "group of seven, heads of 64": {"heads": (14, 2), "D": 64, "page": 64, "half": True},
    "pages of two tiles": _MODEL | {"page": 128},
    "sinks": {"heads": (64, 8), "D": 64, "page": 64, "half": True, "has_sinks": True},
    "shared KV": _MODEL | {"has_kv": False},
    "shared KV, hybrid": _HYBRID | {"has_kv": False},
}


def with_seen_pools(case: MixCase) -> MixCase:
    """Returns the case with pools that are NaN except at positions that are visible or, for shared
    KV, new.
    """
    page = case.k_pages.shape[1]
    is_seen = np.zeros(case.k_pages.shape[:2], bool)
    for row in np.flatnonzero(case.rows.is_real):
        position = np.arange(case.rows.first[row], case.rows.until[row])
        table = case.rows.page_table[case.rows.request[row]]
        if not case.heads.has_kv:
            position = np.append(position, case.rows.places[row])
        is_seen[table[position // page], position % page] = True
    pools = (np.where(is_seen[..., None, None], x, np.nan) for x in (case.k_pages, case.v_pages))
    k_pages, v_pages = (x.astype(np.float32) for x in pools)
    return replace(case, k_pages=k_pages, v_pages=v_pages)


def assert_equal(got: Found, want: Found) -> None:
    assert np.isfinite(want.out).all()
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.pools, want.pools)


def assert_harmed(got: Found, want: Found, spoiled: np.ndarray) -> None:
    """Rows that see a value that is no number are none; the others are as ever."""
    np.testing.assert_array_equal(~np.isfinite(got.out).all(axis=1), spoiled)
    np.testing.assert_array_equal(got.out[~spoiled], want.out[~spoiled])
