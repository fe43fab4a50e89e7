"""Frames carry pixels between the processes, and none is copied more often than it has to be."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from shared.process.frames import FrameReader, in_parts, pack

SIZE = 16 << 20
MESSAGE = ["add", [np.arange(SIZE, dtype=np.uint8).data]]


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@contextmanager
def copies(at_most: float) -> Iterator[None]:
    """Takes no more memory beside what is taken than so many times the pixels."""
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    yield
    assert tracemalloc.get_traced_memory()[1] - before <= at_most * SIZE


def test_pixels_are_packed_once_and_travel_as_they_are_packed():
    with copies(2.1):  # the library takes room for as much again
        parts = in_parts(MESSAGE)
    assert b"".join(parts) == pack(MESSAGE)


def test_pixels_are_unpacked_from_where_they_have_arrived():
    data, reader = pack(MESSAGE), FrameReader()
    assert not list(reader.feed(data[:-1]))
    with copies(1.2):
        (message,) = reader.feed(data[-1:] + pack(["next"])[:3])
    assert message == ["add", [bytes(MESSAGE[1][0])]]
    assert list(reader.feed(pack(["next"])[3:])) == [["next"]]
