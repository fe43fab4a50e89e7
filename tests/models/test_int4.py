"""INT4 checkpoints: layouts of releases, formats in memory, and unsupported settings."""

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
from shared.models.checkpoint import Checkpoint, CheckpointError, load_all, open_checkpoint
from shared.models.dummy_weights import DummyCheckpoint
from shared.models.families import config_from_dict, stated_encoding
from shared.models.formats import four_bit
from shared.models.formats.int4_checkpoint import SYMMETRIC
from shared.models.formats.int4_encoding import Int4Encoding
from shared.models.formats.int4_w4a16 import Int4W4A16, of_scale_words, scale_words
from shared.models.formats.registry import choose_formats
from shared.models.formats.weight_format import plane_bytes
from shared.models.parameter import CheckpointTensor, Parameter
from shared.models.parameters import parameters
from tests.support.files import read_stored, write_stored
from tests.support.int4_files import FILE, LAYOUTS, compressed_int4, gptq, write_int4
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import ON_GPU
from torch_impl.formats import registry as torch_formats

VECTORS = Path(__file__).parents[1] / "golden" / "int4_packing" / "vectors.npz"
NAME = "layers.0.mlp.down_proj.weight"
HALF = ml_dtypes.bfloat16
CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def qwen3(**sizes: Any) -> dict[str, Any]:
    return tiny_config("qwen3", nested=False, with_mtp=False, tied=False) | SIZES | sizes


@pytest.fixture(scope="module")
def vectors() -> dict[str, np.ndarray]:
    return dict(np.load(VECTORS))


def golden_file(folder: Path, vectors: dict[str, np.ndarray], form: str) -> Checkpoint:
    """A checkpoint of one weight in a form of the golden vectors."""
    module, tensors = NAME.removesuffix(".weight"), {}
    for role in [x.partition(".")[2] for x in vectors if x.startswith(f"{form}.")]:
        numbers = vectors[f"{form}.{role}"]
        if role in ("weight", "weight_bf16"):
            continue
        kind = {"int32": "I32", "int64": "I64", "float16": "F16", "float32": "BF16"}
        if numbers.dtype == np.float32:
            numbers = numbers.astype(HALF)
        tensors[f"{module}.{role}"] = (kind[vectors[f"{form}.{role}"].dtype.name], numbers)
    write_stored(folder / FILE, tensors)
    return Checkpoint([folder / FILE])


def whole(weight: np.ndarray) -> Parameter:
    pieces = ((CheckpointTensor(NAME, weight.shape),),)
    return Parameter("mlp.down", (1, *weight.shape), pieces, stacked=True)


@pytest.mark.parametrize("form", ["gptq_sym", "gptq_act_order", "awq", "ct_int4", "ct_int4_asym"])
def test_libraries_weights_dequantize_exactly(form, vectors, tmp_path) -> None:
    """Golden: packed and dequantised by the library of each form."""
    opened, want = golden_file(tmp_path, vectors, form), vectors[f"{form}.weight"]
    parameter = whole(want)
    opened.check_parameters([parameter])
    got = opened.load(parameter, np.float32)[0]
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(got.astype(HALF), vectors[f"{form}.weight_bf16"].astype(HALF))


def test_asymmetric_gptq_weights_rejected(vectors, tmp_path) -> None:
    opened = golden_file(tmp_path, vectors, "gptq")
    with pytest.raises(CheckpointError, match="down_proj.qzeros has asymmetric zero points"):
        opened.check_parameters([whole(vectors["gptq.weight"])])


