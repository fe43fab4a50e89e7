"""What plans say of pictures, and where their rows wait."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from shared.boundary.program import Program, Work
from shared.models.pictures import PictureConfig
from shared.models.vision import VisionConfig
from shared.spec.tower import Pixels


@dataclass(frozen=True)
class PicturePool:
    """Where rows of pictures wait until prompts have read them.

    Attributes:
      vision: The tower that makes them.
      processor: What pixels become before the tower reads them; no backend asks.
      num_rows: Of all pictures, with row 0, the sink.
    """

    vision: VisionConfig
    processor: PictureConfig
    num_rows: int


@dataclass(frozen=True)
class Pictures:
    """What the pictures of prompts bring to a prefill; of text, turns that are its positions.

    Attributes:
      sources: The row of the pool that stands in the place of each token's own; 0: none does.
      turns: By which each token's row is rotated; see `shared.spec.turns`.
      next_sources: As `sources`, of the token after each row's last, which drafters read.
      deltas: What the turns of each row's later tokens are above their positions; kept by slot.
    """

    sources: Int32[np.ndarray, " T"]
    turns: Int32[np.ndarray, "T 3"]
    next_sources: Int32[np.ndarray, " B"]
    deltas: Int32[np.ndarray, " B"]


@dataclass(frozen=True)
class Encode:
    """Makes the rows of one picture, or takes it some blocks further; no row of the plan is read.

    A picture that is encoded in several steps waits between them on the device, which has room for
    one: where another one begins that takes several, it is given up.

    Attributes:
      pixels: The picture's, with padding behind; None where the step goes on with one.
      place: The pool's row that gets the first of its rows; 0: the sink gets all. Read by the step
        that runs the last block.
    """

    pixels: Pixels | None
    place: Int32[np.ndarray, " 1"]


def most_begun(programs: Iterable[Program], vision: VisionConfig) -> int:
    """Patches of the largest picture that is encoded in several steps; 0 where none is."""
    cut = (p.tokens for p in programs if p.work is Work.ENCODE and len(p.blocks) < vision.depth)
    return max(cut, default=0)
