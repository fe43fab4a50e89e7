"""FP8 weights of Mamba2 hybrids with partial blocks: on ranks, in both languages, as dummies.

The experts of the model here are 208 wide and its input projections have 1,040 outputs, as those of
Nemotron 3 Nano are 1,856 wide and have 10,304 outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl.formats import registry as jax_formats
from shared.models.checkpoint import open_checkpoint
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.families import config_from_dict
from shared.models.formats import fp8, fp8_w8a16
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.formats.fp8_w8a16 import FP8W8A16, ScaleLayout
from shared.models.formats.weight_format import SCALES, VALUES, Planes, plane_bytes
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.parameters import parameters
from tests.support.fp8_files import LAYOUTS, write_fp8
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import w8a16_of
from torch_impl.formats import registry as torch_formats

SIZES = {"hidden_size": 128, "moe_intermediate_size": 208, "moe_latent_size": 256}
SIZES |= {"mamba_num_heads": 16, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 128}
BLOCK, CHANNEL = Granularity.BLOCK, Granularity.CHANNEL
PROJECTIONS = {"mamba2.inputs", "mamba2.out", "mlp.gate_up"}
EXPERTS = {"experts.gate_up", "experts.down"}
EXPERTS |= {f"mtp.layer.{name}" for name in EXPERTS}
LAYOUT_NAMES = ("compressed-tensors, block", "compressed-tensors, channel", "ModelOpt", "AutoFP8")
CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]
HALF = ml_dtypes.bfloat16


def nemotron() -> dict[str, Any]:
    return tiny_config("nemotron_h", nested=False, with_mtp=True, tied=False) | SIZES


@pytest.fixture(scope="module", params=LAYOUT_NAMES)
def written(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("fp8")
    layout = LAYOUTS[request.param]
    config = write_fp8(folder, nemotron(), layout)
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, True)
    return checkpoint, parameters(config, True), layout


def on_host(planes: Planes) -> dict[str, np.ndarray]:
    """Planes of either backend as float32 and int32."""
    wide = {name: x.float() if hasattr(x, "float") else x for name, x in planes.items()}
    words = planes[VALUES]
    return {SCALES: np.asarray(wide[SCALES], np.float32), VALUES: np.asarray(words)}


def check_planes(checkpoint: Stored, own: Parameter, format: FP8W8A16) -> None:
    """Both backends read planes that are dequantised to the weight, of the planned bytes."""
    want = checkpoint.load(own, HALF).astype(np.float32)
    for registry, device in ((torch_formats, CPU), (jax_formats, JAX_CPU)):
        planes = registry.read(checkpoint, own, format, device, lambda count: None)
        assert sum(x.nbytes for x in planes.values()) == plane_bytes(format, own.shape)
        wide = registry.dequantized(format, planes)
        got = wide.float().numpy() if registry is torch_formats else np.asarray(wide)
        np.testing.assert_array_equal(got.astype(np.float32), want)
        np.testing.assert_array_equal(format.dequantize(on_host(planes)), want)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.matrix)])
def test_partial_fp8_blocks_equal_dequantised(ranks: int, written) -> None:
    checkpoint, wanted, layout = written
    has_wide_scales = layout.kind == "F32"
    for rank in {0, ranks - 1}:
        local = [parameter.shard(rank, ranks) for parameter in wanted]
        formats = w8a16_of(checkpoint, local)
        assert formats.keys() == (EXPERTS if has_wide_scales else EXPERTS | PROJECTIONS)
        for own in (each for each in local if each.name in formats):
            assert own.name not in EXPERTS or own.shape[-2] * ranks in (208, 256)
            is_cut = layout.granularity is BLOCK and own.shape[-2] % fp8.BLOCK > 0
            assert formats[own.name] == FP8W8A16(
                BLOCK if layout.granularity is BLOCK else CHANNEL,
                by_output=is_cut,
                scale_dtype="float32" if has_wide_scales else "bfloat16",
                padding=48 if own.name.endswith("down") else 0,
            )
            check_planes(checkpoint, own, formats[own.name])


@pytest.mark.parametrize("granularity", [BLOCK, CHANNEL])
@pytest.mark.parametrize("ranks", [1, 2])
def test_dummy_partial_fp8_blocks_equal_dequantised(ranks: int, granularity: Granularity) -> None:
    config = config_from_dict(nemotron())
    dummy = DummyCheckpoint.of_model(config, FP8Encoding(granularity))
    local = [parameter.shard(ranks - 1, ranks) for parameter in parameters(config, True)]
    formats = w8a16_of(dummy, local)
    assert formats.keys() == EXPERTS | PROJECTIONS
    for own in (each for each in local if each.name in formats):
        check_planes(dummy, own, formats[own.name])


@pytest.mark.parametrize(
    ("hidden", "dense"), [(192, {"mamba2.out"}), (384, PROJECTIONS), (512, None)]
)
def test_dense_fp8_weights_have_no_padding(hidden: int, dense: set[str] | None, tmp_path) -> None:
    """Kernels of dense weights read whole blocks of inputs; those of few rows two at once."""
    stated = nemotron() | {"hidden_size": hidden}
    config = write_fp8(tmp_path, stated, LAYOUTS["compressed-tensors, block"])
    found = w8a16_of(open_checkpoint(tmp_path), parameters(config, True)).keys()
    assert found == EXPERTS | dense if dense else found > EXPERTS | PROJECTIONS


@pytest.mark.parametrize(
    ("ranges", "are_cut"),
    [
        (None, True),
        (((0, 128), (128, 256)), False),
        (((0, 128), (256, 300)), True),
        (((64, 128),), True),
    ],
)
def test_cuts_blocks_follows_outputs(ranges, are_cut: bool) -> None:
    shape = (300 if are_cut else 384, 100)
    assert fp8.cuts_blocks(CheckpointTensor("w", shape, axis=0, ranges=ranges)) == are_cut


def test_scale_layout_follows_shapes() -> None:
    assert fp8_w8a16.shares_of((256, 64), (2, 2)) == ScaleLayout(128, 2)
    assert fp8_w8a16.shares_of((130, 64), (130, 2)) == ScaleLayout(1, 2)
    assert fp8_w8a16.shares_of((130, 64), (130, 1)) == ScaleLayout(1, 1)
