"""KV transfer record: what one server sends to another, so that a prefix is a cache hit there.

A record is what the prefix cache keeps of a sequence: full pages of target and draft KV, at most
one recurrent-state snapshot at their end, and the tokens and images of the cache key. The header is
plain data; the body is its sections one after another, each with entries of equal size
(`shared.boundary.transfer_spec`):

    pages | pages of window pool 0 | ... | layers of states 0 | ...

A window pool has only the last pages of the prefix, those that the next rows attend to.

A prefix may be sent in several records, its parts. Each has the pages after those of the part
before, and the last one has window pages and snapshot too.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from itertools import groupby, pairwise
from math import prod
from typing import Any, Self

import numpy as np
from jaxtyping import Int32

from shared.boundary.transfer_spec import WORD_BYTES, Arrays, TransferSpec
from shared.models.cache_spec import ITEM_BYTES
from shared.models.image_processor import DIGEST_BYTES

VERSION = 3
"""Version of header and body."""

CHECKSUM_BYTES = 1 << 24
"""Bytes of the body in each CRC-32 of its checksum."""

HOST_THREADS, COPIED_BYTES = 8, 1 << 20
"""Threads for copies of records, and for their checksums, and minimum bytes of a copy for each."""


class TransferRejected(ValueError):
    """A record that this server cannot import, or a body that does not match its header.

    Attributes:
      reason: Short name, for metrics: "header", "version", "fingerprint", "arrays", "truncated",
        "checksum", "tokens", "no_snapshot", "no_pages" or "no_cache".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class TransferImage:
    """Image of a record's tokens, as the cache key contains it.

    Attributes:
      first, count: Position of its first image token, and their number.
      digest: Digest of its size and pixels.
    """

    first: int
    count: int
    digest: bytes

    @property
    def end(self) -> int:
        """Position after its last image token."""
        return self.first + self.count


@dataclass(frozen=True)
class HeaderArray:
    """Array of a record.

    Attributes:
      name, pool, dtype: Same as in `TransferArray`.
      shape: Shape in an entry.
      section: Section of the body.
      entries: Number of entries of the section.
    """

    name: str
    pool: str
    dtype: str
    shape: tuple[int, ...]
    section: int
    entries: int

    @property
    def words(self) -> int:
        """Number of int32 words in an entry."""
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, WORD_BYTES) // WORD_BYTES


