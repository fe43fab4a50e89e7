"""Model configs: all spellings of a config.json, and errors that name the field."""

import json
import math
from dataclasses import replace

import pytest

from shared.models.families import config_from_dict, config_from_folder
from shared.models.parameters import parameters
from shared.models.stacks import BIAS
from tests.support.tiny_models import tiny_config


def llama(**changes):
    return {**tiny_config("llama", nested=False, with_mtp=False, tied=False), **changes}


def hybrid(**changes):
    return {**tiny_config("qwen3_5", nested=False, with_mtp=True, tied=False), **changes}


def test_nested_config_equals_text_config():
    nested = tiny_config("qwen3_5", nested=True, with_mtp=True, tied=False)
    assert config_from_dict(nested) == config_from_dict(hybrid())


def test_hybrid_config_reads_layers_gate_and_rotation():
    config = config_from_dict(hybrid())
    assert [each.mixer.kind for each in config.layers] == ["gated_delta", "attention"] * 2
    assert [(each.name, each.layers) for each in config.groups] == [
        ("gated_delta", (0, 2)),
        ("attention", (1, 3)),
    ]
    assert config.attention.has_gate
    assert config.zero_centered_norms
    assert config.has_mtp
    assert config.attention.rotary.width == 8


def test_layer_kinds_follow_full_attention_interval():
    config = hybrid(full_attention_interval=4)
    del config["layer_types"]
    kinds = tuple(each.mixer.kind for each in config_from_dict(config).layers)
    assert kinds == ("gated_delta",) * 3 + ("attention",)


def test_qwen3_5_partial_rotary_factor_defaults_to_quarter():
    rope = {"rope_theta": 1e7}
    assert config_from_dict(hybrid(rope_parameters=rope)).attention.rotary.width == 4


def test_rotary_settings_found_in_every_place():
    nowhere = llama(rope_scaling=None, rope_theta=None)
    assert config_from_dict(nowhere).attention.rotary.theta == 10000.0
    for new in ({"rope_theta": 5.0}, {"rope_parameters": {"rope_theta": 5}, "rope_theta": 5.0}):
        assert config_from_dict(nowhere | new).attention.rotary.theta == 5.0


def test_yarn_sets_attention_factor_and_context_length():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    config = config_from_dict(llama(rope_scaling=scaling))
    assert config.attention.rotary.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert config.context_length == 4 * 2048


def test_eos_ids_are_union_of_both_files():
    config = config_from_dict(hybrid(eos_token_id=44), {"eos_token_id": [46, 44]})
    assert config.eos_ids == (44, 46)


def test_tied_read_from_top_or_text_config():
    nested = tiny_config("qwen3_5", nested=True, with_mtp=True, tied=True)
    assert config_from_dict(nested).tied
    del nested["tie_word_embeddings"]
    assert config_from_dict(nested).tied
    del nested["text_config"]["tie_word_embeddings"]
    assert not config_from_dict(nested).tied


def test_head_size_independent_of_hidden_size():
    assert config_from_dict(llama(head_dim=16)).attention.head_size == 16
    assert config_from_dict(llama(head_dim=None)).attention.head_size == 12


def test_mistral_equals_llama_with_sliding_window():
    """A null window means no window, and Llama has no such field."""
    mistral = llama(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
    found, like = config_from_dict(mistral), config_from_dict(llama(sliding_window=4096))
    assert (found.layers, found.hidden, found.rms_eps) == (like.layers, like.hidden, like.rms_eps)
    assert not found.drafts_trees
    del mistral["architectures"]
    assert config_from_dict(mistral) == found
    (sliding,) = config_from_dict(mistral | {"sliding_window": 512}).attentions
    assert sliding.window == 512


def test_mistral3_vlm_checkpoint_serves_text_model():
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128}
    text = llama(rope_scaling=None, rope_parameters=yarn | {"llama_4_scaling_beta": 0.1})
    del text["architectures"]
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"}
    for kind, growth in (("ministral3", 0.1), ("mistral", 0.0)):
        found = config_from_dict(outer | {"text_config": text | {"model_type": kind}})
        assert (found.name, found.attention.query_scaling_beta) == (kind, growth)
    with pytest.raises(ValueError, match="architectures in config.json is mamba"):
        config_from_dict(outer | {"text_config": text | {"model_type": "mamba"}})
    with pytest.raises(ValueError, match="has no text_config; copy the field"):
        config_from_dict(outer | text)


