"""Golden numbers of a VLM: image embeddings and M-RoPE positions in prompts, and its MTP layer.

The numbers come from the reference implementation, see golden/README.md; the weights are those of
`qwen3_5_dense`.
"""

from functools import partial

import numpy as np
import pytest

from shared.spec import mrope
from tests.support.golden_images import MODEL, WANT, fitted, patches_of, vision
from tests.support.golden_implementations import IMPLEMENTATIONS
from tests.support.golden_models import Images
from tests.support.vision_encoders import of_specification

# As of text, see test_golden.py: the orders of float32 sums differ.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def images_of(prompt: str, numbers: tuple[int, ...], rows: np.ndarray) -> Images:
    """Image inputs of a golden prompt; their pool rows start at 1."""
    tokens, image = WANT[f"{prompt}_ids"], vision().image_token
    grids = [tuple(int(x) // 2 for x in WANT[f"grid_{i}"][1:]) for i in numbers]
    found, delta = mrope.mrope_positions(tokens, image, grids)
    is_image = tokens == image
    sources = np.where(is_image, np.cumsum(is_image), 0).astype(np.int32)
    return Images(found, delta, np.concatenate([np.full_like(rows[:1], np.nan), rows]), sources)


TWO = images_of("mm", (0, 1), WANT["mm_embeds"])


@pytest.mark.parametrize("cuts", [(57,), (20, 37), (4, 3, 50)], ids=str)
def test_image_prompt_any_split_matches_golden(cuts, implementation):
    golden, begins, logits, hidden = implementation(MODEL), 0, [], []
    for count in cuts:
        at = slice(begins, begins + count)
        passed = golden.prefill(WANT["mm_ids"][at], None, TWO.piece(at))
        logits.append(passed.logits)
        hidden.append(passed.hidden)
        begins += count
    close(np.concatenate(logits), WANT["mm_logits"])
    close(np.concatenate(hidden), WANT["mm_hidden"])


def greedy(golden, logits, count):
    token, text, scored = logits[-1].argmax(), [], []
    while len(text) < count:
        text.append(token)
        got = golden.verify(np.array([token]), np.zeros(1, np.int32)).logits
        golden.commit(np.arange(1))
        scored.append(got[0])
        token = got[0].argmax()
    return text, scored


def test_text_after_images_matches_golden(implementation):
    golden = implementation(MODEL)
    logits = golden.prefill(WANT["mm_ids"], None, TWO).logits
    text, scored = greedy(golden, logits, 10)
    assert text == WANT["mm_greedy_ids"].tolist()
    close(scored, WANT["mm_greedy_logits"])


def test_image_at_prompt_start_matches_golden(implementation):
    """Its rows are the specification's own, from pixels on."""
    rows = of_specification()(patches_of(fitted(2)))
    images = images_of("one", (2,), rows)
    golden = implementation(MODEL)
    logits = golden.prefill(WANT["one_ids"], None, images).logits
    text, _ = greedy(golden, logits, 10)
    assert text == WANT["one_greedy_ids"].tolist()


def test_mtp_with_images_matches_golden(implementation):
    sources = np.append(TWO.sources[1:], 0).astype(np.int32)
    following = Images(TWO.turns, TWO.delta, TWO.pool, sources)
    given = (WANT["mtp_next_ids"], WANT["mm_hidden"], 0)
    hidden, logits = implementation(MODEL).mtp(*given, following)
    close(hidden, WANT["mtp_images_hidden"])
    close(logits, WANT["mtp_images_logits"])
    of_ids = Images(TWO.turns, TWO.delta, TWO.pool, np.zeros_like(sources))
    hidden, logits = implementation(MODEL).mtp(*given, of_ids)
    close(logits, WANT["mtp_ids_logits"])
    assert np.abs(logits - WANT["mtp_images_logits"]).max() > 1


def test_text_with_mrope_positions_bitwise_equal(implementation):
    tokens = np.arange(1, 30)
    plain = implementation(MODEL).prefill(tokens, None)
    places = np.arange(29, dtype=np.int32)[:, None].repeat(3, axis=1)
    nothing = Images(places, 0, TWO.pool, np.zeros(29, np.int32))
    seen = implementation(MODEL).prefill(tokens, None, nothing)
    np.testing.assert_array_equal(seen.logits, plain.logits)
