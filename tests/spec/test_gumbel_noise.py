"""Gumbel noise of a token: published cipher vectors, its inputs, and equality of both backends."""

import numpy as np
import pytest

from shared.spec import gumbel_noise as spec
from tests.support.implementations import Implementation, each_implementation
from tests.support.sampling_rows import REAL_VOCAB, i32


class TestNoise:
    @pytest.mark.parametrize(
        ("key", "counter", "words"),
        [
            ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
            ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
            ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
        ],
    )
    def test_threefry_matches_published_vectors(
        self, key: tuple[int, int], counter: tuple[int, int], words: tuple[int, int]
    ) -> None:
        arrays = [tuple(np.array([word], np.uint32) for word in pair) for pair in (key, counter)]
        assert tuple(int(word[0]) for word in spec.threefry2x32(*arrays)) == words

    def test_gumbel_numbered_by_token_id(self) -> None:
        seeds, positions = np.array([7], np.uint32), i32(9)
        got = spec.gumbel(seeds, positions, 5, 0)
        for token in range(5):
            key = (seeds, positions.astype(np.uint32))
            counter = (np.array([token >> 1], np.uint32), np.zeros(1, np.uint32))
            word = spec.threefry2x32(key, counter)[token & 1]
            assert got[0, token] == spec.noise_of_words(word[None])[0, 0]
        # A wider vocabulary (a padded one) leaves the noise of its first ids as it was.
        assert (spec.gumbel(seeds, positions, 8, 0)[:, :5] == got).all()

    def test_gumbel_depends_on_seed_position_and_stream_only(self) -> None:
        def one(seed: int, position: int, stream: int) -> bytes:
            return spec.gumbel(np.array([seed], np.uint32), i32(position), 16, stream).tobytes()

        assert len({one(1, 1, 0), one(2, 1, 0), one(1, 2, 0), one(1, 1, 1)}) == 4
        batch = spec.gumbel(np.array([5, 1], np.uint32), i32(3, 1), 16, 0)
        assert batch[1].tobytes() == one(1, 1, 0)

    def test_noise_of_words_always_finite(self) -> None:
        words = np.array([[0, 1, 0xFFFFFFFF, 0xFFFFFF80, 0xFFFFFF7F, 0x80000000]], np.uint32)
        assert np.float32(words[0, 2]) * np.float32(2**-32) == 1  # the planted trap
        noise = spec.noise_of_words(words)
        assert np.isfinite(noise).all()
        # A large uniform means small noise here, so the clamped end cannot win.
        assert noise[0, 0] == noise.max()
        assert noise[0, 2] == noise.min()
        rng = np.random.default_rng(0)
        assert np.isfinite(
            spec.noise_of_words(rng.integers(0, 2**32, (1, 1 << 20), dtype=np.uint32))
        ).all()

    def test_derive_seed_distinct_per_choice_modulo_64_bits(self) -> None:
        assert len({spec.derive_seed(3, choice) for choice in range(128)}) == 128
        assert spec.derive_seed(-5, 2) == spec.derive_seed(2**64 - 5, 2)
        assert spec.derive_seed(0, 0) == 0x6B200159
        assert spec.derive_seed(1 << 32, 0) != spec.derive_seed(0, 0)


def test_uniform_of_words_never_zero_or_one() -> None:
    """A draft of the target's own probability is then always accepted."""
    words = np.array([[0, 1, 2**32 - 1]], np.uint32)
    made = spec.uniform_of_words(words)
    assert made.min() > 0
    assert made.max() < 1


@each_implementation
def test_threefry_bits_match_spec(implementation: Implementation) -> None:
    words = np.random.default_rng(0).integers(0, 2**32, (4, 300), dtype=np.uint32)
    words[:, :2] = [[0, 2**32 - 1]] * 4
    want = spec.threefry2x32((words[0], words[1]), (words[2], words[3]))
    got = implementation("gumbel_noise").threefry2x32((words[0], words[1]), (words[2], words[3]))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g.view(np.uint32), w)


@each_implementation
def test_gumbel_real_vocabulary_matches_spec(
    implementation: Implementation,
) -> None:
    seeds, positions = np.array([7, 2**32 - 1], np.uint32), np.array([0, 70_000], np.int32)
    for vocab in (REAL_VOCAB, 5):
        want = spec.gumbel(seeds, positions, vocab, spec.TARGET_STREAM)
        got = implementation("gumbel_noise").gumbel(seeds, positions, vocab, spec.TARGET_STREAM)
        assert np.isfinite(got).all()
        # The words are equal; the logarithms of the libraries differ in their last bits.
        np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@each_implementation
def test_noise_of_extreme_words_matches_spec(implementation: Implementation) -> None:
    words = np.array([[0, 1, 2**32 - 1, 2**32 - 2, 2**31]], np.uint32)
    got = implementation("gumbel_noise").noise_of_words(words)
    np.testing.assert_allclose(got, spec.noise_of_words(words), rtol=2e-6, atol=2e-6)


@each_implementation
def test_uniforms_and_rejection_streams_match_spec(implementation: Implementation) -> None:
    ops = implementation("gumbel_noise")
    seeds, positions = np.array([3, 2**32 - 1, 7], np.uint32), i32(0, 5, 90_000)
    # Integers are equal; the uniforms are one rounding of them.
    np.testing.assert_array_equal(
        ops.uniforms(seeds, positions, 4), spec.uniforms(seeds, positions, 4)
    )
    for stream in (spec.RESIDUAL_STREAM, spec.DRAFT_STREAM, spec.DRAFT_STREAM + 2):
        got = ops.gumbel(seeds, positions, 33, stream)
        # As the target's noise: two logarithms.
        np.testing.assert_allclose(got, spec.gumbel(seeds, positions, 33, stream), atol=4e-6)