def test_window_covering_whole_context_is_dropped():
    mistral = llama(architectures=["MistralForCausalLM"], sliding_window=2047)
    assert config_from_dict(mistral).attention.window == 2047
    assert config_from_dict(mistral, context_length=2048).attention.window == 2047
    assert config_from_dict(mistral, context_length=2047).attention.window is None
    assert config_from_dict(mistral | {"sliding_window": 2048}).attention.window is None


def test_qwen_sliding_window_follows_flag_and_layers():
    fields = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        qwen = llama(architectures=[name], rope_scaling=None, **fields)
        windows = [each.mixer.window for each in config_from_dict(qwen).layers]
        assert windows == [None, None, 64]
        listed = qwen | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        windows = [each.mixer.window for each in config_from_dict(listed).layers]
        assert windows == [64, None, None]
        (whole,) = config_from_dict(listed | {"use_sliding_window": False}).attentions
        assert whole.window is None


def test_biases_follow_fields_and_family():
    def names(**fields):
        found = parameters(config_from_dict(llama(rope_scaling=None, **fields)), False)
        return {s.name.split(".", 2)[2] for p in found if p.name.endswith(BIAS) for s in p.sources}

    qkv = {f"self_attn.{x}_proj.bias" for x in "qkv"}
    mlp = {f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")}
    assert names() == set()
    assert names(architectures=["Qwen2ForCausalLM"]) == qkv
    assert names(attention_bias=True) == qkv | {"self_attn.o_proj.bias"}
    assert names(mlp_bias=True) == mlp


def test_smollm3_nope_layers_follow_list_or_default():
    smol = llama(architectures=["SmolLM3ForCausalLM"], rope_scaling=None, num_hidden_layers=4)

    def turned(**fields):
        layers = config_from_dict(smol | fields).layers
        return [each.mixer.rotary.type != "none" for each in layers]

    assert turned() == [True, True, True, False]
    assert turned(no_rope_layers=[0, 1, 1, 0]) == [False, True, True, False]
    with pytest.raises(ValueError, match="no_rope_layers lists 3 layers"):
        turned(no_rope_layers=[0, 1, 1])


def test_olmo3_reads_post_norms_windows_and_yarn():
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
    olmo = llama(architectures=["Olmo3ForCausalLM"], sliding_window=32, rope_scaling=yarn)
    config = config_from_dict(olmo | {"num_hidden_layers": 4})
    assert [each.mixer.window for each in config.layers] == [32, 32, 32, None]
    rotations = [each.mixer.rotary.type for each in config.layers]
    assert rotations == ["default", "default", "default", "yarn"]
    assert config.input_norm_eps is None
    found = {p.name: p.shape for p in parameters(config, False)}
    assert not {"input_norm", "post_attention_norm"} & found.keys()
    assert found["attention.q_norm"] == (4, 4 * 16)
    assert found["attention.k_norm"] == (4, 2 * 16)


def test_granite_reads_four_multipliers():
    fields = {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
        "attention_multiplier": 0.0625,
    }
    config = config_from_dict(llama(architectures=["GraniteForCausalLM"], **fields))
    assert (config.embedding_factor, config.residual_factor) == (12.0, 0.22)
    assert (config.logits_factor, config.attention.scale) == (0.125, 0.0625)
    config = config_from_dict(llama(**fields))
    assert (config.embedding_factor, config.residual_factor, config.logits_factor) == (1, 1, 1)
    assert config.attention.scale is None


def test_phi3_reads_fused_projections_and_window():
    phi = llama(architectures=["Phi3ForCausalLM"], rope_scaling=None, sliding_window=None)
    names = {
        source.name for each in parameters(config_from_dict(phi), False) for source in each.sources
    }
    assert {"layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.gate_up_proj.weight"} <= names
    assert not [name for name in names if "q_proj" in name or "up_proj" in name.split(".")]
    (sliding,) = config_from_dict(phi | {"sliding_window": 2047}).attentions
    assert sliding.window == 2047


LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_longrope_factors_follow_served_context_length(kind):
    """The length of a request has no effect: cached keys would have other rotations."""
    long = llama(rope_scaling=LONG | {"type": kind}, original_max_position_embeddings=256)
    whole = config_from_dict(long).attention.rotary
    assert whole.extensions == (4.0,) * 8
    assert config_from_dict(long, context_length=257).attention.rotary == whole
    short = config_from_dict(long, context_length=256).attention.rotary
    assert short.extensions == (1.0,) * 8
    assert short.attention_factor == whole.attention_factor
    assert whole.attention_factor == pytest.approx(math.sqrt(1 + math.log(8) / math.log(256)))


def test_ministral3_reads_query_scaling_and_mscale():
    yarn = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 128}
    grown = yarn | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    config = config_from_dict(llama(architectures=["Ministral3ForCausalLM"], rope_scaling=grown))
    assert config.attention.query_scaling_beta == 0.1
    assert config.attention.rotary.attention_factor == 1.0
    unequal = yarn | {"mscale": 0.7, "mscale_all_dim": 1.0}
    found = config_from_dict(llama(rope_scaling=unequal)).attention
    want = (0.07 * math.log(16) + 1) / (0.1 * math.log(16) + 1)
    assert found.rotary.attention_factor == pytest.approx(want)
    assert found.query_scaling_beta == 0


