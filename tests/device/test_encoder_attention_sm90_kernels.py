"""Image attention with WGMMA on Hopper: bitwise equal to `encoder_attention`, in both languages.

Gluon and Mosaic GPU have no interpreter, so the kernel runs on a GPU only. Its expected result is
that of the kernel of `encoder_attention`. The packed layout of both is tested on any machine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels.tiles import MEASURED, EncoderAttentionTiles, Tiles
from shared.spec import layers
from shared.spec.reduction_order import ATTENTION
from tests.support.cases.attention.attention import image_arguments
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS

HEADS, D = 16, 72
SIZES = [(1, 0), (64, 0), (65, 0), (130, 3), (640, 128), (1100, 40)]
"""Rows of an image, and of padding: tiles and blocks of rows that are whole, and cut ones."""
WAYS = [(2, 2), (4, 2), (3, 3)]
"""Stages, and warpgroups that multiply."""


@pytest.fixture(params=KERNELS)
def on_hopper(request: pytest.FixtureRequest) -> str:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels of a Hopper's matrix units")
    return request.param


@cache
def tiles_of(language: str, rows: int, stages: int, groups: int) -> EncoderAttentionTiles:
    """Returns the table's tile config with the given stages of the sm90 kernel; 0 disables it."""
    table = Tiles.load(f"{language}_gpu", MEASURED).encoder_attention
    tiles = table.of(item_bytes=2, rows=rows, head_size=D)
    return replace(tiles, described=stages, groups=groups)


def called(language: str, arguments: dict[str, np.ndarray], stages: int, groups: int) -> np.ndarray:
    """Returns the outputs of an image's patches, computed in bfloat16 and converted to float32."""
    rows, count = len(arguments["qkv"]), int(arguments["count"][0])
    how: dict[str, Any] = {"tile": ATTENTION.tile, "scale": D**-0.5}
    how["tiles"] = tiles_of(language, rows, stages, groups)
    call = KERNELS[language]["encoder_attention"].bidirectional_attention
    if language == "triton":
        given = {name: torch.from_numpy(x).cuda() for name, x in arguments.items()}
        given["qkv"] = given["qkv"].bfloat16()
        return call(**given, **how).float().cpu().numpy()[:count]
    given = {name: jnp.asarray(x) for name, x in arguments.items()}
    given["qkv"] = given["qkv"].astype(jnp.bfloat16)
    return np.asarray(jax.jit(partial(call, **how))(**given).astype(jnp.float32))[:count]


@cache
def image(rows: int, spare: int) -> dict[str, np.ndarray]:
    return image_arguments(rows, R=rows, heads=HEADS, D=D, spare=spare)


@cache
def today(language: str, rows: int, spare: int) -> np.ndarray:
    """Returns the result of `encoder_attention` without the sm90 kernel."""
    return called(language, image(rows, spare), 0, 2)


@pytest.mark.gpu
@pytest.mark.parametrize(("stages", "groups"), WAYS)
@pytest.mark.parametrize(("rows", "spare"), SIZES)
def test_encoder_attention_sm90_bitwise_equal(
    rows: int, spare: int, stages: int, groups: int, on_hopper: str
) -> None:
    got, want = (
        called(on_hopper, image(rows, spare), stages, groups),
        today("triton", rows, spare),
    )
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got, today(on_hopper, rows, spare))


@pytest.mark.gpu
def test_encoder_attention_sm90_large_image_bitwise_equal(on_hopper: str) -> None:
    want = today(on_hopper, 4096, 1)
    for _ in range(3):  # a race need not show at once
        np.testing.assert_array_equal(called(on_hopper, image(4096, 1), 4, 2), want)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [0, 1, 2], ids=["query", "key", "value"])
def test_encoder_attention_sm90_nan_spoils_same_rows(part: int, on_hopper: str) -> None:
    """A query's its own row, a key's and a value's every row, of one head; a value's one column."""
    given = image(300, 20)
    harmed = given["qkv"].copy()
    column = (part * HEADS + 5) * D + 70
    harmed[200, column] = np.nan
    found = [called(on_hopper, given | {"qkv": harmed}, *way) for way in ((0, 2), (4, 2))]
    np.testing.assert_array_equal(found[1], found[0])  # NaN where today's is
    spoiled = ~np.isfinite(found[1])
    rows, columns = (np.flatnonzero(spoiled.any(axis=x)) for x in (1, 0))
    assert rows.tolist() == ([200] if part == 0 else list(range(280)))
    assert set(columns) == ({5 * D + 70} if part == 2 else set(range(5 * D, 6 * D)))
    np.testing.assert_array_equal(found[1][~spoiled], today(on_hopper, 300, 20)[~spoiled])


@pytest.mark.gpu
def test_encoder_attention_sm90_consecutive_images_bitwise_equal(on_hopper: str) -> None:
    """The memory of one is the next one's."""
    sizes = [(1100, 40), (130, 3), (640, 128), (130, 3)]
    found = [called(on_hopper, image(*size), 4, 2) for size in sizes]
    for size, got in zip(sizes, found, strict=True):
        np.testing.assert_array_equal(got, today(on_hopper, *size))


def laid_of(module: ModuleType, given: dict[str, np.ndarray], rows: int) -> np.ndarray:
    """Returns the packed input of both kernels of `encoder_attention`, in float32."""
    sizes = module.sizes_of(2, D)
    if module is KERNELS.get("triton", {}).get("encoder_attention"):
        arrays = {x: torch.from_numpy(y).to("cuda" if ON_GPU else "cpu") for x, y in given.items()}
        return module.pack_encoder_qkv(**arrays, rows=rows, sizes=sizes).cpu().numpy()
    lay = partial(module.pack_encoder_qkv, rows=rows, sizes=sizes, interpret=INTERPRET)
    program = jax.jit(lay, compiler_options=OPTIONS)
    return np.asarray(program(**{name: jnp.asarray(x) for name, x in given.items()}))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("language", KERNELS)
def test_encoder_attention_packs_heads_and_repeats_last_patch(language: str) -> None:
    given = image_arguments(3, R=21, heads=2, D=D, spare=4)
    got = laid_of(KERNELS[language]["encoder_attention"], given, 32)
    patch = np.minimum(np.arange(32), 16)
    q, k, v = given["qkv"][patch].reshape(32, 3, 2, D).swapaxes(0, 1)
    q, k = (layers.apply_rotary(x, given["cos"][patch], given["sin"][patch]) for x in (q, k))
    heads = np.concatenate([q, k, v], axis=1)  # [32, 6, D]
    first, second = heads[..., :64], np.zeros((32, 6, 16), np.float32)
    second[..., :8] = heads[..., 64:]
    second[:, 4:, 8] = 1  # behind values
    want = np.concatenate([first.reshape(32, -1), second.reshape(32, -1)], axis=1)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)  # a product and a sum, fused
