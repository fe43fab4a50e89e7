"""The bench of loading: it writes what a start reads, and sees memory that is taken."""

import numpy as np

from bench.steps import loading
from models.make_random import ROOT
from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder

SHAPE = ROOT / "demo" / "standalone"


def test_a_checkpoint_of_a_shape_is_whole_and_is_measured(tmp_path):
    found = loading.write(SHAPE, tmp_path)
    open_checkpoint(tmp_path).check(config_from_folder(tmp_path), with_mtp=False)
    assert 0 < found["largest_tensor_gb"] <= found["checkpoint_gb"]
    for backend in ("torch", "jax"):
        read = loading.measure(backend, tmp_path)
        assert read["seconds"] > 0
        assert read["peak_gb"] < 1


def test_the_peak_is_of_what_was_held_for_a_moment():
    before = loading.own_gigabytes()
    with loading.Peak() as peak:
        held = np.ones(60_000_000)
        assert held.sum() > 0
        del held
    assert peak.highest - before > 0.3