def experts(family="qwen3_moe", **changes):
    config = tiny_config(family, nested=False, with_mtp=False, tied=False)
    return {**config, **changes}


def test_expert_layers_follow_list_and_step():
    def kinds(**fields):
        found = config_from_dict(experts(num_hidden_layers=4, **fields)).layers
        return tuple(each.mlp.kind for each in found)

    assert kinds() == ("experts", "mlp", "experts", "experts")
    assert kinds(mlp_only_layers=[]) == ("experts",) * 4
    assert kinds(mlp_only_layers=[3], decoder_sparse_step=2) == ("mlp", "experts", "mlp", "mlp")
    assert kinds(num_experts=0) == ("mlp",) * 4
    grouped = config_from_dict(experts("glm4_moe", num_hidden_layers=4, first_k_dense_replace=3))
    assert [each.mlp.kind for each in grouped.layers] == ["mlp"] * 3 + ["experts"]


def test_moe_without_dense_layers_needs_no_intermediate_size():
    config = experts(mlp_only_layers=[], intermediate_size=None)
    assert config_from_dict(config).dense is None
    with pytest.raises(ValueError, match="intermediate_size"):
        config_from_dict(config | {"mlp_only_layers": [0]})


def test_expert_weight_renormalization_follows_family():
    def is_renormalised(family, **fields):
        return config_from_dict(experts(family, **fields)).experts.is_renormalised

    silent = experts()
    del silent["norm_topk_prob"]
    assert not config_from_dict(silent).experts.is_renormalised
    assert is_renormalised("qwen3_moe", norm_topk_prob=True)
    assert is_renormalised("qwen3_5_moe")
    assert is_renormalised("qwen3_5_moe", norm_topk_prob=False)  # a field that the family ignores
    assert not is_renormalised("glm4_moe", norm_topk_prob=False)


