"""A DFlash head is trained on the blocks that it will fill in serving."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_impl.training import block as blocks
from jax_impl.training import init
from jax_impl.training.block import Block
from jax_impl.training.forward import Passed
from jax_impl.training.modules import DraftModel
from shared.models.checkpoint import Checkpoint
from shared.models.families import config_from_dict
from shared.models.fields import read_json
from shared.models.parameters import decoder_parameters, single
from tests.support.training import GOLDEN, golden_model, jitted, lowered, padded, vectors

HOW = {"compute_dtype": jnp.float32, "remat": False}


def golden_block() -> tuple[Block, DraftModel]:
    settings = read_json(GOLDEN / "dflash" / "config.json")
    layer = config_from_dict({**settings, "architectures": ["Qwen3ForCausalLM"]})
    own = settings["dflash_config"]
    streams = tuple(i + 1 for i in own["target_layer_ids"])
    block = Block(layer, streams, settings["block_size"], own["mask_token_id"])
    files = Checkpoint([GOLDEN / "dflash" / "model.safetensors"])
    norm = (layer.hidden,)
    wanted = [
        single("fc", "fc.weight", (layer.hidden, len(streams) * layer.hidden)),
        single("hidden_norm", "hidden_norm.weight", norm),
        single("final_norm", "norm.weight", norm),
        *decoder_parameters("layer.", layer, [f"layers.{i}" for i in range(layer.num_layers)]),
    ]
    loaded = {p.name: files.load(p, np.float32, lambda count: None) for p in wanted}
    return block, DraftModel({name: jnp.asarray(array) for name, array in loaded.items()})


def test_blocks_of_one_sequence_give_the_golden_numbers_all_at_once():
    want, (block, head), (_, model) = vectors("dflash"), golden_block(), golden_model("qwen3")
    feats = np.pad(want["feats"], ((0, 8), (0, 0)))[None]
    parts = dict(zip(block.aux_streams, np.split(feats, 3, axis=2), strict=True))
    streams = tuple(jnp.asarray(parts.get(i, np.full((1, 48, 32), np.nan))) for i in range(9))
    passed = Passed(streams[2], streams)
    anchors = jnp.asarray(want["starts"][None], jnp.int32)
    fill = jitted(blocks.fill, block, **HOW)
    hidden = fill(head, model, passed, padded(want["tokens"], 48), anchors)
    for place, start in enumerate(want["starts"]):
        # Float32 on both sides, magnitudes up to 10: only the orders of the sums differ.
        got, logits = hidden[0, place], hidden[0, place, 1:] @ model.head[...].T
        np.testing.assert_allclose(got, want[f"hidden_{start}"], rtol=0, atol=1e-4)
        np.testing.assert_allclose(logits, want[f"logits_{start}"], rtol=0, atol=1e-4)


def test_anchors_differ_and_stand_before_tokens_of_the_answer():
    mask = np.zeros((2, 20), np.float32)
    mask[0, [5, 9, 10, 19]] = 1
    mask[0, 2] = 0.1  # of the prompt
    anchors, is_real = jitted(blocks.draw_anchors, num_anchors=6)(mask, jax.random.key(3))
    assert sorted(anchors[0, is_real[0]]) == [4, 8, 9, 18]
    assert not is_real[1].any()


def test_near_slots_weigh_more_and_slots_past_the_answer_nothing():
    block, _ = golden_block()
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


@pytest.mark.parametrize("remat", [False, True])
def test_a_gradient_step_lowers_the_loss_of_a_fresh_head(remat):
    block, _ = golden_block()
    config, model = golden_model("qwen3")
    head = init.fresh_block(block, config, model, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 32), 0, config.vocab)

    def loss(head):
        what = (block, head, config, model, tokens, jnp.ones((2, 32)), jax.random.key(1))
        return blocks.block_loss(*what, 3, jnp.float32, remat)

    before, after = lowered(loss, head)
    assert after < before
