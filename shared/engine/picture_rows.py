"""Which rows of the device's pool hold which picture, and which pictures a step needs there.

A picture keeps its rows until others need them, those that were read longest ago first: so the
second turn of a chat encodes nothing, and a prompt that is read in chunks encodes each picture
once. A large one takes several steps, between which others have theirs; one at a time is under way.
Nothing is held for a running request. Steps take effect in the order of their submission, so
rows may go to another picture as soon as the last prefill that names them is submitted, and what a
later chunk, or a prompt that lost its pages, no longer finds is encoded anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from shared.boundary.pictures import PicturePool
from shared.boundary.program import Program, Work
from shared.engine.pictures import Picture, touched
from shared.engine.request import Request
from shared.engine.rows import Chunk, Rows
from shared.spec import tower
from shared.spec.gated_delta import CHUNK

Key = tuple[str, bytes]
"""Whose picture, and its digest: nobody reads what another one's tower has made."""


def least_rows(largest: int) -> int:
    """Rows of a pool, without the sink, that hold what any chunk of `CHUNK` tokens names.

    Of the tokens, and the one behind them, the first and the last may lie in a largest picture.
    """
    return 2 * largest + CHUNK


class PictureRows:
    """The host's side of a picture pool.

    Args:
      pool: The backend's.
      programs: The backend's, of which some encode.

    Attributes:
      num_encoded: Pictures that were encoded, those anew included.
    """

    def __init__(self, pool: PicturePool, programs: Sequence[Program]) -> None:
        self._pool = pool
        self._pieces = _pieces(programs)
        self._held: OrderedDict[Key, range] = OrderedDict()
        self._begun: tuple[Key, list[range]] | None = None
        self.num_encoded = 0

    @property
    def num_held(self) -> int:
        """Rows that hold pictures."""
        return sum(map(len, self._held.values()))

    def chunk_of(self, request: Request, end: int, may_encode: bool) -> Chunk | Rows | None:
        """The next chunk of a prompt, up to `end` or before, or what must be encoded before it.

        Args:
          end: As `chunk_end` says.
          may_encode: Whether an encoding would be the next step; else there is None in its place,
            as a picture counts as encoded from when its last step is planned.
        """
        first = request.prefilled
        named = list(touched(request.pictures, first, end + 1))
        while sum(each.count for each in named) >= self._pool.num_rows:
            end = (named.pop().first - 1) // CHUNK * CHUNK
            named = list(touched(named, first, end + 1))
        assert end > first, "the pool holds what the shortest chunk names"
        keys = [(request.tenant, each.digest) for each in named]
        for key, each in zip(keys, named, strict=True):
            if key not in self._held:
                return self._encode(key, each, keys) if may_encode else None
        for key in keys:
            self._held.move_to_end(key)
        places = [self._held[key].start for key in keys]
        return Chunk(request, first, end, tuple(zip(named, places, strict=True)))

    def _encode(self, key: Key, picture: Picture, beside: Collection[Key]) -> Rows:
        """The next step that encodes the picture; with the last one it has its rows.

        Where it takes several, another one between two steps is given up: its prompt has ended, has
        lost its pages, or waits for one of a better priority.
        """
        patches, vision = picture.count * self._pool.vision.merged, self._pool.vision
        pixels, place = None, 0
        if self._begun is not None and self._begun[0] == key:
            blocks, *left = self._begun[1]
            self._begun = None
        else:
            pixels = tower.pixels_of(picture.pixels, vision, self._pool.processor)
            blocks, *left = next(each for size, each in self._pieces.items() if size >= patches)
        if left:
            self._begun = key, left
        else:
            place = self._take(picture.count, beside)
            self._held[key] = range(place, place + picture.count)
            self.num_encoded += 1
        return Rows.encode(patches, blocks, pixels, place)

    def _take(self, count: int, beside: Collection[Key]) -> int:
        """The first of `count` rows that nobody has any more; row 0 is the sink.

        Where the pictures of one chunk lie so that there is no room between them they all go, and
        are encoded one behind the other.
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
    """The blocks of each step that encodes a picture, by the most patches; the smallest first."""
    pieces: dict[int, list[range]] = {}
    encodings = [program for program in programs if program.work is Work.ENCODE]
    for program in sorted(encodings, key=lambda p: (p.tokens, p.blocks.start)):
        pieces.setdefault(program.tokens, []).append(program.blocks)
    return pieces
