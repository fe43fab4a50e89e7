"""Checkpoints written by the installed transformers: outputs equal its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file, save_file

from shared.models.architectures import ARCHITECTURES, FAMILIES
from shared.models.config_classes.config_class import ConfigClass
from shared.models.config_classes.llama import MISTRAL3
from shared.models.config_classes.qwen import QWEN3_5_OUTER, QWEN3_5_VISION
from shared.models.families import config_from_dict, vision_from_folder
from shared.offline.llm import LLM
from shared.offline.params import SamplingParams
from tests.support import saved_models
from tests.support.saved_models import NESTED, VARIANTS
from tests.support.serve_reference import PLATFORM

PROMPTS = [[5, 9, 31, 77, 3, 140, 22, 8, 90, 41, 66, 17], [101, 4, 4, 58]]
TOKENS = 12
CASES = [*saved_models.FAMILIES, *NESTED, *VARIANTS]
matrix = pytest.mark.matrix


class ReferenceLLM(LLM):
    PLATFORM = PLATFORM
    RANK_MODULE = None


@cache
def made(name: str) -> Any:
    return saved_models.make(name)


@cache
def wanted(name: str) -> list[list[int]]:
    return [saved_models.greedy(made(name), prompt, TOKENS) for prompt in PROMPTS]


def written(folder: Path, name: str) -> dict[str, Any]:
    """Saves a model and returns its config.json."""
    made(name).save_pretrained(folder)
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def served(folder: Path) -> list[list[int]]:
    """Greedy tokens of an engine."""
    options = {"context_length": 64, "max_running_requests": 2, "language_model_only": True}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with ReferenceLLM(str(folder), **options) as llm:
        return [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params)]


def text_class(model_type: str) -> ConfigClass:
    return FAMILIES[ARCHITECTURES[model_type]].of


def classes_of(config: Mapping[str, Any]) -> dict[tuple[str, ...], ConfigClass]:
    """The class of each object of a config.json that has one, by its path."""
    model_type = config["model_type"]
    if model_type not in NESTED:
        return {(): text_class(model_type)}
    text = {("text_config",): text_class(config["text_config"]["model_type"])}
    if model_type == "mistral3":
        return {(): MISTRAL3, **text}
    return {(): QWEN3_5_OUTER, ("vision_config",): QWEN3_5_VISION, **text}


def fields_at_defaults(config: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yields the paths of all fields at their default, rotary settings included."""
    for path, of in classes_of(config).items():
        stated = at(config, path)
        for name, value in of.completed(stated).items():
            if name in stated and name in of.fields and value == of.fields[name]:
                yield (*path, name)
        is_whole = stated.get("rope_parameters") == of.fields.get("rope_parameters")
        if "rope_parameters" not in of.fields or "vision_config" in path or is_whole:
            continue
        rope = stated["rope_parameters"]
        nested = {(x,): y for x, y in rope.items() if isinstance(y, dict)} or {(): rope}
        defaults = {"rope_type": "default", "rope_theta": of.theta}
        defaults["partial_rotary_factor"] = of.rotated
        for inner, settings in nested.items():
            for name in defaults.keys() & settings.keys():
                if settings[name] == defaults[name]:
                    yield (*path, "rope_parameters", *inner, name)


def at(config: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        config = config[name]
    return config


def without(config: Mapping[str, Any], *paths: tuple[str, ...]) -> dict[str, Any]:
    left = copy.deepcopy(dict(config))
    for *outer, name in paths:
        del at(left, tuple(outer))[name]
    return left


@pytest.mark.parametrize("name", CASES)
def test_default_valued_fields_may_be_absent(name, tmp_path):
    config = written(tmp_path, name)
    paths = [*fields_at_defaults(config)]
    assert len(paths) > 5
    want = config_from_dict(config)
    for path in paths:
        assert config_from_dict(without(config, path)) == want, path
    assert config_from_dict(without(config, *paths)) == want


@pytest.mark.parametrize(
    "name", [x if x not in VARIANTS else pytest.param(x, marks=matrix) for x in CASES]
)
def test_output_matches_transformers(name, tmp_path):
    """Families without a variant are tested without the fields at their default."""
    config = written(tmp_path, name)
    left = config if name in VARIANTS else without(config, *fields_at_defaults(config))
    (tmp_path / "config.json").write_text(json.dumps(left), encoding="utf-8")
    assert len({*map(tuple, wanted(name))}) == len(PROMPTS)
    assert served(tmp_path) == wanted(name)


@matrix
@pytest.mark.parametrize("name", [*saved_models.FAMILIES, *NESTED])
def test_saved_file_output_matches_transformers(name, tmp_path):
    written(tmp_path, name)
    assert served(tmp_path) == wanted(name)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_vision_config_matches_transformers(name, tmp_path):
    config = written(tmp_path, name)
    found = vision_from_folder(tmp_path)
    assert found is not None
    theirs = made(name).config
    assert found.depth == theirs.vision_config.depth
    assert found.patch_size == theirs.vision_config.patch_size
    assert found.image_token == theirs.image_token_id
    left = without(config, *fields_at_defaults(config))
    (tmp_path / "config.json").write_text(json.dumps(left), encoding="utf-8")
    assert vision_from_folder(tmp_path) == found


@pytest.mark.parametrize("name", ["qwen3, tied", pytest.param("mistral3", marks=matrix), "qwen3_5"])
def test_lm_head_beside_tied_embedding_matches_transformers(name, tmp_path):
    """Covers an `lm_head` that differs from the embedding, and an equal copy."""
    config = written(tmp_path, name) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (embedding,) = (x for key, x in tensors.items() if key.endswith("embed_tokens.weight"))
    head = np.roll(embedding, 1, axis=0)
    for values in (head, embedding.copy()):
        save_file({**tensors, "lm_head.weight": values}, path, {"format": "pt"})
        model = saved_models.reloaded(tmp_path)
        assert served(tmp_path) == [saved_models.greedy(model, x, TOKENS) for x in PROMPTS]


@pytest.mark.parametrize("name", CASES)
def test_eos_ids_match_transformers(name, tmp_path):
    written(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    stated = transformers.GenerationConfig.from_model_config(made(name).config).eos_token_id
    theirs = stated if isinstance(stated, list) else [stated]
    want = {token for token in theirs if token is not None and token < saved_models.VOCAB}
    assert {*config_from_dict(config).eos_ids} == want
    assert {*config_from_dict(without(config, *fields_at_defaults(config))).eos_ids} == want


OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "theta at the top": ("smollm3", {"rope_theta": 5000000.0}),
    "partial factor at the top": ("phi3", {"partial_rotary_factor": 0.75, "rope_theta": 1e5}),
    "partial factor of the class": ("glm4_moe", {"partial_rotary_factor": 0.25}),
    "an older type": ("llama", {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 10}),
    "scaling of full layers": (
        "olmo3",
        {
            "rope_theta": 500000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "a window of null": ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    "settings in place of the class's": (
        "ministral3",
        {"rope_parameters": {"rope_type": "default"}},
    ),
    "KV heads of null": ("granite", {"num_key_value_heads": None}),
}


@pytest.mark.parametrize("case", OLDER)
def test_older_config_spellings_match_transformers(case, tmp_path):
    model_type, fields = OLDER[case]
    config = {**saved_models.SIZES, **saved_models.FAMILIES[model_type], **fields}
    transformers.AutoConfig.for_model(model_type, **config).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    named = {"architectures": [ARCHITECTURES[model_type]]}
    assert config_from_dict(config | named) == config_from_dict(saved | named)