@dataclass(frozen=True, kw_only=True)
class TransferHeader:
    """Header of a record.

    Attributes:
      version: Format of header and body.
      fingerprint: Hex digest of everything that both servers must have in common.
      tenant, adapter, adapter_version: Cache namespace: the tenant, and name and digest of the LoRA
        adapter, empty for the base model.
      tokens: Tokens of the pages, and the lookahead of the cache key.
      images: Images with a token among them.
      page_size, num_pages: Tokens of a page, and number of full pages of the prefix.
      first_page: First page of the body; those before it are in earlier parts.
      is_last: True for the last part of a prefix, or the only one.
      is_whole: Flag per page: True if its draft KV is complete.
      has_snapshot: True if a recurrent-state snapshot is included.
      arrays: Arrays of the body, by section and then in the order of an entry.
    """

    version: int
    fingerprint: str
    tenant: str
    adapter: str
    adapter_version: str
    tokens: Int32[np.ndarray, " T"]
    images: tuple[TransferImage, ...]
    page_size: int
    num_pages: int
    first_page: int = 0
    is_last: bool = True
    is_whole: tuple[bool, ...]
    has_snapshot: bool
    arrays: tuple[HeaderArray, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages of the prefix hold."""
        return self.num_pages * self.page_size

    @cached_property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """Entries, and int32 words of an entry, of each section of the body."""
        each = groupby(self.arrays, key=lambda array: (array.section, array.entries))
        return tuple((entries, sum(x.words for x in arrays)) for (_, entries), arrays in each)

    @property
    def num_bytes(self) -> int:
        """Bytes of the body."""
        return WORD_BYTES * sum(entries * words for entries, words in self.sections)

    def to_fields(self) -> dict[str, Any]:
        """Returns the header as values that JSON and MessagePack can encode."""
        return self._other_fields() | {"tokens": self.tokens.tolist()}

    def checksum(self) -> int:
        """Returns the CRC-32 of the tokens and of all other fields."""
        others = json.dumps(self._other_fields(), sort_keys=True).encode()
        return zlib.crc32(others, zlib.crc32(self.tokens.astype("<i4").tobytes()))

    def _other_fields(self) -> dict[str, Any]:
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        del plain["tokens"]
        images = [[each.first, each.count, each.digest.hex()] for each in self.images]
        return plain | {
            "images": images,
            "is_whole": [int(each) for each in self.is_whole],
            "arrays": [asdict(each) | {"shape": list(each.shape)} for each in self.arrays],
        }

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Self:
        """Returns the header of `to_fields`.

        Raises:
          TransferRejected: The version is another one ("version"), or a field is missing or invalid
            ("header").
        """
        if not isinstance(given, Mapping) or given.get("version") != VERSION:
            found = given.get("version") if isinstance(given, Mapping) else None
            raise TransferRejected(
                "version", f"a record of version {VERSION} is required, got {found!s:.40}"
            )
        try:
            return cls(**_read(given))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise TransferRejected("header", f"invalid header of a record: {error}") from error


def _read(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a header in their own types."""
    tokens = np.array(given["tokens"], np.int64)
    num_pages, page_size = int(given["num_pages"]), int(given["page_size"])
    first_page = int(given["first_page"])
    is_whole = tuple(map(bool, given["is_whole"]))
    arrays = tuple(
        HeaderArray(**{**each, "shape": tuple(map(int, each["shape"]))}) for each in given["arrays"]
    )
    if not (page_size > 0 and 0 <= first_page <= num_pages == len(is_whole) > 0):
        raise ValueError(
            f"pages {first_page} to {num_pages} of {page_size} tokens, {len(is_whole)} flags"
        )
    if tokens.ndim != 1 or not num_pages * page_size <= len(tokens):
        raise ValueError(f"{tokens.shape} tokens for {num_pages} pages of {page_size}")
    if tokens.min() < 0 or tokens.max() >= 1 << 31:
        raise ValueError("token ids must be non-negative 32-bit integers")
    for each in arrays:
        if min((each.entries, *each.shape)) < 0:
            raise ValueError(f"the array {each.name} has a negative size")
    images = tuple(TransferImage(int(a), int(n), bytes.fromhex(x)) for a, n, x in given["images"])
    if any(len(each.digest) != DIGEST_BYTES for each in images):
        raise ValueError(f"an image digest must have {DIGEST_BYTES} bytes")
    return {
        "version": VERSION,
        "fingerprint": str(given["fingerprint"]),
        **{x: str(given[x]) for x in ("tenant", "adapter", "adapter_version")},
        "tokens": tokens.astype(np.int32),
        "images": images,
        "page_size": page_size,
        "num_pages": num_pages,
        "first_page": first_page,
        "is_last": bool(given["is_last"]),
        "is_whole": is_whole,
        "has_snapshot": bool(given["has_snapshot"]),
        "arrays": arrays,
    }


def header_arrays(
    spec: TransferSpec, num_pages: int, window_pages: Sequence[int], *, has_snapshot: bool
) -> tuple[HeaderArray, ...]:
    """Returns the arrays of a record.

    Args:
      spec: Entries of KV transfer.
      num_pages: Pages of the body.
      window_pages: Pages of the record in each window pool.
      has_snapshot: True if a snapshot is included.
    """
    sections: list[tuple[Arrays, int]] = [(spec.pages, num_pages)]
    sections += zip(spec.windows, window_pages, strict=True)
    if has_snapshot:
        sections += [(pool.arrays, len(pool.layers)) for pool in spec.states]
    return tuple(
        HeaderArray(array.name, array.pool, array.dtype, array.shape, number, entries)
        for number, (arrays, entries) in enumerate(sections)
        for array in arrays
    )


@dataclass(frozen=True)
class TransferRecord:
    """A record in host memory.

    Attributes:
      header: Its header.
      arrays: Entries of each section of the body.
    """

    header: TransferHeader
    arrays: tuple[Int32[np.ndarray, "n words"], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the body."""
        return self.header.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that the pages of the prefix hold."""
        return self.header.num_tokens

    def parts(self) -> list[memoryview]:
        """Returns the body in order, without a copy."""
        return [array.data.cast("B") for array in self.arrays if array.size]

    def checksum(self) -> int:
        """Returns the CRC-32 of the header and of the CRC-32 of each `CHECKSUM_BYTES` of the body.

        `zlib.crc32` reads 4.2 GB/s on one core of a server CPU, BLAKE2b 0.9 GB/s and SHA-256 1.8
        GB/s. It releases the GIL, so threads share the body.
        """
        return _checksum(self.header, self.parts())

    @classmethod
    def of(cls, header: TransferHeader, body: memoryview | bytes | bytearray) -> Self:
        """Returns the record in a body, as views of it.

        Raises:
          TransferRejected: The body has another size than its header states ("truncated").
        """
        body = memoryview(body).cast("B")
        if len(body) != header.num_bytes:
            raise TransferRejected(
                "truncated", f"a body of {header.num_bytes} bytes is required, got {len(body)}"
            )
        words, first, found = np.frombuffer(body, np.int32), 0, list[np.ndarray]()
        for entries, size in header.sections:
            end = first + entries * size
            found.append(words[first:end].reshape(entries, size))
            first = end
        return cls(header, tuple(found))

    @classmethod
    def checked(
        cls, header: TransferHeader, body: memoryview | bytes | bytearray, checksum: int
    ) -> Self:
        """Same as `of`, for a body and a header with a checksum from `checksum`.

        Raises:
          TransferRejected: See `of`; or a byte of header or body has changed ("checksum").
        """
        record = cls.of(header, body)
        if record.checksum() != checksum:
            raise TransferRejected("checksum", "the checksum of the record does not match")
        return record


def copy_words(into: Int32[np.ndarray, "n words"], source: Int32[np.ndarray, "n words"]) -> None:
    """Copies contiguous entries, many bytes in threads.

    New memory is mapped when it is first written, which takes longer than the copy on one thread.
    """
    into, source = into.reshape(-1), source.reshape(-1)
    count = min(HOST_THREADS, source.nbytes // COPIED_BYTES)
    if count < 2:
        into[:] = source
        return
    ends = [len(source) * number // count for number in range(count + 1)]
    spans = [slice(first, end) for first, end in pairwise(ends)]
    for _ in _copying().map(lambda span: np.copyto(into[span], source[span]), spans):
        pass


def copy_later(into: Int32[np.ndarray, "n words"], source: Int32[np.ndarray, "n words"]) -> Future:
    """Copies entries in a thread; both arrays must stay as they are until the result is known."""
    return _copying().submit(np.copyto, into, source)


@cache
def _copying() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="kv records")


@cache
def _checking() -> ThreadPoolExecutor:
    """Threads of their own, because the engine's thread waits for copies."""
    return ThreadPoolExecutor(HOST_THREADS, thread_name_prefix="kv checksums")


def _checksum(header: TransferHeader, parts: Sequence[memoryview]) -> int:
    of_body = np.array(list(_checking().map(_crc, _chunks(parts))), "<u4")
    return zlib.crc32(of_body.tobytes(), header.checksum())


def _crc(parts: Sequence[memoryview]) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def _chunks(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yields the bytes of a body, `CHECKSUM_BYTES` at a time."""
    chunk, room = list[memoryview](), CHECKSUM_BYTES
    for part in parts:
        while part:
            taken, part = part[:room], part[room:]
            chunk.append(taken)
            room -= len(taken)
            if not room:
                yield chunk
                chunk, room = [], CHECKSUM_BYTES
    if chunk:
        yield chunk
