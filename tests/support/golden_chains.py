"""Choice of the drafts of a filled block: the golden tests' interface, and its implementations."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_impl.backend import compiler_options
from jax_impl.drafters import Ranking as JaxRanking
from jax_impl.drafters.dflash import SELECTIONS as JAX
from jax_impl.ops.sampling.sampling import Sampling as JaxSampling
from shared.engine.request import SamplingParams
from shared.models.families import config_from_folder
from shared.reference.drafters import CHAINS as SPEC
from shared.reference.rows import PenaltyRanking as SpecRanking
from tests.support.equality import spec_sampling
from tests.support.golden_blocks import TARGET
from torch_impl.drafters import Ranking as TorchRanking
from torch_impl.drafters.dflash import SELECTIONS as TORCH
from torch_impl.ops.sampling.sampling import Sampling as TorchSampling

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
        own = (self._head.config, self._head.weights, newest)
        chain = SPEC[self._head.config.kind]
        return *chain(*own, hidden, everywhere, rank), rank.drafted


class TorchChain:
    """The same with torch; its scores are those of sampled drafts, equal at temperature 0."""

    def __init__(self, block, how: SamplingParams) -> None:
        self._weights, self._how = block._weights, sampling_of(how)

    def __call__(self, newest, hidden, scored):
        arrays = [torch.from_numpy(x) for x in (newest, hidden, scored)]
        select = TORCH[self._weights.config.kind](self._weights)
        drafts, edges, _ = select(*arrays, self._rank(False), True)
        same, _, laws = select(*arrays, self._rank(True), False)
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
        options = compiler_options(jax.devices("cpu")[0], quick_compile=True)
        self._run = jax.jit(self._chained, compiler_options=options)

    def __call__(self, newest, hidden, scored):
        drafts, same, edges, laws = (np.asarray(x) for x in self._run(newest, hidden, scored))
        np.testing.assert_array_equal(drafts, same)
        return drafts, edges, laws

    def _chained(self, *arrays):
        select = JAX[self._weights.config.kind](self._weights)
        drafts, edges, _ = select(*arrays, self._rank(False), True)
        same, _, laws = select(*arrays, self._rank(True), False)
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
