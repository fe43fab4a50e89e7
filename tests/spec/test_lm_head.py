"""LM head of both backends: the choice from a projection equals the choice from full logits."""

import numpy as np
import pytest

from shared.spec import lm_head as spec
from tests.support.cases.sampling.lm_head import TABLE
from tests.support.op_sides import SIDES

CASE, RANKED = (case for case in TABLE if not case.is_large)


@pytest.mark.parametrize("name", SIDES)
def test_fused_rank_matches_spec(name: str) -> None:
    side, arguments = SIDES[name](), RANKED.arguments(seed=4)
    ids, weights = side.run(side.operation(RANKED), side.placed(RANKED, arguments))
    want = spec.fused_rank(**arguments)
    np.testing.assert_array_equal(ids, want.ids)
    # Logarithms of two libraries, and masses that are rounded to units.
    np.testing.assert_allclose(weights, want.weights, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", SIDES)
def test_fused_choose_matches_spec(name: str) -> None:
    side, arguments = SIDES[name](), CASE.arguments(seed=4)
    got = side.run(side.operation(CASE), side.placed(CASE, arguments))
    for found, want in zip(got, CASE.specified(arguments, None), strict=True):
        np.testing.assert_array_equal(found, want)


def test_needs_logits_false_rows_choose_argmax() -> None:
    """A row that needs no logits takes its best token; the others do not."""
    arguments = CASE.arguments(seed=4)
    given = {name: arguments[name] for name in ("seen", "positions", "request")}
    asks = spec.needs_logits(params=arguments["params"], **given)
    chosen, scores = spec.fused_choose(**arguments), spec.scores(arguments["projection"])
    assert not asks[8:].any()
    assert asks[:8].sum() == 8
    np.testing.assert_array_equal(chosen.ids[~asks], scores.argmax(axis=1)[~asks])
