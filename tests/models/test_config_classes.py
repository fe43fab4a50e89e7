"""Configuration classes: defaults and aliases of the installed transformers."""

from __future__ import annotations

from dataclasses import MISSING, fields
from unittest.mock import patch

import pytest
import transformers

from shared.models.architectures import FAMILIES
from shared.models.config_classes import deepseek, gemma, gpt_oss, llama, mamba2, qwen
from shared.models.config_classes.config_class import ConfigClass
from shared.models.config_fields import count, positive
from shared.models.families import config_from_dict
from tests.support.tiny_models import DENSE, EXPERTS, tiny_config
from tests.support.tiny_models import FAMILIES as TINY

CLASSES = {
    each.name: each
    for module in (deepseek, gemma, gpt_oss, llama, mamba2, qwen)
    for each in vars(module).values()
    if isinstance(each, ConfigClass)
}
each_class = pytest.mark.parametrize("of", CLASSES.values(), ids=CLASSES)

ROTARY = {"rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
"""Rotary fields, which transformers moves into `rope_parameters`."""

SWITCHES = {
    *("attention_bias", "mlp_bias", "use_sliding_window", "layer_types", "head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "scoring_func", "topk_method"),
    *("mlp_only_layers", "decoder_sparse_step", "moe_layer_freq", "mtp_num_hidden_layers"),
    *("mtp_use_dedicated_embeddings", "quantization_config", "architectures", "model_type"),
    *("attention_k_eq_v", "num_kv_shared_layers", "hidden_size_per_layer_input"),
    *("text_config", "num_nextn_predict_layers", "max_window_layers", "output_gate_type"),
    "rope_parameters",
}
"""Fields that a class may leave undeclared, because their absence has no effect."""


def default_of(name: str, field: str):
    """Default of a field in a transformers class, or MISSING if it is not declared."""
    theirs = getattr(transformers, name)
    field = theirs.attribute_map.get(field, field)
    other = {alias: own for own, alias in theirs.attribute_map.items()}.get(field, field)
    found = {each.name: each.default for each in fields(theirs)}
    return found.get(field, found.get(other, MISSING))


@each_class
def test_config_class_defaults_equal_transformers(of):
    theirs = getattr(transformers, of.name)
    rope = of.fields.get("rope_parameters")
    assert {x: default_of(of.name, x) for x in of.fields if x != "rope_parameters"} == {
        name: value for name, value in of.fields.items() if name != "rope_parameters"
    }
    assert {default_of(of.name, name) for name in of.extras} <= {MISSING}
    made = theirs().rope_parameters if "rope_parameters" in of.fields else None
    if rope is not None:
        assert made.items() >= rope.items()
    elif made and "full_attention" in made:
        bases = {of.theta, of.theta if of.local_theta is None else of.local_theta}
        assert {each["rope_theta"] for each in made.values()} == bases
    elif made:
        assert made["rope_theta"] == of.theta
        assert made.get("partial_rotary_factor", 1.0) == of.rotated


@each_class
def test_config_class_aliases_equal_transformers(of):
    theirs = getattr(transformers, of.name).attribute_map
    assert {frozenset(pair) for pair in theirs.items()} == {
        frozenset(pair) for pair in of.aliases.items()
    }


class Recorder(dict):
    """A config.json dictionary that records which fields are read."""

    read: set[str] = set()

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("name", [*TINY, *DENSE, *EXPERTS])
def test_fields_read_are_in_config_class_table(name):
    config = tiny_config(name, nested=False, with_mtp=True, tied=False)
    completed, seen = ConfigClass.completed, Recorder()
    seen.read = set()

    def recorded(of, stated, place="config.json"):
        found = Recorder(completed(of, stated, place))
        found.read = seen.read
        return found

    with patch.object(ConfigClass, "completed", recorded):
        config_from_dict(config)
    (family,) = {FAMILIES[each] for each in config["architectures"]}
    assert seen.read >= {"vocab_size", "rms_norm_eps", "num_hidden_layers"}
    declared = {*family.of.defaults, *family.of.aliases, *family.of.names.values()}
    beside = seen.read - declared
    assert beside <= SWITCHES | ROTARY | {field for field, _ in family.fixed}
    assert {default_of(family.of.name, field) for field in beside} <= {MISSING}


@each_class
def test_config_class_defaults_pass_their_reader(of):
    """A default that its reader rejects would fail at the first file without the field."""
    for name, value in of.fields.items():
        if isinstance(value, int) and not isinstance(value, bool):
            assert (positive if value else count)(of.completed({}), name) == value
