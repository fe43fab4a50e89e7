"""Benchmark of logit bits: one checksum in both frameworks, and comparisons."""

import jax.numpy as jnp
import numpy as np
import torch

from bench.quality import logit_bits, logit_recorder
from models.make_random import ROOT
from shared.models.checkpoint import open_checkpoint
from shared.models.families import config_from_folder
from shared.text.tokenizer import Tokenizer

ODD = 2654435761
DEMO = ROOT / "demo" / "target"


def test_logit_sum_equal_in_frameworks_and_bit_sensitive():
    logits = np.random.default_rng(0).standard_normal((3, 5000)).astype(np.float32) * 100
    places = (2 * np.arange(5000, dtype=object) + 1) * ODD % 2**32
    want = ((logits.view(np.uint32).astype(object) * places).sum(1) % 2**32).tolist()
    assert logit_recorder.torch_sum(torch.tensor(logits)).tolist() == want
    assert np.asarray(logit_recorder.jax_sum(jnp.asarray(logits))).tolist() == want
    logits.view(np.uint32)[1, 77] ^= 1
    changed = logit_recorder.torch_sum(torch.tensor(logits)).tolist()
    assert [x == y for x, y in zip(changed, want, strict=True)] == [True, False, True]


def test_logit_sum_of_parts_equals_whole_row():
    logits = np.random.default_rng(1).standard_normal((2, 300)).astype(np.float32)
    filled = np.pad(logits, ((0, 0), (0, 84)))  # three ranks have 128 places each
    want = logit_recorder.torch_sum(torch.tensor(logits)).tolist()
    for summed, array in (
        (logit_recorder.torch_sum, torch.tensor),
        (logit_recorder.jax_sum, jnp.asarray),
    ):
        parts = [summed(array(filled[:, at : at + 128]), at, 300) for at in (0, 128, 256)]
        assert logit_recorder.of_all([np.asarray(part).tolist() for part in parts]) == want


def test_compared_counts_positions_of_common_prefix():
    ours = [([5, 6, 7], [1, 2, 3]), ([5, 5], [1, 1])]
    theirs = [([5, 9, 7], [1, 4, 8]), ([5, 5], [1, 1])]
    assert logit_bits.compared(ours, theirs) == {"positions": 4, "with_other_bits": 1}


def test_write_random_checkpoint_loads_with_tokenizer(tmp_path):
    for family in ("granite", "phi3", "gemma4"):
        folder = tmp_path / family
        folder.mkdir()
        logit_bits.write_random(folder, family, DEMO)
        config = config_from_folder(folder)
        open_checkpoint(folder).check(config, with_mtp=False)
        assert config.vocab == config_from_folder(DEMO).vocab
        assert Tokenizer.from_folder(folder) is not None
