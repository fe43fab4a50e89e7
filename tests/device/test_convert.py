"""Conversion of checkpoints to Orbax folders that serve like their source."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from jax_impl import convert, weights
from jax_impl.convert import EXIT_INVALID, OrbaxCheckpoint, main
from shared.models.checkpoint import CheckpointError
from shared.models.families import config_from_dict, config_from_folder
from shared.models.parameters import parameters
from tests.support.tiny_models import write_tiny

ROOT = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    write_tiny(folder, "qwen3_5", 3, num_shards=2)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def leaves(folder):
    config = config_from_folder(folder)
    read = []
    model = weights.load(
        convert.open_checkpoint(folder),
        config,
        config.has_mtp,
        np.float32,
        jax.devices("cpu")[0],
        read.append,
        (),
    )
    return jax.tree.leaves(model), sum(read)


def test_convert_preserves_weights_and_byte_count(source, tmp_path):
    target = tmp_path / "target"
    assert main([str(source), str(target)]) == 0
    (want, want_bytes), (got, got_bytes) = leaves(source), leaves(target)
    for a, b in zip(want, got, strict=True):
        np.testing.assert_array_equal(a, b)
    assert got_bytes == want_bytes > 0
    config = config_from_folder(source)
    wanted = {parameter.name for parameter in parameters(config, config.has_mtp)}
    assert {*convert.open_checkpoint(target).names} == wanted


def test_convert_copies_config_and_tokenizer_files(source, tmp_path):
    target = tmp_path / "target"
    main([str(source), str(target)])
    names = {file.name for file in target.iterdir()}
    assert names == {"orbax", "config.json", "generation_config.json", "tokenizer.json"}
    assert config_from_folder(target) == config_from_folder(source)


def test_orbax_checkpoint_checks_shapes_before_load(source, tmp_path):
    target = tmp_path / "target"
    main([str(source), str(target)])
    config = config_from_folder(target)
    opened = convert.open_checkpoint(target)
    assert isinstance(opened, OrbaxCheckpoint)
    assert opened.has_mtp(config)
    opened.check(config, True)
    wider = json.loads((target / "config.json").read_text()) | {"intermediate_size": 100}
    with pytest.raises(CheckpointError, match=r"mlp.gate_up has shape .*, expected"):
        opened.check(config_from_dict(wider), False)
    with pytest.raises(CheckpointError, match="no array lm_head.weight"):
        opened.load(parameters(config, False)[0].__class__("lm_head.weight", (), (), False), "f4")


def refusal(capsys, *argv):
    assert main([str(arg) for arg in argv]) == EXIT_INVALID
    *_, last = capsys.readouterr().err.strip().splitlines()
    return last


def test_convert_rejects_unusable_source_or_target(source, tmp_path, capsys):
    assert "does not exist" in refusal(capsys, tmp_path / "nowhere", tmp_path / "new")
    assert "already exists" in refusal(capsys, source, source)
    (source / "model-00001-of-00002.safetensors").write_bytes(b"\0" * 20)
    assert "truncated" in refusal(capsys, source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_open_checkpoint_rejects_incomplete_orbax_folder(source):
    (source / "orbax").mkdir()
    with pytest.raises(CheckpointError, match="not a complete Orbax checkpoint"):
        convert.open_checkpoint(source)


def test_missing_orbax_error_names_extra(source, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="Install the extra `train`"):
        convert.convert(source, tmp_path / "new")
    (source / "orbax").mkdir()
    with pytest.raises(CheckpointError, match="requires orbax-checkpoint, which is not installed"):
        convert.open_checkpoint(source)


def test_jax_server_imports_no_training_libraries():
    """So that `make serve BACKEND=jax` need not install them; Orbax alone takes 2.6 s to import."""
    code = (
        "import sys, jax_impl.platform, jax_impl.llm\n"
        "print({'flax', 'orbax', 'optax', 'matplotlib'} & {*sys.modules})"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "set()\n"


def test_convert_error_exits_with_code_two(tmp_path):
    command = [sys.executable, "-m", "jax_impl.convert", str(tmp_path / "a"), str(tmp_path / "b")]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ended.returncode == EXIT_INVALID
    assert ended.stderr.strip().endswith("does not exist")
    assert "Traceback" not in ended.stderr
