"""Training of block heads on the blocks that serving fills, and on their draft choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.training import block as blocks
from jax_impl.training import candidate_loss, init
from jax_impl.training.block import BlockHeadConfig
from jax_impl.training.forward import Passed
from jax_impl.training.nnx_modules import DraftModel
from shared.drafts.dspark_config import MarkovConfig
from tests.support.golden_blocks import close, golden_block_head
from tests.support.training import GOLDEN, golden_model, jitted, lowered, padded, vectors

HOW = {"compute_dtype": jnp.float32, "remat": False}


def golden_block(folder: str) -> tuple[BlockHeadConfig, DraftModel]:
    head, _ = golden_block_head(GOLDEN / folder, GOLDEN / "qwen3")
    return BlockHeadConfig.of(head.config), DraftModel(
        {name: jnp.asarray(array) for name, array in head.weights.items()}
    )


@pytest.mark.parametrize("folder", ["dflash", "dspark_vanilla", "dflash2_anchor"])
def test_fill_of_all_anchors_matches_golden(folder):
    (block, head), (_, model) = golden_block(folder), golden_model("qwen3")
    given, want = vectors("dflash" if folder == "dflash" else "dflash_speculators"), vectors(folder)
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
        if folder == "dflash":
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
    losses, agrees = candidate_loss.loss(block.config, head, model, *rows, jnp.float32)
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


def test_slot_weights_decrease_and_end_with_answer():
    block, _ = golden_block("dflash")
    mask = np.zeros((1, 20), np.float32)
    mask[0, 5:8] = 1
    anchors, ones = jnp.asarray([[4, 17]]), jnp.ones((1, 20))
    weights = blocks.slot_weights(block, jnp.asarray(mask), anchors, jnp.asarray([[True, True]]))
    assert (np.diff(weights[0, 0, :3]) < 0).all()
    assert not weights[0, 0, 3:].any()
    assert not weights[0, 1].any()
    # A block at the end has slots that no token belongs to.
    at_end = blocks.slot_weights(block, ones, anchors, jnp.asarray([[False, True]]))
    assert not at_end[0, 0].any()
    assert np.count_nonzero(at_end[0, 1]) == 2


@pytest.mark.parametrize(
    ("folder", "remat"),
    [
        pytest.param("dflash", False, marks=pytest.mark.matrix),
        ("dflash", True),
        ("dspark_vanilla", False),
        ("dflash2_anchor", False),
    ],
)
def test_block_loss_decreases_after_gradient_step(folder, remat):
    block, _ = golden_block(folder)
    config, model = golden_model("qwen3")
    head = init.fresh_block(block, config, model, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, config.vocab)

    def loss(head):
        what = (block, head, config, model, tokens, jnp.ones((2, 32)), jax.random.key(1))
        return blocks.block_loss(*what, 3, jnp.float32, remat)

    before, after = lowered(loss, head)
    assert after < before
