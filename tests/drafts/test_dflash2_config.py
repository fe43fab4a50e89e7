"""DFlash2 configs: supported spellings, and errors that name the field."""

import json

import numpy as np
import pytest

from shared.drafts.checkpoint import check_head, kind_of, load_head, open_head
from shared.drafts.config import DraftConfig
from shared.drafts.dflash2 import ConvConfig, SelectorConfig
from shared.drafts.dflash_config import stated_nodes
from shared.drafts.infer_from_tensors import infer_from_tensors
from shared.models.checkpoint import CheckpointError
from shared.options.command_line import parse
from shared.options.rule_context import RuleContext
from shared.options.rules import refusals
from tests.support.tiny_heads import tiny_block_config, tiny_pair_config, write_tiny_pair
from tests.support.tiny_models import tiny_model

TARGET, _ = tiny_model("qwen3", 6)
CONFIG = tiny_pair_config(TARGET)
OWN = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def parsed(**fields) -> DraftConfig:
    return DraftConfig.from_dict({**CONFIG, **fields}, TARGET)


def test_dflash2_head_round_trips(tmp_path):
    want = write_tiny_pair(tmp_path / "head", TARGET, 3)
    files = open_head(tmp_path / "head")
    assert kind_of(files.names) == want.config.kind == "DFLASH2"
    config = infer_from_tensors(DraftConfig.from_folder(tmp_path / "head", TARGET), files, None)
    assert config == want.config
    got = load_head(files, config, np.float32)
    assert got.weights.keys() == want.weights.keys()
    for name, array in want.weights.items():
        np.testing.assert_array_equal(got.weights[name], array, err_msg=name)


def test_dflash2_fields_accepted_in_either_place():
    flat = {name: value for name, value in CONFIG.items() if name not in OWN}
    nested = {**flat["dflash_config"], **{name: CONFIG[name] for name in OWN}}
    assert DraftConfig.from_dict({**flat, "dflash_config": nested}, TARGET) == parsed()
    block = parsed().block
    assert block.part(ConvConfig) == ConvConfig(taps=2, group_size=4)
    assert block.part(SelectorConfig) == SelectorConfig(rank=8, candidates=6)
    assert (block.first_slot, block.nodes) == (1, 4)
    assert parsed(sample_from_anchor=True).block.nodes == 5


def test_speculators_dflash2_config_uses_defaults():
    outer = ("architectures", "block_size", "dflash_config", "num_target_layers", *OWN)
    layer = {name: value for name, value in CONFIG.items() if name not in outer}
    written = {
        "speculators_model_type": "dflash2",
        "aux_hidden_state_layer_ids": [1],
        "mask_token_id": 5,
        "draft_vocab_size": TARGET.vocab,
        "transformer_layer_config": layer | {"hidden_size": TARGET.hidden},
    }
    block = DraftConfig.from_dict(written, TARGET).block
    assert (block.size, block.nodes, block.from_anchor) == (8, 8, True)
    assert block.causal == (False,) * 4
    assert block.part(ConvConfig) == ConvConfig(taps=2, group_size=16)
    assert block.part(SelectorConfig) == SelectorConfig(rank=256, candidates=16)
    assert stated_nodes(written, "DFLASH2") == 8


REFUSED = {
    "conv_kernel_size": ({"conv_kernel_size": 5}, "1 to 4"),
    "conv_group_size": ({"conv_group_size": 5}, "must divide its hidden_size"),
    "selector_rank": ({"selector_rank": None}, "got None"),
    "selector_top_k": ({"selector_top_k": 65}, "1 to 64"),
    "draft_vocab_size": ({"draft_vocab_size": 100}, "DFlash2 does not support a draft vocabulary"),
    "markov_rank": ({"markov_rank": 16}, "DSpark"),
    "output_multiplier": ({"output_multiplier": 2.0}, "must be 1.0"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_dflash2_config_rejects_unsupported_field(field):
    fields, named = REFUSED[field]
    with pytest.raises(ValueError, match="draft model") as refused:
        parsed(**fields)
    assert field in str(refused.value)
    assert named in str(refused.value)


def test_dflash2_config_rejects_differing_vocab_padding():
    with pytest.raises(ValueError, match="selector is indexed by the target's tokens"):
        DraftConfig.from_dict({**CONFIG, "vocab_size": TARGET.vocab + 8}, TARGET, None, 99)


def test_dflash2_head_distinguished_from_dflash(tmp_path):
    write_tiny_pair(tmp_path / "head", TARGET, 3)
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(tiny_block_config(TARGET)), encoding="utf-8")
    other = DraftConfig.from_folder(tmp_path / "head", TARGET)
    with pytest.raises(
        CheckpointError, match="DFLASH2 head, but its config.json describes a DFLASH"
    ):
        check_head(open_head(tmp_path / "head"), other)
    line = ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "head"]
    setup = RuleContext(
        options=parse(line), model=TARGET, has_mtp=False, head_kind="DFLASH2", block=4
    )
    (refused,) = refusals(setup)
    assert "give --speculative-algorithm DFLASH2" in refused
