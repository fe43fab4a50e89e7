"""KV transfer records: header and body, and the arrays of models."""

from __future__ import annotations

import json
import threading
import zlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest

from shared.boundary.kv_transfer import (
    HOST_THREADS,
    VERSION,
    TransferHeader,
    TransferImage,
    TransferRecord,
    TransferRejected,
    copy_words,
    header_arrays,
)
from shared.boundary.transfer_spec import STEP_BYTES, TransferSpec
from shared.drafts.drafter_spec import DrafterSpec
from tests.support.tiny_models import tiny_model

PAGES, WINDOW_PAGES, PAGE_SIZE = 5, 2, 16


def spec_of(family: str, windows: tuple[int, ...] = ()) -> TransferSpec:
    config, _ = tiny_model(family, seed=1)
    drafts = DrafterSpec.of_mtp(config) if family == "qwen3_5" else DrafterSpec.none()
    return TransferSpec.of(config, drafts, "bfloat16", PAGE_SIZE, windows)


def record_of(family: str, windows: tuple[int, ...] = ()) -> TransferRecord:
    spec, has_snapshot = spec_of(family, windows), family == "qwen3_5"
    arrays = header_arrays(spec, PAGES, [WINDOW_PAGES] * len(windows), has_snapshot=has_snapshot)
    header = TransferHeader(
        version=VERSION,
        fingerprint="abc",
        tenant="t",
        adapter="a",
        adapter_version="1",
        tokens=np.arange(PAGES * PAGE_SIZE + 1, dtype=np.int32),
        images=(TransferImage(3, 8, bytes(range(32))),),
        page_size=PAGE_SIZE,
        num_pages=PAGES,
        is_whole=(True, True, False, True, True),
        has_snapshot=has_snapshot,
        arrays=arrays,
    )
    rng, shape = np.random.default_rng(1), header.sections
    made = (rng.integers(-(2**31), 2**31, size, dtype=np.int64).astype(np.int32) for size in shape)
    return TransferRecord(header, tuple(made))


CASES = [("qwen3", ()), ("qwen3_5", ()), ("olmo3", (12,)), ("deepseek_v3", ())]


def sent(record: TransferRecord, code) -> TransferRecord:
    header = TransferHeader.from_fields(code(record.header.to_fields()))
    return TransferRecord.checked(header, b"".join(record.parts()), record.checksum())


@pytest.mark.parametrize(
    "code", [lambda x: json.loads(json.dumps(x)), lambda x: msgpack.unpackb(msgpack.packb(x))]
)
@pytest.mark.parametrize(("family", "windows"), CASES)
def test_record_survives_transfer(family, windows, code):
    record = record_of(family, windows)
    got = sent(record, code)
    assert got.header.to_fields() == record.header.to_fields()
    assert got.num_tokens == PAGES * PAGE_SIZE
    assert got.num_bytes == sum(map(len, got.parts())) > 0
    for mine, other in zip(got.arrays, record.arrays, strict=True):
        np.testing.assert_array_equal(mine, other)


def test_received_record_copies_nothing():
    record = record_of("qwen3_5")
    body = bytearray(b"".join(record.parts()))
    got = TransferRecord.of(record.header, body)
    body[:4] = bytes(4)
    assert got.arrays[0][0, 0] == 0


@pytest.mark.parametrize("where", ["first", "last", "tokens"])
def test_changed_record_is_rejected_by_checksum(where):
    record = record_of("qwen3_5")
    body, header = bytearray(b"".join(record.parts())), record.header
    if where == "tokens":
        header = replace(header, tokens=header.tokens + (header.tokens == 7))
    else:
        body[0 if where == "first" else -1] ^= 1
    with pytest.raises(TransferRejected, match="checksum") as caught:
        TransferRecord.checked(header, body, record.checksum())
    assert caught.value.reason == "checksum"


@pytest.mark.parametrize("size", [1000, 4099, 1 << 20])
def test_checksum_depends_on_bytes_alone(monkeypatch, size):
    """Several arrays of a sender have the checksum of one received body."""
    monkeypatch.setattr("shared.boundary.kv_transfer.CHECKSUM_BYTES", size)
    record = record_of("qwen3_5")
    assert len(record.arrays) > 1
    assert record.checksum() == sent(record, dict).checksum()


