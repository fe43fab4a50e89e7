"""MXFP4 checkpoints of gpt-oss: golden tensors, format in memory, text of the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl.formats import registry as jax_formats
from shared.models.checkpoint import CheckpointError, load_all, open_checkpoint
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.families import config_from_dict, config_from_folder, stated_encoding
from shared.models.formats.mxfp4 import MXFP4W4A16, NUMBERS, MXFP4Encoding, dequantize
from shared.models.formats.registry import choose_formats
from shared.models.formats.weight_format import plane_bytes
from shared.models.parameters import parameters
from tests.support.files import read_stored, write_stored
from tests.support.mxfp4_files import FILE, write_mxfp4
from tests.support.texts import packed_weights, texts
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import ON_GPU
from torch_impl.formats import registry as torch_formats

GOLDEN = Path(__file__).parents[1] / "golden"
HALF = ml_dtypes.bfloat16
CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]
KEPT = ("experts.gate_up", "experts.down")


def gpt_oss(**sizes: Any) -> dict[str, Any]:
    usual = {"hidden_size": 64, "intermediate_size": 32}
    return tiny_config("gpt_oss", nested=False, with_mtp=False, tied=False) | usual | sizes


def test_golden_mxfp4_experts_equal_dequantized_copy() -> None:
    config = config_from_folder(GOLDEN / "gpt_oss")
    open_checkpoint(GOLDEN / "gpt_oss").check(config, False)
    got, want = (load_all(GOLDEN / name, config, False) for name in ("gpt_oss", "gpt_oss_bf16"))
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_numbers_and_powers_are_exact() -> None:
    assert NUMBERS[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = np.tile(np.arange(16, dtype=np.uint8), (1, 2))
    for exponent in (0, 1, 120, 127, 250):
        got = dequantize(codes, np.full((1, 1), exponent, np.uint8))[0, :8]
        assert got.tolist() == [x * 2.0 ** (exponent - 127) for x in NUMBERS[:8].tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_mxfp4_planes_dequantize_to_loaded_weight(ranks, tmp_path) -> None:
    config = write_mxfp4(tmp_path / "mxfp4", gpt_oss(), tmp_path / "wide")
    opened, wide = (open_checkpoint(tmp_path / name) for name in ("mxfp4", "wide"))
    local = [p.shard(ranks - 1, ranks) for p in parameters(config, False)]
    formats = choose_formats(local, opened.stored, ON_GPU)
    assert formats.keys() == {*KEPT}
    for parameter in (p for p in local if p.name in formats):
        format, seen = formats[parameter.name], []
        want = wide.load(parameter, np.float32)
        np.testing.assert_array_equal(opened.load(parameter, np.float32), want)
        for read, where in ((torch_formats, CPU), (jax_formats, JAX_CPU)):
            planes = read.read(opened, parameter, format, where, seen.append)
            sizes = [x.nbytes for x in planes.values()]
            assert sum(sizes) == plane_bytes(format, parameter.shape)
            on_device = read.dequantized(format, planes)
            got = on_device.float().numpy() if read is torch_formats else np.float32(on_device)
            np.testing.assert_array_equal(got, want)
            host = {name: np.asarray(x) for name, x in planes.items()}
            np.testing.assert_array_equal(format.dequantize(host), want)
        assert sum(seen) == 2 * opened.num_bytes([parameter])


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_backends_generate_mxfp4_dummies_bitwise_equal(framework) -> None:
    config = config_from_dict(gpt_oss(hidden_size=160, intermediate_size=256))
    dummy = DummyCheckpoint.of_model(config, MXFP4Encoding())
    local = [p.shard(1, 2) for p in parameters(config, False)]
    formats = choose_formats(local, dummy.stored, ON_GPU)
    assert formats == {KEPT[0]: MXFP4W4A16(160), KEPT[1]: MXFP4W4A16(256)}
    read, where = {"torch": (torch_formats, CPU), "jax": (jax_formats, JAX_CPU)}[framework]
    for parameter in (p for p in local if p.name in formats):
        format = formats[parameter.name]
        want = dummy.load(parameter, HALF).astype(np.float32)
        got = read.dequantized(format, read.read(dummy, parameter, format, where, lambda n: None))
        got = got.float().numpy() if framework == "torch" else np.float32(got)
        np.testing.assert_array_equal(got, want)
        plain = DummyCheckpoint.of_model(config, None).load(parameter, np.float32)
        assert want.std() == pytest.approx(plain.std(), rel=0.4)


def test_large_or_nan_scales_are_never_packed(tmp_path) -> None:
    config = write_mxfp4(tmp_path, gpt_oss(), tmp_path / "wide")
    tensors = read_stored(tmp_path / FILE)
    (name,) = (x for x in tensors if x.endswith("layers.1.mlp.experts.down_proj_scales"))
    for scale, names in ((128, {*KEPT}), (129, {KEPT[0]})):
        changed = np.full_like(tensors[name][1], scale)
        write_stored(tmp_path / FILE, tensors | {name: ("U8", changed)})
        opened = open_checkpoint(tmp_path)
        found = choose_formats(parameters(config, False), opened.stored, ON_GPU)
        assert found.keys() == names
    write_stored(tmp_path / FILE, tensors | {name: ("U8", np.full_like(changed, 255))})
    with pytest.raises(CheckpointError, match="down_proj_scales contains NaN"):
        load_all(tmp_path, config, False)


@pytest.mark.parametrize(
    ("field", "value"), [("quant_method", "mxfp6"), ("dequantize_to", "float16")]
)
def test_unsupported_mxfp4_config_names_field(field, value) -> None:
    stated = json.loads((GOLDEN / "gpt_oss" / "config.json").read_text())
    assert stated_encoding(stated) == MXFP4Encoding()
    stated["quantization_config"] |= {field: value}
    with pytest.raises(ValueError, match=f"^quantization_config with {field}"):
        config_from_dict(stated)


@pytest.mark.parametrize(
    ("backend", "flags"),
    [
        ("torch", ()),
        pytest.param("torch", ("--speculative-algorithm", "NGRAM"), marks=pytest.mark.matrix),
        pytest.param("jax", ("--speculative-algorithm", "NGRAM"), marks=pytest.mark.matrix),
    ],
)
def test_mxfp4_text_equals_dequantized_model(backend, flags, tmp_path) -> None:
    write_mxfp4(tmp_path / "mxfp4", gpt_oss(), tmp_path / "wide")
    line = ["--max-running-requests", "2", "--context-length", "64", "--dtype", "bfloat16"]
    line += ["--chunked-prefill-size", "64", *flags, "--model-path"]
    with packed_weights() as found:
        got, want = (texts(backend, [*line, str(tmp_path / name)]) for name in ("mxfp4", "wide"))
    assert got == want
    assert [bool(each) for each in found] == [True, False]
