"""Golden numbers of peft adapters on every implementation, see golden/README.md."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.support.golden_implementations import IMPLEMENTATIONS

GOLDEN = Path(__file__).parents[1] / "golden"
BASES = {
    "qwen3_lora": "qwen3",
    "qwen3_lora_part": "qwen3",
    "qwen3_lora_dora": "qwen3",
    "qwen3_moe_lora": "qwen3_moe",
}

# Float32 on both sides, logits of magnitude 4 to 10: only the orders of the sums differ.
close = partial(np.testing.assert_allclose, rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("folder", BASES)
def test_adapted_logits_match_golden(folder: str, implementation: str) -> None:
    """A prefill, then a tree with rejected branches, then single tokens."""
    want = np.load(GOLDEN / folder / "vectors.npz")
    base = GOLDEN / BASES[folder]
    golden = IMPLEMENTATIONS[implementation](base, adapter=GOLDEN / folder)
    close(golden.prefill(want["short_ids"], None).logits, want["short_logits"])
    a, b, c, *others = want["decode_ids"]
    wrong = (b + 1) % want["decode_logits"].shape[1]
    got = golden.verify(np.array([a, wrong, b, b, c]), np.array([0, 0, 0, 1, 2]))
    close(got.logits[[0, 2, 4]], want["decode_logits"][:3])
    golden.commit(np.array([0, 2, 4]))
    got = golden.verify(np.array(others), np.maximum(np.arange(5) - 1, 0))
    close(got.logits, want["decode_logits"][3:])
