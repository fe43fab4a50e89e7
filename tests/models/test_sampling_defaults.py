"""Sampling defaults of a checkpoint."""

from __future__ import annotations

import json

import pytest

from shared.models.model_folder import ModelFolder
from shared.models.sampling import SamplingDefaults, unapplied


def test_sampling_defaults_read_generation_config(tmp_path):
    stated = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 1, "min_p": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    found = SamplingDefaults.from_folder(ModelFolder(tmp_path))
    assert found == SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20)
    assert str(found) == "temperature 0.6, top_p 0.95, top_k 20"


def test_sampling_defaults_without_fields_equal_openai(tmp_path):
    assert SamplingDefaults.from_folder(ModelFolder(tmp_path)) == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 1.0}')
    assert SamplingDefaults.from_folder(ModelFolder(tmp_path)) == SamplingDefaults()
    assert str(SamplingDefaults()) == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "0.6"), ("top_p", 0), ("top_k", 1.5), ("top_k", True)]
    + [("repetition_penalty", 0), ("min_p", 2), ("temperature", float("nan"))],
)
def test_sampling_defaults_reject_invalid_value(tmp_path, name, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{name} in .* --sampling-defaults openai"):
        SamplingDefaults.from_folder(ModelFolder(tmp_path))


APPLIED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
SILENT = {
    **{"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 0, "transformers_version": "5.0"},
    **{"_from_model_config": True, "do_sample": True, "use_cache": True, "max_length": 20},
    **{"num_beams": 1, "length_penalty": 1.0, "suppress_tokens": None, "bad_words_ids": []},
    **{"presence_penalty": 0.0, "no_repeat_ngram_size": 0, "early_stopping": False},
    **{"cache_implementation": "static", "output_scores": True},
}
NAMED = {
    **{"max_new_tokens": 2048, "max_length": 4096, "suppress_tokens": [5], "num_beams": 4},
    **{"no_repeat_ngram_size": 3, "presence_penalty": 1.5, "typical_p": 0.9, "do_sample": False},
    **{"stop_strings": ["x"], "a_field_of_tomorrow": 1},
}


@pytest.mark.parametrize("name", NAMED)
def test_unapplied_names_ignored_generation_fields(name, tmp_path):
    assert unapplied(ModelFolder(tmp_path).generation_config) == []
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps(APPLIED | SILENT))
    assert unapplied(ModelFolder(tmp_path).generation_config) == []
    path.write_text(json.dumps({**APPLIED, **SILENT, name: NAMED[name]}))
    assert unapplied(ModelFolder(tmp_path).generation_config) == [name]
