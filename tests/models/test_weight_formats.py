"""Weight formats: planes and bytes, and a further format that only the registries list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl import weights as jax_weights
from jax_impl.formats import registry as jax_formats
from jax_impl.ops.gemm import linear as jax_linear
from kernels.pallas_gpu.gemm import block_loaders as pallas_loaders
from shared.models.checkpoint import CheckpointError, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict, config_from_folder, stated_encoding
from shared.models.formats import registry
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.formats.names import ENCODINGS
from shared.models.formats.quantization_config import CompressedTensors
from shared.models.formats.weight_format import (
    PLAIN,
    FormatOps,
    Plane,
    PlanePiece,
    StoredTensor,
    plane_bytes,
)
from shared.models.parameter_arrays import slice_tensor
from shared.models.parameters import parameters
from shared.models.stored_tensor import check_stored
from shared.spec.linear import Matrix
from tests.support.counting import NO_TRITON
from tests.support.files import write_stored
from tests.support.tiny_models import tiny_config
from tests.support.weight_formats import ON_GPU, read_planes, w8a8_of
from torch_impl import weights as torch_weights
from torch_impl.formats import registry as torch_formats
from torch_impl.ops.gemm import linear as torch_linear

FP8_FOLDER = Path(__file__).parents[1] / "golden" / "qwen3_moe_fp8"
GROUP, PARTS, CPU = 32, 8, jax.devices("cpu")[0]


@pytest.mark.parametrize("by_output", [False, True])
def test_w8a8_planes_dequantize_to_loaded_weight(by_output: bool) -> None:
    config, opened = config_from_folder(FP8_FOLDER), open_checkpoint(FP8_FOLDER)
    wanted = [p for p in parameters(config, False) if p.name == "attention.inputs"]
    assert w8a8_of(opened, wanted) == {"attention.inputs": FP8W8A8(by_output=True)}
    format, want = FP8W8A8(by_output), opened.load(wanted[0], np.float32)
    planes = read_planes(opened, wanted[0], format)
    assert sum(x.nbytes for x in planes.values()) == plane_bytes(format, want.shape)
    np.testing.assert_array_equal(format.dequantize(planes), want)
    for read, where in ((torch_formats, torch.device("cpu")), (jax_formats, CPU)):
        on_device = read.read(opened, wanted[0], format, where, lambda num_bytes: None)
        np.testing.assert_array_equal(read.dequantized(format, on_device), want)


@dataclass(frozen=True)
class Groups:
    """Encoding of four-bit integers with a scale for each group of inputs."""

    name = "planted"


@dataclass(frozen=True)
class Planted:
    """Format of packed four-bit integers, in the order of the checkpoint."""

    label = "planted"
    item_bytes = 1
    padding = 0
    quantizes_activations = expands_dense = False

    @classmethod
    def choose(cls, parameter, stored, context) -> Planted | None:
        if not context.on_gpu or not parameter.name.endswith("mlp.gate_up"):
            return None
        tensors = stored(parameter)
        return cls() if all(x is not None and x.encoding == Groups() for x in tensors) else None

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        *rows, inputs = shape
        scales = Plane((*rows, inputs // GROUP), "bfloat16")
        return {"values": Plane((*rows, inputs // PARTS), "int32"), "scales": scales}

    def pieces(self, tensor: StoredTensor, at, shape, whole) -> Iterator[PlanePiece]:
        for plane in ("values", "scales"):
            part = slice_tensor(tensor.source, tensor.read(plane))
            yield PlanePiece(plane, at, part.reshape(*shape[:-1], part.shape[-1]))

    def dequantize(self, planes: Mapping[str, np.ndarray]) -> np.ndarray:
        words, scales = planes["values"], planes["scales"].astype(np.float32)
        codes = (words[..., None] >> (4 * np.arange(PARTS)) & 15).reshape(*words.shape[:-1], -1)
        numbers = (codes - 8).astype(np.float32) * np.repeat(scales, GROUP, axis=-1)
        return numbers.astype(ml_dtypes.bfloat16).astype(np.float32)


class PlantedReader:
    """Reader of `X_planted` and `X_sizes`, without a tensor `X`."""

    stored_as = "I32 with scales"

    def companions(self, name, files) -> tuple[str, ...]:
        names = (f"{name}_planted", f"{name}_sizes")
        return names if files.has(names[0]) else ()

    def is_unused(self, name, files) -> bool:
        return False

    def check_unquantised(self, source, files) -> None:
        """Accepts all tensors: integers have no other meaning."""

    def check(self, source, files) -> None:
        packed, scales = self.companions(source.name, files)
        rows, inputs = source.shape
        check_stored(packed, files.header(packed), [(rows, inputs // PARTS)], ("I32",))
        check_stored(scales, files.header(scales), [(rows, inputs // GROUP)], ("BF16",))

    def num_bytes(self, source, files) -> int:
        return prod(source.shape) // 2 + 2 * prod(source.shape) // GROUP

    def stored(self, source, files) -> StoredTensor:
        packed, scales = self.companions(source.name, files)
        return StoredTensor(
            source, Groups(), lambda plane: files.tensor(packed if plane == "values" else scales)
        )

    def dequantized(self, source, files) -> np.ndarray:
        read = self.stored(source, files).read
        return slice_tensor(
            source, Planted().dequantize({x: read(x) for x in ("values", "scales")})
        )


SPELLING = CompressedTensors(
    formats=("planted",),
    served={"num_bits": [4], "type": ["int"], "group_size": [GROUP]},
    activations={},
    read=lambda weights: Groups(),
)
WEIGHTS = {"weights": {"num_bits": 4, "type": "int", "group_size": GROUP}}
STATED = {
    "quant_method": SPELLING.method,
    "format": "planted",
    "config_groups": {"group_0": WEIGHTS},
}


def jax_dequantized(planes: Mapping[str, Any]) -> jax.Array:
    words, jnp = planes["values"], jax.numpy
    codes = (words[..., None] >> (4 * jnp.arange(PARTS)) & 15).reshape(*words.shape[:-1], -1)
    scales = jnp.repeat(planes["scales"].astype(jnp.float32), GROUP, axis=-1)
    return ((codes - 8).astype(jnp.float32) * scales).astype(jnp.bfloat16)


def torch_dequantized(planes: Mapping[str, Any]) -> torch.Tensor:
    codes = (planes["values"][..., None] >> (4 * torch.arange(PARTS)) & 15).flatten(-2)
    scales = planes["scales"].float().repeat_interleave(GROUP, -1)
    return ((codes - 8).float() * scales).bfloat16()


@pytest.fixture
def planted(monkeypatch, tmp_path) -> Path:
    """Registers the format, and writes a checkpoint with packed MLPs."""
    of_registry = {"planted": registry.Quantization(PlantedReader(), (SPELLING,), (Planted,))}
    monkeypatch.setattr(registry, "QUANTIZATIONS", registry.QUANTIZATIONS | of_registry)
    for module, ops in (
        (jax_formats, FormatOps(jax_dequantized, lambda words: words, None)),
        (torch_formats, FormatOps(torch_dequantized, lambda words: words, None)),
    ):
        monkeypatch.setattr(module, "FORMATS", {**module.FORMATS, Planted: ops})
    config = tiny_config("qwen3", nested=False, with_mtp=False, tied=False)
    (tmp_path / "config.json").write_text(
        json.dumps(
            config | {"hidden_size": 64, "intermediate_size": 128, "quantization_config": STATED}
        )
    )
    return written(tmp_path, config_from_folder(tmp_path))


def written(folder: Path, config: ModelConfig) -> Path:
    rng, tensors = np.random.default_rng(0), {}
    for source in (x for p in parameters(config, False) for x in p.sources):
        name, half = source.name, ml_dtypes.bfloat16
        if "mlp" not in name:
            tensors[name] = ("BF16", rng.standard_normal(source.shape, np.float32).astype(half))
            continue
        rows, inputs = source.shape
        words = rng.integers(-(2**31), 2**31, (rows, inputs // PARTS)).astype(np.int32)
        scales = rng.uniform(0.01, 0.02, (rows, inputs // GROUP)).astype(half)
        tensors |= {f"{name}_planted": ("I32", words), f"{name}_sizes": ("BF16", scales)}
    write_stored(folder / "model.safetensors", tensors)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_planted_format_served_by_both_backends(planted: Path, ranks: int) -> None:
    config, opened = config_from_folder(planted), open_checkpoint(planted)
    opened.check(config, False)
    assert stated_encoding(json.loads((planted / "config.json").read_text())) == Groups()
    local = [p.shard(ranks - 1, ranks) for p in parameters(config, False)]
    formats = registry.choose_formats(local, opened.stored, ON_GPU)
    assert formats == {"mlp.gate_up": Planted()}
    gate_up = next(p for p in local if p.name == "mlp.gate_up")
    want = opened.load(gate_up, np.float32)
    planes = read_planes_of(opened, gate_up)
    assert sum(x.nbytes for x in planes.values()) == plane_bytes(Planted(), gate_up.shape)
    matrix = Matrix(Planted(), planes).at(1)
    np.testing.assert_array_equal(matrix.format.dequantize(matrix.rows(3).planes), want[1, 3:])
    if ranks == 1:
        nothing = lambda num_bytes: None  # noqa: E731
        how = (False, "bfloat16")
        of_torch = torch_weights.load(
            opened, config, *how, torch.device("cpu"), nothing, formats
        ).layers[1]
        got = torch_linear.widened(of_torch.feed.gate_up)
        np.testing.assert_array_equal(got.float().numpy(), want[1])
        loaded = jax_weights.load(opened, config, *how, CPU, nothing, formats)
        layer = jax_weights.weights_of(config, loaded, False).layers[1]
        got = jax_linear.widened(layer.feed.gate_up)
        np.testing.assert_array_equal(got.astype(np.float32), want[1])
        assert layer.feed.down.format.label is None  # dequantised at load


def read_planes_of(opened, parameter) -> dict[str, np.ndarray]:
    kinds = {"values": np.int32, "scales": ml_dtypes.bfloat16}
    shapes = Planted().planes(parameter.shape)
    planes = {name: np.empty(plane.shape, kinds[name]) for name, plane in shapes.items()}
    for piece in opened.planes(parameter, Planted(), lambda num_bytes: None):
        planes[piece.plane][piece.place] = piece.part
    return planes


def test_planted_format_names_faulty_tensor(planted: Path) -> None:
    config = json.loads((planted / "config.json").read_text()) | {"intermediate_size": 96}
    with pytest.raises(CheckpointError, match="gate_proj.weight_planted has shape"):
        open_checkpoint(planted).check(config_from_dict(config), False)


def test_registry_lists_all_names_of_encodings() -> None:
    assert tuple(registry.QUANTIZATIONS) == ENCODINGS


def test_kernels_load_blocks_of_all_formats() -> None:
    classes = {choice for kind in registry.QUANTIZATIONS.values() for choice in kind.formats}
    names = {PLAIN, *(each.name for each in classes)}
    assert pallas_loaders.LOADERS.keys() == names
    if find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    triton_loaders = import_module("kernels.triton_gpu.gemm.block_loaders")
    assert {each.name for each in triton_loaders.FORMATS} == names
