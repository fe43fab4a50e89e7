"""FP8 checkpoints with latent attention: `kv_b_proj` is dequantised, whatever the flags."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from models import quantize_fp8
from shared.models.checkpoint import open_checkpoint
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.formats import fp8
from shared.models.parameter import Parameter
from shared.models.parameters import parameters
from shared.models.saving import save_checkpoint
from tests.support.golden_jax import JaxModel
from tests.support.golden_models import SpecModel
from tests.support.golden_torch import TorchModel
from tests.support.tiny_models import tiny_config, tiny_weights
from tests.support.weight_formats import w8a8_of, w8a16_of

TOKENS = np.arange(3, 30, dtype=np.int32)
KV_B = "latent_attention.kv_b"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> tuple[ModelConfig, Path]:
    """A model of which the rows of a head (80) begin within blocks of 128, in FP8."""
    folder = tmp_path_factory.mktemp("latent")
    fields = tiny_config("deepseek_v3", nested=False, with_mtp=False, tied=False)
    fields |= {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    fields |= {"qk_nope_head_dim": 32, "v_head_dim": 48, "kv_lora_rank": 136}
    config = config_from_dict(fields)
    drawn = tiny_weights(config, 1)
    rounded = {name: x.astype(ml_dtypes.bfloat16) for name, x in drawn.items()}
    save_checkpoint(folder / "plain", fields, rounded)
    quantize_fp8.write(folder / "plain", folder / "twin")
    return config, folder / "twin"


def parameter_of(config: ModelConfig) -> Parameter:
    (found,) = (each for each in parameters(config, False) if each.name == KV_B)
    return found


def test_kv_b_equals_dequantized_rows_by_head(checkpoint):
    config, folder = checkpoint
    opened, kv_b = open_checkpoint(folder), parameter_of(config)
    name = kv_b.sources[0].name
    codes, scales = (opened.bytes_of(kv_b.sources[0]), opened.tensor(f"{name}_scale_inv"))
    assert scales.shape == (3, 2)
    rows = fp8.dequantize(codes, scales.astype(np.float32))
    np.testing.assert_array_equal(opened.load(kv_b, np.float32)[0], rows)
    ranks = [opened.load(kv_b.shard(rank, 4), np.float32)[0] for rank in range(4)]
    assert {len(each) for each in ranks} == {config.attentions[0].num_heads // 4 * 80}
    np.testing.assert_array_equal(np.concatenate(ranks), rows)


def test_kv_b_has_no_format_of_quantized_weights(checkpoint):
    config, folder = checkpoint
    opened, wanted = open_checkpoint(folder), parameters(config, False)
    weights_only, activations = w8a16_of(opened, wanted), w8a8_of(opened, wanted)
    assert {"experts.gate_up", "experts.down"} <= weights_only.keys()
    assert {"latent_attention.inputs", "latent_attention.queries"} <= activations.keys()
    assert KV_B not in {*weights_only, *activations}


@pytest.mark.parametrize("quantises", [False, True])
def test_fp8_latent_model_matches_spec(checkpoint, quantises):
    want = SpecModel(checkpoint[1], quantises=quantises).prefill(TOKENS, None).logits
    for model in (TorchModel, JaxModel):
        got = model(checkpoint[1], quantises=quantises).prefill(TOKENS, None).logits
        # Float32: the orders of the sums differ. The last bit of a norm can change an FP8 value.
        rows = slice(1) if quantises else slice(None)
        np.testing.assert_allclose(got[rows], want[rows], rtol=0, atol=1e-4)
