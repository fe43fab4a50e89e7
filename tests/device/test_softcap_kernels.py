"""Kernel of the soft cap of logits against the specification: on a GPU, or interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shared.spec import layers as spec
from tests.support.kernels import AS_WRITTEN, INTERPRET, KERNELS, ON_GPU, share_arithmetic

pytestmark = pytest.mark.usefixtures("interpreted")

CAP = 30.0


def logits() -> np.ndarray:
    """Rows of more than one block: small, usual and far logits, and no number."""
    rows = np.random.default_rng(0).standard_normal((3, 1500)).astype(np.float32)
    rows *= np.array([[1e-3], [20.0], [300.0]], np.float32)
    rows[0, :6] = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e6)
    return rows


def run(language: str) -> np.ndarray:
    """Calls the kernel of a language."""
    softcap = KERNELS[language]["layers"].softcap
    if language == "triton":
        given = torch.from_numpy(logits()).to("cuda" if ON_GPU else "cpu")
        return softcap(given, CAP).cpu().numpy()
    program = partial(softcap, capped=CAP, interpret=INTERPRET)
    return np.asarray(jax.jit(program, compiler_options=AS_WRITTEN)(jnp.asarray(logits())))


@pytest.mark.parametrize("language", KERNELS)
def test_softcap_kernel_matches_spec(language: str) -> None:
    # 1 + exp(2 y) rounds to units of 1.2e-7, which the cap multiplies.
    np.testing.assert_allclose(run(language), spec.softcap(logits(), CAP), rtol=0, atol=1e-5)


def test_softcap_kernels_bitwise_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    share_arithmetic(monkeypatch)
    first, second = (run(language).view(np.uint32) for language in KERNELS)
    np.testing.assert_array_equal(first, second)
