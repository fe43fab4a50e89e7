"""`python -m tests.support.jax_vlm_ranks`: ranks in JAX see as one does, to the bit.

Its two devices are virtual ones of a CPU; see `tests/support/jax_ranks.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from jax_impl.backend import JaxBackend
from jax_impl.weights import Loaded, load_vision_encoder
from shared.boundary.tp_group import TPGroup
from shared.models.checkpoint import load_all, open_checkpoint
from shared.models.families import config_from_folder
from tests.support import vlm
from tests.support.backends import PreparedOnUse, drafts_of
from tests.support.golden_images import MODEL, vision
from tests.support.ranks import SideBySide
from tests.support.run_engine import drive

ROOT, COUNT = Path(__file__).parents[2], 2


def main() -> None:
    """Serves a prompt with two images on one rank and on two, step by step."""
    config = config_from_folder(MODEL)
    capacity = vlm.capacity_of("NEXTN", vlm.POOL_ROWS, vlm.NUM_PAGES)
    made = (config, load_all(MODEL, config, True), capacity, *drafts_of("NEXTN", config))
    how = {"dtype": "float32", "device": "cpu", "quick_compile": True}

    def tower(device: jax.Device) -> Loaded:
        return load_vision_encoder(
            open_checkpoint(MODEL), vision(), np.float32, device, lambda _: None
        )

    devices = jax.devices("cpu")
    alone = JaxBackend(*made, **how, tower=tower(devices[0]))
    towers = [tower(device) for device in devices[:COUNT]]
    ranks = JaxBackend(*made, **how, group=TPGroup(0, COUNT, None), tower=towers)
    backend = PreparedOnUse(SideBySide(alone, [ranks], lambda: None))
    vlm.MADE["jax ranks", "NEXTN"] = backend
    engine = vlm.engine_of("jax ranks", "NEXTN")
    prompt = vlm.Prompt(
        vlm.words(20, 1), vlm.pixels(8, 10, 1), vlm.pixels(4, 5, 2), vlm.words(9, 1)
    )
    assert drive(engine, [prompt.request()])[0].tokens == prompt.text()
    backend.close()
    print("the same bits")


def check() -> None:
    """Runs `main` in a process with two devices, and looks at its end."""
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={COUNT}"}
    command = [sys.executable, "-m", "tests.support.jax_vlm_ranks"]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.strip().endswith("the same bits"), f"{done.stdout}\n{done.stderr[-4000:]}"


if __name__ == "__main__":
    main()
