"""Latent attention: the absorbed form, its parts, and both backends' reference ops."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shared.spec import latent_attention as spec
from shared.spec import layers, linear
from shared.spec.attention import attend, write
from shared.spec.linear import Matrix
from tests.support.cases.attention.latent_attention import (
    CASES,
    LAYER,
    LatentCase,
    with_nan_in_unwritten_rows,
)
from tests.support.cases.gemm.head_product import row_adapters
from tests.support.implementations import Implementation, each_implementation
from tests.support.latent_sizes import GLM

# Float32 on both sides: sums over at most 110 keys and 64 products in another order.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
each_case = pytest.mark.parametrize("name", CASES)


def real(case: LatentCase) -> np.ndarray:
    return np.flatnonzero(case.rows.is_real)


def plain_form(case: LatentCase) -> np.ndarray:
    """Returns the outputs with keys and values of each head projected from the latents."""
    config, weights, rows = case.config, case.weights, case.spec_rows
    where = rows.page_table, rows.request, rows.places, rows.is_real
    query, latents = spec.latent_rows(case.inputs, config, weights, case.angles)
    if weights.queries is not None:
        query = linear.product(query, weights.queries)
    size = config.nope_size + config.rope_size
    q = query[:, : config.num_heads * size].reshape(len(query), -1, size)
    rotated = spec.rotate(q[..., config.nope_size :], config, case.angles)
    q = np.concatenate([q[..., : config.nope_size], rotated], axis=-1)
    cached = write(case.pool[LAYER, 0], *where, latents[:, None])[..., 0, :]
    latent, rope = np.split(cached, [config.latent_rank], axis=-1)
    projected = np.einsum("pnc,hwc->pnhw", latent, spec.of_heads(weights.kv_b.values, config))
    keys, values = np.split(projected, [config.nope_size], axis=-1)
    shared_key = np.broadcast_to(rope[:, :, None], (*keys.shape[:3], config.rope_size))
    k = np.concatenate([keys, shared_key], axis=-1)
    visible = rows.page_table, rows.request, rows.first, rows.until, rows.window
    # `attend` requires keys and values of one size.
    v = np.pad(values, [(0, 0)] * 3 + [(0, max(0, k.shape[-1] - values.shape[-1]))])
    out = attend(q, k, v, *visible, config.scale)[..., : config.value_size]
    return out.reshape(len(query), -1)


@each_case
def test_absorbed_form_equals_plain_form(name: str) -> None:
    case = CASES[name]
    np.testing.assert_allclose(case.specified()[0], plain_form(case), **TOLERANCE)


@each_case
def test_unwritten_cache_rows_do_not_change_outputs(name: str) -> None:
    case, rows = CASES[name], real(CASES[name])
    spoiled = with_nan_in_unwritten_rows(case)
    assert np.isnan(spoiled.pool).any()
    np.testing.assert_array_equal(spoiled.specified()[0][rows], case.specified()[0][rows])


def test_interleaved_rotation_equals_permuted_halves() -> None:
    case = CASES["trees"]
    cos, sin = case.angles.cos, case.angles.sin
    x = np.random.default_rng(0).standard_normal((len(cos), 3, 2 * cos.shape[1]), np.float32)
    order = [*range(0, x.shape[-1], 2), *range(1, x.shape[-1], 2)]
    got = layers.apply_rotary_interleaved(x, cos, sin)[..., order]
    np.testing.assert_array_equal(got, layers.apply_rotary(x[..., order], cos, sin))
    assert (got != x[..., order]).any()


def test_cached_row_is_independent_of_heads() -> None:
    case = CASES["queries without rank"]
    halved = replace(
        case,
        config=case.config.local(2),
        inputs=case.inputs[:, 2 * (case.config.nope_size + case.config.rope_size) :],
        weights=replace(case.weights, kv_b=case.weights.kv_b.rows(2 * case.config.head_rows)),
    )
    (whole, pages), (half, same_pages) = case.specified(), halved.specified()
    np.testing.assert_array_equal(pages, same_pages)
    np.testing.assert_allclose(half, whole[:, whole.shape[1] // 2 :], **TOLERANCE)


def with_adapters(case: LatentCase, slots: np.ndarray) -> LatentCase:
    """Returns a case with adapters of `kv_b`; those of slot 2 are huge and broken."""
    lora = row_adapters(case.config, slots, num=3, rank=4)
    b = lora.weights.b.copy()
    b[1] *= 1e9
    b[1, :, 0] = np.nan
    lora = replace(lora, weights=replace(lora.weights, b=b))
    return replace(case, weights=replace(case.weights, kv_b=replace(case.weights.kv_b, lora=lora)))


def merged(case: LatentCase, slot: int) -> LatentCase:
    """Returns a case with the adapter of a slot merged into `kv_b`."""
    kv_b, own = (
        case.weights.kv_b,
        row_adapters(case.config, np.zeros(1, int), num=3, rank=4).weights,
    )
    change = own.b[slot - 1] @ (own.scales[slot - 1][:, None] * own.a[slot - 1])
    return replace(case, weights=replace(case.weights, kv_b=Matrix.plain(kv_b.values + change)))


def run(case: LatentCase, ops: Implementation) -> tuple[np.ndarray, np.ndarray]:
    """Returns the outputs of a backend, and the pools."""
    given = (case.inputs, case.config, case.weights, case.angles, case.rows, case.pool, LAYER)
    got, (pools,) = ops.leaving((5,), "latent_attention", *given)
    return got if isinstance(got, tuple) else (got, pools)


@each_case
def test_adapted_latent_attention_equals_merged_weight(name: str) -> None:
    case = CASES[name]
    adapted = with_adapters(case, np.full(len(case.inputs), 3))
    got, want = (x.specified()[0][real(case)] for x in (adapted, merged(case, 3)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)  # order of the sums
    assert np.abs(want - case.specified()[0][real(case)]).max() > 0.1


@each_implementation
@each_case
def test_adapted_latent_attention_matches_spec(name: str, implementation: Implementation) -> None:
    """Rows have the adapters in turn, next to broken ones; rows without one keep their bits."""
    case, ops = CASES[name], implementation("latent_attention")
    slots = np.arange(len(case.inputs)) % 4
    adapted = with_adapters(case, slots)
    (got, _), (plain, _), (want, _) = run(adapted, ops), run(case, ops), adapted.specified()
    base, first, broken, last = (
        [row for row in real(case) if slots[row] == slot] for slot in range(4)
    )
    healthy = first + last
    np.testing.assert_allclose(got[healthy], want[healthy], rtol=1e-4, atol=1e-4)
    assert np.isnan(got[broken]).any()
    np.testing.assert_array_equal(got[base], plain[base])
    assert (got[healthy] != plain[healthy]).any(axis=1).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@each_implementation
def test_products_without_adapters_keep_plain_bits(
    dtype: Any, implementation: Implementation
) -> None:
    """In bfloat16 the products over heads are rounded once, as without adapters."""
    config, rng = GLM._replace(heads=2).config(), np.random.default_rng(5)
    ops, slots = implementation("latent_attention"), np.arange(64) % 4
    lora = row_adapters(config, slots, num=3, rank=4)
    own = replace(lora.weights, a=lora.weights.a.astype(dtype), b=lora.weights.b.astype(dtype))
    shape = (config.num_heads * config.head_rows, config.latent_rank)
    plain = Matrix.plain(rng.standard_normal(shape, np.float32).astype(dtype))
    weight = replace(plain, lora=replace(lora, weights=own))
    for name, width in (("absorb_queries", config.nope_size), ("value_heads", config.latent_rank)):
        x = rng.standard_normal((len(slots), config.num_heads, width), np.float32).astype(dtype)
        product = getattr(ops, name)
        got, want = product(x, config, weight), product(x, config, plain)
        np.testing.assert_array_equal(got[slots == 0], want[slots == 0])
        assert (got[slots > 0] != want[slots > 0]).any(axis=(1, 2)).all()


@each_implementation
@each_case
def test_latent_attention_matches_spec(name: str, implementation: Implementation) -> None:
    case = CASES[name]
    got, pools = run(case, implementation("latent_attention"))
    outputs, pages = case.specified()
    np.testing.assert_allclose(got[real(case)], outputs[real(case)], **TOLERANCE)
    np.testing.assert_allclose(pools[LAYER, 0, 1:], pages[1:], **TOLERANCE)
    other = 1 - LAYER
    np.testing.assert_array_equal(pools[other, 0, 1:], case.pool[other, 0, 1:])
