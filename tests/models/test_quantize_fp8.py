"""FP8 copies of checkpoints: nearest values, and loading on both backends."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jax_impl.training import tasks
from models import quantize_fp8
from shared.models.checkpoint import INDEX_FILE, load_all, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict, config_from_folder
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.parameter_arrays import shard_array
from shared.models.parameters import parameters
from shared.models.saving import save_checkpoint
from shared.options.options import DEFAULT_MODEL
from tests.support.golden_jax import JaxModel
from tests.support.golden_models import SpecModel
from tests.support.golden_torch import TorchModel
from tests.support.tiny_models import tiny_config, tiny_weights
from tests.support.weight_formats import w8a16_of

TOKENS = np.arange(3, 30, dtype=np.int32)


def test_quantised_picks_nearest_values_and_scales():
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((2, 130, 200)) * np.exp(rng.standard_normal((2, 130, 1)))
    weight = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    weight[1, :128, :128] = 0
    codes, scales = quantize_fp8.quantised(weight)
    assert scales.dtype == ml_dtypes.bfloat16
    assert scales.shape == (2, 2, 2)
    assert not fp8.has_nan(codes.view(np.uint8))
    numbers = np.unique(fp8.VALUES[~np.isnan(fp8.VALUES)])
    for stack, row, column in ((0, 3, 5), (0, 129, 199), (1, 4, 150), (1, 129, 0), (1, 0, 0)):
        scale = np.float32(scales[stack, row // 128, column // 128])
        block = weight[stack, row // 128 * 128 :][:128, column // 128 * 128 :][:, :128]
        if not scale:
            assert codes[stack, row, column] == 0
            continue
        # The scale fits the largest weight, and no smaller bfloat16 value does.
        assert np.abs(block).max() <= 448 * scale < np.abs(block).max() * (1 + 2**-7)
        distances = np.abs(numbers - weight[stack, row, column] / scale)
        got = np.abs(np.float32(codes[stack, row, column]) - weight[stack, row, column] / scale)
        assert got == distances.min()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_quantized_mtp_layer_keeps_input_projection(family, tmp_path):
    """Releases quantise the experts of an MTP layer and not its `eh_proj`."""
    fields = tiny_config(family, nested=False, with_mtp=True, tied=False)
    fields |= {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    config = config_from_dict(fields)
    drawn = tiny_weights(config, 1)
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in drawn.items()}
    save_checkpoint(tmp_path / "plain", fields, rounded)
    quantize_fp8.write(tmp_path / "plain", tmp_path / "twin")
    opened, wanted = open_checkpoint(tmp_path / "twin"), parameters(config, True)
    assert {"mtp.layer.experts.gate_up", "mtp.layer.experts.down"} <= w8a16_of(
        opened, wanted
    ).keys()
    (fc,) = (each for each in wanted if each.name == "mtp.fc")
    np.testing.assert_array_equal(opened.load(fc, np.float32), np.float32(rounded["mtp.fc"]))
    hidden = np.random.default_rng(0).standard_normal((len(TOKENS), 128), np.float32)
    want = SpecModel(tmp_path / "twin").mtp(TOKENS, hidden, 0)
    for model in (TorchModel, JaxModel):
        for got, each in zip(model(tmp_path / "twin").mtp(TOKENS, hidden, 0), want, strict=True):
            # Float32 on both sides: the orders of the sums differ.
            np.testing.assert_allclose(got, each, rtol=0, atol=1e-4)


def test_quantized_fused_delta_projections_load_by_rank(tmp_path):
    """A rank reads heads of a fused FP8 projection; its blocks cover parts of several heads."""
    fields = tiny_config("qwen3_next", nested=False, with_mtp=False, tied=False)
    config = config_from_dict(fields)
    save_checkpoint(tmp_path / "plain", fields, tiny_weights(config, 1))
    quantize_fp8.write(tmp_path / "plain", tmp_path / "twin")
    twin, plain = (open_checkpoint(tmp_path / name) for name in ("twin", "plain"))
    (inputs,) = (x for x in parameters(config, False) if x.name == "gated_delta.inputs")
    whole, exact = (each.load(inputs, np.float32) for each in (twin, plain))
    np.testing.assert_allclose(whole, exact, rtol=2**-4, atol=np.abs(exact).max() / 448 * 2**-9)
    assert (whole != exact).any()
    for rank in range(2):
        local = inputs.shard(rank, 2)
        got = twin.load(local, np.float32)
        np.testing.assert_array_equal(got, shard_array(local, whole))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> tuple[ModelConfig, Path, Path]:
    """A MoE checkpoint in two files, with matrices of whole blocks, and its FP8 copy."""
    folder = tmp_path_factory.mktemp("mixture")
    fields = tiny_config("qwen3_moe", nested=False, with_mtp=False, tied=True)
    fields |= {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4}
    fields |= {"num_hidden_layers": 2, "mlp_only_layers": [], "head_dim": 64}
    config = config_from_dict(fields)
    drawn = tiny_weights(config, 1)
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in drawn.items()}
    save_checkpoint(folder / "plain", fields, rounded, num_shards=2)
    (folder / "plain" / "tokenizer.json").write_text("{}", encoding="utf-8")
    quantize_fp8.write(folder / "plain", folder / "twin")
    return config, folder / "plain", folder / "twin"


def test_quantized_checkpoint_tensors_within_rounding(mixture):
    config, plain, twin = mixture
    assert config_from_folder(twin) == config
    assert (twin / "tokenizer.json").is_file()
    opened = open_checkpoint(twin)
    opened.check(config, False)
    names = ("attention.out", "experts.gate_up", "experts.down")
    kept = dict.fromkeys(names, FP8W8A16(Granularity.BLOCK))
    assert w8a16_of(opened, parameters(config, False)) == kept
    want, got = (load_all(folder, config, False) for folder in (plain, twin))
    quantised = {"attention.inputs", "attention.out", "experts.gate_up", "experts.down"}
    for name in want:
        if name not in quantised:
            np.testing.assert_array_equal(got[name], want[name], err_msg=name)
            continue
        # A value has four significant bits; subnormal values have equal steps.
        largest = np.abs(want[name]).max()
        np.testing.assert_allclose(got[name], want[name], rtol=2**-4, atol=largest / 448 * 2**-9)
        assert (got[name] != want[name]).any()


def test_quantized_checkpoint_torch_matches_spec(mixture):
    config, plain, twin = mixture
    want = SpecModel(twin).prefill(TOKENS, None).logits
    got = TorchModel(twin).prefill(TOKENS, None).logits
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)  # float32: other orders of sums
    assert np.abs(SpecModel(plain).prefill(TOKENS, None).logits - want).max() > 1e-2
    read = tasks.load_model(twin, config, False, np.float32)
    arrays = load_all(twin, config, False)
    np.testing.assert_array_equal(read.layers.experts.gate_up[...], arrays["experts.gate_up"])
    np.testing.assert_array_equal(read.layers.experts.down[...], arrays["experts.down"])


def test_write_copies_tensors_of_other_folders(tmp_path):
    """Uses the VLM, because its index names the weight file of the text model."""
    folder = DEFAULT_MODEL.parent / "vlm"
    quantize_fp8.write(folder, tmp_path / "twin")
    names = set(json.loads((folder / INDEX_FILE).read_text())["weight_map"])
    index = json.loads((tmp_path / "twin" / INDEX_FILE).read_text())["weight_map"]
    assert names <= index.keys()
    assert all((tmp_path / "twin" / name).is_file() for name in index.values())
    config = config_from_folder(tmp_path / "twin")
    open_checkpoint(tmp_path / "twin").check(config, with_mtp=False)


def test_write_rejects_fp8_checkpoint_and_own_folder(mixture):
    _, plain, twin = mixture
    for folders in ((twin, plain.parent / "third"), (plain, plain)):
        with pytest.raises(ValueError, match="must be an unquantised checkpoint and a different"):
            quantize_fp8.write(*folders)
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
