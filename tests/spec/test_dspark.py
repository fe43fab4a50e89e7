"""DSpark: the numbers of its makers' code, in all variants, on every implementation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_impl.drafters import Ranking as JaxRanking
from jax_impl.drafters import dspark as jax_dspark
from jax_impl.ops.sampling import Sampling as JaxSampling
from shared.engine.request import SamplingParams
from shared.models.families import config_from_folder
from shared.reference.rows import Ranking as SpecRanking
from shared.spec import dspark
from tests.support.equality import spec_sampling
from tests.support.golden_blocks import BLOCKS, GOLDEN, TARGET, close, golden_block_head
from torch_impl.drafters import Ranking as TorchRanking
from torch_impl.drafters import dspark as torch_dspark
from torch_impl.ops.sampling import Sampling as TorchSampling

FOLDERS = ["dspark_vanilla", "dspark_gated", "dspark_rnn"]
TARGET_CONFIG = config_from_folder(TARGET)
GREEDY = SamplingParams(temperature=0.0, seed32=1)
ONE = np.zeros(1, np.int32)
SEEN = np.zeros((1, TARGET_CONFIG.vocab), np.int32)


def sampling_of(how: SamplingParams):
    return spec_sampling(how, 1, TARGET_CONFIG.vocab, 1)


class SpecChain:
    """The specification's drafts, log weights, and the scores that the drafts are chosen from."""

    def __init__(self, block, how: SamplingParams) -> None:
        self._head, self._how = block._head, how

    def __call__(self, newest, hidden, scored):
        ids = self._head.weights.get("draft_ids")
        everywhere = np.full((*scored.shape[:2], TARGET_CONFIG.vocab), -np.inf, np.float32)
        everywhere[..., slice(None) if ids is None else ids] = scored
        rank = SpecRanking(
            sampling=sampling_of(self._how),
            slots=ONE,
            lengths=ONE,
            counts=SEEN,
            width=1,
            columns=ids,
            kept=[],
        )
        given = (self._head.config, self._head.weights, newest, hidden, everywhere, rank)
        return *dspark.chain(*given), rank.drafted


class TorchChain:
    """The same of torch, whose scores are those of sampled drafts; without heat they are equal."""

    def __init__(self, block, how: SamplingParams) -> None:
        self._weights, self._how = block._weights, sampling_of(how)

    def __call__(self, newest, hidden, scored):
        arrays = [torch.from_numpy(x) for x in (newest, hidden, scored)]
        drafts, edges, _ = torch_dspark.chain(self._weights, *arrays, self._rank(False), True)
        same, _, laws = torch_dspark.chain(self._weights, *arrays, self._rank(True), False)
        assert drafts.equal(same)
        return drafts.numpy(), edges.numpy(), laws.numpy()

    def _rank(self, is_sampled: bool) -> TorchRanking:
        fields = {name: torch.from_numpy(getattr(self._how, name)) for name in JaxSampling._fields}
        return TorchRanking(
            sampling=TorchSampling(**fields | {"seed": fields["seed"].view(torch.int32)}),
            counts=torch.from_numpy(SEEN),
            slots=torch.from_numpy(ONE).long(),
            lengths=torch.from_numpy(ONE),
            width=1,
            is_sampled=is_sampled,
            columns=self._weights.draft_ids,
        )


class JaxChain:
    """The same of JAX, as one program."""

    def __init__(self, block, how: SamplingParams) -> None:
        self._weights, self._how = block._weights, sampling_of(how)
        self._run = jax.jit(self._chained)

    def __call__(self, newest, hidden, scored):
        drafts, same, edges, laws = (np.asarray(x) for x in self._run(newest, hidden, scored))
        np.testing.assert_array_equal(drafts, same)
        return drafts, edges, laws

    def _chained(self, *arrays):
        drafts, edges, _ = jax_dspark.chain(self._weights, *arrays, self._rank(False), True)
        same, _, laws = jax_dspark.chain(self._weights, *arrays, self._rank(True), False)
        return drafts, same, edges, laws

    def _rank(self, is_sampled: bool) -> JaxRanking:
        fields = {name: jnp.asarray(getattr(self._how, name)) for name in JaxSampling._fields}
        return JaxRanking(
            sampling=JaxSampling(**fields),
            counts=jnp.asarray(SEEN),
            slots=jnp.asarray(ONE),
            lengths=jnp.asarray(ONE),
            width=1,
            is_sampled=is_sampled,
            columns=self._weights.draft_ids,
        )


CHAINS = {"spec": SpecChain, "torch": TorchChain, "jax": JaxChain}


@pytest.mark.parametrize("implementation", CHAINS)
@pytest.mark.parametrize("folder", FOLDERS)
def test_drafts_their_scores_and_their_confidence_are_the_golden_ones(folder, implementation):
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
def test_penalties_count_the_drafts_before(implementation):
    """One token is pushed far up; only what was drafted of it takes another one."""
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
