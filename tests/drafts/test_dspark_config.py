"""DSpark configs: supported spellings, and errors that name the field."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.drafts.checkpoint import check_head, kind_of, load_head, open_head
from shared.drafts.config import DraftConfig
from shared.drafts.dflash_config import stated_nodes
from shared.drafts.drafter_spec import DrafterSpec
from shared.drafts.dspark_config import MarkovConfig
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import SINGLE_FILE, CheckpointError
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.options.rule_context import RuleContext
from shared.options.rules import refusals
from shared.process.device import Device
from shared.process.resolved_config import resolve
from tests.support.tiny_heads import (
    cyclic,
    tiny_block_config,
    tiny_spark_config,
    write_tiny_spark,
)
from tests.support.tiny_models import tiny_model

TARGET, WEIGHTS = tiny_model("qwen3", 6)
WEIGHTS = cyclic(TARGET, WEIGHTS)
CONFIG = tiny_spark_config(TARGET)
KINDS = {"vanilla": {}, "gated": {"markov_head_type": "gated"}, "rnn": {"markov_head_type": "rnn"}}


def parsed(**fields) -> DraftConfig:
    return DraftConfig.from_dict({**CONFIG, **fields}, TARGET)


@pytest.mark.parametrize("kind", KINDS)
def test_dspark_head_round_trips(kind, tmp_path):
    want = write_tiny_spark(tmp_path / "head", TARGET, WEIGHTS, 3, **KINDS[kind])
    files = open_head(tmp_path / "head")
    assert kind_of(files.names) == want.config.kind == "DSPARK"
    config = infer_from_tensors(DraftConfig.from_folder(tmp_path / "head", TARGET), files, None)
    assert config == want.config
    got = load_head(files, config, np.float32)
    assert got.weights.keys() == want.weights.keys()
    for name, array in want.weights.items():
        np.testing.assert_array_equal(got.weights[name], array, err_msg=name)


def test_dspark_config_spellings_are_equal():
    flat = {**CONFIG, "markov_rank": None, "block_size": None}
    nested = {**flat["dflash_config"], "markov_rank": TARGET.hidden, "block_size": 3}
    specforge = {**flat, "dflash_config": {**nested, "projector_type": "dspark"}}
    deepspec = {**CONFIG, "architectures": ["Qwen3DSparkModel"]}
    for other in (specforge, deepspec):
        assert DraftConfig.from_dict(other, TARGET) == parsed()
    markov = MarkovConfig(
        rank=TARGET.hidden, kind="vanilla", has_confidence=True, confidence_sees_previous=True
    )
    assert parsed().part(MarkovConfig) == markov


def test_speculators_dspark_config_uses_defaults():
    outer = ("architectures", "block_size", "dflash_config", "num_target_layers", "markov_rank")
    layer = {name: value for name, value in CONFIG.items() if name not in outer}
    written = {
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [1],
        "mask_token_id": 5,
        "draft_vocab_size": 100,
        "transformer_layer_config": layer,
    }
    block = DraftConfig.from_dict(written, TARGET).block
    assert (block.size, block.nodes, block.from_anchor) == (8, 9, True)
    markov = block.part(MarkovConfig)
    assert (markov.rank, markov.kind) == (256, "vanilla")
    assert stated_nodes(written, "DSPARK") == 9


def test_dspark_first_slot_follows_sample_from_anchor():
    assert (parsed().block.first_slot, parsed().block.nodes) == (0, 4)
    other = parsed(sample_from_anchor=False).block
    assert (other.first_slot, other.nodes) == (1, 3)
    for fields in ({}, {"sample_from_anchor": False}):
        assert stated_nodes({**CONFIG, **fields}, "DSPARK") == parsed(**fields).block.nodes


REFUSED = {
    "markov_rank": ({"markov_rank": 0}, "DFLASH head"),
    "markov_head_type": ({"markov_head_type": "fir"}, "vanilla, gated, rnn"),
    "block_size": ({"block_size": 17}, "2 to 16"),
    "projector_type": ({"projector_type": "dflash"}, "dspark"),
    "confidence_temperatures": ({"confidence_temperatures": [1.5]}, "remove the field"),
    "conv_kernel_size": ({"conv_kernel_size": 3}, "DFlash2"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_dspark_config_rejects_unsupported_field(field):
    fields, named = REFUSED[field]
    with pytest.raises(ValueError, match="draft model") as refused:
        parsed(**fields)
    assert field in str(refused.value)
    assert named in str(refused.value)


def test_dspark_config_rejects_differing_vocab_padding():
    with pytest.raises(ValueError, match="Markov step is indexed by the target's tokens"):
        DraftConfig.from_dict({**CONFIG, "vocab_size": TARGET.vocab + 8}, TARGET, None, 99)


@pytest.mark.parametrize(
    ("fields", "has", "sees"),
    [
        ({}, True, True),
        ({"confidence_head_with_markov": False}, True, False),
        ({"enable_confidence_head": False}, False, False),
    ],
)
def test_dspark_confidence_inferred_from_tensors(fields, has, sees, tmp_path):
    write_tiny_spark(tmp_path / "head", TARGET, WEIGHTS, 3, **fields)
    path = tmp_path / "head" / "config.json"
    silent = {name: x for name, x in CONFIG.items() if "confidence" not in name}
    path.write_text(json.dumps(silent), encoding="utf-8")
    files = open_head(tmp_path / "head")
    config = infer_from_tensors(DraftConfig.from_folder(tmp_path / "head", TARGET), files, None)
    markov = config.part(MarkovConfig)
    assert (markov.has_confidence, markov.confidence_sees_previous) == (has, sees)
    check_head(files, config)


def test_dspark_rejects_tensors_of_other_kinds(tmp_path):
    head = write_tiny_spark(tmp_path / "head", TARGET, WEIGHTS, 3)
    files, dflash = open_head(tmp_path / "head"), tiny_block_config(TARGET)
    with pytest.raises(
        CheckpointError, match="DSPARK head, but its config.json describes a DFLASH"
    ):
        check_head(files, DraftConfig.from_dict(dflash, TARGET))
    path = tmp_path / "head" / SINGLE_FILE
    save_file({**load_file(path), "markov_head.gate_proj.weight": np.zeros((2, 2), "f4")}, path)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight is not part of a DSPARK head"):
        check_head(open_head(tmp_path / "head"), head.config)


def test_speculative_algorithm_must_match_head_kind():
    for algorithm, kind in (("DFLASH", "DSPARK"), ("DSPARK", "DFLASH")):
        line = ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", "head"]
        setup = RuleContext(
            options=parse(line), model=TARGET, has_mtp=False, head_kind=kind, block=4
        )
        (refused,) = refusals(setup)
        assert f"give --speculative-algorithm {kind}" in refused
        assert not refusals(replace(setup, head_kind=algorithm))


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_markov_head_rejects_trees(kind):
    flags = "--speculative-algorithm DSPARK --speculative-draft-model-path head"
    tree = "--speculative-eagle-topk 2 --speculative-num-draft-tokens 8"
    options = parse(f"{flags} {tree}".split())
    drafts = DrafterSpec.of_head(parsed(**KINDS[kind]))
    device = Device("cpu", "CPU", 8 << 30)
    if kind != "rnn":
        assert resolve(options, TARGET, drafts, device, False).draft.num_draft_tokens == 8
        return
    with pytest.raises(ConfigError, match="markov_head_type rnn"):
        resolve(options, TARGET, drafts, device, False)
