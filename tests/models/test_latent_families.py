"""Configs of families with latent attention, and errors for those that are not supported."""

import math

import pytest

from shared.models.families import config_from_dict
from shared.models.mixers import LatentAttentionConfig
from tests.support.tiny_models import tiny_config


def latent(family, **changes):
    return {**tiny_config(family, nested=False, with_mtp=False, tied=False), **changes}


def test_latent_attention_sizes_follow_config():
    (mixer,) = config_from_dict(latent("deepseek_v3")).attentions
    assert isinstance(mixer, LatentAttentionConfig)
    assert (mixer.query_rank, mixer.latent_rank, mixer.value_size) == (32, 24, 20)
    assert (mixer.rotary.width, mixer.rotary.interleaved, mixer.rotary.attention_factor) == (
        8,
        True,
        1.0,
    )
    yarn = (0.1 * math.log(4) + 1) ** 2
    assert mixer.scale == pytest.approx((12 + 8) ** -0.5 * yarn)
    (plain,) = config_from_dict(latent("glm4_moe_lite", rope_interleave=False)).attentions
    assert (plain.query_rank, plain.scale) == (None, 20**-0.5)
    assert not plain.rotary.interleaved


def test_glm4_moe_lite_dense_layers_follow_fields():
    def kinds(**fields):
        return [x.mlp.kind for x in config_from_dict(latent("glm4_moe_lite", **fields)).layers]

    assert kinds() == ["mlp", "experts", "experts"]
    assert kinds(first_k_dense_replace=2) == ["mlp", "mlp", "experts"]
    types = ["sparse", "dense", "sparse"]
    assert kinds(mlp_layer_types=types) == ["experts", "mlp", "experts"]


UNSUPPORTED = {
    "deepseek_v2": "softmax scores",
    "deepseek_v32": "sparse attention",
    "deepseek_v4": "hyper-connections",
    "glm_moe_dsa": "sparse attention",
    "kimi_k25": "vision encoder",
    "kimi_linear": "Kimi Delta Attention",
    "longcat_flash": "two attention blocks",
    "mistral4": "query scaling",
}


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_unsupported_latent_models_name_missing_feature(model_type):
    config = latent("deepseek_v3", model_type=model_type, architectures=None)
    with pytest.raises(ValueError, match=f"requires .*{UNSUPPORTED[model_type]}.*not supported"):
        config_from_dict(config)
    nested = {"text_config": config, "architectures": ["Mistral3ForConditionalGeneration"]}
    with pytest.raises(ValueError, match=UNSUPPORTED[model_type]):
        config_from_dict(nested)


def test_kimi_k2_reads_as_deepseek_v3():
    named = latent("deepseek_v3", model_type="kimi_k2", architectures=None)
    assert config_from_dict(named) == config_from_dict(latent("deepseek_v3"))
