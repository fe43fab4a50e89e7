"""Experts with TMA copies of the weight: the bits of the ordinary kernels, on a GPU."""

from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels.tiles import ExpertsTiles
from shared.models.activation import GELU_TANH, RELU2, SWIGLU_OAI, Activation
from shared.models.formats import four_bit
from shared.models.formats.weight_format import SCALES, VALUES
from shared.spec.reduction_order import SQUARES
from tests.support.experts_kernels import Case, Found, block_of, check_equal, routing, run, tiles
from tests.support.kernels import KERNELS, ON_GPU

pytestmark = pytest.mark.usefixtures("interpreted")
each_language = pytest.mark.parametrize("language", KERNELS)
each_way = pytest.mark.parametrize("grouped", [False, True], ids=["slots", "groups"])
on_a_gpu = pytest.mark.skipif(not ON_GPU, reason="the tiles of a GPU are too large to interpret")

OF_512 = Case(40, 2048, 512, routing(20, 8, is_shared=True, is_gated=True))
OF_704 = Case(40, 2816, 704, routing(12, 8), activation=Activation(GELU_TANH))
NO_GATE = Case(40, 2688, 1856, routing(12, 6), activation=Activation(RELU2))
MXFP4 = Case(40, 2880, 2880, routing(12, 4), quantized="MXFP4")
COPIED = {
    "MXFP4": MXFP4,
    "MXFP4, clamped, biases": MXFP4._replace(
        activation=Activation(SWIGLU_OAI, 1.702, 7.0), has_biases=True
    ),
    "MXFP4, blocks of 256": Case(40, 2048, 768, routing(12, 4), quantized="MXFP4"),
    "MXFP4, partial blocks of 256": Case(40, 2880, 1440, routing(12, 4), quantized="MXFP4"),
    "MXFP4, partial blocks of 256, whole lines": Case(
        40, 2880, 1472, routing(12, 4), quantized="MXFP4"
    ),
    "INT4": Case(150, 2048, 768, routing(12, 8), quantized="INT4"),
    "INT4 in groups of 32": OF_704._replace(quantized="INT4 in groups of 32"),
    "FP8": OF_512._replace(quantized="FP8"),
    "FP8 by channels": OF_512._replace(quantized="FP8 by channels"),
    "FP8, no gate, scales of outputs": NO_GATE._replace(quantized="FP8"),
    "FP8, no gate, float32 scales, biases": NO_GATE._replace(
        quantized="FP8 by channels in float32", has_biases=True
    ),
    "FP8, partial blocks": Case(40, 160, 208, routing(12, 4), quantized="FP8"),
    "FP8, partial blocks, whole lines": OF_704._replace(quantized="FP8", has_biases=True),
}
BFLOAT16 = {
    "bfloat16": OF_512,
    "bfloat16, partial blocks of 128, biases": OF_704._replace(has_biases=True),
    "bfloat16, no gate, partial blocks of 128": NO_GATE,
    "bfloat16, partial lines": Case(40, 168, 216, routing(12, 4)),
    "bfloat16, latents": NO_GATE._replace(is_latent=True),
}
DEEP = {"depth": 512, "down_depth": 512}
SHALLOW = {"depth": 128, "down_depth": 128, "stages": 5, "down_stages": 5}
NARROW = {"depth": 512, "down_depth": 256, "stages": 2, "columns": 16, "down_columns": 32}
WIDE = {"columns": 64, "warps": 4, "down_warps": 2}
CALLS = [
    (1, 0, {}),
    (3, 0, DEEP),
    (3, 0, NARROW),
    (4, 0, SHALLOW),
    (7, 8, {}),
    (8, 16, DEEP),
    (40, 8, DEEP),
    (40, 16, {}),
    (40, 16, NARROW),
    (40, 8, WIDE),
    (40, 32, {}),
]
"""Rows, slots of a tile of expert blocks or 0 without them, and changed tiles."""
LEAST = {"depth": 64, "down_depth": 64, "stages": 2, "down_stages": 2, "down_columns": 32}
BFLOAT16_CALLS = [
    (1, 0, SHALLOW),
    (3, 0, DEEP),
    (3, 0, NARROW),
    (4, 0, LEAST),
    (7, 8, SHALLOW),
    (8, 16, SHALLOW),
    (40, 8, WIDE),
    (40, 16, NARROW),
    (40, 32, {}),
]
"""The same for bfloat16, of which fewer inputs fit in shared memory."""


def copied(slots: int, changed: dict[str, int]) -> ExpertsTiles:
    how = {"depth": 256, "down_depth": 256, "stages": 3, "down_stages": 3} | changed
    how |= {"copies_packed": True, "slots": slots or 16}
    return tiles(grouped=slots > 0, **how)


def is_copied_in_pallas(case: Case, changed: dict[str, int]) -> bool:
    sizes, depth = (case.hidden, case.inner), changed.get("depth", 256)
    is_whole = all(size % 64 == 0 for size in sizes) and depth >= 256
    if case.quantized == "MXFP4":
        is_whole &= all(depth % four_bit.block_of(size) == 0 for size in sizes)
    return case.quantized in ("MXFP4", "FP8") and case.activation.is_gated and is_whole


def check_copied(language: str, case: Case, rows: int, slots: int, changed: dict[str, int]) -> None:
    """Compares results of kernels that copy weights by TMA with those of kernels that do not."""
    module = KERNELS[language]["experts"].experts_packed_sm90
    launch = "linear" if language == "pallas" else "launch_down"
    with patch.object(module, launch, wraps=getattr(module, launch)) as ran:
        got = run(language, case, cut=copied(slots, changed), rows=list(range(rows)))
    assert ran.called
    cut = tiles(grouped=slots > 0)
    check_equal(got, run(language, case, cut=cut, rows=list(range(rows))))


