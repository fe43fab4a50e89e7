"""Training of block heads on the blocks that serving fills, and on their draft choices."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.training import block as blocks
from jax_impl.training import candidate_loss, init, tree_acceptance
from jax_impl.training.block import BlockHeadConfig
from jax_impl.training.candidate_loss import CROSS_ENTROPY, KL
from jax_impl.training.forward import Passed
from jax_impl.training.nnx_modules import DraftModel, named
from shared.drafts.dspark_config import MarkovConfig
from tests.support.golden_blocks import close, golden_block_head
from tests.support.training import GOLDEN, golden_model, jitted, lowered, padded, vectors

HOW = {"compute_dtype": jnp.float32, "remat": False}


def golden_block(folder: str) -> tuple[BlockHeadConfig, DraftModel]:
    head, _ = golden_block_head(GOLDEN / folder, GOLDEN / "qwen3")
    return BlockHeadConfig.of(head.config), DraftModel(
        {name: jnp.asarray(array) for name, array in head.weights.items()}
    )


@pytest.mark.parametrize("folder", ["dflash", "jetspec", "dspark_vanilla", "dflash2_anchor"])
def test_fill_of_all_anchors_matches_golden(folder):
    (block, head), (_, model) = golden_block(folder), golden_model("qwen3")
    is_dflash = folder in ("dflash", "jetspec")
    given, want = vectors("dflash" if is_dflash else "dflash_speculators"), vectors(folder)
    feats = np.pad(given["feats"], ((0, 8), (0, 0)))[None]
    parts = dict(zip(block.aux_streams, np.split(feats, 3, axis=2), strict=True))
    streams = tuple(jnp.asarray(parts.get(i, np.full((1, 48, 32), np.nan))) for i in range(9))
    passed = Passed(streams[2], streams)
    anchors = jnp.asarray(given["starts"][None], jnp.int32)
    fill = jitted(blocks.fill, block, **HOW)
    hidden = fill(head, model, passed, padded(given["tokens"], 48), anchors)
    for place, start in enumerate(given["starts"]):
        # Float32 on both sides, magnitudes up to 10: only the orders of the sums differ.
        close(hidden[0, place], want[f"hidden_{start}"])
        if is_dflash:
            close(hidden[0, place, 1:] @ model.head[...].T, want[f"logits_{start}"])


def surprise(scores: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Cross-entropy of the tokens at these places."""
    return np.logaddexp.reduce(scores, axis=1) - scores[np.arange(len(places)), places]


@pytest.mark.parametrize("is_drafted", [True, False])
@pytest.mark.parametrize("folder", ["dspark_vanilla", "dflash2_anchor"])
def test_candidate_loss_matches_golden_scores(folder, is_drafted):
    """Labels that the original code drafts are covered, and other labels."""
    (block, head), (_, model) = golden_block(folder), golden_model("qwen3")
    given, want = vectors("dflash_speculators"), vectors(folder)
    start = given["starts"][0]
    drafts, hidden = want[f"draft_ids_{start}"], want[f"hidden_{start}"]
    before = np.array([given["tokens"][start], *drafts[:-1]])
    labels = drafts if is_drafted else (drafts + 1) % 256
    rows = (jnp.asarray(each) for each in (hidden, before, labels))
    losses, agrees = candidate_loss.loss(block.config, head, model, *rows, None, jnp.float32)
    assert agrees.tolist() == [is_drafted] * len(drafts)
    if block.config.part(MarkovConfig) is not None:
        sure = want[f"confidence_{start}"]
        expected = surprise(want[f"logits_{start}"], labels)
        expected += np.logaddexp(0, -sure if is_drafted else sure)
    else:
        unary, chosen = hidden @ np.asarray(model.head[...]).T, want[f"scores_{start}"]
        candidates = want[f"candidates_{start}"]
        has_label = (candidates == labels[:, None]).any(axis=1)
        assert has_label.all() == is_drafted
        if not is_drafted:  # a label that is no candidate replaces the last one
            losses, unary, chosen = losses[has_label], unary[has_label], chosen[has_label]
            candidates, labels = candidates[has_label], labels[has_label]
        places = (candidates == labels[:, None]).argmax(axis=1)
        expected = surprise(unary, labels) + surprise(chosen, places)
    close(losses, expected)


def test_draw_anchors_precede_answer_tokens():
    mask = np.zeros((2, 20), np.float32)
    mask[0, [5, 9, 10, 19]] = 1
    mask[0, 2] = 0.1  # of the prompt
    anchors, is_real = jitted(blocks.draw_anchors, num_anchors=6)(mask, jax.random.key(3))
    assert sorted(anchors[0, is_real[0]]) == [4, 8, 9, 18]
    assert not is_real[1].any()


