"""DFlash configs: supported spellings, and errors that name the field."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.boundary.backend import BackendLimits
from shared.drafts.checkpoint import check_head, head_parameters, kind_of, load_head, open_head
from shared.drafts.config import DraftConfig
from shared.drafts.dflash_config import stated_nodes
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.checkpoint import SINGLE_FILE, CheckpointError
from shared.models.families import config_from_folder
from shared.models.saving import split
from shared.options.adaptive import Candidate
from shared.options.command_line import parse
from shared.options.rule_context import RuleContext
from shared.options.rules import refusals
from shared.process.device import Device
from shared.process.memory_plan import plan
from shared.process.resolved_config import resolve
from shared.spec.draft_tree import TreeShape
from tests.support.backends import FRAMEWORKS, make_backend
from tests.support.cells import capacity_of
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_heads import cyclic, tiny_block_config, tiny_block_head
from tests.support.tiny_models import tiny_model

TARGET, WEIGHTS = tiny_model("qwen3", 6)
HEAD = tiny_block_head(TARGET, 4)
CONFIG = tiny_block_config(TARGET)


def parsed(target=TARGET, **fields) -> DraftConfig:
    return DraftConfig.from_dict(tiny_block_config(TARGET, **fields), target)


def dflash(**fields) -> dict:
    """`dflash_config` with changed fields."""
    return {"dflash_config": {**CONFIG["dflash_config"], **fields}}


def write(folder, prefix: str = "", **fields) -> None:
    folder.mkdir()
    config = json.dumps(tiny_block_config(TARGET, **fields))
    (folder / "config.json").write_text(config, encoding="utf-8")
    tensors = {}
    for parameter in head_parameters(HEAD.config, None):
        tensors.update(split(parameter, HEAD.weights[parameter.name], ""))
    save_file({f"{prefix}{name}": t for name, t in tensors.items()}, folder / SINGLE_FILE)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_dflash_head_round_trips_with_and_without_prefix(prefix, tmp_path):
    write(tmp_path / "head", prefix)
    checkpoint = open_head(tmp_path / "head")
    assert kind_of(checkpoint.names) == "DFLASH"
    config = DraftConfig.from_folder(tmp_path / "head", TARGET)
    assert config == HEAD.config
    got = load_head(checkpoint, config, np.float32)
    assert got.weights.keys() == HEAD.weights.keys()
    for name in HEAD.weights:
        np.testing.assert_array_equal(got.weights[name], HEAD.weights[name], err_msg=name)


def test_dflash_block_size_read_from_either_place():
    outer = {"block_size": 8, **dflash()}
    inner = {"block_size": None, **dflash(block_size=8)}
    assert parsed(**outer).block == parsed(**inner).block
    assert parsed(**outer).block.size == 8


def test_dflash_windows_and_causality_follow_config():
    block = parsed().block
    assert block.windows == (2, 2, 2, None)
    assert block.causal == (True, True, True, False)
    assert parsed(is_causal=False).block.causal == (False,) * 4
    assert parsed(**dflash(is_causal=True)).block.causal == (True,) * 4
    full = parsed(layer_types=None, sliding_window=None).block
    assert (full.windows, full.causal) == ((None,) * 4, (False,) * 4)


def test_dflash_head_scales_embeddings_as_gemma_target():
    gemma, granite = (tiny_model(family, 0)[0] for family in ("gemma4", "granite"))
    stated = {"final_logit_softcapping": gemma.logits_softcap}
    layer = DraftConfig.from_dict(tiny_block_config(gemma, **stated), gemma).layer
    assert (layer.embedding_factor, layer.rounds_embedding_factor) == (gemma.hidden**0.5, True)
    assert layer.logits_softcap == gemma.logits_softcap
    other = DraftConfig.from_dict(tiny_block_config(granite), granite).layer
    assert other.embedding_factor == 1 != granite.embedding_factor


def test_dflash_config_requires_softcap_of_target():
    with pytest.raises(ValueError, match=r"final_logit_softcapping must be the target's \(None\)"):
        parsed(final_logit_softcapping=30.0)


NEMO = {"architectures": ["Qwen3DFlashDraftModel"]}


@pytest.mark.parametrize(
    ("fields", "is_causal"),
    [
        (dflash(causal_head=True), True),
        (dflash(causal_head=False), False),
        (NEMO | dflash(causal=True), True),
        (NEMO | dflash(causal=False), False),
    ],
    ids=str,
)
def test_jetspec_head_is_causal_in_all_layers(fields, is_causal):
    want = parsed().block
    causal = (True,) * 4 if is_causal else want.causal
    assert parsed(**fields).block == dataclasses.replace(want, causal=causal)


def test_golden_jetspec_configs_describe_one_head():
    folder = Path(__file__).parents[1] / "golden"
    target = config_from_folder(folder / "qwen3")
    stated = (
        json.loads((folder / "jetspec" / name).read_text(encoding="utf-8"))
        for name in ("config.json", "config_automodel.json")
    )
    own, other = (DraftConfig.from_dict(each, target) for each in stated)
    assert own == other
    assert own.block.causal == (True, True)


AMBIGUOUS = {
    "causal of JetSpec": (dflash(causal=True), "causal is supported only in dflash_config"),
    "causal_head of NeMo": (NEMO | dflash(causal_head=True), "causal_head is supported only"),
    "outside": ({"causal_head": True}, "causal_head is supported only in dflash_config"),
    "missing": (NEMO, "dflash_config has no causal"),
    "is_causal": (dflash(causal_head=True, is_causal=False), "contradicts is_causal false"),
    "sliding": (
        dflash(causal_head=True) | {"sliding_window_non_causal": True},
        "contradicts sliding_window_non_causal true",
    ),
    "adapter": (
        dflash(causal_head=True, target_hidden_size=TARGET.hidden) | {"hidden_size": 64},
        "requires an adapter",
    ),
    "speculators": ({"speculators_model_type": "jetspec"}, "true tokens instead of masks"),
    "shift_label": (dflash(shift_label=True), "Domino"),
    "variable_prefix": (dflash(variable_prefix=True), "D2SD"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_causal_head_rejected_by_name(name):
    fields, message = AMBIGUOUS[name]
    with pytest.raises(ValueError, match=message):
        parsed(**fields)


def test_with_window_replaces_windows_of_all_layers():
    config = parsed()
    assert config.with_window(None) is config
    assert config.with_window(6).block.windows == (6,) * 4
    assert config.with_window(6).block.causal == config.block.causal


@pytest.mark.parametrize(
    ("num_layers", "target_layers", "streams"),
    [
        (5, 36, (2, 10, 18, 26, 34)),  # the released model for Qwen3-8B
        (5, 32, (2, 9, 16, 23, 30)),  # Qwen3.5-4B and 9B
        (8, 40, (2, 7, 12, 17, 23, 28, 33, 38)),
        (1, 36, (19,)),
        (2, 8, (2, 6)),
    ],
)
def test_dflash_default_aux_layers_are_spread_evenly(num_layers, target_layers, streams):
    target = dataclasses.replace(TARGET, layers=TARGET.layers[:1] * target_layers)
    fields = {"num_hidden_layers": num_layers, "num_target_layers": target_layers}
    found = parsed(target, layer_types=None, **fields, **dflash(target_layer_ids=None))
    assert found.aux_streams == streams


REFUSED = {
    "conv_kernel_size": ({"conv_kernel_size": 3}, "DFlash2"),
    "selector_rank": (dflash(selector_rank=8), "DFlash2"),
    "projector_type": (dflash(projector_type="domino"), "domino"),
    "markov_rank": (dflash(markov_rank=16), "DSpark"),
    "draft_vocab_size": ({"draft_vocab_size": 999}, "1 to 272"),
    "speculators_model_type": ({"speculators_model_type": "xpress"}, "xpress"),
    "sample_from_anchor": ({"sample_from_anchor": True}, "own slot"),
    "unheard_of": ({"unheard_of": 3}, "remove the field"),
    "block_size": ({"block_size": 1}, "2 to 17"),
    "mask_token_id": (dflash(mask_token_id=TARGET.vocab), "below"),
    "target_layer_ids": (dflash(target_layer_ids=[2, 9]), "different layers of the target"),
    "num_target_layers": ({"num_target_layers": 9}, "trained for this model"),
    "vocab_size": ({"vocab_size": 100}, "vocab_size"),
    "hidden_size": ({"hidden_size": 64}, "hidden_size"),
    "layer_types": ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear"),
    "sliding_window": ({"sliding_window": None}, "a positive integer, got None"),
    "use_sliding_window": ({"layer_types": None, "use_sliding_window": True}, "layer_types"),
    "quantization_config": ({"quantization_config": {"bits": 4}}, "quantization"),
}


OF_ANOTHER_KIND = [
    *(("layer_types", value, "list strings") for value in (5, True, {}, [[]] * 4)),
    *(("is_causal", value, "be true or false") for value in (1, "x", [])),
    ("sliding_window_non_causal", "x", "be true or false"),
    ("sample_from_anchor", 0, "be true or false"),
    ("sliding_window", 10**30, "be at most 2147483647"),
    ("draft_vocab_size", float("inf"), "be a non-negative integer"),
]


@pytest.mark.parametrize(("field", "value", "must"), OF_ANOTHER_KIND, ids=str)
def test_dflash_config_rejects_invalid_field_value(field, value, must):
    for fields in ({field: value}, dflash(**{field: value})):
        with pytest.raises(
            ValueError, match=f"^{field} in the draft model's config.json must {must}"
        ):
            parsed(**fields)


def test_stated_nodes_rejects_invalid_speculators_model_type():
    assert stated_nodes(CONFIG, "DFLASH") == 4
    for value in ({}, ["dflash"], 5):
        with pytest.raises(ValueError, match="^speculators_model_type in the draft model's"):
            stated_nodes(CONFIG | {"speculators_model_type": value}, "DFLASH")


@pytest.mark.parametrize("field", REFUSED)
def test_dflash_config_rejects_unsupported_field(field):
    fields, named = REFUSED[field]
    with pytest.raises(ValueError, match="draft model") as refused:
        parsed(**fields)
    assert field in str(refused.value)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("tensor", "model"),
    [
        ("selector.weight", "not part of a DFLASH head"),
        ("domino_gru.weight", "Domino"),
        ("hidden_dim_adapter.proj.weight", "JetSpec head with an adapter"),
        ("markov_head.weight", "not part of a DFLASH head"),
        ("layers.7.mlp.up_proj.weight", "layers.7.mlp.up_proj.weight"),
    ],
)
def test_tensors_of_other_models_rejected_by_name(tensor, model, tmp_path):
    write(tmp_path / "head")
    path = tmp_path / "head" / SINGLE_FILE
    save_file({**load_file(path), tensor: np.zeros(3, np.float32)}, path)
    with pytest.raises(CheckpointError, match=model):
        check_head(open_head(tmp_path / "head"), HEAD.config)


DFLASH = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "head"]
COSTS = PLATFORM.costs
CPU = Device("cpu", "CPU", 8 << 30)


def test_dflash_block_sets_shape_and_memory_plan():
    planned = plan(parse(DFLASH), TARGET, DrafterSpec.of_head(HEAD.config), CPU, COSTS)
    capacity, sizes = planned.capacity, {line.name: line.num_bytes for line in planned.lines}
    drafted = {(s.nodes, s.depth, s.width) for s in capacity.shapes if not s.is_plain}
    assert drafted == {(4, 3, 1)}
    layer = HEAD.config.layer
    row = 4 * 2 * layer.attention.num_kv_heads * layer.attention.head_size
    assert sizes["draft KV"] == layer.num_layers * row * capacity.num_pages * capacity.page_size
    assert sizes["draft weights"] == 4 * sum(array.size for array in HEAD.weights.values())
    # Without draft inputs the line has only the fields of all slots.
    assert sizes["draft inputs"] == capacity.num_slots * 3 * 4


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--speculative-num-draft-tokens 8", "drafts chains of 4 nodes; remove them"),
        ("--speculative-num-steps 2", "drafts chains of 4 nodes; remove them"),
        ("--speculative-draft-window-size 3", "than the draft model's chain of 4 nodes"),
    ],
)
def test_dflash_rejects_conflicting_shape_flags(flag, message):
    options = parse([*DFLASH, *flag.split()])
    (refused,) = refusals(
        RuleContext(options=options, model=TARGET, has_mtp=False, head_kind="DFLASH", block=4)
    )
    assert message in refused


TREE = "--speculative-eagle-topk 2 --speculative-num-draft-tokens"


@pytest.mark.parametrize(
    ("flag", "shape"),
    [
        (f"{TREE} 8", (8, 3, 2)),
        (f"{TREE} 3", (3, 2, 2)),  # a path has at most two nodes
        (f"{TREE} 15", (15, 3, 2)),  # more than other drafters have candidates
        (f"{TREE} 5 --speculative-num-steps 2", (5, 2, 2)),
    ],
)
def test_dflash_tree_flags_set_shape(flag, shape):
    options = parse([*DFLASH, *flag.split()])
    given = {"model": TARGET, "has_mtp": False, "head_kind": "DFLASH", "block": 4}
    assert not refusals(RuleContext(options=options, **given))
    planned = plan(options, TARGET, DrafterSpec.of_head(HEAD.config), CPU, COSTS)
    drafted = {(s.nodes, s.depth, s.width, s.block) for s in planned.capacity.shapes}
    assert drafted - {(1, 0, 0, 0)} == {(*shape, 4)}


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (f"{TREE} 16", "must be 4 to 15 with --speculative-num-steps 3"),
        (f"{TREE} 8 --speculative-num-steps 4", "exceeds the block .* drafts 3 levels"),
        ("--speculative-eagle-topk 2", "requires the size of the draft tree"),
    ],
)
def test_dflash_rejects_invalid_tree_flags(flag, message):
    options = parse([*DFLASH, *flag.split()])
    given = {"model": TARGET, "has_mtp": False, "head_kind": "DFLASH", "block": 4}
    (refused,) = refusals(RuleContext(options=options, **given))
    assert re.search(message, refused)


@pytest.mark.parametrize("is_causal", [False, True])
def test_adaptive_tree_is_default_for_causal_block(is_causal):
    head = parsed(block_size=8, **dflash(causal_head=is_causal))
    options = parse([*DFLASH, "--speculative-adaptive"])
    found = resolve(options, TARGET, DrafterSpec.of_head(head), CPU, False).candidates
    assert [each.nodes for each in found] == [2, 4, 8, *([32] if is_causal else [])]
    assert [each.topk for each in found] == [1, 1, 1, *([8] if is_causal else [])]
    assert {each.block for each in found} == {8}


def test_adaptive_config_may_contain_block_trees():
    options = parse([*DFLASH, "--speculative-adaptive"])
    options = dataclasses.replace(options, candidates=(Candidate(3, 2, 8),))
    given = {"model": TARGET, "has_mtp": False, "head_kind": "DFLASH", "block": 4}
    assert not refusals(RuleContext(options=options, **given))
    planned = plan(options, TARGET, DrafterSpec.of_head(HEAD.config), CPU, COSTS)
    drafted = {(s.nodes, s.depth, s.width, s.block) for s in planned.capacity.shapes}
    assert drafted == {(1, 0, 0, 0), (8, 3, 2, 4)}


def test_dflash_accepts_matching_shape_flags():
    same = ["--speculative-num-draft-tokens", "4", "--speculative-num-steps", "3"]
    with_flags, without = (
        plan(parse(f), TARGET, DrafterSpec.of_head(HEAD.config), CPU, COSTS)
        for f in (DFLASH + same, DFLASH)
    )
    assert with_flags.capacity.shapes == without.capacity.shapes


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (TreeShape.chain(4, 4), "at most 3 levels, got 4"),
        (TreeShape(8, 4, 2, 32, 4), "at most 3 levels, got 4"),
        (TreeShape.chain(2, 4), "positions past the length, .* reserves 3"),
    ],
    ids=str,
)
def test_backend_rejects_shapes_beyond_block(shape, message, framework):
    capacity: BackendLimits = capacity_of("qwen3", 16, (shape,))
    with pytest.raises(ValueError, match=message):
        make_backend(framework, TARGET, cyclic(TARGET, WEIGHTS), capacity, HEAD)
