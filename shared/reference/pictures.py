"""Pictures of the reference backend: their rows in its pool, and what prompts see of them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.boundary.pictures import Encode, PicturePool, Pictures
from shared.reference.device_state import DeviceState
from shared.spec import tower
from shared.spec.layers import Shown
from shared.spec.model import Weights


def encode(
    work: Encode,
    blocks: range,
    pictures: PicturePool | None,
    weights: Weights | None,
    state: DeviceState,
) -> None:
    """Takes a picture through blocks of the tower; behind the last its rows are in the pool."""
    assert pictures is not None  # a model that sees has the program
    assert weights is not None
    vision, place = pictures.vision, int(work.place[0])
    picture = state.begun
    if work.pixels is not None:
        picture = tower.begun(weights, tower.patches(vision, work.pixels))
    assert picture is not None  # by this encoding or an earlier one
    picture = tower.advanced(weights, picture, blocks)
    if blocks.stop < vision.depth:
        state.begun = picture
    elif place:
        count = int(picture.count[0]) // vision.merged
        state.pool[place : place + count] = tower.finished(vision, weights, picture)[:count]


@dataclass(frozen=True)
class Seeing:
    """What pictures bring to some rows of a prompt; nothing where the model sees none.

    Attributes:
      turns: By which they turn.
      shown: What stands in the place of their tokens.
    """

    turns: Int[np.ndarray, "R 3"] | None = None
    shown: Shown | None = None

    @classmethod
    def of(
        cls, pictures: Pictures | None, pool: Float[np.ndarray, "rows hidden"], at: slice
    ) -> "Seeing":
        """Of a chunk's tokens."""
        if pictures is None:
            return cls()
        return cls(pictures.turns[at], Shown(pool, pictures.sources[at]))

    def part(self, first: int, end: int | None) -> "Seeing":
        """Of some of the rows; None: to the last."""
        if self.turns is None or self.shown is None:
            return self
        shown = Shown(self.shown.pool, self.shown.sources[first:end])
        return Seeing(self.turns[first:end], shown)

    def before(self, next_source: int) -> "Seeing":
        """Of the same rows, with what stands in the place of the tokens that follow theirs."""
        if self.shown is None:
            return self
        sources = np.append(self.shown.sources[1:], next_source)
        return Seeing(self.turns, Shown(self.shown.pool, sources))
