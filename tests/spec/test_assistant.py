"""Gemma 4 assistants: golden numbers of transformers on every implementation, and properties."""

from pathlib import Path

import numpy as np
import pytest

from shared.models.families import config_from_folder
from shared.spec import assistant as spec
from shared.spec import cache_pools
from tests.support.golden_assistants import ASSISTANTS, TARGETS
from tests.support.golden_models import NUM_PAGES, PAGE_SIZE, TABLE, SpecModel, load_golden_head

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPTS = {"written": 24, "few_written": 5}
"""Golden arrays by the length of the prompt: longer than the windows of 8, and shorter."""


def vectors(folder: str) -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN / folder / "vectors.npz"))


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("folder", TARGETS)
@pytest.mark.parametrize("framework", ASSISTANTS)
def test_assistant_levels_match_golden(framework, folder, name):
    want, prompt = vectors(folder), vectors(TARGETS[folder])["short_ids"][: PROMPTS[name]]
    made = ASSISTANTS[framework](GOLDEN / folder, GOLDEN / TARGETS[folder], prompt)
    hidden, logits = made.hidden, None
    for i, token in enumerate(want[f"{name}_ids"]):
        assert logits is None or token == logits[0].argmax()
        logits, hidden = made.level(token, hidden)
        golden = want[f"{name}_logits"][i : i + 1]
        is_out = np.isneginf(logits)
        # transformers gives tokens outside of the best clusters the least logit - 1.
        is_out_there = golden == golden.min() if "centroids" in folder else np.zeros_like(is_out)
        np.testing.assert_array_equal(is_out, is_out_there)
        # Float32 on both sides: the orders of the sums differ.
        np.testing.assert_allclose(logits[~is_out], golden[~is_out], rtol=0, atol=1e-4)
        np.testing.assert_allclose(hidden, want[f"{name}_hidden"][i : i + 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("folder", TARGETS)
def test_next_position_does_not_match_golden(folder):
    """The golden arrays of transformers' own position differ by more than the tolerance."""
    want = vectors(folder)
    assert np.abs(want["written_logits"] - want["hf_logits"]).max() > 1


def made_of(folder: str) -> tuple[spec.Assistant, SpecModel]:
    model = SpecModel(GOLDEN / TARGETS[folder])
    head = load_golden_head(GOLDEN / folder, GOLDEN / TARGETS[folder])
    return spec.Assistant(head, model.config, model.weights), model


def test_assistant_reads_last_layers_with_kv():
    config = config_from_folder(GOLDEN / "gemma4")
    made, _ = made_of("gemma4_assistant_centroids")
    assert made.head.config.kv_layers == (3, 3, 3, 2)
    sources = [each.kv_shared_layer_index for each in config.layers]
    assert sources == [None, None, None, None, 3, 2]
    assert {(at.pool, at.pool_index) for at in made.places} == {
        (config.places[layer].pool, config.places[layer].pool_index) for layer in (2, 3)
    }


def test_assistant_has_no_kv():
    made, _ = made_of("gemma4_assistant")
    sizes = made.head.config.sizes
    assert sizes.pools == ()
    assert sizes.reads_target_kv
    assert sizes.has_draft_input


def test_window_hides_older_positions():
    """NaN in positions that are not visible has no effect, and NaN in others has."""
    made, model = made_of("gemma4_assistant")
    rows = spec.reading_rows(np.array([24]), TABLE, {}, width=1)
    rng = np.random.default_rng(0)
    pools = [
        rng.standard_normal(pool.shape).astype(np.float32)
        for pool in cache_pools.new_pools(model.config, NUM_PAGES, PAGE_SIZE)
    ]
    hidden = rng.standard_normal((1, model.config.hidden)).astype(np.float32)

    def run(position: int, pool: int) -> np.ndarray:
        changed = [each.copy() for each in pools]
        page = TABLE[0, position // PAGE_SIZE]
        changed[pool][:, :, page, position % PAGE_SIZE] = np.nan
        return made.forward(rows, np.array([3]), hidden, tuple(changed))

    (sliding,) = {x.pool for x in made.places[:3]}
    full = made.places[3].pool
    expected = made.forward(rows, np.array([3]), hidden, tuple(pools))
    for position, pool in ((15, sliding), (24, sliding), (24, full)):
        np.testing.assert_array_equal(run(position, pool), expected)
    for position, pool in ((16, sliding), (23, sliding), (0, full), (23, full)):
        assert np.isnan(run(position, pool)).any()


def test_rows_of_request_do_not_see_each_other():
    made, model = made_of("gemma4_assistant")
    model.prefill(vectors("gemma4_moe")["short_ids"], None)
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((3, model.config.hidden)).astype(np.float32)
    tokens = np.array([3, 50, 7])

    def run(some: slice) -> np.ndarray:
        width = len(tokens[some])
        rows = spec.reading_rows(np.array([24]), TABLE, {}, width=width)
        return made.forward(rows, tokens[some], hidden[some], model.pools)

    whole = run(slice(None))
    for i in range(3):
        one = run(slice(i, i + 1))
        # Float32 values of up to 3: NumPy sums products of one row in another order.
        np.testing.assert_allclose(whole[i : i + 1], one, rtol=0, atol=1e-5)


def test_padding_rows_are_finite():
    made, model = made_of("gemma4_assistant")
    rows = spec.reading_rows(np.array([0]), TABLE, {}, width=2)
    hidden = np.zeros((2, model.config.hidden), np.float32)
    assert not rows.is_real.any()
    assert np.isfinite(made.forward(rows, np.array([1, 2]), hidden, model.pools)).all()
