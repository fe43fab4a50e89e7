"""JAX with weights in stacks over layers, as on a GPU: outputs equal those of torch."""

from __future__ import annotations

import pytest

from jax_impl import weights
from tests.support.cells import GREEDY, PLAIN, Backends, assert_cell
from tests.support.tiny_models import MAMBA2
from tests.support.tree_cells import TREES, cell


@pytest.mark.parametrize(
    "family",
    [MAMBA2[0], *(pytest.param(family, marks=pytest.mark.matrix) for family in MAMBA2[1:])],
)
def test_jax_stacked_recurrent_weights_match_spec(family, monkeypatch):
    monkeypatch.setattr(weights, "are_read_in_stacks", lambda loaded, device: True)
    drafter, shape = ("NEXTN", TREES[0]) if family == "nemotron_h" else ("none", PLAIN)
    backends = Backends({(family, drafter): (shape,)}, lambda family, drafter: drafter)
    assert_cell(cell(family, drafter, shape, GREEDY, "mixed", 1, 16), backends, ("torch", "jax"))
    backends.close()