@pytest.mark.parametrize("inputs", [256, 384, 512, 96, 704])
def test_packed_codes_unpack_in_input_order(inputs: int) -> None:
    codes = np.random.default_rng(0).integers(0, 16, (2, 3, inputs), np.uint8)
    words = four_bit.pack(codes)
    assert words.shape == (2, 3, four_bit.padded(inputs) // 8)
    got = four_bit.unpack(words)
    np.testing.assert_array_equal(got[..., :inputs], codes)
    assert not got[..., inputs:].any()
    width = four_bit.block_of(inputs) // 8
    np.testing.assert_array_equal(words[..., 1] & 15, codes[..., 1])
    if inputs > width:
        np.testing.assert_array_equal(words[..., 0] >> 4 & 15, codes[..., width])


def test_scale_words_keep_every_float16_scale() -> None:
    bits = np.arange(0x7C00, dtype=np.uint16)  # all finite numbers but negative ones
    scales = bits.view(np.float16).astype(np.float32)
    zeros = (bits % 16).astype(np.uint8)
    for each in (scales, -scales):
        got = of_scale_words(scale_words(each, zeros))
        np.testing.assert_array_equal(got[0], each)
        np.testing.assert_array_equal(got[1], zeros)
    with pytest.raises(ValueError, match="must be bfloat16 or float16"):
        scale_words(np.float32([0.1]), None)


@each_layout
def test_int4_layout_loads_as_dequantized(layout, tmp_path) -> None:
    config = write_int4(tmp_path / "int4", qwen3(), LAYOUTS[layout], tmp_path / "wide")
    open_checkpoint(tmp_path / "int4").check(config, False)
    got, want = (load_all(tmp_path / name, config, False) for name in ("int4", "wide"))
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@each_layout
@pytest.mark.parametrize("ranks", [1, 2])
def test_int4_planes_dequantize_to_loaded_weight(layout, ranks, tmp_path) -> None:
    config = write_int4(tmp_path, qwen3(), LAYOUTS[layout])
    opened = open_checkpoint(tmp_path)
    local = [p.shard(ranks - 1, ranks) for p in parameters(config, False)]
    formats = choose_formats(local, opened.stored, ON_GPU)
    if LAYOUTS[layout].is_permuted:
        assert not formats
        return
    assert formats.keys() == {"attention.inputs", "attention.out", "mlp.gate_up", "mlp.down"}
    seen: list[int] = []
    for parameter in (p for p in local if p.name in formats):
        format = formats[parameter.name]
        want = opened.load(parameter, np.float32).astype(HALF).astype(np.float32)
        for read, where in ((torch_formats, CPU), (jax_formats, JAX_CPU)):
            planes = read.read(opened, parameter, format, where, seen.append)
            sizes = [x.nbytes for x in planes.values()]
            assert sum(sizes) == plane_bytes(format, parameter.shape)
            on_device = read.dequantized(format, planes)
            got = on_device.float().numpy() if read is torch_formats else np.float32(on_device)
            np.testing.assert_array_equal(got, want)
            host = {
                name: x.float().numpy() if x.dtype == torch.bfloat16 else np.asarray(x)
                for name, x in planes.items()
            }
            np.testing.assert_array_equal(format.dequantize(host), want)
    assert sum(seen) == 2 * opened.num_bytes([p for p in local if p.name in formats])


@each_layout
def test_config_declares_int4_encoding(layout) -> None:
    stated = qwen3() | {"quantization_config": LAYOUTS[layout].stated}
    assert config_from_dict(stated) == config_from_dict(qwen3())
    encoding = stated_encoding(stated)
    assert isinstance(encoding, Int4Encoding)
    assert encoding.group == LAYOUTS[layout].group
    assert encoding.has_zeros != LAYOUTS[layout].is_symmetric


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize(
    ("encoding", "inputs"),
    [
        (Int4Encoding(32, "BF16", False), 352),
        (Int4Encoding(None, "F16", False), 320),
        (Int4Encoding(128, "F16", True), 256),
    ],
)
def test_backends_generate_int4_dummies_bitwise_equal(framework, encoding, inputs) -> None:
    config = config_from_dict(qwen3(intermediate_size=inputs))
    dummy = DummyCheckpoint.of_model(config, encoding)
    local = [p.shard(1, 2) for p in parameters(config, False)]
    formats = choose_formats(local, dummy.stored, ON_GPU)
    assert formats["mlp.down"] == Int4W4A16.of(encoding, inputs)
    read, where = {"torch": (torch_formats, CPU), "jax": (jax_formats, JAX_CPU)}[framework]
    for parameter in (p for p in local if p.name in formats):
        format = formats[parameter.name]
        want = dummy.load(parameter, HALF).astype(np.float32)
        planes = read.read(dummy, parameter, format, where, lambda count: None)
        got = read.dequantized(format, planes)
        got = got.float().numpy() if framework == "torch" else np.float32(got)
        np.testing.assert_array_equal(got, want)
        plain = DummyCheckpoint.of_model(config, None).load(parameter, np.float32)
        assert want.std() == pytest.approx(plain.std(), rel=0.1)


@pytest.mark.parametrize(
    ("layout", "field", "value"),
    [
        ("GPTQ", "bits", 8),
        ("GPTQ", "group_size", 16),
        ("GPTQ", "sym", False),
        ("GPTQ", "checkpoint_format", "marlin"),
        ("GPTQ", "pack_dtype", "int64"),
        ("GPTQ", "kv_cache_scheme", {"num_bits": 8}),
        ("AWQ", "bits", 8),
        ("AWQ", "zero_point", False),
        ("AWQ", "version", "gemv"),
        ("AWQ", "group_size", 256),
        ("compressed-tensors", "kv_cache_scheme", {"num_bits": 8}),
        ("compressed-tensors", "config_groups.group_0.weights.num_bits", 8),
        ("compressed-tensors", "config_groups.group_0.weights.group_size", 48),
        ("compressed-tensors", "config_groups.group_0.weights.strategy", "tensor"),
        ("compressed-tensors", "config_groups.group_0.weights.type", "float"),
        ("compressed-tensors", "config_groups.group_0.input_activations", {"num_bits": 8}),
    ],
    ids=str,
)
def test_unsupported_int4_config_names_field(layout, field, value) -> None:
    stated = json.loads(json.dumps(LAYOUTS[layout].stated))
    *outer, last = field.split(".")
    inner = stated
    for name in outer:
        inner = inner[name]
    inner[last] = value
    with pytest.raises(ValueError, match=f"^quantization_config with {field}"):
        config_from_dict(qwen3() | {"quantization_config": stated})


def broken(suffix: str, change: Any) -> Any:
    def apply(tensors: dict[str, Any]) -> dict[str, Any]:
        (name,) = (x for x in tensors if x.endswith(f"0.mlp.down_proj.{suffix}"))
        kind, numbers = tensors[name]
        return tensors | {name: change(kind, numbers)}

    return apply


@pytest.mark.parametrize(
    ("message", "layout", "suffix", "change"),
    [
        ("has shape", "GPTQ", "qweight", lambda kind, x: (kind, x[:-4].copy())),
        ("has shape", "AWQ", "qzeros", lambda kind, x: (kind, x[:-1].copy())),
        (
            "has shape",
            "compressed-tensors",
            "weight_scale",
            lambda kind, x: (kind, x[:, :3].copy()),
        ),
        ("is stored as", "AWQ", "scales", lambda kind, x: ("I16", x)),
        ("must contain groups from 0 to 7", "GPTQ, desc_act", "g_idx", lambda k, x: (k, x + 1)),
        ("is not part of a", "GPTQ", "bias", lambda kind, x: (kind, np.ones_like(x))),
    ],
)
def test_faulty_int4_tensor_named_in_error(message, layout, suffix, change, tmp_path) -> None:
    config = write_int4(tmp_path, qwen3(), LAYOUTS[layout])
    tensors = read_stored(tmp_path / FILE)
    write_stored(tmp_path / FILE, broken(suffix, change)(tensors))
    opened = open_checkpoint(tmp_path)

    def read() -> None:
        opened.check(config, False)
        load_all(tmp_path, config, False)

    with pytest.raises(CheckpointError, match=message):
        read()


def test_groups_that_do_not_divide_inputs_rejected(tmp_path) -> None:
    name, shape = "layers.0.mlp.down_proj.weight", (128, 240)  # 7.5 groups of 32
    parts = {
        "packed": ("I32", np.zeros((128, 30), np.int32)),
        "shape": ("I64", np.array([128, 240])),
    }
    parts["scale"] = ("BF16", np.ones((128, 8), HALF))
    write_stored(tmp_path / FILE, {f"{name}_{x}": y for x, y in parts.items()})
    pieces = ((CheckpointTensor(name, shape),),)
    parameter = Parameter("mlp.down", (1, *shape), pieces, stacked=True)
    with pytest.raises(CheckpointError, match="down_proj.weight_scale has shape"):
        Checkpoint([tmp_path / FILE]).check_parameters([parameter])


def test_gptq_v2_zero_points_are_symmetric(tmp_path) -> None:
    config = write_int4(tmp_path, qwen3(), LAYOUTS["GPTQ"], tmp_path / "wide")
    tensors = read_stored(tmp_path / FILE)
    for name in [x for x in tensors if x.endswith("qzeros")]:
        kind, zeros = tensors[name]
        tensors[name] = (kind, np.full(zeros.view(np.int32).shape, SYMMETRIC[1], np.int32))
    write_stored(tmp_path / FILE, tensors)
    got, want = (load_all(x, config, False) for x in (tmp_path, tmp_path / "wide"))
    np.testing.assert_array_equal(got["mlp.down"], want["mlp.down"])


def test_spellings_read_whole_rows() -> None:
    for stated in (gptq(desc_act=False, group=-1), compressed_int4(group=-1, is_symmetric=True)):
        encoding = stated_encoding({"quantization_config": stated})
        assert isinstance(encoding, Int4Encoding)
        assert encoding.group is None
