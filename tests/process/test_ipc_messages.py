"""IPC messages: pixels pass between processes with the minimum of copies."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shared.process.ipc_messages import FrameReader, in_parts, pack

SIZE = 16 << 20
PIXELS = np.arange(SIZE, dtype=np.uint8).reshape(-1, 4, 4)
FEW = np.arange(5, dtype=np.uint8)
PIECE = 1 << 18


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@contextmanager
def taking(at_most: int) -> Iterator[None]:
    """Asserts a limit of additional peak memory."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    yield
    assert tracemalloc.get_traced_memory()[1] - before <= at_most


def test_in_parts_sends_pixels_without_copy(traced):
    with taking(2 * PIECE):
        _, sent, _, few, _ = in_parts(["add", 3], [PIXELS, FEW])
    assert np.shares_memory(np.asarray(sent), PIXELS)
    assert bytes(few) == bytes(FEW)


def test_frame_reader_copies_pixels_once(traced):
    data = memoryview(b"".join(in_parts(["add", 3], [PIXELS])) + pack(["next"]))
    reader, messages = FrameReader(), []
    for at in range(0, len(data), PIECE):
        # The first piece allocates memory for all pixels, later pieces reuse it.
        with taking(SIZE + 3 * PIECE if at == 0 else 3 * PIECE):
            messages += reader.feed(bytes(data[at : at + PIECE]))
        assert reader.is_within == (at + PIECE < len(data))
    (kind, number, (pixels,)), last = messages
    assert (kind, number, last) == ("add", 3, ["next"])
    np.testing.assert_array_equal(pixels, PIXELS.reshape(-1))


@pytest.mark.parametrize("size", [1, 2, 7, 100])
def test_frame_reader_handles_any_chunk_size(size):
    sent = [(["a", 1], []), (["b"], [FEW, FEW[:0], FEW[:3]]), (["c"], []), (["d"], [FEW[:1]])]
    data = b"".join(bytes(part) for message in sent for part in in_parts(*message))
    reader = FrameReader()
    read = [m for at in range(0, len(data), size) for m in reader.feed(data[at : at + size])]
    for got, (message, pixels) in zip(read, sent, strict=True):
        assert got[: len(message)] == message
        assert [bytes(each) for part in got[len(message) :] for each in part] == [
            *map(bytes, pixels)
        ]
