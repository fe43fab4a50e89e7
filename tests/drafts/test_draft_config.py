"""Draft head configs: supported spellings, and errors that name the field."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.drafts.aux_hidden_states import LayerIdMeaning
from shared.drafts.checkpoint import DraftFiles, check_head, kind_of, load_head, open_head
from shared.drafts.config import DraftConfig, DraftHead
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import SINGLE_FILE, CheckpointError
from shared.spec import attention, cache_pools, eagle, layers, model
from tests.support.tiny_heads import tiny_head, tiny_head_config, write_tiny_head
from tests.support.tiny_models import FAMILIES, tiny_model

TARGET, WEIGHTS = tiny_model("llama", 0)
EAGLE3_VARIANTS = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": TARGET.vocab},
    "shared lm_head": {"draft_vocab_size": None},
    "own size": {"hidden_size": 32, "target_hidden_size": TARGET.hidden},
    "norms": {"fc_norm": True, "norm_before_fc": True, "norm_output": True},
    "bias": {"bias": True},
}


def parsed(kind, target=TARGET, **fields):
    return DraftConfig.from_dict(tiny_head_config(target, kind, **fields), target)


def rewrite(folder, change):
    tensors = load_file(folder / SINGLE_FILE)
    change(tensors)
    save_file(tensors, folder / SINGLE_FILE)


def renamed(tensors, old, new):
    for name in [name for name in tensors if old in name]:
        tensors[name.replace(old, new)] = tensors.pop(name)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_eagle_head_round_trips_for_every_target(family, kind, tmp_path):
    target, weights = tiny_model(family, 0)
    want = write_tiny_head(tmp_path / "head", target, weights, kind, 1)
    config = DraftConfig.from_folder(tmp_path / "head", target)
    seen = []
    checkpoint = open_head(tmp_path / "head")
    got = load_head(checkpoint, config, np.float32, seen.append)
    assert (got.config, config.kind) == (want.config, kind)
    assert got.weights.keys() == want.weights.keys()
    for name in want.weights:
        np.testing.assert_array_equal(got.weights[name], want.weights[name], err_msg=name)
    assert sum(seen) == DraftFiles(DrafterSpec.of_head(config), checkpoint).num_bytes


@pytest.mark.parametrize("name", EAGLE3_VARIANTS)
def test_eagle3_variant_has_configured_tensors(name, tmp_path):
    fields = EAGLE3_VARIANTS[name]
    head = write_tiny_head(tmp_path / "head", TARGET, WEIGHTS, "EAGLE3", 1, **fields)
    wanted = check_head(open_head(tmp_path / "head"), head.config)
    extra = {"own size": {"embed"}, "norms": {"aux_norm", "input_norm"}, "bias": {"fc_bias"}}
    optional = {"embed", "aux_norm", "input_norm", "fc_bias"}
    assert {p.name for p in wanted} & optional == extra.get(name, set())
    assert head.config.own_lm_head == (name != "shared lm_head") == ("lm_head" in head.weights)
    whole = ("whole vocabulary", "shared lm_head")
    assert head.config.has_draft_vocab == (name not in whole) == ("draft_ids" in head.weights)


def test_aux_streams_follow_listed_or_default_layers():
    eight = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * 8)
    assert parsed("EAGLE3", eight, eagle_config={}).aux_streams == (2, 4, 5)
    for nothing in ([], None):
        none = {"eagle_aux_hidden_state_layer_ids": nothing}
        assert parsed("EAGLE3", eight, eagle_config=none).aux_streams == (2, 4, 5)
    listed = {"eagle_aux_hidden_state_layer_ids": [7, 0, 3]}
    assert parsed("EAGLE3", eight, eagle_config=listed).aux_streams == (1, 4, 8)
    second = {"eagle_aux_hidden_state_layer_ids": [5, 1, 3]}
    assert parsed("EAGLE3", eight, eagle_config=second).aux_streams == (2, 4, 6)
    for nested in ({}, {"eagle_aux_hidden_state_layer_ids": None}):
        assert parsed("EAGLE3", eight, eagle_config=nested, **second).aux_streams == (2, 4, 6)
    inputs = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    assert parsed("EAGLE3", eight, eagle_config=inputs).aux_streams == (2, 4, 5)
    assert parsed("EAGLE").aux_streams == ()


@pytest.mark.parametrize("nested", [False, True])
def test_aux_layer_ids_including_layer_count_are_streams(nested):
    eight = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * 8)
    listed = {"eagle_aux_hidden_state_layer_ids": [4, 6, 8]}
    fields = {"eagle_config": listed} if nested else {"eagle_config": {}, **listed}
    assert parsed("EAGLE3", eight, **fields).aux_streams == (4, 6, 8)


@pytest.mark.parametrize(
    ("ids", "nested"),
    [([0, 3, 6], False), ([3, 4, 6], True), ([3, 4, 6], False)],
)
def test_ambiguous_aux_layer_ids_require_flag(ids, nested):
    """With the wrong convention a head loads without an error and drafts badly."""
    eight = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * 8)
    listed = {"eagle_aux_hidden_state_layer_ids": ids}
    fields = {"eagle_config": listed} if nested else {"eagle_config": {}, **listed}
    with pytest.raises(ValueError, match="is ambiguous: outputs or inputs"):
        parsed("EAGLE3", eight, **fields)
    config = tiny_head_config(eight, "EAGLE3", **fields)
    streams = [DraftConfig.from_dict(config, eight, which).aux_streams for which in LayerIdMeaning]
    assert streams == [tuple(ids), tuple(i + 1 for i in ids)]


def test_aux_layer_convention_without_list_raises():
    eight = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * 8)
    for config in (
        tiny_head_config(eight, "EAGLE3", eagle_config={}),
        tiny_head_config(eight, "EAGLE"),
    ):
        with pytest.raises(ValueError, match="remove --speculative-aux-layer-convention"):
            DraftConfig.from_dict(config, eight, LayerIdMeaning.INPUTS)


@pytest.mark.parametrize(
    ("architecture", "fields", "kind"),
    [
        ("LlamaForCausalLM", {}, "EAGLE"),
        ("LlamaForCausalLM", {"draft_vocab_size": 100}, "EAGLE3"),
        ("LlamaForCausalLM", {"draft_vocab_size": None}, "EAGLE3"),
        ("LlamaForCausalLMEagle", {}, "EAGLE"),
        ("LlamaForCausalLMEagle3", {}, "EAGLE3"),
    ],
)
def test_head_kind_follows_architecture_and_draft_vocabulary(architecture, fields, kind):
    config = tiny_head_config(TARGET, "EAGLE3")
    del config["draft_vocab_size"]
    config |= {"architectures": [architecture], **fields}
    if kind == "EAGLE":
        del config["eagle_config"]
    assert DraftConfig.from_dict(config, TARGET).kind == kind


def test_head_rotation_and_bias_are_own():
    assert TARGET.attention.rotary.type == "llama3"
    rotary = parsed("EAGLE").layer.attention.rotary
    assert (rotary.type, rotary.theta) == ("default", 10000.0)
    assert parsed("EAGLE3", rope_theta=5.0).layer.attention.rotary.theta == 5.0
    assert parsed("EAGLE").has_bias
    assert not parsed("EAGLE", bias=False).has_bias
    assert not parsed("EAGLE3").has_bias


REFUSED_CONFIGS = {
    "another architecture": ("EAGLE", {"architectures": ["MedusaModel"]}, "MedusaModel"),
    "streams of EAGLE": ("EAGLE", {"eagle_aux_hidden_state_layer_ids": [1]}, "layer_ids"),
    "an unknown field": ("EAGLE", {"unheard_of": 1}, "unheard_of"),
    "drafts at once": ("EAGLE3", {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft"),
    "another norm": ("EAGLE3", {"eagle_config": {"use_last_layernorm": False}}, "use_last"),
    "token map": ("EAGLE", {"hot_vocab_size": 64}, "hot_vocab_size"),
    "quantised": ("EAGLE3", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "vision": ("EAGLE3", {"vision_config": {}, "text_config": {"a": 1}}, "text_config"),
    "another target": ("EAGLE", {"hidden_size": 32}, "hidden_size (32) does not match"),
    "another target's streams": ("EAGLE3", {"hidden_size": 32}, "hidden_size (32) does not match"),
    "a wrong target size": ("EAGLE3", {"target_hidden_size": 99}, "target_hidden_size (99)"),
    "an EAGLE head of its own size": (
        "EAGLE",
        {"hidden_size": 32, "target_hidden_size": TARGET.hidden},
        "hidden_size",
    ),
    "own size, shared lm_head": (
        "EAGLE3",
        {"hidden_size": 32, "target_hidden_size": TARGET.hidden, "draft_vocab_size": None},
        "lm_head",
    ),
    "another vocabulary": ("EAGLE", {"vocab_size": 99}, "vocab_size (99)"),
    "a wide draft vocabulary": ("EAGLE3", {"draft_vocab_size": 999}, "draft_vocab_size"),
    "two streams": ("EAGLE3", {"num_aux_hidden_states": 2}, "num_aux_hidden_states"),
    "no streams": ("EAGLE3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux"),
    "a stream of no layer": (
        "EAGLE3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}},
        "eagle_aux_hidden_state_layer_ids are [0, 1, 4]",
    ),
    "a stream twice": (
        "EAGLE3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}},
        "eagle_aux_hidden_state_layer_ids",
    ),
    "default streams of a shallow target": ("EAGLE3", {"eagle_config": {}}, "is missing"),
    "a relative": ("EAGLE3", {"speculators_model_type": "peagle"}, "peagle"),
    "latent attention": (
        "EAGLE3",
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        "DeepseekV2",
    ),
}


@pytest.mark.parametrize("case", REFUSED_CONFIGS)
def test_unsupported_head_config_names_field(case):
    kind, fields, named = REFUSED_CONFIGS[case]
    with pytest.raises(ValueError, match="draft model") as refused:
        parsed(kind, **fields)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


NORMS = ("fc_norm", "use_aux_norm", "norm_before_fc", "norm_before_residual", "norm_output")
OF_ANOTHER_KIND = [
    *(
        ("draft_vocab_size", value, "be a non-negative integer")
        for value in ("x", "", True, 2.5, [1], {})
    ),
    *((field, "x", "be true or false") for field in (*NORMS, "bias", "qkv_bias")),
    ("tie_word_embeddings", 0, "be true or false"),
    *(("architectures", value, "list strings") for value in (5, True, [["LlamaForCausalLM"]])),
    ("speculators_model_type", ["eagle3"], "be a string"),
]


@pytest.mark.parametrize(("field", "value", "must"), OF_ANOTHER_KIND, ids=str)
def test_head_config_rejects_invalid_field_value(field, value, must):
    with pytest.raises(ValueError, match=f"^{field} in the draft model's config.json must {must}"):
        parsed("EAGLE3", **{field: value})


def test_speculators_layer_model_type_must_be_string():
    layer = tiny_head_config(TARGET, "EAGLE3")
    del layer["architectures"], layer["draft_vocab_size"], layer["eagle_config"]
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": layer}
    for value in ([], {}, 5):
        layer["model_type"] = value
        with pytest.raises(ValueError, match="^model_type in the draft model's config.json must"):
            DraftConfig.from_dict(config, TARGET)


def medusa(tensors):
    renamed(tensors, "fc.weight", "medusa_head.0.weight")


def dflash(tensors):
    tensors["hidden_norm.weight"] = np.ones(4, np.float32)
    tensors["layers.0.self_attn.q_norm.weight"] = np.ones(4, np.float32)


def whole_model(tensors):
    del tensors["fc.weight"]


def mapped_twice(tensors):
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def other_kept(tensors):
    tensors["t2d"] = ~tensors["t2d"]


REFUSED_TENSORS = {
    "a Medusa head": ("EAGLE", medusa, "Medusa"),
    "a DFlash model": ("EAGLE", dflash, "DFLASH"),
    "a whole model": ("EAGLE", whole_model, "fc.weight"),
    "a tensor too many": ("EAGLE3", lambda t: t.update({"fc.bias": t["norm.weight"]}), "fc.bias"),
    "another shape": ("EAGLE3", lambda t: t.update(d2t=t["d2t"][1:]), "d2t"),
    "a map that is not one to one": ("EAGLE3", mapped_twice, "d2t"),
    "maps that disagree": ("EAGLE3", other_kept, "t2d and d2t"),
    "no map": ("EAGLE3", lambda t: t.pop("d2t"), "d2t"),
}


@pytest.mark.parametrize("case", REFUSED_TENSORS)
def test_tensors_of_other_heads_rejected_by_name(case, tmp_path):
    kind, spoil, named = REFUSED_TENSORS[case]
    head = write_tiny_head(tmp_path / "head", TARGET, WEIGHTS, kind, 1)
    rewrite(tmp_path / "head", spoil)
    with pytest.raises(CheckpointError) as refused:
        check_head(open_head(tmp_path / "head"), head.config)
    assert named in str(refused.value)


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
def test_kind_of_tensors_must_match_config(kind, tmp_path):
    write_tiny_head(tmp_path / "head", TARGET, WEIGHTS, kind, 1)
    checkpoint = open_head(tmp_path / "head")
    assert kind_of(checkpoint.names) == kind
    other = "EAGLE" if kind == "EAGLE3" else "EAGLE3"
    with pytest.raises(CheckpointError, match=f"tensors are those of an {kind} head"):
        check_head(checkpoint, parsed(other))


def test_head_tensors_accept_other_spellings(tmp_path):
    fields = {"use_aux_norm": True}
    want = write_tiny_head(tmp_path / "head", TARGET, WEIGHTS, "EAGLE3", 1, **fields)

    def change(tensors):
        renamed(tensors, "midlayer.", "layers.0.")
        for i, name in enumerate(("low", "mid", "high")):
            renamed(tensors, f"fc_norm.{i}.", f"aux_norm_{name}.")
        tensors["embed_tokens.weight"] = WEIGHTS["embed"]
        renamed(tensors, "fc.", "model.fc.")

    rewrite(tmp_path / "head", change)
    got = load_head(open_head(tmp_path / "head"), want.config, np.float32)
    for name in want.weights:
        np.testing.assert_array_equal(got.weights[name], want.weights[name], err_msg=name)


def test_missing_fc_bias_is_dropped(tmp_path):
    write_tiny_head(tmp_path / "head", TARGET, WEIGHTS, "EAGLE", 1)
    rewrite(tmp_path / "head", lambda tensors: tensors.pop("fc.bias"))
    files = open_head(tmp_path / "head")
    head = load_head(files, infer_from_tensors(parsed("EAGLE"), files, None), np.float32)
    assert "fc_bias" not in head.weights


def test_pickled_head_weights_raise(tmp_path):
    write_tiny_head(tmp_path / "head", TARGET, WEIGHTS, "EAGLE3", 1)
    (tmp_path / "head" / SINGLE_FILE).rename(tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        open_head(tmp_path / "head")


def test_missing_or_broken_head_config_raises(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        DraftConfig.from_folder(tmp_path / "nowhere", TARGET)
    with pytest.raises(ValueError, match=r"no config\.json"):
        DraftConfig.from_folder(tmp_path, TARGET)
    (tmp_path / "config.json").write_text(json.dumps([]))
    with pytest.raises(ValueError, match="JSON object"):
        DraftConfig.from_folder(tmp_path, TARGET)


def passed_over(rng, num_rows):
    streams = rng.standard_normal((TARGET.num_layers + 1, num_rows, TARGET.hidden))
    kv = cache_pools.new_kv(TARGET.attention, 0, 1, 1)
    return model.Forward(streams[-1].astype(np.float32), streams.astype(np.float32), kv)


def test_fc_norms_apply_per_stream_then_jointly():
    head = tiny_head(TARGET, WEIGHTS, "EAGLE3", 1, fc_norm=True, norm_before_fc=True, bias=True)
    passed, eps = passed_over(np.random.default_rng(0), 5), head.config.layer.rms_eps
    norms = zip(head.config.aux_streams, head.weights["aux_norm"], strict=True)
    joined = np.concatenate([layers.rms_norm(passed.streams[i], w, eps) for i, w in norms], axis=1)
    want = layers.rms_norm(joined, head.weights["input_norm"], eps) @ head.weights["fc"].T
    got = eagle.EagleHeadDrafter.of_head(head, WEIGHTS).reads(passed)
    # Float32 sums of 144 products in the same order, except for the bias.
    np.testing.assert_allclose(got, want + head.weights["fc_bias"], atol=1e-5)
    plain = tiny_head(TARGET, WEIGHTS, "EAGLE3", 1)
    assert not np.allclose(
        got, eagle.EagleHeadDrafter.of_head(plain, WEIGHTS).reads(passed), atol=0.1
    )


def one_row(head, reads):
    """Output and logits of a head for one row at position 0."""
    drafter, table = eagle.EagleHeadDrafter.of_head(head, WEIGHTS), np.array([[1]])
    rows = attention.causal_rows(np.array([0, 1]), np.zeros(1, int), np.zeros(1, int), table, 1)
    kv = cache_pools.new_kv(drafter.layer.attention, 1, 2, 4)
    hidden, logits, _ = drafter.run(rows, np.array([7]), None, reads, kv)
    return hidden, logits


def test_norm_output_changes_only_next_hidden():
    reads = np.random.default_rng(0).standard_normal((1, TARGET.hidden)).astype(np.float32)
    plain = tiny_head(TARGET, WEIGHTS, "EAGLE3", 1)
    config = dataclasses.replace(plain.config, norm_output=True)
    hidden, logits = one_row(plain, reads)
    normed, same = one_row(DraftHead(config, plain.weights), reads)
    np.testing.assert_array_equal(same, logits)
    want = layers.rms_norm(hidden, plain.weights["final_norm"], config.layer.rms_eps)
    np.testing.assert_array_equal(normed, want)


def test_head_scores_only_draft_vocabulary():
    reads = np.random.default_rng(0).standard_normal((1, TARGET.hidden)).astype(np.float32)
    head = tiny_head(TARGET, WEIGHTS, "EAGLE3", 1)
    _, logits = one_row(head, reads)
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(logits)), head.weights["draft_ids"])


def test_head_of_own_size_uses_own_embedding():
    fields = {"hidden_size": 32, "target_hidden_size": TARGET.hidden}
    head = tiny_head(TARGET, WEIGHTS, "EAGLE3", 1, **fields)
    reads = np.random.default_rng(0).standard_normal((1, 32)).astype(np.float32)
    hidden, logits = one_row(head, reads)
    assert hidden.shape == (1, 32)
    other = {**head.weights, "embed": head.weights["embed"] + np.float32(1)}
    assert not np.array_equal(one_row(DraftHead(head.config, other), reads)[1], logits)
