"""DFlash2: golden numbers of the original code, in several shapes, on every implementation."""

import numpy as np
import pytest

from shared.engine.request import SamplingParams
from shared.spec.dflash2 import NEVER
from tests.support.golden_blocks import BLOCKS, GOLDEN, TARGET, close, golden_block_head
from tests.support.golden_chains import CHAINS, GREEDY, TARGET_CONFIG

FOLDERS = ["dflash2", "dflash2_anchor"]


@pytest.mark.parametrize("implementation", CHAINS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_dflash2_drafts_and_candidate_scores_match_golden(folder, implementation):
    head, weights = golden_block_head(GOLDEN / folder, TARGET)
    block = BLOCKS[implementation](head, TARGET_CONFIG, weights)
    chain, first, length = CHAINS[implementation](block, GREEDY), head.config.block.first_slot, 0
    want, given = (np.load(GOLDEN / x / "vectors.npz") for x in (folder, "dflash_speculators"))
    for start in given["starts"]:
        block.extend(given["feats"][length:start])
        length, newest = start, given["tokens"][start].astype(np.int32)
        hidden, scored = block.fill(int(newest), first)
        close(hidden, want[f"hidden_{start}"])
        drafts, _, laws = chain(newest[None], hidden[None], scored[None])
        np.testing.assert_array_equal(drafts[0], want[f"draft_ids_{start}"])
        laws_wanted = np.full_like(laws[0], NEVER)
        candidates, scores = want[f"candidates_{start}"], want[f"scores_{start}"]
        np.put_along_axis(laws_wanted, candidates, scores, axis=1)
        close(laws[0], laws_wanted)


@pytest.mark.parametrize("implementation", ["torch", pytest.param("jax", marks=pytest.mark.matrix)])
def test_dflash2_candidates_precede_sampling_params(implementation):
    """A token that is pushed far up is no candidate; a candidate that is pushed is selected."""
    head, weights = golden_block_head(GOLDEN / "dflash2_anchor", TARGET)
    rng, S = np.random.default_rng(5), head.config.block.size
    hidden = rng.standard_normal((1, S, head.config.layer.hidden)).astype(np.float32)
    scored = rng.standard_normal((1, S, TARGET_CONFIG.vocab)).astype(np.float32)
    scored[:, :, [7, 9]] = -9, 9
    how = {"temperature": 0.0, "logit_bias": {7: 90.0, 9: 40.0}, "frequency_penalty": 2.0}
    given, params = (np.array([3], np.int32), hidden, scored), SamplingParams(seed32=1, **how)
    want, got = (
        CHAINS[each](BLOCKS[each](head, TARGET_CONFIG, weights), params)(*given)
        for each in ("spec", implementation)
    )
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(want[0], 9)
    close(got[1], want[1])
