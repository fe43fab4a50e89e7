"""Models with one sublayer per layer: patterns of config.json, and mixed models."""

from dataclasses import replace

import pytest

from shared.models.block_types import BlockType, read_block_types
from shared.models.families import config_from_dict
from shared.models.mlp import NoMLP
from shared.models.parameters import parameters
from tests.support.tiny_models import tiny_config, tiny_model


def config(**changed):
    return tiny_config("nemotron_h", nested=False, with_mtp=False, tied=False) | changed


def test_list_and_pattern_give_equal_layers():
    names = ["mamba", "attention", "moe", "mlp", "linear_attention", "moe"]
    pattern = config_from_dict(config())
    stated = config(layers_block_type=names)
    del stated["hybrid_override_pattern"]
    assert config_from_dict(stated) == pattern
    kinds = [each.mixer.kind for each in pattern.layers]
    assert kinds == ["mamba2", "attention", "no_mixer", "no_mixer", "mamba2", "no_mixer"]
    mlps = [each.mlp.kind for each in pattern.layers]
    assert mlps == ["no_mlp", "no_mlp", "experts", "mlp", "no_mlp", "experts"]


def test_pattern_names_every_sublayer():
    stated = {"layers_block_type": None, "num_hidden_layers": 4}
    types = read_block_types(stated | {"hybrid_override_pattern": "M*-E"})
    assert types == [*BlockType]


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"hybrid_override_pattern": "*X*-E"}, "hybrid_override_pattern contains 'X'"),
        ({"hybrid_override_pattern": None}, "must have hybrid_override_pattern or"),
        ({"num_hidden_layers": 4}, "names 6 layers, num_hidden_layers is 4"),
        ({"layers_block_type": ["attention", "rnn"]}, "layers_block_type contains 'rnn'"),
        ({"hybrid_override_pattern": "E---E"}, "at least one full_attention layer"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act must be relu2"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"use_bias": True}, "use_bias must be False"),
        ({"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "ME"}, "must be '.E' and"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
    ],
)
def test_invalid_block_types_raise(changed, error):
    with pytest.raises(ValueError, match=error):
        config_from_dict(config(**changed))


def test_layers_of_both_forms_raise():
    model = tiny_model("qwen3", 0)[0]
    single = replace(model.layers[0], mlp=NoMLP())
    with pytest.raises(ValueError, match="or all have one of both"):
        replace(model, layers=(single, *model.layers[1:]))


def test_single_sublayers_have_one_norm_each():
    model = tiny_model("nemotron_h", 0)[0]
    norms = {p.name: p.shape for p in parameters(model, False) if p.name.endswith("_norm")}
    assert norms == {"input_norm": (6, model.hidden), "final_norm": (model.hidden,)}
