"""Sampling of a token: distribution, filters, penalties."""

import numpy as np

from shared.spec import sampling as spec
from shared.spec.gumbel_noise import TARGET_STREAM, gumbel
from tests.support.sampling_rows import REAL_VOCAB, choose, f32, i32, in_tree, neutral, process


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


class TestLaw:
    def test_choose_follows_distribution(self) -> None:
        logits = f32(2.0, 1.0, 0.0, -0.5, 0.5, -1.0, 1.5, 0.2)
        draws = 20_000
        seeds, warm = np.full(draws, 11, np.uint32), np.ones(draws, np.float32)
        sampling = neutral(draws, 8, temperature=warm, seed=seeds)
        positions = np.arange(draws, dtype=np.int32)
        chosen = choose(spec, np.tile(logits, (draws, 1)), positions, sampling)
        probabilities = np.exp(logits) / np.exp(logits).sum()
        # 99.9 % quantile of chi-square with 7 degrees of freedom; seed and positions are fixed.
        assert chi_square(np.bincount(chosen, minlength=8), probabilities) < 24.3

    def test_choose_real_vocabulary_follows_distribution(self) -> None:
        # Noise that is infinite for one word in 2^24 shows here only: 151,936 words a draw give 1 %
        # of all draws to a random id. The heavy tail tests unlikely ids in groups, the
        # light one (0.1 %) would be ten times too frequent.
        rng = np.random.default_rng(3)
        tail = rng.normal(size=REAL_VOCAB).astype(np.float32)
        tail[:8] = rng.normal(size=8) / 4
        heads = np.arange(REAL_VOCAB) < 8
        laws = [tail + np.float32(shift) * heads for shift in (10.0, 17.0)]
        cell = np.where(heads, np.arange(REAL_VOCAB), 8 + np.arange(REAL_VOCAB) % 16)
        cells = [cell, np.minimum(cell, 8)]
        counts = [np.zeros(24), np.zeros(9)]
        for first in range(0, 700, 50):
            positions = np.arange(first, first + 50, dtype=np.int32)
            noise = gumbel(np.full(50, 5, np.uint32), positions, REAL_VOCAB, 0)
            for law, of_id, count in zip(laws, cells, counts, strict=True):
                count += np.bincount(of_id[(law + noise).argmax(axis=1)], minlength=len(count))
        # 99.9 % quantiles with 23 and 8 degrees of freedom.
        for law, of_id, count, limit in zip(laws, cells, counts, (49.8, 26.1), strict=True):
            probabilities = np.exp(law.astype(np.float64))
            expected = np.bincount(of_id, weights=probabilities / probabilities.sum())
            assert chi_square(count, expected) < limit

    def test_choose_ties_prefer_lower_id(self) -> None:
        rows = np.array([[1, 3, 3, 2], [0, 0, 0, 0]], np.float32)
        assert choose(spec, rows, i32(0, 0), neutral(2, 4)).tolist() == [1, 0]
        assert spec.best(rows).tolist() == [1, 0]
        assert spec.top_candidates(rows, 3).tolist() == [[1, 2, 3], [0, 1, 2]]

    def test_greedy_rows_add_no_noise(self) -> None:
        # Noise alone decides these rows: 20 of 40 would not choose id 1 by chance.
        rows = np.tile(f32(0, 1e-6, 0), (40, 1))
        positions, everyone = np.arange(40, dtype=np.int32), np.arange(40, dtype=np.int32)
        for temperature, is_noisy in ((0, False), (1, True)):
            warm = np.full(40, temperature, np.float32)
            sampling = neutral(40, 3, temperature=warm, seed=np.full(40, 11, np.uint32))
            chosen = choose(spec, rows, positions, sampling)
            assert (chosen != 1).any() == is_noisy
            noisy = spec.add_gumbel_noise(rows, sampling, everyone, positions, TARGET_STREAM)
            assert (noisy != rows).any() == is_noisy

    def test_draft_weights_are_log_probabilities_divided_by_tau(self) -> None:
        rows = np.array([[0, 1, 2], [0, 1, 2]], np.float32)
        weights = spec.draft_weights(rows, f32(0, 0.7), 0.5)
        np.testing.assert_allclose(np.exp(weights).sum(axis=1), 1, rtol=1e-6)
        # Differences of log probabilities: as the logits at T = 0, divided by tau otherwise.
        np.testing.assert_allclose(np.diff(weights), [[1, 1], [2, 2]], rtol=1e-6)


def kept(probabilities: list[float], **filters: float) -> list[int]:
    logits = np.log(np.array([probabilities], np.float32))
    settings = {"top_k": len(probabilities), "top_p": 1.0, "min_p": 0.0} | filters
    keep = spec.support(
        logits, i32(int(settings["top_k"])), f32(settings["top_p"]), f32(settings["min_p"])
    )
    return np.flatnonzero(keep[0]).tolist()


