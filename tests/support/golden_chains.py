"""Choice of the drafts of a filled block: the golden tests' interface, and its implementations.

`CHAINS` have the drafts of a chain, and `LISTS` the candidates of a tree.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_impl.backend import compiler_options
from jax_impl.drafters import Ranking as JaxRanking
from jax_impl.drafters.dflash import RANKINGS as JAX_LISTS
from jax_impl.drafters.dflash import SELECTIONS as JAX
from jax_impl.ops.sampling.sampling import Sampling as JaxSampling
from shared.engine.request import SamplingParams
from shared.models.families import config_from_folder
from shared.reference.drafters import CHAINS as SPEC
from shared.reference.drafters import LISTS as SPEC_LISTS
from shared.reference.rows import PenaltyRanking as SpecRanking
from tests.support.equality import spec_sampling
from tests.support.golden_blocks import TARGET
from torch_impl.drafters import Ranking as TorchRanking
from torch_impl.drafters.dflash import RANKINGS as TORCH_LISTS
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
        rank, own = self._rank([]), (self._head.config, self._head.weights, newest)
        chain = SPEC[self._head.config.kind]
        return *chain(*own, hidden, self._everywhere(scored), rank), rank.drafted

    def _everywhere(self, scored):
        ids = self._head.weights.get("draft_ids")
        everywhere = np.full((*scored.shape[:2], TARGET_CONFIG.vocab), -np.inf, np.float32)
        everywhere[..., slice(None) if ids is None else ids] = scored
        return everywhere

    def _rank(self, kept, width: int = 1) -> SpecRanking:
        return SpecRanking(
            sampling=sampling_of(self._how),
            slots=ONE,
            lengths=ONE,
            counts=SEEN,
            width=width,
            columns=self._head.weights.get("draft_ids"),
            kept=kept,
        )


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


class SpecLists(SpecChain):
    """The specification's candidates, log weights and lists."""

    def __call__(self, newest, hidden, scored, width):
        config, weights, rank = self._head.config, self._head.weights, self._rank(None, width)
        lists = SPEC_LISTS[config.kind]
        return lists(config, weights, newest, hidden, self._everywhere(scored), rank.lists)


class TorchLists(TorchChain):
    """The same with torch."""

    def __call__(self, newest, hidden, scored, width):
        newest, hidden, scored = map(torch.from_numpy, (newest, hidden, scored))
        lists = TORCH_LISTS[self._weights.config.kind](self._weights)
        return lists(newest, hidden, scored, replace(self._rank(False), width=width))


class JaxLists(JaxChain):
    """The same with JAX."""

    def __call__(self, newest, hidden, scored, width):
        lists = JAX_LISTS[self._weights.config.kind](self._weights)
        rank = self._rank(False)._replace(width=width)
        return jax.jit(lambda newest, hidden, scored: lists(newest, hidden, scored, rank))(
            newest, hidden, scored
        )


CHAINS = {"spec": SpecChain, "torch": TorchChain, "jax": JaxChain}
LISTS = {"spec": SpecLists, "torch": TorchLists, "jax": JaxLists}
