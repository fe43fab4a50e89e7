"""DFlash: golden numbers of the reference implementation, and the attention mask of a block."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jax_impl.backend import compiler_options
from jax_impl.drafters import Ranking as JaxRanking
from jax_impl.drafters import dflash as jax_dflash
from jax_impl.ops.gemm.linear import Matrix as JaxMatrix
from jax_impl.ops.sampling.lm_head import Projection as JaxProjection
from jax_impl.ops.sampling.sampling import Sampling as JaxSampling
from shared.drafts.config import DraftHead
from shared.drafts.dflash_config import BlockConfig
from shared.engine.request import SamplingParams
from shared.models.families import config_from_folder
from shared.spec import attention, cache_pools, dflash, gumbel_noise, sampling
from shared.spec.tree_growth import DraftRequests
from tests.support.equality import spec_sampling
from tests.support.golden_blocks import (
    BLOCKS,
    GOLDEN,
    TARGET,
    assert_golden_numbers,
    close,
    golden_block_head,
)
from tests.support.tiny_heads import cyclic, tiny_block_head
from tests.support.tiny_models import tiny_model
from torch_impl.drafters import Ranking as TorchRanking
from torch_impl.drafters import dflash as torch_dflash
from torch_impl.ops.gemm.linear import Matrix as TorchMatrix
from torch_impl.ops.sampling.lm_head import Projection as TorchProjection
from torch_impl.ops.sampling.sampling import Sampling as TorchSampling


@pytest.fixture(params=BLOCKS)
def block_of(request):
    """Makes an implementation of a golden head."""

    def made(folder: str, factor: float = 1.0):
        head, weights = golden_block_head(GOLDEN / folder, TARGET)
        scaled = replace(head.config.layer, embedding_factor=factor)
        head = DraftHead(replace(head.config, layer=scaled), head.weights)
        weights["embed"] = weights["embed"] / np.float32(factor)
        return BLOCKS[request.param](head, config_from_folder(TARGET), weights)

    return made


FOLDERS = [
    *("dflash", "dflash_sliding", "dflash_speculators", "dflash_speculators_sliding"),
    "jetspec",
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_dflash_block_matches_golden(folder, block_of):
    assert_golden_numbers(folder, block_of)


def test_dflash_block_multiplies_embeddings_by_factor(block_of):
    """An embedding layer of Gemma does so."""
    assert_golden_numbers("dflash_speculators", partial(block_of, factor=8.0))


def test_dflash_context_kv_matches_golden_cache(block_of):
    want, block = np.load(GOLDEN / "dflash" / "vectors.npz"), block_of("dflash")
    last = want["starts"][-1]
    block.extend(want["feats"][:last])
    block.fill(3)
    for got, golden in zip(block.context(), (want["ctx_K_0"], want["ctx_V_0"]), strict=True):
        close(got, golden)


SIZE, WINDOWS = 4, (None, 2, 7)
ROWS = {
    "spec": lambda block, *given: dflash.block_rows(block, *given),
    "torch": lambda block, *given: torch_dflash.block_rows(
        block, *(torch.from_numpy(np.asarray(each, np.int32)) for each in given)
    ),
    "jax": lambda block, *given: jax_dflash.block_rows(
        block, *(jnp.asarray(each, jnp.int32) for each in given)
    ),
}


@pytest.mark.parametrize("implementation", ROWS)
@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_block_rows_visible_positions(window, is_causal, from_anchor, implementation):
    block = BlockConfig(
        size=SIZE,
        mask_id=9,
        windows=(window,),
        causal=(is_causal,),
        from_anchor=from_anchor,
        first_slot=1,
        parts=(),
    )
    lengths, draft_from = np.array([9, 5, 3]), np.array([2, 5, 0])
    (rows,) = ROWS[implementation](block, lengths, draft_from, np.zeros((3, 4), int))
    seen = attention.attention_mask(
        *(np.asarray(each) for each in (rows.first, rows.until, rows.window)), 16
    )
    for row, sees in enumerate(seen):
        request, slot = divmod(row, SIZE)
        start, length = draft_from[request], lengths[request]
        position, place = length + slot, np.arange(16)
        want = (place >= start) & (place < length + SIZE) & (start < length)
        if window is not None:
            in_reach = place >= length - window if from_anchor else abs(place - position) < window
            want &= in_reach
        if is_causal:
            want &= place <= position
        np.testing.assert_array_equal(sees, want)
        assert bool(rows.is_real[row]) == (start < length)
        if start < length:
            assert (int(rows.positions[row]), int(rows.places[row])) == (position, position)


TARGET_CONFIG, TARGET_WEIGHTS = tiny_model("llama", 0)


def head_with(**fields) -> DraftHead:
    return tiny_block_head(TARGET_CONFIG, 5, **fields)


VARIANTS = {
    "sliding and full": {},
    "all full": {"layer_types": ["full_attention"] * 4},
    "symmetric": {"is_causal": False, "sliding_window": 3},
    "causal": {"is_causal": True, "sliding_window": 5},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("implementation", ["torch", "jax"])
@pytest.mark.parametrize("name", VARIANTS)
def test_dflash_head_variants_match_spec(name, implementation):
    head, weights = head_with(**VARIANTS[name]), cyclic(TARGET_CONFIG, TARGET_WEIGHTS)
    blocks = [BLOCKS[each](head, TARGET_CONFIG, weights) for each in ("spec", implementation)]
    features = np.random.default_rng(3).standard_normal((37, head.config.fc_inputs))
    for cut in np.split(features.astype(np.float32), [11, 30]):
        for block in blocks:
            block.extend(cut)
        want, got = (block.fill(12) for block in blocks)
        for one, other in zip(got, want, strict=True):
            close(one, other)


def test_block_drafts_form_chain_below_newest_token():
    head, weights = head_with(), cyclic(TARGET_CONFIG, TARGET_WEIGHTS)
    drafter = dflash.BlockHeadDrafter(head, weights)

    def choose(_, logits):
        return logits.argmax(axis=2), logits.max(axis=2)

    kv = cache_pools.new_kv(drafter.layer.attention, drafter.layer.num_layers, 4, 16)
    requests = DraftRequests(
        newest=np.array([5, 8]),
        lengths=np.array([3, 4]),
        draft_from=np.array([0, 4]),
        max_drafts=np.array([2, 3]),
        page_table=np.array([[1], [2]]),
    )
    tokens, parents, num_nodes, _ = drafter.draft(kv, requests, 3, choose)
    np.testing.assert_array_equal(parents, [[0, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(num_nodes, [3, 1])  # a limit of 2; nothing to draft from
    np.testing.assert_array_equal(tokens[:, 0], [5, 8])
    assert not tokens[0, 3:].any()
    assert not tokens[1, 1:].any()


VOCAB, S = 97, 5
HOW = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_k": 40, "top_p": 0.95},
    # One token has a high bias; only its earlier occurrences lead to another one.
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 2.0, "logit_bias": {8: 7.0}},
    "sampled with penalties": {
        "temperature": 1.0,
        "presence_penalty": 2.0,
        "repetition_penalty": 1.5,
        "logit_bias": {8: 7.0},
        "min_p": 0.001,
    },
}


class Choosing:
    """Logits of two requests' slots, and how an implementation picks a draft for each."""

    def __init__(self, how: dict) -> None:
        rng = np.random.default_rng(21)
        self.logits = rng.normal(0, 1.5, (2, S, VOCAB)).astype(np.float32)
        self.how = spec_sampling(SamplingParams(seed32=77, **how), 3, VOCAB, 2)
        self.lengths = np.array([6, 11], np.int32)
        self.seen, self.slots = np.zeros((2, VOCAB), np.int32), np.arange(2)
        self.seen[1, 8] = 6  # three times in the output of the second

    def spec(self) -> tuple[np.ndarray, np.ndarray]:
        """Slot by slot: the target's own choice after the committed text, and its log weight."""
        everyone, text, found = np.arange(2), sampling.counts_alone(self.seen, self.slots), []
        for slot in range(S):
            logits, positions = self.logits[:, slot], self.lengths + 1 + slot
            ids = sampling.choose(logits, text, positions, self.how, everyone, None).ids
            keys = (positions, gumbel_noise.TARGET_STREAM, 1, False, None)
            ranked = sampling.rank(logits[:, None], text, positions, self.how, *keys)
            found.append((ids, ranked.weights[:, 0, 0]))
        drafts, edges = (np.stack(parts, axis=1) for parts in zip(*found, strict=True))
        return drafts, edges

    def projected(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and an LM head with exactly these logits."""
        return self.logits.reshape(-1, VOCAB), np.eye(VOCAB, dtype=np.float32)

    def torch(self, is_weighed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        fields = {name: torch.from_numpy(getattr(self.how, name)) for name in JaxSampling._fields}
        rank = TorchRanking(
            sampling=TorchSampling(**fields | {"seed": fields["seed"].view(torch.int32)}),
            counts=torch.from_numpy(self.seen),
            slots=torch.from_numpy(self.slots),
            lengths=torch.from_numpy(self.lengths),
            width=1,
            is_sampled=False,
        )
        rows, head = (torch.from_numpy(x) for x in self.projected())
        scored = TorchProjection(rows, TorchMatrix.plain(head))
        drafts, edges, processed = rank.chain(scored, S, is_weighed)
        assert processed is None
        return drafts.numpy(), None if edges is None else edges.numpy()

    def jax(self, is_weighed: bool) -> tuple[np.ndarray, np.ndarray | None]:
        fields = {name: jnp.asarray(getattr(self.how, name)) for name in JaxSampling._fields}
        seen = (self.seen, jnp.asarray(self.slots, jnp.int32), self.lengths)
        drafts, edges = jax_chain(JaxSampling(**fields), seen, self.projected(), is_weighed)
        return np.asarray(drafts), None if edges is None else np.asarray(edges)


@partial(
    jax.jit,
    static_argnames="is_weighed",
    compiler_options=compiler_options(jax.devices("cpu")[0], quick_compile=True),
)
def jax_chain(
    how: JaxSampling, seen: tuple, projected: tuple[jax.Array, jax.Array], is_weighed: bool
) -> tuple[jax.Array, jax.Array | None]:
    """One program for every way of choosing, as in a step."""
    rank = JaxRanking(how, *seen, width=1, is_sampled=False)
    rows, head = projected
    drafts, edges, processed = rank.chain(JaxProjection(rows, JaxMatrix.plain(head)), S, is_weighed)
    assert processed is None
    return drafts, edges


@pytest.mark.parametrize("implementation", ["torch", "jax"])
@pytest.mark.parametrize("name", HOW)
def test_dflash_draft_choice_matches_spec(name, implementation):
    choosing = Choosing(HOW[name])
    want, weights = choosing.spec()
    for is_weighed in (False, True):
        drafts, edges = getattr(choosing, implementation)(is_weighed)
        np.testing.assert_array_equal(drafts, want)
        assert (edges is None) is not is_weighed
        if edges is not None:  # float32, sums over the vocabulary in another order
            np.testing.assert_allclose(edges, weights, atol=1e-5)
    if "penalties" in name:
        assert (want[0] == 8).sum() > (want[1] == 8).sum()