class TestSupport:
    def test_support_of_single_filters(self) -> None:
        p = [0.1, 0.4, 0.2, 0.3]
        assert kept(p, top_k=2) == [1, 3]
        assert kept(p, top_p=0.5) == [1, 3]  # 0.4 is before token 3, still below
        assert kept(p, top_p=0.3) == [1]
        assert kept(p, min_p=0.6) == [1, 3]
        assert kept(p, top_p=1e-9) == [1]

    def test_support_filters_measured_on_full_distribution(self) -> None:
        # Renormalised over the top 2, 0.4 would become 0.57 and top_p 0.5 would drop token 3.
        assert kept([0.1, 0.4, 0.2, 0.3], top_k=2, top_p=0.5) == [1, 3]
        assert kept([0.1, 0.4, 0.2, 0.3], top_k=3, top_p=0.69, min_p=0.7) == [1, 3]

    def test_support_ties_ranked_by_id(self) -> None:
        assert kept([0.25] * 4, top_k=2) == [0, 1]
        assert kept([0.25] * 4, top_p=0.5) == [0, 1]
        assert kept([0.25] * 4, min_p=1.0) == [0, 1, 2, 3]

    def test_support_neutral_filters_keep_all_tokens(self) -> None:
        # Halves, so that a float32 sum reaches 1 after some 25 tokens of 60.
        logits = -np.log(np.float32(2)) * np.arange(60, dtype=np.float32)[None]
        assert spec.support(logits, i32(60), f32(1), f32(0)).all()
        almost_one = np.nextafter(f32(1), f32(0))
        assert not spec.support(logits, i32(60), almost_one, f32(0)).all()

    def test_support_measured_at_temperature(self) -> None:
        logits = np.log(np.array([[0.6, 0.3, 0.1]] * 2, np.float32))
        sampling = neutral(2, 3, temperature=f32(0.5, 2), top_p=f32(0.6, 0.6))
        got = process(spec, logits, np.zeros((2, 3), np.int32), i32(0, 0), sampling, None)
        assert np.isfinite(got).tolist() == [[True, False, False], [True, True, False]]


class TestProcessed:
    def test_process_neutral_parameters_bitwise_equal(self) -> None:
        logits = np.random.default_rng(0).normal(size=(2, 50)).astype(np.float32)
        seen = np.random.default_rng(1).integers(0, 9, (2, 50)).astype(np.int32)
        for temperature in (0.0, 1.0):
            sampling = neutral(2, 50, temperature=f32(temperature, temperature))
            got = process(spec, logits, seen, i32(3, 4), sampling, None)
            assert got.dtype == np.float32
            assert (got == logits).all()

    def test_penalties_distinguish_prompt_and_output(self) -> None:
        logits = np.array([[2, 2, 2, 2, -2]], np.float32)
        seen = np.array([[0, 1, 2, 5, 1]], np.int32)  # not, prompt, output, both (twice), prompt
        sampling = neutral(1, 5, repetition=f32(2), presence=f32(0.5), frequency=f32(0.25))
        got = process(spec, logits, seen, i32(9), sampling, None)
        assert got.tolist() == [[2, 1, 1 - 0.5 - 0.25, 1 - 0.5 - 0.5, -4]]

    def test_penalties_in_tree_count_ancestors_only(self) -> None:
        seen = np.array([[0, 1, 2, 0]], np.int32)
        tokens = np.array([[2, 3, 1, 3, 3]], np.int32)
        parents = np.array([[0, 0, 1, 1, 0]], np.int32)
        got = in_tree(spec, seen, tokens, parents)
        # The root's own token (2) is in `seen` already; siblings do not see one another.
        want = [[0, 1, 2, 0], [0, 1, 2, 2], [0, 3, 2, 2], [0, 1, 2, 4], [0, 1, 2, 2]]
        assert got[0].tolist() == want

    def test_bias_stop_ids_and_mask_precede_temperature(self) -> None:
        logits = np.array([[1, 2, 3, 4]], np.float32)
        sampling = neutral(
            1,
            4,
            temperature=f32(0.5),
            bias_ids=np.array([[0, 1, 0]], np.int32),
            bias_values=np.array([[5, -1, 0]], np.float32),
            stop_ids=np.array([[3, 3]], np.int32),
            min_length=i32(8),
        )
        seen = np.zeros((1, 4), np.int32)
        early = process(spec, logits, seen, i32(7), sampling, None)
        assert early.tolist() == [[12, 2, 6, -np.inf]]
        late = process(spec, logits, seen, i32(8), sampling, None)
        assert late.tolist() == [[12, 2, 6, 8]]
        allowed = np.array([[False, True, True, True]])
        masked = process(spec, logits, seen, i32(8), sampling, allowed)
        assert masked.tolist() == [[-np.inf, 2, 6, 8]]

    def test_grammar_mask_narrows_support(self) -> None:
        logits = np.log(np.array([[0.7, 0.2, 0.1]], np.float32))
        sampling = neutral(1, 3, temperature=f32(1), top_p=f32(0.6))
        allowed = np.array([[False, True, True]])
        got = process(spec, logits, np.zeros((1, 3), np.int32), i32(0), sampling, allowed)
        assert np.isfinite(got).tolist() == [[False, True, False]]

    def test_sampling_rows_gathers_every_parameter(self) -> None:
        sampling = neutral(
            3, 4, temperature=f32(1, 2, 3), stop_ids=np.array([[1], [2], [3]], np.int32)
        )
        got = sampling.rows(i32(2, 2, 0))
        assert got.temperature.tolist() == [3, 3, 1]
        assert got.stop_ids.tolist() == [[3], [3], [1]]
        assert got.seed.tolist() == [2, 2, 0]
