"""M-RoPE positions equal the reference implementation's; text positions are unchanged."""

import time

import numpy as np
import pytest

from shared.models.rotary import RotaryConfig
from shared.spec import mrope as spec
from tests.support.golden_images import WANT, vision


def grid(number: int) -> tuple[int, int]:
    _, rows, columns = WANT[f"grid_{number}"] // 2
    return int(rows), int(columns)


@pytest.mark.parametrize(("prompt", "images"), [("mm", (0, 1)), ("one", (2,))])
def test_mrope_positions_match_golden(prompt, images):
    tokens = WANT[f"{prompt}_ids"]
    found, delta = spec.mrope_positions(
        tokens, vision().image_token, [grid(each) for each in images]
    )
    np.testing.assert_array_equal(found.T, WANT[f"{prompt}_pos"])
    assert delta == WANT[f"{prompt}_delta"]


def test_mrope_position_after_image_is_max_side():
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens, want, turn, grids = [], [], 0, []
        for rows, columns in rng.integers(1, 5, (rng.integers(4), 2)).tolist():
            for _ in range(rng.integers(3)):
                tokens, want, turn = [*tokens, 1], [*want, [turn] * 3], turn + 1
            grids.append((rows, columns))
            tokens += [250] * (rows * columns)
            want += [[turn, turn + i, turn + j] for i in range(rows) for j in range(columns)]
            turn += max(rows, columns)
        tokens, want = [*tokens, 1], [*want, [turn] * 3]
        found, delta = spec.mrope_positions(np.array(tokens), 250, grids)
        assert found.tolist() == want
        assert delta == turn + 1 - len(tokens)


def test_mrope_positions_of_long_prompt_are_fast():
    tokens = np.ones(1 << 20, np.int64)
    tokens[5:9] = 250
    began = time.process_time()
    spec.mrope_positions(tokens, 250, [(2, 2)])
    assert time.process_time() - began < 0.5  # 0.02 s; a look at each token takes 1.6


def test_mrope_of_text_equals_positions():
    found, delta = spec.mrope_positions(np.arange(7), 250, [])
    np.testing.assert_array_equal(found, np.arange(7)[:, None].repeat(3, axis=1))
    assert delta == 0


@pytest.mark.parametrize("grids", [[], [(1, 2)], [(1, 4)], [(1, 3), (1, 1)], [(0, 3)]])
def test_mrope_positions_reject_mismatched_images(grids):
    with pytest.raises(ValueError, match="image tokens.* its images"):
        spec.mrope_positions(np.array([1, 250, 250, 250, 2]), 250, grids)


@pytest.mark.parametrize(
    ("sections", "want"), [((11, 11, 10), [0, 1, 2] * 10 + [0, 1]), ((2, 1, 1), [0, 1, 2, 0])]
)
def test_mrope_section_map_alternates(sections, want):
    rotary = RotaryConfig(theta=1e4, width=2 * sum(sections), sections=sections)
    assert spec.mrope_section_map(rotary).tolist() == want
