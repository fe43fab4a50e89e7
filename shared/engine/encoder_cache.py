"""Encoder cache on the host: which image occupies which rows, and which images a step must encode.

Images stay cached until their rows are needed, in LRU order. The next turn of a conversation
therefore encodes nothing, and a chunked prompt encodes each image once. A large image is encoded in
several steps, between which other steps run; only one such image is in progress. Nothing is pinned
for a running request: steps take effect in the order of submission, so rows may be reused as soon
as the last prefill that names them is submitted. A later chunk or a preempted prompt that no longer
finds its image encodes it again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from shared.boundary.images import EncoderCacheSpec
from shared.boundary.program import Program, StepKind
from shared.engine.image_inputs import PromptImage, overlapping
from shared.engine.request import Request
from shared.engine.rows import Chunk, ScheduledRows
from shared.spec import vision_encoder
from shared.spec.gated_delta import CHUNK

Key = tuple[str, bytes]
"""Tenant and digest of an image: cached embeddings are never shared between tenants."""


def min_rows(largest: int) -> int:
    """Returns the minimum rows of the cache for any chunk of `CHUNK` tokens.

    The first and the last token of a chunk (and the token after it) may both be in a largest image.
    """
    return 2 * largest + CHUNK


class EncoderCache:
    """Host side of the encoder cache.

    Args:
      pool: Encoder cache of the backend.
      programs: Programs of the backend, some of which encode.

    Attributes:
      num_encoded: Number of encoded images, including repeated ones.
    """

    def __init__(self, pool: EncoderCacheSpec, programs: Sequence[Program]) -> None:
        self._pool = pool
        self._pieces = _pieces(programs)
        self._held: OrderedDict[Key, range] = OrderedDict()
        self._begun: tuple[Key, list[range]] | None = None
        self.num_encoded = 0

    @property
    def num_held(self) -> int:
        """Rows that hold images."""
        return sum(map(len, self._held.values()))

    def chunk_of(
        self, request: Request, end: int, may_encode: bool
    ) -> Chunk | ScheduledRows | None:
        """Returns the next chunk of a prompt up to `end` or earlier, or the encode step required
        before it.

        Args:
          request: The request.
          end: Result of `chunk_end`.
          may_encode: True if an encode step can be the next step. If False, returns None instead of
            an encode step, because an image counts as encoded once its last step is planned.
        """
        first = request.prefilled
        named = list(overlapping(request.images, first, end + 1))
        while sum(each.count for each in named) >= self._pool.num_rows:
            end = (named.pop().first - 1) // CHUNK * CHUNK
            named = list(overlapping(named, first, end + 1))
        assert end > first, "the encoder cache holds the images of the shortest chunk"
        keys = [(request.tenant, each.digest) for each in named]
        for key, each in zip(keys, named, strict=True):
            if key not in self._held:
                return self._encode(key, each, keys) if may_encode else None
        for key in keys:
            self._held.move_to_end(key)
        places = [self._held[key].start for key in keys]
        return Chunk(request, first, end, tuple(zip(named, places, strict=True)))

    def _encode(self, key: Key, image: PromptImage, beside: Collection[Key]) -> ScheduledRows:
        """Returns the next encode step of the image; its last step assigns the rows.

        If another image is in progress, it is discarded: its prompt has ended, was preempted, or
        waits for one of higher priority.
        """
        patches, vision = image.count * self._pool.vision.merged, self._pool.vision
        pixels, place = None, 0
        if self._begun is not None and self._begun[0] == key:
            blocks, *left = self._begun[1]
            self._begun = None
        else:
            pixels = vision_encoder.pixels_of(image.pixels, vision, self._pool.processor)
            blocks, *left = next(each for size, each in self._pieces.items() if size >= patches)
        if left:
            self._begun = key, left
        else:
            place = self._take(image.count, beside)
            self._held[key] = range(place, place + image.count)
            self.num_encoded += 1
        return ScheduledRows.encode(patches, blocks, pixels, place)

    def _take(self, count: int, beside: Collection[Key]) -> int:
        """Allocates `count` consecutive rows and returns the first; row 0 is reserved.

        If the images of one chunk are placed so that no gap fits, all are evicted and encoded again
        in sequence.
        """
        while (place := self._gap(count)) is None:
            oldest = next((key for key in self._held if key not in beside), None)
            if oldest is None:
                self._held.clear()
            else:
                del self._held[oldest]
        return place

    def _gap(self, count: int) -> int | None:
        place = 1
        for taken in sorted(self._held.values(), key=lambda rows: rows.start):
            if taken.start - place >= count:
                return place
            place = taken.stop
        return place if self._pool.num_rows - place >= count else None


def _pieces(programs: Sequence[Program]) -> dict[int, list[range]]:
    """Returns the block ranges of the steps that encode an image, by maximum patches, ascending."""
    pieces: dict[int, list[range]] = {}
    encodings = [program for program in programs if program.work is StepKind.ENCODE]
    for program in sorted(encodings, key=lambda p: (p.tokens, p.blocks.start)):
        pieces.setdefault(program.tokens, []).append(program.blocks)
    return pieces
