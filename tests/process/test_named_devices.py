"""Devices in environment variables: a missing one ends the startup with one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.options.flags import ConfigError
from shared.process.device import check_gpu_environment
from tests.support.http_fixtures import ROOT
from tests.support.tiny_models import write_tiny

MISSING = 99  # more GPUs than any machine has


def start(backend: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    write_tiny(folder, "qwen3", 0)
    left = {name: v for name, v in os.environ.items() if not name.startswith(("JAX_", "CUDA_"))}
    command = [sys.executable, "-m", f"{backend}.serve", "--model-path", str(folder), "--port", "0"]
    return subprocess.run(
        command, cwd=ROOT, env=left | variables, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("backend", "variables"),
    [
        ("jax_impl", {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "-1"}),
        pytest.param("jax_impl", {"JAX_PLATFORMS": "tpu"}, marks=pytest.mark.matrix),
        ("jax_impl", {"JAX_PLATFORMS": "no_such"}),
        ("jax_impl", {"JAX_PLATFORM_NAME": "tpu"}),
        ("jax_impl", {"CUDA_VISIBLE_DEVICES": str(MISSING)}),
        ("torch_impl", {"CUDA_VISIBLE_DEVICES": str(MISSING)}),
    ],
    ids=str,
)
def test_missing_device_in_environment_raises(tmp_path, backend, variables):
    ended = start(backend, tmp_path, **variables)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    last = ended.stderr.splitlines()[-1]
    name, value = next(iter(variables.items()))
    assert name in last
    assert value in last
    assert "unset" in last


def test_trainer_rejects_missing_device_and_convert_ignores_it(tmp_path):
    write_tiny(tmp_path / "model", "qwen3", 0)
    data = tmp_path / "data.jsonl"
    data.write_text("")
    training = ["--target", "model", "--draft", "eagle3", "--data", str(data), "--steps", "1"]
    for words, code in (("train", *training, "--out", "out"), 2), (("convert", "model", "to"), 0):
        ended = subprocess.run(
            [sys.executable, "-m", f"jax_impl.{words[0]}", *words[1:]],
            cwd=tmp_path,
            env={**os.environ, "JAX_PLATFORMS": "tpu", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == code, ended.stderr
        assert "Traceback" not in ended.stderr
        assert (code == 2) == ("JAX has no device 'tpu'" in ended.stderr)


@pytest.mark.parametrize("named", ["0", "0,1", "GPU-5a", " 1"])
def test_check_gpu_environment_rejects_named_missing_gpu(named):
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES={named} contains a GPU"):
        check_gpu_environment({"CUDA_VISIBLE_DEVICES": named})


@pytest.mark.parametrize("hidden", ["", "-1", "-1,0", "none", "NoDevFiles"])
def test_check_gpu_environment_accepts_hidden_gpus(hidden):
    check_gpu_environment({"CUDA_VISIBLE_DEVICES": hidden})
    check_gpu_environment({})
