"""Memory files of records: seals, and files that are written again."""

from __future__ import annotations

import contextlib
import os
from mmap import mmap

import pytest

from shared.cluster.transfer.record_memory import REUSED_BYTES, RecordMemory, is_sealed
from shared.cluster.transfer.record_store import RecordStore
from tests.support.record_store import publish

SIZE = REUSED_BYTES + 4097


def _inode(memory: RecordMemory) -> int:
    return os.fstat(memory.file).st_ino


def _freed(store: RecordStore, size: int = SIZE) -> RecordMemory:
    """Returns the memory of a record that was published and is no longer held."""
    ticket, record = publish(store, b"key", {}, [memoryview(b"\1" * size)], 0)
    store.drop(ticket)
    return record.memory


@pytest.mark.parametrize("size", [5, SIZE])
def test_descriptor_of_reader_cannot_change_file(size: int):
    memory = RecordMemory(size, lambda _: None)
    memory.body[:] = b"\1" * size
    memory.seal()
    with memory.opened() as file:
        assert is_sealed(file, size)
        for again in (file, os.open(f"/proc/self/fd/{file}", os.O_RDWR)):
            with pytest.raises(OSError):
                os.pwrite(again, b"\2", 0)
            with pytest.raises(OSError):
                os.ftruncate(again, size + 1)
            with pytest.raises(OSError):
                mmap(again, size)
        os.close(again)
        assert os.pread(file, size + 1, 0) == b"\1" * size
    memory.close()


def test_held_record_keeps_size_after_reuse():
    """A server counts the bytes that it has sent after it has freed the record."""
    store = RecordStore(4 * SIZE, 60.0)
    ticket, record = publish(store, b"key", {}, [memoryview(b"\1" * SIZE)], 0)
    store.drop(ticket)
    assert store.allocate(SIZE - 1).num_bytes == SIZE - 1
    assert record.num_bytes == SIZE


def test_seals_of_smaller_file_are_rejected():
    memory = RecordMemory(SIZE, lambda _: None)
    assert not is_sealed(memory.file, SIZE + 1)
    memory.close()


@pytest.mark.parametrize("count", [SIZE, SIZE // 2 + 1])
def test_store_writes_unused_file_again(count: int):
    store = RecordStore(4 * SIZE, 60.0)
    first = _inode(_freed(store))
    memory = store.allocate(count)
    assert _inode(memory) == first
    assert (memory.num_bytes, len(memory.body), store.num_bytes) == (count, count, SIZE)
    memory.close()
    assert store.num_bytes == 0


@pytest.mark.parametrize("count", [SIZE + 1, SIZE // 2])
def test_store_keeps_file_of_other_size(count: int):
    store = RecordStore(4 * SIZE, 60.0)
    first = _inode(_freed(store))
    assert _inode(store.allocate(count)) != first
    assert _inode(store.allocate(SIZE)) == first


@pytest.mark.parametrize("is_mapped", [False, True])
def test_file_of_reader_is_not_written_again(is_mapped: bool):
    store = RecordStore(4 * SIZE, 60.0)
    memory = _freed(store)
    with memory.opened() as file:
        mapping = mmap(file, SIZE, prot=1) if is_mapped else None
        kept = -1 if is_mapped else os.dup(file)
    other = store.allocate(SIZE)
    assert _inode(other) != _inode(memory)
    other.close()
    if mapping is None:
        os.close(kept)
    else:
        mapping.close()
    assert _inode(store.allocate(SIZE)) == _inode(memory)


def test_unused_files_are_within_limit():
    store = RecordStore(3 * SIZE, 60.0)
    held = [store.allocate(SIZE) for _ in range(3)]
    first = _inode(held[0])
    for number, memory in enumerate(held):
        ticket, _ = store.publish(b"%d" % number, {}, memory, 0)
        store.drop(ticket)
    store.allocate(REUSED_BYTES // 4).close()  # the oldest file makes room
    inodes = [_inode(store.allocate(SIZE)) for _ in range(3)]
    assert len(set(inodes)) == 3
    assert first not in inodes[:2]


def test_file_of_cancelled_export_is_freed():
    """Threads may still write to it."""
    store = RecordStore(4 * SIZE, 60.0)
    memory = store.allocate(SIZE)
    body = memory.body
    memory.close()
    other = store.allocate(SIZE)
    body[:4] = b"late"
    assert bytes(other.body[:4]) == bytes(4)


@contextlib.contextmanager
def _old_kernel(monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patched:
        patched.setattr("shared.cluster.transfer.record_memory.FUTURE_WRITE", 1 << 20)
        yield


def test_file_serves_one_record_without_seal(monkeypatch: pytest.MonkeyPatch):
    store = RecordStore(4 * SIZE, 60.0)
    with _old_kernel(monkeypatch):
        memory = store.allocate(SIZE)
        assert not memory.is_reusable
        memory.body[:3] = b"abc"
        ticket, record = store.publish(b"key", {}, memory, 0)
        with record.memory.opened() as file:
            assert is_sealed(file, SIZE)
            assert os.pread(file, 3, 0) == b"abc"
        store.drop(ticket)
        assert store.num_bytes == 0
        assert bytes(store.allocate(SIZE).body[:3]) == bytes(3)
