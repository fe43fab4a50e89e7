"""INT4 weights with inputs that are no multiple of 128: on ranks, in both languages, as dummies.

The experts of the model here are 320 wide and its MLPs 448, as those of Gemma 4 26B-A4B are 704 and
2,112 wide. The last block of down has zeros.
"""

from __future__ import annotations

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
from shared.models.formats.int4_encoding import Int4Encoding
from shared.models.formats.int4_w4a16 import Int4W4A16
from shared.models.formats.registry import choose_formats
from shared.models.formats.weight_format import SCALES, VALUES, plane_bytes
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from tests.support.int4_files import LAYOUTS, write_int4
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import ON_GPU
from torch_impl.formats import registry as torch_formats

SIZES = {"hidden_size": 128, "head_dim": 32, "global_head_dim": 64}
SIZES |= {"moe_intermediate_size": 320, "intermediate_size": 448, "num_key_value_heads": 4}
PADDING = {"experts.down": 64, "experts.parallel_down": 64}
CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]
HALF = ml_dtypes.bfloat16
RANKS = pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(each, marks=pytest.mark.matrix) for each in (1, 4))]
)


def gemma() -> dict[str, Any]:
    return tiny_config("gemma4_moe", nested=False, with_mtp=False, tied=True) | SIZES


def check_planes(checkpoint: Stored, own: Parameter, format: Int4W4A16) -> None:
    """Both backends read equal planes of the planned bytes, which dequantise to the weight."""
    want, found = checkpoint.load(own, HALF).astype(np.float32), []
    for registry, device in ((torch_formats, CPU), (jax_formats, JAX_CPU)):
        planes = registry.read(checkpoint, own, format, device, lambda count: None)
        assert sum(x.nbytes for x in planes.values()) == plane_bytes(format, own.shape)
        wide = registry.dequantized(format, planes)
        got = wide.float().numpy() if registry is torch_formats else np.asarray(wide)
        np.testing.assert_array_equal(got.astype(np.float32), want)
        scales = planes[SCALES] if format.has_words else planes[SCALES] + 0.0
        scales = scales.float() if scales.dtype == torch.bfloat16 else scales
        kind = np.int32 if format.has_words else np.float32
        found.append({VALUES: np.asarray(planes[VALUES]), SCALES: np.asarray(scales, kind)})
    for name, plane in found[0].items():
        np.testing.assert_array_equal(plane, found[1][name], err_msg=name)
    np.testing.assert_array_equal(format.dequantize(found[0]), want)


def check_shards(checkpoint: Stored, ranks: int, encoding: Int4Encoding) -> None:
    """A rank takes outputs, so that each has all inputs and the same padding."""
    wanted = parameters(config_from_dict(gemma()), False)
    for rank in {0, ranks - 1}:
        local = [parameter.shard(rank, ranks) for parameter in wanted]
        formats = choose_formats(local, checkpoint.stored, ON_GPU)
        assert {*PADDING, "experts.gate_up", "experts.parallel_gate_up"} < formats.keys()
        for own in (each for each in local if each.name in formats):
            format = Int4W4A16.of(encoding, own.shape[-1])
            assert format is not None
            assert formats[own.name] == format
            assert format.padding == PADDING.get(own.name, 0)
            check_planes(checkpoint, own, format)


@RANKS
@pytest.mark.parametrize("layout", ["compressed-tensors", "AWQ"])
def test_partial_int4_blocks_equal_dequantised(layout: str, ranks: int, tmp_path) -> None:
    config = write_int4(tmp_path, gemma(), LAYOUTS[layout])
    opened = open_checkpoint(tmp_path)
    opened.check(config, False)
    encoding = {
        "compressed-tensors": Int4Encoding(32, "BF16", has_zeros=False),
        "AWQ": Int4Encoding(64, "F16", has_zeros=True),
    }[layout]
    check_shards(opened, ranks, encoding)


@RANKS
@pytest.mark.parametrize("group", [64, None])
def test_dummy_partial_int4_blocks_equal_dequantised(group: int | None, ranks: int) -> None:
    encoding = Int4Encoding(group, "BF16", has_zeros=False)
    check_shards(DummyCheckpoint.of_model(config_from_dict(gemma()), encoding), ranks, encoding)


@pytest.mark.parametrize(("inputs", "padding"), [(704, 64), (2112, 64), (768, 0), (200, 56)])
def test_int4_plane_bytes_include_padding(inputs: int, padding: int) -> None:
    encoding = Int4Encoding(None, "BF16", has_zeros=False)
    format = Int4W4A16.of(encoding, inputs)
    assert format is not None
    assert format.padding == padding
    assert plane_bytes(format, (2, 16, inputs)) == 2 * 16 * ((inputs + padding) // 2 + 2)


def test_inputs_that_are_no_eights_dequantised_at_load(tmp_path) -> None:
    stated = gemma() | {"intermediate_size": 452}
    encoding = Int4Encoding(None, "BF16", has_zeros=False)
    dummy = DummyCheckpoint.of_model(config_from_dict(stated), encoding)
    formats = choose_formats(parameters(config_from_dict(stated), False), dummy.stored, ON_GPU)
    assert "experts.parallel_down" not in formats
    assert "experts.down" in formats
