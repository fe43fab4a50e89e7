"""What a start tells of a model's folder."""

import json
from pathlib import Path

from shared.options.command_line import parse
from shared.process.notes import head_notes, tokenizer_notes


def test_a_tokenizer_that_is_not_read_is_told(tmp_path: Path):
    assert not [*tokenizer_notes(tmp_path)]
    (tmp_path / "tokenizer.model").touch()
    (told,) = tokenizer_notes(tmp_path)
    assert "no tokenizer.json" in told
    (tmp_path / "tokenizer.json").touch()
    assert not [*tokenizer_notes(tmp_path)]


def told_of(folder: Path, *flags: str) -> list[str]:
    line = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(folder)]
    return [*head_notes(parse([*line, *flags]))]


def test_what_a_head_may_mean_otherwise_is_told_unless_a_flag_tells(tmp_path: Path):
    listed = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    written = {"speculators_model_type": "eagle3", "transformer_layer_config": {}, **listed}
    (tmp_path / "config.json").write_text(json.dumps(written))
    (told,) = told_of(tmp_path)
    assert "layers from 1 on" in told
    assert not told_of(tmp_path, "--speculative-draft-layer-ids", "inputs")
    written = {"architectures": ["LlamaForCausalLMEagle3"], "norm_output": True}
    (tmp_path / "config.json").write_text(json.dumps(written))
    (told,) = told_of(tmp_path)
    assert "norm_output" in told
    (tmp_path / "config.json").write_text(json.dumps(written | {"fc_norm": True}))
    assert not told_of(tmp_path)
