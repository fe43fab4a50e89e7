"""What a checkpoint says of how its tokens are chosen."""

from __future__ import annotations

import json

import pytest

from shared.models.sampling import SamplingDefaults


def test_a_model_names_its_defaults(tmp_path):
    stated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 1, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    found = SamplingDefaults.from_folder(tmp_path)
    assert found == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 20"


def test_a_model_that_names_none_has_openais(tmp_path):
    assert SamplingDefaults.from_folder(tmp_path) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 1.0}')
    assert SamplingDefaults.from_folder(tmp_path) == SamplingDefaults()
    assert str(SamplingDefaults()) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "0.6"), ("top_p", 0), ("top_k", 1.5), ("top_k", True)]
    + [("repetition_penalty", 0), ("min_p", 2), ("temperature", float("nan"))],
)
def test_a_value_that_cannot_be_meant_is_named(tmp_path, name, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{name} in .* --sampling-defaults openai"):
        SamplingDefaults.from_folder(tmp_path)
