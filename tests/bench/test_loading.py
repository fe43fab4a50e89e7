"""Benchmark of weight loading: written checkpoints, and measured peak memory."""

import argparse
import shutil
from pathlib import Path

import numpy as np
import pytest

from bench.steps import weight_loading
from models.make_random import ROOT
from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder

SHAPE = ROOT / "demo" / "standalone"


def test_weight_loading_writes_valid_checkpoint_and_measures(tmp_path):
    found = weight_loading.write(SHAPE, tmp_path)
    open_checkpoint(tmp_path).check(config_from_folder(tmp_path), with_mtp=False)
    assert 0 < found["largest_tensor_gb"] <= found["checkpoint_gb"]
    for backend in ("torch", "jax"):
        read = weight_loading.measure(backend, tmp_path)
        assert read["seconds"] > 0
        assert read["peak_gb"] < 1


def test_weight_loading_writes_several_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_loading, "SHARD_BYTES", 1)
    weight_loading.write(SHAPE, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    open_checkpoint(tmp_path).check(config_from_folder(tmp_path), with_mtp=False)


def test_weight_loading_runs_each_tree_separately(tmp_path):
    other = tmp_path / "other"
    for name in ("shared", "torch_impl", "kernels"):
        shutil.copytree(weight_loading.ROOT / name, other / name)
    with (other / "torch_impl" / "weights.py").open("a", encoding="utf-8") as weights:
        weights.write("\ndef load(*_):\n    hold = np.ones(60_000_000)\n    return hold.sum()\n")
    options = argparse.Namespace(
        shape=SHAPE, backend=["torch"], tree=[Path(), other], rounds=1, out=None
    )
    ours, theirs = weight_loading.run(options, "")["lines"]
    assert (ours["tree"], theirs["tree"]) == (".", str(other))
    assert ours["peak_gb"] < 0.3 < theirs["peak_gb"]
    assert {"python", "numpy", "torch", "device"} <= ours.keys()


@pytest.mark.parametrize("name", [name for _, name in weight_loading.OWN])
def test_own_gigabytes_equal_for_every_source(name, monkeypatch):
    every = weight_loading.own_gigabytes()
    monkeypatch.setattr(
        weight_loading, "OWN", [each for each in weight_loading.OWN if each[1] == name]
    )
    assert weight_loading.own_gigabytes() == pytest.approx(every, rel=0.1)
    monkeypatch.setattr(weight_loading, "OWN", ())
    with pytest.raises(RuntimeError, match="cannot be measured"):
        weight_loading.own_gigabytes()


def test_peak_includes_released_memory():
    before = weight_loading.own_gigabytes()
    with weight_loading.Peak() as peak:
        held = np.ones(60_000_000)
        assert held.sum() > 0
        del held
    assert peak.highest - before > 0.3
