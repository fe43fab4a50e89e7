"""Startup notes about the folder of a model."""

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import SINGLE_FILE, open_checkpoint
from shared.options.command_line import parse
from shared.process.opened_models import DraftFolder, OpenedDraft, OpenedTarget
from shared.process.start import prepare
from shared.process.startup_report import head_notes, start_notes, tokenizer_notes
from tests.support.fp8_files import LAYOUTS, write_fp8
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_models import tiny_config, write_tiny


def test_tokenizer_notes_report_unread_tokenizer(tmp_path: Path):
    assert not [*tokenizer_notes(tmp_path)]
    (tmp_path / "tokenizer.model").touch()
    (note,) = tokenizer_notes(tmp_path)
    assert "no tokenizer.json" in note
    (tmp_path / "tokenizer.json").touch()
    assert not [*tokenizer_notes(tmp_path)]


def notes_of_head(folder: Path, *flags: str) -> list[str]:
    line = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder)]
    options = parse([*line, *flags])
    target = OpenedTarget(options, open_checkpoint)
    return [*head_notes(options, OpenedDraft(options, target, DraftFolder(str(folder))))]


def test_head_notes_report_ambiguous_fields(tmp_path: Path):
    listed = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    written = {"speculators_model_type": "eagle3", "transformer_layer_config": {}, **listed}
    (tmp_path / "config.json").write_text(json.dumps(written))
    (note,) = notes_of_head(tmp_path)
    assert "layers from 1 on" in note
    assert not notes_of_head(tmp_path, "--speculative-aux-layer-convention", "inputs")
    written = {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True}
    (tmp_path / "config.json").write_text(json.dumps(written))
    (note,) = notes_of_head(tmp_path)
    assert "norm_output" in note
    (tmp_path / "config.json").write_text(json.dumps(written | {"fc_norm": True}))
    assert not notes_of_head(tmp_path)


def notes_of(folder: Path, *flags: str) -> list[str]:
    bounds = ["--context-length", "64", "--grammar-backend", "none"]
    line = ["--model-path", str(folder), *bounds, *flags]
    start = prepare(parse(line), PLATFORM)
    return [*start_notes(start)]


def test_start_notes_report_ignored_generation_fields(tmp_path: Path):
    write_tiny(tmp_path, "llama", 0)
    assert not notes_of(tmp_path)
    stated = {"no_repeat_ngram_size": 3, "suppress_tokens": [5], "top_k": 20}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    applied, others = notes_of(tmp_path)
    assert "top_k 20" in applied
    assert "also sets no_repeat_ngram_size, suppress_tokens, which" in others
    assert not notes_of(tmp_path, "--sampling-defaults", "openai")


def test_start_notes_report_ignored_kv_scales(tmp_path: Path):
    stated = tiny_config("nemotron_h", nested=False, with_mtp=False, tied=False)
    for layout, notes in (
        ("compressed-tensors, tensor", []),
        (
            "ModelOpt",
            [
                "the scales of an FP8 KV cache in the checkpoint are ignored: the KV cache is "
                "float32"
            ],
        ),
    ):
        write_fp8(tmp_path / layout, stated, LAYOUTS[layout])
        assert notes_of(tmp_path / layout, "--dtype", "float32") == notes


def test_start_notes_report_untied_lm_head(tmp_path: Path):
    write_tiny(tmp_path, "llama", 0, tied=True)
    tensors = load_file(tmp_path / SINGLE_FILE)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding}, tmp_path / SINGLE_FILE)
    assert not notes_of(tmp_path)
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / SINGLE_FILE)
    (note,) = notes_of(tmp_path)
    assert "lm_head.weight differs from the embedding" in note