def test_glm4_moe_reads_grouped_sigmoid_router():
    found = config_from_dict(experts("glm4_moe", n_shared_experts=2)).experts
    assert (found.scores, found.has_score_bias, found.routed_factor) == ("sigmoid", True, 1.8)
    assert (found.num_groups, found.num_chosen_groups) == (4, 2)
    assert (found.shared_intermediate, found.shared_is_gated) == (48, False)
    attention = config_from_dict(experts("glm4_moe")).attention
    assert (attention.input_bias, attention.out_bias, attention.qk_norm) == (True, False, True)
    assert not config_from_dict(experts("glm4_moe", use_qk_norm=False)).attention.qk_norm
    plain = experts("glm4_moe")
    del plain["partial_rotary_factor"]
    assert config_from_dict(plain).attention.rotary.width == 8


def test_qwen3_5_moe_mtp_layer_has_experts():
    outer = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    inner = experts("qwen3_5_moe", mtp_num_hidden_layers=1)
    config = config_from_dict({**outer, "text_config": inner})
    assert config == config_from_dict(inner)
    assert config.draft_layer.mlp == config.experts
    assert (config.experts.shared_intermediate, config.experts.shared_is_gated) == (40, True)
    del outer["architectures"], inner["architectures"]
    assert config_from_dict({**outer, "text_config": inner}) == config
    assert config_from_dict(inner) == config


REFUSED_EXPERTS = [
    ("qwen3_moe", "num_experts_per_tok must be 1 to 8", 9),
    ("qwen3_moe", "moe_intermediate_size", None),
    ("qwen3_moe", "mlp_bias", True),
    ("qwen3_moe", "n_routed_experts", 8),
    ("qwen3_5_moe", "shared_expert_intermediate_size", None),
    ("qwen3_5_moe", "mlp_only_layers", [0]),
    ("qwen3_5_moe", "decoder_sparse_step", 2),
    ("qwen3_5_moe", "decoder_sparse_step in config.json must be a positive", "2"),
    ("glm4_moe", "scoring_func must be sigmoid", "softmax"),
    ("glm4_moe", "topk_method must be noaux_tc", "greedy"),
    ("glm4_moe", "moe_layer_freq must be 1", 2),
    ("glm4_moe", "n_group", 3),
    ("glm4_moe", "topk_group must be 1 to 4", 5),
    ("glm4_moe", "num_experts_per_tok must be 1 to 4", 5),
    ("minimax_m2", "attn_type_list must be 1", [1, 0, 1]),
    ("minimax_m2", "partial_rotary_factor in config.json must name the same", 0.25),
    ("minimax_m2", "scoring_func must be sigmoid", "softmax"),
    ("minimax_m2", "shared_intermediate_size must be 0", 64),
    ("minimax_m2", "use_qk_norm must be True", False),
    ("deepseek_v3", "scoring_func must be sigmoid", "softmax"),
    ("deepseek_v3", "topk_method must be noaux_tc", "group_limited_greedy"),
    ("deepseek_v3", "index_topk", 2048),
    ("deepseek_v3", "hc_mult", 4),
    ("glm4_moe_lite", "compress_rates", {"compressed_sparse_attention": 4}),
    ("deepseek_v3", "q_lora_rank", 0),
    ("deepseek_v3", "qk_rope_head_dim", None),
    ("glm4_moe_lite", "attention_bias", True),
    ("glm4_moe_lite", "mlp_layer_types", ["dense"]),
    ("glm4_moe_lite", "mlp_layer_types contains", ["dense", "moe", "sparse"]),
]


@pytest.mark.parametrize(("family", "field", "value"), REFUSED_EXPERTS, ids=str)
def test_unsupported_moe_config_raises(family, field, value):
    with pytest.raises(ValueError, match=field):
        config_from_dict(experts(family, **{field.split()[0]: value}))


