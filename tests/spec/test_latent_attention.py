"""Latent attention: the absorbed form, its parts, and both backends' reference ops."""

from dataclasses import replace

import numpy as np
import pytest

from shared.spec import latent_attention as spec
from shared.spec import layers, linear
from shared.spec.attention import attend, write
from tests.support.cases.attention.latent_attention import (
    CASES,
    LAYER,
    LatentCase,
    with_nan_in_unwritten_rows,
)
from tests.support.implementations import Implementation, each_implementation

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


@each_implementation
@each_case
def test_latent_attention_matches_spec(name: str, implementation: Implementation) -> None:
    case = CASES[name]
    given = (case.inputs, case.config, case.weights, case.angles, case.rows, case.pool, LAYER)
    ops = implementation("latent_attention")
    got, (pools,) = ops.leaving((5,), "latent_attention", *given)
    if isinstance(got, tuple):
        got, pools = got
    outputs, pages = case.specified()
    np.testing.assert_allclose(got[real(case)], outputs[real(case)], **TOLERANCE)
    np.testing.assert_allclose(pools[LAYER, 0, 1:], pages[1:], **TOLERANCE)
    other = 1 - LAYER
    np.testing.assert_array_equal(pools[other, 0, 1:], case.pool[other, 0, 1:])