@pytest.mark.parametrize("folder", ["dflash", "dspark_vanilla", "dflash2_anchor"])
def test_kl_loss_is_zero_for_teacher(folder):
    """The divergence is 0 for equal logits, and positive for others, whatever the label is."""
    (block, head), (_, model) = golden_block(folder), golden_model("qwen3")
    own = {name: jnp.asarray(array) for name, array in named(head).items()}
    zeroed = ("markov.lm_head", "confidence", "confidence_bias", "selector.hidden")
    head = DraftModel({n: jnp.zeros_like(x) if n in zeroed else x for n, x in own.items()})
    hidden = jax.random.normal(jax.random.key(0), (6, model.head[...].shape[1]))
    labels, before = jnp.arange(6), jnp.arange(6)

    def loss(teacher: jax.Array) -> np.ndarray:
        losses, _ = candidate_loss.loss(
            block.config, head, model, hidden, before, labels, teacher, jnp.float32
        )
        return np.asarray(losses)

    # A zero confidence costs log 2, and zero selector factors leave the candidates' logits.
    rest = loss(hidden)
    if folder == "dflash":
        np.testing.assert_allclose(rest, 0, atol=1e-5)
    elif folder == "dspark_vanilla":
        np.testing.assert_allclose(rest, np.log(2), atol=1e-5)
    scores, wanted = (np.asarray(x @ model.head[...].T, np.float64) for x in (hidden, -hidden))
    log_q, log_p = (x - np.logaddexp.reduce(x, axis=1)[:, None] for x in (scores, wanted))
    close(loss(-hidden) - rest, (np.exp(log_p) * (log_p - log_q)).sum(axis=1))


def test_slot_weights_follow_objective_and_answer():
    block, _ = golden_block("dflash")
    label_mask = jnp.asarray([[[1.0] * 3 + [0.0] * (block.drafts - 3)]])
    decayed = blocks.slot_weights(block, label_mask, CROSS_ENTROPY)
    assert (np.diff(decayed[0, 0, :3]) < 0).all()
    assert not decayed[0, 0, 3:].any()
    assert blocks.slot_weights(block, label_mask, KL).tolist() == label_mask.tolist()


def test_label_mask_ends_with_answer_and_row():
    block, head = golden_block("dflash")
    config, model = golden_model("qwen3")
    mask = np.zeros((1, 20), np.float32)
    mask[0, [5, 6, 7, 19]] = 1

    def fill(head, model, mask):
        tokens, key = jnp.arange(20)[None], jax.random.key(3)
        return blocks.fill_blocks(
            block, head, config, model, tokens, mask, key, 4, jnp.float32, False
        )

    filled = jitted(fill)(head, model, mask)
    by_first = {
        int(t[0]): m.tolist() for t, m in zip(filled.labels[0], filled.label_mask[0], strict=True)
    }
    slots = block.drafts
    assert by_first[5] == ([1.0, 1.0, 1.0] + [0.0] * slots)[:slots]
    assert by_first[7] == ([1.0] + [0.0] * slots)[:slots]
    assert by_first[19] == ([1.0] + [0.0] * slots)[:slots]
    assert filled.before[0, :, 0].tolist() == [int(t[0]) - 1 for t in filled.labels[0]]


@pytest.mark.parametrize(
    ("folder", "objective", "remat"),
    [
        pytest.param("dflash", CROSS_ENTROPY, False, marks=pytest.mark.matrix),
        ("dflash", CROSS_ENTROPY, True),
        ("jetspec", KL, False),
        ("dspark_vanilla", CROSS_ENTROPY, False),
        pytest.param("dspark_vanilla", KL, False, marks=pytest.mark.matrix),
        ("dflash2_anchor", CROSS_ENTROPY, False),
        pytest.param("dflash2_anchor", KL, False, marks=pytest.mark.matrix),
    ],
)
def test_block_loss_decreases_after_gradient_step(folder, objective, remat):
    block, _ = golden_block(folder)
    config, model = golden_model("qwen3")
    head = init.fresh_block(block, config, model, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, config.vocab)

    def loss(head):
        mask, key = jnp.ones((2, 32)), jax.random.key(1)
        filled = blocks.fill_blocks(
            block, head, config, model, tokens, mask, key, 3, jnp.float32, remat
        )
        return blocks.block_loss(block, head, model, filled, objective, jnp.float32)

    before, after = lowered(loss, head)
    assert after < before


def expected_tree_length(weights: np.ndarray, ranks: list[int], nodes: int) -> int:
    """Accepted tokens, by brute force over all prefixes of the candidates."""
    prefixes = [
        (float(sum(weights[d, r] for d, r in enumerate(prefix))), prefix)
        for depth in range(1, len(weights) + 1)
        for prefix in product(range(weights.shape[1]), repeat=depth)
    ]
    best = {prefix for _, prefix in sorted(prefixes, reverse=True)[: nodes - 1]}
    return 1 + sum(tuple(ranks[:depth]) in best for depth in range(1, len(ranks) + 1))


def test_tree_acceptance_equals_brute_force():
    rng = np.random.default_rng(2)
    for _ in range(40):
        logits = 2 * rng.standard_normal((4, 3)).astype(np.float32)
        weights = np.sort(jax.nn.log_softmax(logits, axis=-1), axis=1)[:, ::-1]
        ranks = rng.integers(0, 4, 4)
        chain, *trees = tree_acceptance.accepted(weights, ranks)
        assert chain == 1 + int(np.cumprod(ranks == 0).sum())
        assert trees == [expected_tree_length(weights, ranks.tolist(), n) for n in (16, 32, 64)]
