"""Gumbel noise and uniform numbers of the kernels: on a GPU, or interpreted."""

import jax
import numpy as np
import pytest
import torch

from kernels.pallas_gpu.sampling import gumbel_noise as pallas_noise
from shared.spec import gumbel_noise as spec
from tests.support.implementations import to_torch
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, triton_interpreter

pytestmark = pytest.mark.usefixtures("interpreted")

if "triton" in KERNELS:
    with triton_interpreter():
        import triton
        import triton.language as tl

        noise_of_words = KERNELS["triton"]["gumbel_noise"].noise_of_words
        max_noise = KERNELS["triton"]["gumbel_noise"].max_noise

        @triton.jit
        def noise_kernel(words_at, out_at, lanes: tl.constexpr):
            """The noise of words, and its upper bound."""
            lane = tl.arange(0, lanes)
            words = tl.load(words_at + lane).to(tl.uint32, bitcast=True)
            tl.store(out_at + lane, noise_of_words(words))
            tl.store(out_at + lanes + lane, max_noise(words))


each_language = pytest.mark.parametrize("language", KERNELS)
WORDS = np.concatenate(
    [
        np.array([0, 1, 2, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 257], np.uint32),
        np.random.default_rng(0).integers(0, 2**32, 4089, dtype=np.uint32),
    ]
)


def noise(language: str) -> np.ndarray:
    """The noise of all words, and its bounds."""
    if language == "pallas":
        both = (pallas_noise.noise_of_words, pallas_noise.max_noise)
        return np.stack([np.asarray(jax.jit(function)(WORDS)) for function in both])
    device = "cuda" if ON_GPU else "cpu"
    words, out = to_torch(WORDS).to(device), torch.empty(2, len(WORDS), device=device)
    noise_kernel[(1,)](words, out, lanes=len(WORDS), enable_fp_fusion=False)
    return out.cpu().numpy()


@each_language
def test_gumbel_noise_matches_float64_reference(language) -> None:
    uniform = np.minimum(WORDS.astype(np.float32) * 2.0**-32 + np.float32(2**-33), 1 - 2.0**-24)
    exact = -np.log(-np.log1p(-uniform.astype(np.float32).astype(np.float64)))
    # A relative error of 1e-7 of the inner logarithm is an absolute one of the outer.
    np.testing.assert_allclose(noise(language)[0], exact, rtol=2e-7, atol=2e-7)


@each_language
def test_gumbel_noise_below_upper_bound(language) -> None:
    found, most = noise(language)
    assert (found < most).all()
    assert found.min() > -3
    # Close enough to be of use where noise is large, which it is for small words.
    small = WORDS < 2**30
    assert (most - found)[small].max() < 0.3


@pytest.mark.parametrize("language", KERNELS)
@pytest.mark.parametrize("levels", [1, 5, 8])
def test_uniforms_match_spec(levels: int, language: str) -> None:
    seeds, positions = np.array([3, 2**32 - 1, 7], np.uint32), np.array([0, 5, 90_000], np.int32)
    uniforms = KERNELS[language]["gumbel_noise"].uniforms
    if language == "pallas":
        given = (jax.numpy.asarray(seeds), jax.numpy.asarray(positions))
        got = np.asarray(uniforms(*given, levels, spec.ACCEPT_STREAM, interpret=INTERPRET))
    else:
        device = "cuda" if ON_GPU else "cpu"
        given = (torch.tensor(x, device=device) for x in (seeds.view(np.int32), positions))
        got = uniforms(*given, levels, spec.ACCEPT_STREAM).cpu().numpy()
    np.testing.assert_array_equal(got, spec.uniforms(seeds, positions, levels))


def test_gumbel_noise_constants_match_spec() -> None:
    assert tuple(spec.ROTATIONS) == pallas_noise.ROTATIONS
    assert int(spec.PARITY) == pallas_noise.PARITY
    for modules in KERNELS.values():
        for name in ("ROTATIONS", "PARITY", "LN2_HIGH", "LN2_LOW", "LOG_TERMS"):
            assert getattr(modules["gumbel_noise"], name) == getattr(pallas_noise, name)