@on_a_gpu
@each_language
@pytest.mark.parametrize(("rows", "slots", "changed"), CALLS)
@pytest.mark.parametrize("name", COPIED)
def test_experts_packed_sm90_bitwise_equal(
    name: str, rows: int, slots: int, changed: dict[str, int], language: str
) -> None:
    case = COPIED[name]
    is_copied = is_copied_in_pallas(case, changed) and changed not in (NARROW, WIDE)
    if language == "pallas" and not is_copied:
        pytest.skip("unsupported in Pallas")
    check_copied(language, case, rows, slots, changed)


@on_a_gpu
@pytest.mark.parametrize(("rows", "slots", "changed"), BFLOAT16_CALLS)
@pytest.mark.parametrize("name", BFLOAT16)
def test_triton_experts_packed_sm90_bfloat16_bitwise_equal(
    name: str, rows: int, slots: int, changed: dict[str, int]
) -> None:
    check_copied("triton", BFLOAT16[name], rows, slots, changed)


@on_a_gpu
@each_language
@each_way
@pytest.mark.parametrize("name", ["MXFP4", "FP8", "bfloat16"])
def test_experts_packed_sm90_nan_row_spoils_only_itself(
    name: str, grouped: bool, language: str
) -> None:
    case = (COPIED | BFLOAT16)[name]
    cut = tiles(grouped=grouped, copies_packed=True, depth=256, down_depth=256)
    block, nan = block_of(case), {}
    for field in ("rows", "scaled", "squares"):
        nan[field] = getattr(block, field).copy()
        nan[field][1] = np.nan
    got = run(language, case, cut=cut, rows=[0, 1, 2], changed=nan)
    want = run(language, case, cut=cut, rows=[0, 1, 2])
    assert np.isnan(got.rows[1]).all()
    check_equal(Found(*(x[[0, 2]] for x in got)), Found(*(x[[0, 2]] for x in want)))


@pytest.mark.parametrize(("rows", "slots", "changed"), [call for call in CALLS if call[2] != WIDE])
@pytest.mark.parametrize("name", COPIED)
def test_pallas_experts_packed_sm90_takes_whole_lines(
    name: str, rows: int, slots: int, changed: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, case = KERNELS["pallas"]["experts"].experts_packed_sm90, COPIED[name]
    monkeypatch.setattr(module, "has_mosaic", lambda: True)

    def stored(outputs: int, inputs: int) -> Any:
        shape = (1, 12, outputs, four_bit.padded(inputs))
        planes = (case.format.planes(shape)[name] for name in (VALUES, SCALES))
        words, scales = (jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype)) for x in planes)
        return module.ExpertWeights(words, scales, None)

    found = module.takes(
        jax.ShapeDtypeStruct((rows, case.hidden), jnp.bfloat16),
        stored(2 * case.inner, case.hidden),
        stored(case.hidden, case.inner),
        formats=(case.format.name,) * 2,
        squares=jax.ShapeDtypeStruct((rows, case.hidden // SQUARES.chunk), jnp.float32),
        activation=case.activation,
        is_adapted=False,
        tiles=copied(slots, changed),
    )
    assert found == is_copied_in_pallas(case, changed)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize(
    ("formats", "has_gate", "changed", "taken"),
    [
        (("plain", "plain"), True, {}, True),
        (("plain", "plain"), False, {"depth": 128}, True),
        (("plain", "plain"), True, {"columns": 128}, False),
        (("plain", "plain"), True, {"slots": 64}, False),
        (("plain", "plain"), True, {"copies_packed": False}, False),
        (("plain", "float32"), True, {}, False),
        (("plain", "int4_w4a16"), True, {}, False),
        (("fp8_w8a16", "plain"), True, {}, False),
        (("fp8_w8a16", "fp8_w8a16"), False, {}, True),
        (("int4_w4a16", "int4_w4a16"), True, {}, True),
        (("int4_w4a16", "int4_w4a16"), False, {}, False),
    ],
    ids=str,
)
def test_triton_experts_packed_sm90_takes_formats(
    formats: tuple[str, str],
    has_gate: bool,
    changed: dict[str, Any],
    taken: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = KERNELS["triton"]["experts"].experts_packed_sm90
    monkeypatch.setattr(module, "is_on_hopper", lambda: True)

    def stored(format: str, outputs: int, inputs: int) -> Any:
        if format in ("plain", "float32"):
            dtype = torch.float32 if format == "float32" else torch.bfloat16
            return module.ExpertWeights(torch.empty((2, outputs, inputs), dtype=dtype), None, None)
        packed = 4 if format == "fp8_w8a16" else 8
        words = torch.empty((2, outputs, inputs // packed), dtype=torch.int32)
        scales = torch.empty((2, outputs, inputs // 32), dtype=torch.bfloat16)
        return module.ExpertWeights(words, scales, None)

    activation = Activation() if has_gate else Activation(RELU2)
    first, second = formats
    found = module.takes(
        torch.empty((3, 2688), dtype=torch.bfloat16),
        stored(first, activation.num_projections * 768, 2688),
        stored(second, 2688, 768),
        formats=tuple("plain" if format == "float32" else format for format in formats),
        activation=activation,
        tiles=tiles(**({"copies_packed": True, "depth": 256, "down_depth": 256} | changed)),
    )
    assert found == taken
