"""`--load-format dummy`: a config.json suffices, and all backends make the same weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shared.process import launch
from tests.support import serve_reference
from tests.support.texts import texts
from tests.support.tiny_assistants import tiny_assistant_config
from tests.support.tiny_heads import (
    tiny_block_config,
    tiny_head_config,
    tiny_pair_config,
    tiny_spark_config,
)
from tests.support.tiny_models import tiny_config, tiny_model

DUMMY = ["--load-format", "dummy"]
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folders of a target and its drafters, each with a config.json only."""
    folder, (target, _) = tmp_path_factory.mktemp("dummies"), tiny_model("qwen3_5", 0)
    given = {
        "in_fp8": tiny_config("qwen3_5", nested=False, with_mtp=True, tied=False) | FP8,
        "target": tiny_config("qwen3_5", nested=False, with_mtp=True, tied=False),
        "STANDALONE": tiny_config("qwen3", nested=False, with_mtp=False, tied=True),
        "EAGLE": tiny_head_config(target, "EAGLE"),
        "EAGLE3": tiny_head_config(target, "EAGLE3"),
        "DFLASH": tiny_block_config(target),
        "DSPARK": tiny_spark_config(target, markov_head_type="rnn"),
        "DFLASH2": tiny_pair_config(target),
        "gemma4": tiny_config("gemma4", nested=False, with_mtp=False, tied=False),
        "ASSISTANT": tiny_assistant_config(tiny_model("gemma4", 0)[0]),
    }
    for name, config in given.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder


def line_of(folders: Path, drafter: str, target: str = "target") -> list[str]:
    line = ["--model-path", str(folders / target), *DUMMY, "--max-running-requests", "2"]
    line += ["--context-length", "64", "--chunked-prefill-size", "64", "--dtype", "float32"]
    if drafter == "none":
        return line
    line += ["--speculative-algorithm", drafter]
    own = folders / drafter
    return line + (["--speculative-draft-model-path", str(own)] if own.exists() else [])


@pytest.fixture(scope="module")
def plain(folders) -> list[list[int]]:
    return texts("reference", line_of(folders, "none"))


def test_dummy_weights_output_varies(plain):
    assert len({token for text in plain for token in text}) > 10


DRAFTERS = (
    *("none", "NEXTN", "EAGLE", "EAGLE3", "DFLASH", "DSPARK", "DFLASH2"),
    *("STANDALONE", "NGRAM"),
)


@pytest.mark.parametrize(
    ("backend", "drafter"),
    [
        *(("torch", name) for name in DRAFTERS),
        pytest.param("jax", "EAGLE3", marks=pytest.mark.matrix),
    ],
)
def test_dummy_weights_backends_match_reference(backend, drafter, folders, plain):
    assert texts(backend, line_of(folders, drafter)) == plain


def test_dummy_assistant_torch_matches_reference(folders):
    line = line_of(folders, "ASSISTANT", "gemma4")
    expected = texts("reference", line_of(folders, "none", "gemma4"))
    assert texts("torch", line) == texts("reference", line) == expected


def test_fp8_dummy_weights_torch_matches_reference(folders, plain):
    line = line_of(folders, "NEXTN", "in_fp8")
    assert texts("torch", line) == texts("reference", line_of(folders, "none", "in_fp8")) != plain


def test_config_without_weights_raises_without_dummy_flag(folders, capfd):
    line = [word for word in line_of(folders, "none") if word not in DUMMY]
    assert launch.launch(line, lambda: serve_reference.PLATFORM) == 2
    assert "model.safetensors" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("drafter", "files", "named"),
    [
        ("EAGLE", "EAGLE3", "--speculative-algorithm EAGLE does not fit the draft model"),
        ("STANDALONE", "EAGLE3", "LlamaForCausalLMEagle3"),
        ("EAGLE3", "STANDALONE", "Qwen3ForCausalLM"),
        ("EAGLE3", "nowhere", "does not exist"),
    ],
)
def test_dummy_drafter_with_wrong_config_raises(drafter, files, named, folders, capfd):
    line = line_of(folders, drafter)
    line[line.index("--speculative-draft-model-path") + 1] = str(folders / files)
    assert launch.launch(["--port", "0", *line], lambda: serve_reference.PLATFORM) == 2
    assert named in capfd.readouterr().err


def test_startup_reports_dummy_weights_and_simulated_acceptance(folders, capfd):
    def refuse(*_):
        raise ValueError("far enough")

    platform = replace(serve_reference.PLATFORM, load=refuse)
    simulated = ["--speculative-simulate-accept-length", "1.5"]
    assert (
        launch.launch(["--port", "0", *line_of(folders, "NEXTN"), *simulated], lambda: platform)
        == 2
    )
    err = capfd.readouterr().err
    assert "dummy weights (--load-format dummy)" in err
    assert "acceptance is simulated (--speculative-simulate-accept-length 1.5)" in err


@pytest.mark.parametrize("drafter", ["NGRAM", "STANDALONE", "DFLASH"])
def test_simulated_acceptance_of_one_preserves_output(drafter, folders, plain):
    line = [*line_of(folders, drafter), "--speculative-simulate-accept-length", "1"]
    assert texts("torch", line) == plain
