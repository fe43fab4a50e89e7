"""The shared-memory all-gather of ranks: order, fences and timeouts."""

import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from shared.boundary import shm_allgather as module
from shared.boundary.shm_allgather import AllGatherTimeout, ShmAllGather
from shared.boundary.tp_group import SINGLE_RANK, TPGroup

PAGE = 4096  # the sequence numbers of a rank have a page of their own


@pytest.fixture
def shm_all_gather():
    made = ShmAllGather.create(3, box_bytes=64, wait_s=60.0)
    yield made
    made.remove()


def given_by(rank, call, size=150):
    return ((np.arange(size) + 7 * rank + 31 * call) % 251).astype(np.uint8)


def exchanges(shm_all_gather, rank, calls=40):
    return [shm_all_gather.all_gather(rank, given_by(rank, call)) for call in range(calls)]


def expected(calls=40):
    return [np.stack([given_by(rank, call) for rank in range(3)]) for call in range(calls)]


def test_shm_allgather_returns_all_ranks_in_order(shm_all_gather):
    with ThreadPoolExecutor(3) as threads:
        got = list(threads.map(partial(exchanges, shm_all_gather), range(3)))
    for of_rank in got:
        np.testing.assert_array_equal(of_rank, expected())


def test_shm_allgather_fences_values_and_sequence_numbers(shm_all_gather, monkeypatch):
    """Weakly ordered CPUs need fences between data and sequence number."""
    path, *_ = shm_all_gather.__reduce__()[1]
    memory, seen = np.memmap(path, np.uint8, "r"), []
    numbers, own = memory[: 3 * PAGE].view(np.int64).reshape(3, -1)[:, 0], memory[3 * PAGE + 64 :]

    def looked():
        if threading.current_thread() is threading.main_thread():
            seen.append((numbers.tolist()[0], min(numbers[1:]), own[:4].tolist()))

    monkeypatch.setattr(module, "fence", looked)
    with ThreadPoolExecutor(2) as threads:
        others = [
            threads.submit(shm_all_gather.all_gather, rank, given_by(rank, 0, 4)) for rank in (1, 2)
        ]
        while min(numbers[1:]) < 1:
            time.sleep(0.001)
        shm_all_gather.all_gather(0, given_by(0, 0, 4))
        assert [len(each.result(10)) for each in others] == [3, 3]
    values = given_by(0, 0, 4).tolist()
    assert seen == [(0, 1, values), (1, 1, values), (1, 1, values)]


def test_shm_allgather_works_across_processes(shm_all_gather):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        others = pool.map_async(partial(exchanges, shm_all_gather), (1, 2), chunksize=1)
        np.testing.assert_array_equal(exchanges(shm_all_gather, 0), expected())
        for of_rank in others.get(60):
            np.testing.assert_array_equal(of_rank, expected())


@pytest.mark.parametrize("rank", [0, 1])
def test_shm_allgather_timeout_names_missing_rank(shm_all_gather, rank):
    """Each rank has a timeout of its own, and the other one is certain to be present."""
    path, num_ranks, box_bytes, _ = shm_all_gather.__reduce__()[1]
    words, other = np.memmap(path, np.int64, "r"), 1 - rank
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(shm_all_gather.all_gather, other, given_by(other, 0, 8))
        while words[other * PAGE // 8] < 1:
            time.sleep(0.001)
        error = rf"rank 2 of 3 did not reach exchange 1 within 0.3 s \(waited on by rank {rank}\)"
        with pytest.raises(AllGatherTimeout, match=error):
            ShmAllGather(path, num_ranks, box_bytes, 0.3).all_gather(rank, given_by(rank, 0, 8))
        shm_all_gather.all_gather(2, given_by(2, 0, 8))
        assert len(waiting.result(60)) == 3


def test_shm_allgather_waits_once_for_missing_rank(shm_all_gather):
    """A step has many exchanges, and only one may wait for the timeout."""
    shm_all_gather.wait_s, began = 0.3, time.monotonic()
    for call, wait_s in ((1, 0.3), (2, 0)):
        error = f"did not reach exchange {call} within {wait_s} s"
        with pytest.raises(AllGatherTimeout, match=error):
            shm_all_gather.all_gather(0, given_by(0, 0, 8))
        assert time.monotonic() - began >= 0.3


def test_shm_allgather_size_mismatch_names_rank(shm_all_gather):
    with ThreadPoolExecutor(3) as threads:
        sizes = (8, 8, 12)
        futures = [
            threads.submit(shm_all_gather.all_gather, rank, given_by(rank, 0, size))
            for rank, size in enumerate(sizes)
        ]
        with pytest.raises(AllGatherTimeout, match="rank 2 of 3 sent 12 bytes in exchange 1"):
            futures[0].result(10)


def test_tp_group_rejects_invalid_ranks(shm_all_gather):
    with pytest.raises(ValueError, match="rank must be in 0..2, got 3"):
        TPGroup(3, 3, shm_all_gather)
    with pytest.raises(ValueError, match="shm_all_gather must be created for 2 ranks, got 3"):
        TPGroup(0, 2, shm_all_gather)
    assert SINGLE_RANK.is_single


def test_shm_allgather_leaves_no_file():
    """A killed process leaves no file behind."""
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    made = ShmAllGather.create(2, box_bytes=64)
    assert (set(shared.iterdir()) if shared.is_dir() else set()) == before
    made.remove()
