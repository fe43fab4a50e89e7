"""Startup errors: exit code 2 and one sentence with the remedy."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from models import make_random
from shared.models.checkpoint import CheckpointError
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.saving import save_checkpoint
from shared.process.device import Device
from shared.process.launch import launch
from shared.text.tokenizer import Tokenizer
from tests.support.http_fixtures import save_tokenizer
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import tiny_model, tiny_weights, write_tiny
from tests.support.tiny_small import small_config
from torch_impl import platform as torch_platform

ROOT = Path(__file__).resolve().parents[2]
RANDOM_MODEL = ROOT / "models" / "random"
NEXTN = ["--speculative-algorithm", "NEXTN"]


def refuse_to_load(*_):
    raise AssertionError("weights were loaded")


def start(argv: list[str], load_backend=refuse_to_load) -> int:
    """Starts a server; a backend that is not given must not be reached."""
    device = Device("cpu", "CPU", 1 << 30)
    platform = replace(PLATFORM, find_device=lambda: device, load=load_backend)
    return launch(["--port", "0", *argv], lambda: platform)


@pytest.fixture
def folder(tmp_path):
    write_tiny(tmp_path / "model", "qwen3_5", 0, with_mtp=False)
    return tmp_path / "model"


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def break_template(folder: Path) -> None:
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text("{% if %}")


SPOILED = {
    "another architecture": (
        lambda f: edit_config(f, architectures=["GPT2LMHeadModel"]),
        "GPT2LMHeadModel",
    ),
    "experts": (lambda f: edit_config(f, num_experts=8), "num_experts"),
    "another shape": (lambda f: edit_config(f, intermediate_size=100), "shape"),
    "a truncated file": (truncate, "truncated"),
    "an empty file": (lambda f: (f / "model.safetensors").write_bytes(b""), "truncated"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json"),
    "a broken chat template": (break_template, "chat template"),
    "a list for a config": (lambda f: (f / "config.json").write_text("[]"), "config.json"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_unservable_checkpoint_rejected_in_one_sentence(fault, folder, capfd):
    spoil, named = SPOILED[fault]
    spoil(folder)
    assert start(["--model-path", str(folder)]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert named in lines[0]


def test_missing_model_folder_is_named(capfd):
    assert start(["--model-path", "/no/such/folder"]) == 2
    assert "/no/such/folder" in capfd.readouterr().err


def test_nextn_without_mtp_tensors_raises(folder, capfd):
    edit_config(folder, mtp_num_hidden_layers=1)
    assert start(["--model-path", str(folder), *NEXTN]) == 2
    assert "--speculative-algorithm NEXTN" in capfd.readouterr().err.splitlines()[-1]


def edit_tensors(folder: Path, **changes) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **changes}, folder / "model.safetensors")


def pickle_head(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


HEADS_REFUSED = {
    "an EAGLE-3 head as EAGLE": ("EAGLE3", "EAGLE", lambda f: None, "give --speculative-algorithm"),
    "an EAGLE head as EAGLE-3": ("EAGLE", "EAGLE3", lambda f: None, "give --speculative-algorithm"),
    "an EAGLE-3 head with a config of EAGLE": (
        "EAGLE3",
        "EAGLE",
        lambda f: edit_config(f, architectures=["LlamaForCausalLMEagle"]),
        "tensors are those of an EAGLE3 head",
    ),
    "a head of another target": (
        "EAGLE",
        "EAGLE",
        lambda f: edit_config(f, hidden_size=32),
        "hidden_size (32)",
    ),
    "other shapes": ("EAGLE", "EAGLE", lambda f: edit_config(f, intermediate_size=8), "shape"),
    "a tensor too many": (
        "EAGLE3",
        "NAIVE_EAGLE",
        lambda f: edit_tensors(f, extra=np.ones(2, np.float32)),
        "tensor extra",
    ),
    "pickled weights": ("EAGLE", "EAGLE", pickle_head, "pytorch_model.bin"),
    "a truncated file": ("EAGLE", "EAGLE", truncate, "truncated"),
    "no config": ("EAGLE", "EAGLE", lambda f: (f / "config.json").unlink(), "config.json"),
}


@pytest.mark.parametrize("case", HEADS_REFUSED)
def test_unservable_draft_head_rejected_in_one_sentence(case, folder, tmp_path, capfd):
    kind, algorithm, spoil, named = HEADS_REFUSED[case]
    write_tiny_head(tmp_path / "head", *tiny_model("qwen3_5", 0, with_mtp=False), kind, 0)
    spoil(tmp_path / "head")
    drafting = ["--speculative-algorithm", algorithm]
    drafting += ["--speculative-draft-model-path", str(tmp_path / "head")]
    assert start(["--model-path", str(folder), *drafting]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert named in lines[0]


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3"])
@pytest.mark.parametrize("algorithm", ["its own", "NAIVE_EAGLE"])
def test_draft_head_reaches_backend_with_algorithm_shape(kind, algorithm, tmp_path):
    target, weights = tiny_model("llama", 0)
    write_tiny(tmp_path / "model", "llama", 0)
    want = write_tiny_head(tmp_path / "head", target, weights, kind, 0)
    reached = []

    def load_backend(blueprint, checkpoint, draft_files, progress):
        drafts = blueprint.drafts
        reached.append((drafts.with_mtp, drafts.head, blueprint.capacity.shapes[-1]))
        raise CheckpointError("enough")

    name = kind if algorithm == "its own" else algorithm
    drafting = ["--speculative-algorithm", name]
    drafting += ["--speculative-draft-model-path", str(tmp_path / "head")]
    assert start(["--model-path", str(tmp_path / "model"), *drafting], load_backend) == 2
    ((with_mtp, config, shape),) = reached
    assert (config, with_mtp) == (want.config, False)
    drafted = {"NAIVE_EAGLE": (2, 1, 1)}.get(name, (8, 5, 4))
    assert (shape.nodes, shape.depth, shape.width) == drafted


def write_small(folder: Path, family: str, **fields: Any) -> ModelConfig:
    """Writes the folder of a small model with the byte tokenizer of the target."""
    config = config_from_dict(small_config(family, **fields))
    save_checkpoint(folder, small_config(family, **fields), tiny_weights(config, 1), 1)
    save_tokenizer(folder)
    return config


@pytest.fixture
def target_and_small(tmp_path) -> tuple[Path, Path]:
    write_tiny(tmp_path / "model", "qwen3", 0)
    save_tokenizer(tmp_path / "model")
    return tmp_path / "model", tmp_path / "small"


def standalone(model: Path, small: Path) -> list[str]:
    drafting = ["--speculative-algorithm", "STANDALONE"]
    drafting += ["--speculative-draft-model-path", str(small)]
    return ["--model-path", str(model), *drafting]


def another_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    loaded = json.loads(path.read_text())
    loaded["added_tokens"][0]["content"] = "<|other|>"
    path.write_text(json.dumps(loaded))


SMALL_REFUSED = {
    "another tokenizer": (another_tokenizer, "another tokenizer than the target"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "other shapes": (lambda f: edit_config(f, intermediate_size=8), "shape"),
    "experts": (lambda f: edit_config(f, num_experts=8), "the draft model is not supported"),
    "pickled weights": (pickle_head, "pytorch_model.bin"),
}


@pytest.mark.parametrize("case", SMALL_REFUSED)
def test_unusable_draft_model_rejected_in_one_sentence(case, target_and_small, capfd):
    spoil, named = SMALL_REFUSED[case]
    write_small(target_and_small[1], "llama")
    spoil(target_and_small[1])
    assert start(standalone(*target_and_small)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert named in lines[0]


def test_standalone_rejects_draft_head(target_and_small, capfd):
    target = tiny_model("qwen3", 0)
    write_tiny_head(target_and_small[1], *target, "EAGLE3", 0)
    assert start(standalone(*target_and_small)) == 2
    assert "give --speculative-algorithm EAGLE3" in capfd.readouterr().err.splitlines()[-1]


def test_standalone_without_draft_model_path_raises(folder, capfd):
    assert start(["--model-path", str(folder), "--speculative-algorithm", "STANDALONE"]) == 2
    assert "--speculative-draft-model-path" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_draft_model_reaches_backend_and_memory_plan(family, target_and_small, capfd):
    want = write_small(target_and_small[1], family)  # another padded vocabulary
    reached = []

    def load_backend(blueprint, checkpoint, draft_files, progress):
        drafts = blueprint.drafts
        reached.append((drafts.with_mtp, drafts.model, blueprint.capacity.shapes[-1]))
        raise CheckpointError("enough")

    assert start(standalone(*target_and_small), load_backend) == 2
    ((with_mtp, config, shape),) = reached
    assert (with_mtp, config) == (False, replace(want, eos_ids=config.eos_ids))
    assert (shape.nodes, shape.depth, shape.width) == (4, 3, 1)
    plan = capfd.readouterr().err
    assert "draft weights" in plan
    assert f"the same pages, {len(want.kv_pools[0])} layer" in plan
    assert ("draft state" in plan) == (family == "qwen3_5")


def test_context_length_beyond_model_raises(folder, capfd):
    assert start(["--model-path", str(folder), "--context-length", "2049"]) == 2
    assert "--context-length 2049" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("name", ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"])
def test_cuda_graph_flags_rejected_without_torch(name, folder, capfd):
    assert start(["--model-path", str(folder), name]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"{name} requires the torch backend")


def test_port_in_use_rejected_before_loading(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert start(["--port", str(taken.getsockname()[1])]) == 2
    assert "--port" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("backend", ["torch_impl", "jax_impl"])
def test_invalid_flag_exits_with_code_2(backend):
    ended = subprocess.run(
        [sys.executable, "-m", f"{backend}.serve", "--pp-size", "2"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("--pp-size is not supported")


def test_startup_reports_generation_config_sampling_defaults(folder, capfd):
    def give_up(*_):
        raise ValueError("far enough")

    stated = json.dumps({"temperature": 0.6, "top_k": 20})
    (folder / "generation_config.json").write_text(stated)
    for flags, expected in (([], True), (["--sampling-defaults", "openai"], False)):
        assert start(["--model-path", str(folder), *flags], give_up) == 2
        is_reported = (
            "sampling defaults from generation_config.json: temperature 0.6, top_k 20"
            in capfd.readouterr().err
        )
        assert is_reported == expected
    (folder / "generation_config.json").write_text('{"top_p": "all"}')
    assert start(["--model-path", str(folder)]) == 2
    assert "top_p in" in capfd.readouterr().err


def test_random_model_equals_script_output(tmp_path):
    make_random.write(tmp_path)
    stored = {path.name: path.read_bytes() for path in RANDOM_MODEL.iterdir()}
    assert stored == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_random_model_tokenizer_round_trips_text():
    tokenizer = Tokenizer.from_folder(RANDOM_MODEL)
    text = "Grüße, 東京! \t\n <|x|>"
    assert tokenizer.encode(text) == list(text.encode())
    chat = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert chat[:5] == [257, *b"user"]
    assert chat[-11:] == [257, *b"assistant\n"]


def test_missing_corpus_file_raises_before_loading(folder, capsys):
    flags = ["--speculative-algorithm", "NGRAM", "--speculative-ngram-external-sam-budget", "2"]
    corpus = str(folder / "corpus.jsonl")
    flags += ["--speculative-ngram-external-corpus-path", corpus]
    assert start(["--model-path", str(folder), *flags]) == 2
    sentence = f"--speculative-ngram-external-corpus-path {corpus} cannot be read: No such file"
    assert sentence in capsys.readouterr().err


def test_set_cpu_threads_uses_one_for_small_models(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(torch_platform, "ALL_THREADS", 2)
    try:
        for size, wanted in ((9_000_000, 1), (600_000_000, 2)):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            torch_platform.set_cpu_threads(size)
            assert torch.get_num_threads() == wanted
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        torch_platform.set_cpu_threads(9_000_000)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
