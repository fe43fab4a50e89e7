"""State of a slot after a step: lengths, newest tokens and token counts."""

import numpy as np
import pytest

from shared.spec import slot_state as spec
from tests.support.implementations import Implementation, each_implementation

SLOTS, VOCAB = 6, 9


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def memory(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths, newest = rng.integers(5, 20, SLOTS), rng.integers(0, VOCAB, SLOTS)
    seen, draft_from = rng.integers(0, 5, (SLOTS, VOCAB)), rng.integers(0, 5, SLOTS)
    return tuple(x.astype(np.int32) for x in (lengths, newest, seen, draft_from))


def commit_case(is_fed: bool) -> dict[str, np.ndarray | None]:
    """Rows that emit 3, 0, 1 and 2 tokens; prompts end before, after and within them."""
    lengths, newest, seen, draft_from = memory(1)
    owners = i32(4, 2, 1, 5)
    return {
        "lengths": lengths,
        "newest": newest,
        "seen": seen,
        "draft_from": None if is_fed else draft_from,
        "slots": owners,
        "before": lengths[owners],
        "tokens": np.array([[7, 7, 3], [8, 1, 2], [5, 0, 0], [6, 2, 0]], np.int32),
        "counts": i32(3, 0, 1, 2),
        "prompt_length": lengths[owners] + i32(-2, 1, 3, 2),
    }


def test_slot_commit_updates_own_rows_only() -> None:
    case = commit_case(is_fed=False)
    lengths, newest, seen, draft_from = spec.commit(**case)
    assert (lengths - case["lengths"]).tolist() == [0, 1, 0, 0, 3, 2]
    assert newest[case["slots"]].tolist() == [3, case["newest"][2], 5, 2]
    assert newest[[0, 3]].tolist() == case["newest"][[0, 3]].tolist()
    assert (draft_from[case["slots"]] == lengths[case["slots"]]).all()
    gained = seen - case["seen"]
    assert gained[4].tolist() == [0, 0, 0, 2, 0, 0, 0, 4, 0]  # both 7 count
    assert not gained[[0, 2, 3]].any()
    assert seen[1, 5] == case["seen"][1, 5] | 1  # still within the prompt: a mark
    assert seen[5, 6] == case["seen"][5, 6] | 1
    assert gained[5, 2] == 2  # the first output


def test_slot_commit_with_drafter_extend_omits_draft_from() -> None:
    assert spec.commit(**commit_case(is_fed=True))[3] is None


def test_count_marks_prompt_once_and_counts_outputs() -> None:
    seen = np.zeros((2, 4), np.int32)
    tokens = i32(3, 3, 2, 2, 1)
    is_output = np.array([False, False, True, True, True])
    is_counted = np.array([True, True, True, True, False])
    got = spec.count(seen, i32(1, 1, 1, 1, 1), tokens, is_output, is_counted)
    assert got.tolist() == [[0, 0, 0, 0], [0, 0, 4, 1]]


@each_implementation
@pytest.mark.parametrize("is_fed", [True, False])
def test_slot_commit_matches_spec(is_fed: bool, implementation: Implementation) -> None:
    case, names = commit_case(is_fed), ("lengths", "newest", "seen", "draft_from")
    got = implementation("slot_state").commit(**case)
    for name, want, found in zip(names, spec.commit(**case), got, strict=True):
        if want is not None:
            np.testing.assert_array_equal(found, want, err_msg=name)


@each_implementation
def test_count_matches_spec(implementation: Implementation) -> None:
    rng = np.random.default_rng(2)
    R = 40
    case = (
        memory(3)[2],
        rng.integers(1, SLOTS, R).astype(np.int32),
        rng.integers(0, VOCAB, R).astype(np.int32),
        rng.random(R) < 0.5,
        rng.random(R) < 0.8,
    )
    got, want = implementation("slot_state").count(*case), spec.count(*case)
    np.testing.assert_array_equal(got[1:], want[1:])  # padding goes to slot 0
