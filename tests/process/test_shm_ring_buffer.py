"""The shared-memory ring buffer: all plans reach every rank complete and in order."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shared.process.tp.shm_ring_buffer import Reader, Ring, RingFullError
from tests.support.polling import wait_until

ROOT = Path(__file__).resolve().parents[2]
SIZES = (1, 2, 512, 513, 16384)
SLOTS = 4


def message(number: int, size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int32) * 7 + number


READS = """
import sys, time
from shared.process.tp.shm_ring_buffer import Reader
descriptor, reader, count, pause = int(sys.argv[1]), *map(int, sys.argv[2:4]), float(sys.argv[4])
ring = Reader(descriptor, reader)
print("ready", flush=True)
for number in range(1, count + 1):
    while (words := ring.look(0.002)) is None:
        pass
    expected = 7 * (len(words) - 1) + number
    assert words[0] == number and words[-1] == expected, (number, words)
    assert (words[1:] - words[:-1] == 7).all(), (number, words)
    time.sleep(pause)
print("all", flush=True)
"""


class ReaderProcess:
    """A reader in its own process."""

    def __init__(self, ring: Ring, reader: int, count: int, pause_s: float = 0.0) -> None:
        arguments = map(str, (ring.descriptor, reader, count, pause_s))
        self.process = subprocess.Popen(
            [sys.executable, "-c", READS, *arguments],
            cwd=ROOT,
            pass_fds=[ring.descriptor],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 60)[0], "the reader writes nothing"
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def ring():
    made = Ring(readers=2, max_words=max(SIZES), slots=SLOTS)
    yield made
    made.close()


@pytest.fixture
def reading(ring):
    """Starts readers, and ends them after the test."""
    begun = []

    def begin(*given, **named) -> ReaderProcess:
        begun.append(ReaderProcess(ring, *given, **named))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


def test_ring_readers_receive_all_messages_in_order(ring, reading):
    count = 500  # more than a hundred rounds, with all sizes in all slots
    readers = [reading(index, count) for index in range(2)]
    for number in range(1, count + 1):
        ring.write(message(number, SIZES[number % len(SIZES)]), 30.0)
    assert [reader.line() for reader in readers] == ["all", "all"]
    assert [ring.taken(index) for index in range(2)] == [count, count]


def test_ring_writer_waits_for_slow_reader(ring, reading):
    count = 40
    readers = [reading(0, count), reading(1, count, pause_s=0.01)]
    began = time.monotonic()
    for number in range(1, count + 1):
        ring.write(message(number, 512), 30.0)
        assert number - ring.taken(1) <= SLOTS, "a slot was overwritten before it was read"
    assert time.monotonic() - began > 0.01 * (count - 5), "the writer did not wait"
    assert [reader.line() for reader in readers] == ["all", "all"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda each: each.name)
def test_stopped_ring_reader_is_named_in_error(ring, reading, number):
    """The other reader has read all messages, so that it is not the one to wait for."""
    readers = [reading(0, 100), reading(1, 100)]
    for index in range(3):
        ring.write(message(index + 1, 512), 30.0)
    assert wait_until(lambda: ring.taken(1) == 3)
    os.kill(readers[1].process.pid, number)
    os.waitpid(readers[1].process.pid, os.WUNTRACED)
    for index in range(3, 3 + SLOTS):
        ring.write(message(index + 1, 512), 30.0)
    assert wait_until(lambda: ring.taken(0) == 3 + SLOTS)
    began = time.monotonic()
    with pytest.raises(
        RingFullError, match="reader 1 has read 3 messages and freed no slot in time"
    ) as caught:
        ring.write(message(4 + SLOTS, 512), 0.5)
    assert caught.value.reader == 1
    assert time.monotonic() - began >= 0.5


def test_ring_write_returns_sleeping_readers(ring):
    first, second = Reader(ring.descriptor, 0), Reader(ring.descriptor, 1)
    assert first.fall_asleep() is None
    assert ring.write(message(1, 4), 1.0) == [0]
    first.wake_up()
    assert first.look(0.0) is not None
    assert second.fall_asleep() is not None, "it arrived before the reader slept"
    assert ring.write(message(2, 4), 1.0) == [], "a reader that found a message does not block"


def test_ring_message_is_owned_by_reader(ring):
    first, second = Reader(ring.descriptor, 0), Reader(ring.descriptor, 1)
    ring.write(message(1, 4), 1.0)
    got = first.look(0.0)
    assert second.take() is not None
    for number in range(2, 6):
        ring.write(message(number, 4), 1.0)
        first.take(), second.take()
    np.testing.assert_array_equal(got, message(1, 4))


def test_ring_look_times_out(ring):
    began = time.monotonic()
    assert Reader(ring.descriptor, 0).look(0.05) is None
    assert time.monotonic() - began >= 0.05


def test_ring_rejects_oversized_message_and_unknown_reader(ring):
    with pytest.raises(ValueError, match=f"at most {max(SIZES)} words, got {max(SIZES) + 1}"):
        ring.write(message(1, max(SIZES) + 1), 1.0)
    with pytest.raises(ValueError, match="has 2 readers, none is 2"):
        Reader(ring.descriptor, 2)


def test_ring_leaves_no_shared_memory_file(ring):
    shared = Path("/dev/shm")
    before = set(shared.iterdir()) if shared.is_dir() else set()
    Ring(readers=1, max_words=4, slots=2).close()
    assert (set(shared.iterdir()) if shared.is_dir() else set()) == before
