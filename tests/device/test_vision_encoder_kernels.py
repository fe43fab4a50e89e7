"""Kernels of the vision encoder against the specification: on a GPU, or interpreted.

The bits of a patch depend neither on padding nor on tile config, and are equal in both languages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels.tiles import MEASURED, EncoderAttentionTiles, Tiles
from shared.spec import attention as spec_attention
from shared.spec import layers as spec
from shared.spec.reduction_order import ATTENTION, SQUARES
from tests.support.cases.attention.attention import image_arguments
from tests.support.cases.gemm.layers import blend_arguments, gelu_arguments, layer_norm_arguments
from tests.support.kernels import (
    AS_WRITTEN,
    INTERPRET,
    KERNELS,
    ON_GPU,
    OPTIONS,
    share_arithmetic,
)

pytestmark = pytest.mark.usefixtures("interpreted")

each_language = pytest.mark.parametrize("language", KERNELS)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}  # sums have another order
SMALL = replace(
    Tiles.load("pallas_gpu", MEASURED).encoder_attention.of(item_bytes=2, rows=64, head_size=72),
    lanes=32,
    warps=4,
)

ROWS = {
    "layer_norm": partial(layer_norm_arguments, R=3, size=200),
    "gelu": partial(gelu_arguments, R=3, size=450),
    "gelu_tanh": partial(gelu_arguments, R=3, size=450),
    "bilinear_pos_embed": partial(blend_arguments, R=3, size=80, side=4),
}
BFLOAT16 = {"x", "table", "qkv"}


def run(
    language: str,
    module: str,
    function: str,
    arguments: dict[str, Any],
    how: dict[str, Any],
    dtype: str = "float32",
    options: dict[str, Any] | None = None,
) -> np.ndarray:
    """Calls a kernel; its results are converted to float32."""
    call: Callable[..., Any] = getattr(KERNELS[language][module], function)
    arrays = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    if language == "triton":
        device = "cuda" if ON_GPU else "cpu"
        given = {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}
        given |= {x: y.to(getattr(torch, dtype)) for x, y in given.items() if x in BFLOAT16}
        return call(**given, **how).float().cpu().numpy()
    given = {
        name: jnp.asarray(x, dtype if name in BFLOAT16 else None) for name, x in arrays.items()
    }
    options = OPTIONS if options is None else options
    program = jax.jit(partial(call, **how, interpret=INTERPRET), compiler_options=options)
    return np.asarray(program(**given).astype(jnp.float32))


def how_of(function: str) -> dict[str, Any]:
    return {"eps": 1e-6, "order": SQUARES} if function == "layer_norm" else {}


def attention_how(D: int, tiles: EncoderAttentionTiles = SMALL) -> dict[str, Any]:
    return {"tile": ATTENTION.tile_float32, "scale": D**-0.5, "tiles": tiles}


@each_language
@pytest.mark.parametrize("function", ROWS)
def test_vision_row_kernels_match_spec(function: str, language: str) -> None:
    given = ROWS[function](0)
    want = getattr(spec, function)(**given)
    arrays = {name: x for name, x in given.items() if name != "eps"}
    got = run(language, "layers", function, arrays, how_of(function))
    np.testing.assert_allclose(got, want, **FLOAT32)


@each_language
def test_layer_norm_precise_with_large_mean(language: str) -> None:
    given = ROWS["layer_norm"](1)
    given["x"] = given["x"] * np.float32(0.01) + np.float32(5)
    exact = given | {"x": given["x"].astype(np.float64)}
    arrays = {name: x for name, x in given.items() if name != "eps"}
    got = run(language, "layers", "layer_norm", arrays, how_of("layer_norm"))
    # The mean is summed in units of 2^-21 of the largest number, 5e-4 of these deviations.
    np.testing.assert_allclose(got, spec.layer_norm(**exact), rtol=0, atol=2e-3)


@each_language
@pytest.mark.parametrize(("R", "D", "spare"), [(21, 16, 5), (50, 48, 0), (50, 72, 3)])
def test_bidirectional_attention_matches_spec_and_ignores_padding(
    R: int, D: int, spare: int, language: str
) -> None:
    """A head of 48 or 72 columns is two blocks; tiles of patches are whole or not."""
    given = image_arguments(0, R=R, heads=2, D=D, spare=spare)
    got = run(language, "encoder_attention", "bidirectional_attention", given, attention_how(D))
    count = R - spare
    np.testing.assert_allclose(
        got[:count], spec_attention.bidirectional_attention(**given)[:count], **FLOAT32
    )


@each_language
def test_bidirectional_attention_bits_independent_of_padding_and_tiles(language: str) -> None:
    given = image_arguments(1, R=50, heads=2, D=72, spare=0)
    alone = run(language, "encoder_attention", "bidirectional_attention", given, attention_how(72))
    padded = {
        name: np.pad(x, ((0, 30), (0, 0)), constant_values=7) if x.ndim == 2 else x
        for name, x in given.items()
    }
    tiles = replace(SMALL, lanes=16)
    got = run(
        language, "encoder_attention", "bidirectional_attention", padded, attention_how(72, tiles)
    )
    np.testing.assert_array_equal(got[:50], alone)


needs_both = pytest.mark.skipif(len(KERNELS) < 2, reason="one language alone")


@needs_both
@pytest.mark.parametrize("function", [*ROWS, "bidirectional_attention"])
def test_vision_encoder_kernels_bitwise_equal(function: str, monkeypatch) -> None:
    share_arithmetic(monkeypatch)
    module, how, given = "layers", how_of(function), ROWS.get(function, lambda seed: {})(2)
    if function == "bidirectional_attention":
        module, how = "encoder_attention", attention_how(72)
        given = image_arguments(2, R=24, heads=1, D=72, spare=3)
    if ON_GPU and function == "bidirectional_attention":  # tiles, types, sizes of a real one
        given = image_arguments(2, R=1100, heads=16, D=72, spare=40)
        tables = {x: Tiles.load(f"{x}_gpu", MEASURED).encoder_attention for x in KERNELS}
        sizes = {"item_bytes": 2, "rows": 1100, "head_size": 72}
        how |= {"tile": ATTENTION.tile}
    else:
        tables, sizes = {}, {}
    arrays = {name: x for name, x in given.items() if name != "eps"}
    found = []
    for language in KERNELS:
        if tables:
            how |= {"tiles": tables[language].of(**sizes)}
        found.append(run(language, module, function, arrays, how, "bfloat16", AS_WRITTEN))
    count = len(found[0]) if function != "bidirectional_attention" else int(given["count"][0])
    np.testing.assert_array_equal(found[0][:count], found[1][:count])
