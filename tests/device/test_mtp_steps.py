"""NEXTN with MTP layers in DeepSeek's naming: text and steps equal those of transformers.

The checkpoint is random. Its MTP layer agrees with the model at about every second position. JAX
has the marker `matrix`, as have shorter chains, which draft the first tokens of the longest.
"""

from __future__ import annotations

import pytest

from shared.spec.draft_tree import TreeShape
from tests.support.backends import FRAMEWORKS
from tests.support.cells import BATCH, GREEDY, MODEL_SEEDS, Backends, requests_of
from tests.support.closing_fixture import closing_fixture
from tests.support.saved_mtp import SavedMtp
from tests.support.tiny_models import write_tiny
from tests.support.tree_cells import TREES, cell

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
CHAINS = tuple(TreeShape.chain(depth, BATCH) for depth in (1, 2, 3))
TREE = TREES[2]


backends = closing_fixture(
    lambda: Backends({(x, "NEXTN"): (*CHAINS, TREE) for x in FAMILIES}, lambda family, name: name)
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SavedMtp]:
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        write_tiny(folder, family, MODEL_SEEDS[family])
        found[family] = SavedMtp(folder)
    return found


@pytest.mark.parametrize(
    "shape",
    [
        *(pytest.param(x, id=f"S{x.depth}", marks=pytest.mark.matrix) for x in CHAINS[:-1]),
        *(pytest.param(CHAINS[-1], id="S3"), pytest.param(TREE, id="tree")),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "framework",
    [pytest.param(x, marks=pytest.mark.matrix if x == "jax" else ()) for x in FRAMEWORKS],
)
def test_mtp_steps_equal_those_of_transformers(framework, family, shape, backends, saved):
    one = cell(family, "NEXTN", shape, GREEDY, "mixed", 1, 16)
    outcomes, accepted = backends.served(framework, one), set()
    for request in requests_of(one):
        served = outcomes[request.request_id]
        text = saved[family].greedy(request.prompt, len(served.tokens))
        assert served.tokens == text
        if shape != TREE:
            want = saved[family].accepted(request.prompt, text, shape.depth)
            # A text may end within the accepted drafts of its last step.
            assert served.accepted[:-1] == want[:-1]
            assert served.accepted[-1] >= want[-1]
        accepted |= {*served.accepted}
    assert {*range(min(shape.depth, 3) + 1)} <= accepted, "drafts of some depths were never tested"