@pytest.mark.parametrize("count", [0, 5, 1 << 20, (1 << 20) + 3])
def test_copy_in_threads_copies_all_words(count):
    words, into = np.arange(count, dtype=np.int32), np.full(count + 1, -1, np.int32)
    copy_words(into[:count], words)
    np.testing.assert_array_equal(into, np.append(words, -1))


def test_copies_do_not_wait_for_checksums(monkeypatch):
    """The engine waits for copies, but not for checksums."""
    begun, may_end, crc = threading.Semaphore(0), threading.Event(), zlib.crc32

    def slow(data: bytes, value: int = 0) -> int:
        begun.release()
        may_end.wait(20)
        return crc(data, value)

    monkeypatch.setattr("shared.boundary.kv_transfer.zlib.crc32", slow)
    monkeypatch.setattr("shared.boundary.kv_transfer.CHECKSUM_BYTES", 64)
    record = record_of("qwen3")
    thread = threading.Thread(target=record.checksum)
    thread.start()
    assert all(begun.acquire(timeout=10) for _ in range(HOST_THREADS))
    source, into = np.ones(1 << 20, np.int32), np.zeros(1 << 20, np.int32)
    copying = threading.Thread(target=copy_words, args=[into, source])
    copying.start()
    copying.join(10)
    is_over = not copying.is_alive()
    may_end.set()
    thread.join()
    copying.join()
    assert is_over
    np.testing.assert_array_equal(into, source)


@pytest.mark.parametrize("change", [-1, 1])
def test_body_of_other_size_is_rejected(change):
    record = record_of("qwen3")
    with pytest.raises(TransferRejected, match="bytes is required") as caught:
        TransferRecord.of(record.header, bytes(record.num_bytes + change))
    assert caught.value.reason == "truncated"


BAD = {
    "version": ("version", {"version": 1}),
    "no version": ("version", {"version": None}),
    "pages": ("header", {"num_pages": 6}),
    "flags": ("header", {"is_whole": [1]}),
    "tokens": ("header", {"tokens": [1, 2]}),
    "negative token": ("header", {"tokens": [-1] * 200}),
    "text": ("header", {"tokens": "text"}),
    "image": ("header", {"images": [[1, 2, "aa"]]}),
    "arrays": ("header", {"arrays": [{"name": "x"}]}),
    "size": ("header", {"page_size": 0}),
}


@pytest.mark.parametrize("change", BAD)
def test_invalid_header_is_rejected(change):
    reason, fields = BAD[change]
    given = record_of("qwen3").header.to_fields() | fields
    with pytest.raises(TransferRejected) as caught:
        TransferHeader.from_fields(given)
    assert caught.value.reason == reason


def test_header_without_field_is_rejected():
    given = record_of("qwen3").header.to_fields()
    for name in given:
        with pytest.raises(TransferRejected):
            TransferHeader.from_fields({x: y for x, y in given.items() if x != name})


def test_step_has_bounded_bytes():
    """A step has several entries only if they take at most `STEP_BYTES`."""
    spec = spec_of("qwen3_5")
    for size in (1 << 10, 1 << 14, STEP_BYTES):
        for program in replace(spec, step_bytes=size).programs():
            ((rows, words),) = [shape for _, shape in spec.fields(program)]
            assert rows == 1 or 4 * rows * words <= size


@pytest.mark.parametrize("size", [1 << 10, 1 << 20])
def test_layers_of_programs_cover_snapshot(size):
    spec = replace(spec_of("qwen3_5"), step_bytes=size)
    for work in {program.work for program in spec.programs()}:
        layers = [i for p in spec.programs() if p.work is work for i in p.blocks]
        assert layers == [i for pool in spec.states for i in pool.layers]


def test_entry_of_odd_bytes_is_rejected():
    config, _ = tiny_model("deepseek_v3", seed=1)
    layer = config.layers[0]
    odd = replace(layer, mixer=replace(layer.mixer, rope_size=layer.mixer.rope_size + 1))
    with pytest.raises(ValueError, match="use a larger --page-size"):
        TransferSpec.of(replace(config, layers=(odd,)), DrafterSpec.none(), "bfloat16", 1, ())