def test_moe_config_rejects_post_norms_and_mixed_sizes():
    config = config_from_dict(experts())
    for change, message in (
        ({"post_norm": True}, "MoE layers with post-norms"),
        ({"residual_factor": 0.5}, "must equal the model's residual_factor"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, **change)
    with pytest.raises(ValueError, match="not supported with score biases or expert groups"):
        replace(config.experts, has_score_bias=True)
    with pytest.raises(ValueError, match="softmax or sigmoid"):
        replace(config.experts, scores="sqrt")
    wider = replace(config.layers[0], mlp=replace(config.experts, intermediate=32))
    with pytest.raises(ValueError, match="MoE blocks of different sizes"):
        replace(config, layers=(*config.layers, wider))


REFUSED = {
    "architectures": {"architectures": ["GemmaForCausalLM"]},
    "num_experts: MoE is not supported in a llama model": {"num_experts": 8},
    "use_sliding_window": {"use_sliding_window": True},
    "rope_type": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "long_factor in the rotary settings must list 8 numbers": {
        "rope_scaling": LONG | {"long_factor": [1.0]},
        "original_max_position_embeddings": 256,
    },
    "long_mscale": {"rope_scaling": LONG | {"long_mscale": 1.2}},
    "factor": {"rope_scaling": {"rope_type": "linear"}},
    "mscale": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
    "attention_bias": {"architectures": ["MistralForCausalLM"], "attention_bias": True},
    "mlp_bias": {"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True},
    "hidden_act": {"hidden_act": "gelu"},
    "quantization_config": {"quantization_config": {"quant_method": "bitsandbytes"}},
    "vocab_size": {"vocab_size": 0},
    "num_hidden_layers": {"num_hidden_layers": "3"},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "hidden_size": {"hidden_size": 50, "head_dim": None},
    "text_config in config.json must be an object": {"text_config": [1]},
    "rms_norm_eps": {"rms_norm_eps": None},
    "rms_norm_eps in config.json must be a positive number": {"rms_norm_eps": "small"},
    "rope_scaling in config.json must be an object": {"rope_scaling": [1]},
    "rope_theta in config.json is 500000.0 and rope_theta in rope_parameters is 5.0": {
        "rope_parameters": {"full_attention": {"rope_theta": 5.0}},
        "rope_scaling": None,
    },
    "rope_type in rope_parameters is 'yarn' and rope_type in rope_scaling is 'llama3'": {
        "rope_parameters": {"type": "yarn", "factor": 8.0},
    },
    "type and rope_type in rope_scaling must be equal, got 'linear' and 'yarn'": {
        "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 8.0},
    },
    "factor in rope_parameters must not be next to settings by layer type": {
        "rope_parameters": {"full_attention": {"rope_type": "linear"}, "factor": 2.0},
    },
    "chunked_attention in rope_parameters must not be next to": {
        "rope_parameters": {"chunked_attention": {"rope_type": "linear"}},
    },
    "head_dim in config.json must be even": {"head_dim": 63},
    "head_dim in config.json must be a positive integer": {"head_dim": 64.5},
    "eos_token_id must name tokens of the vocabulary": {"eos_token_id": [-1]},
    "eos_token_id .* got 1000000": {"eos_token_id": 1_000_000},
    "eos_token_id .* got '<end>'": {"eos_token_id": "<end>"},
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_model_config_names_field(field):
    with pytest.raises(ValueError, match=field):
        config_from_dict(llama(**REFUSED[field]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", ["sliding_attention"] * 4),
        ("layer_types", ["full_attention"] * 3),
        ("layer_types", ["mamba"] * 4),
        ("layer_types must contain at least one full_attention layer", ["linear_attention"] * 4),
        ("linear_conv_kernel_dim", 3),
        ("linear_num_value_heads", 3),
        ("mtp_num_hidden_layers", 2),
        ("output_gate_type", "sigmoid"),
    ],
)
def test_unsupported_hybrid_config_names_field(field, value):
    with pytest.raises(ValueError, match=field):
        config_from_dict(hybrid(**{field.split()[0]: value}))


def test_config_from_folder_rejects_unreadable_config(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        config_from_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ')
    with pytest.raises(ValueError, match="not valid JSON"):
        config_from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="JSON object"):
        config_from_folder(tmp_path)
