"""FP8 input projections of Mamba2 layers, with a last block of fewer than 128 outputs.

The projection of the model here has 1,040 outputs, as that of Nemotron 3 Nano has 10,304.
"""

from __future__ import annotations

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl.formats import registry as jax_formats
from shared.models.checkpoint import open_checkpoint
from shared.models.formats import fp8, fp8_w8a16
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8W8A16, ScaleLayout
from shared.models.formats.weight_format import SCALES, VALUES
from shared.models.parameter import CheckpointTensor
from shared.models.parameters import parameters
from tests.support.fp8_files import LAYOUTS, write_fp8
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import w8a16_of
from torch_impl.formats import registry as torch_formats

SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "moe_latent_size": 128}
SIZES |= {"mamba_num_heads": 16, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 128}
NAME, OUTPUTS = "mamba2.inputs", 1040
BLOCK, CHANNEL = Granularity.BLOCK, Granularity.CHANNEL
FORMATS = {f"compressed-tensors, {each.value}": each for each in (BLOCK, CHANNEL)}
CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]


@pytest.fixture(scope="module", params=FORMATS)
def written(request, tmp_path_factory):
    folder: Path = tmp_path_factory.mktemp("fp8")
    stated = tiny_config("nemotron_h", nested=False, with_mtp=True, tied=False) | SIZES
    config = write_fp8(folder, stated, LAYOUTS[request.param])
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, True)
    (inputs,) = (p for p in parameters(config, True) if p.name == NAME)
    assert inputs.shape[-2] == OUTPUTS
    return checkpoint, inputs, FORMATS[request.param]


@pytest.mark.parametrize("ranks", [1, 2])
def test_partial_fp8_blocks_equal_dequantised(ranks: int, written) -> None:
    checkpoint, inputs, granularity = written
    for rank in range(ranks):
        own = inputs.shard(rank, ranks)
        (format,) = w8a16_of(checkpoint, [own]).values()
        assert format == FP8W8A16(granularity)
        want = checkpoint.load(own, ml_dtypes.bfloat16).astype(np.float32)
        for registry, device in ((torch_formats, CPU), (jax_formats, JAX_CPU)):
            planes = registry.read(checkpoint, own, format, device, lambda count: None)
            outputs = OUTPUTS // ranks
            scales = -(-outputs // fp8.BLOCK) if granularity is BLOCK else outputs
            assert planes[SCALES].shape[-2] == scales
            wide = registry.dequantized(format, planes)
            got = wide.float().numpy() if registry is torch_formats else np.asarray(wide)
            np.testing.assert_array_equal(got.astype(np.float32), want)
            words = np.asarray(planes[VALUES])
            stored = np.asarray(
                planes[SCALES].float() if registry is torch_formats else planes[SCALES]
            )
            np.testing.assert_array_equal(fp8_w8a16.widened(words, stored), want)


def test_fp8_blocks_cut_by_ranks_are_dequantised(written) -> None:
    checkpoint, inputs, granularity = written
    for rank in range(4):
        assert bool(w8a16_of(checkpoint, [inputs.shard(rank, 4)])) == (granularity is CHANNEL)


@pytest.mark.parametrize(
    ("ranges", "are_blocks"),
    [
        (None, True),
        (((0, 128), (256, 300)), True),
        (((0, 128), (290, 300)), True),
        (((0, 128), (200, 300)), False),
        (((0, 100), (128, 256)), False),
    ],
)
def test_has_blocks_allows_one_partial_block(ranges, are_blocks: bool) -> None:
    source = CheckpointTensor("w", (300, 128), axis=0, ranges=ranges)
    assert fp8.has_blocks(source, BLOCK) == are_blocks
    assert fp8.has_blocks(source, CHANNEL)


def test_shares_of_partial_blocks() -> None:
    assert fp8_w8a16.shares_of((130, 64), (2, 2)) == ScaleLayout(128, 2)
    assert fp8_w8a16.shares_of((130, 64), (130, 1)) == ScaleLayout(1, 1)
