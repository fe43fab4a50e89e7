"""DSpark: golden numbers of the original code, in all variants, on every implementation."""

import numpy as np
import pytest

from shared.engine.request import SamplingParams
from tests.support.golden_blocks import BLOCKS, GOLDEN, TARGET, close, golden_block_head
from tests.support.golden_chains import CHAINS, GREEDY, TARGET_CONFIG

FOLDERS = ["dspark_vanilla", "dspark_gated", "dspark_rnn"]


@pytest.mark.parametrize("implementation", CHAINS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_dspark_drafts_scores_and_confidence_match_golden(folder, implementation):
    head, weights = golden_block_head(GOLDEN / folder, TARGET)
    block = BLOCKS[implementation](head, TARGET_CONFIG, weights)
    chain = CHAINS[implementation](block, GREEDY)
    want, given = (np.load(GOLDEN / x / "vectors.npz") for x in (folder, "dflash_speculators"))
    ids, first, length = head.weights.get("draft_ids", slice(None)), head.config.block.first_slot, 0
    for start in given["starts"]:
        block.extend(given["feats"][length:start])
        length, newest = start, given["tokens"][start].astype(np.int32)
        hidden, scored = block.fill(int(newest), first)
        close(hidden, want[f"hidden_{start}"])
        drafts, edges, laws = chain(newest[None], hidden[None], scored[None])
        np.testing.assert_array_equal(drafts[0], want[f"draft_ids_{start}"])
        close(edges[0], -np.logaddexp(0, -want[f"confidence_{start}"]))
        close(laws[0][:, ids], want[f"logits_{start}"])


@pytest.mark.parametrize("implementation", ["torch", pytest.param("jax", marks=pytest.mark.matrix)])
def test_dspark_penalties_count_earlier_drafts(implementation):
    """One token has a high bias; only its earlier drafts lead to another one."""
    head, weights = golden_block_head(GOLDEN / "dspark_gated", TARGET)
    favoured = int(head.weights["draft_ids"][7])
    how = {"temperature": 0.0, "logit_bias": {favoured: 60.0}, "frequency_penalty": 2.0}
    rng, S = np.random.default_rng(5), head.config.block.size
    hidden = rng.standard_normal((1, S, head.config.layer.hidden)).astype(np.float32)
    scored = rng.standard_normal((1, S, head.config.draft_vocab)).astype(np.float32)
    scored[:, :, 7] -= 58.5  # the second time it is the best no longer
    given, params = (np.array([3], np.int32), hidden, scored), SamplingParams(seed32=1, **how)
    want, got = (
        CHAINS[each](BLOCKS[each](head, TARGET_CONFIG, weights), params)(*given)
        for each in ("spec", implementation)
    )
    np.testing.assert_array_equal(got[0], want[0])
    close(got[2], want[2])
    assert 0 < (want[0] == favoured).sum() < S
