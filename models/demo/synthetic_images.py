"""Pictures that the project draws itself: some things of one shape and color, and their words."""

from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

WIDTH, HEIGHT = 192, 96
"""Pixels: rows of 32 x 32 are 18, as many as `SENTENCE` has tokens."""

SHADES = {
    "red": (205, 30, 35),
    "orange": (240, 135, 20),
    "yellow": (235, 215, 40),
    "green": (40, 145, 60),
    "blue": (40, 80, 195),
    "purple": (125, 45, 150),
    "black": (20, 20, 20),
    "white": (250, 250, 250),
}
"""Colors by the words that texts of the demo model's training have."""

OUTLINES = {
    "ball": [(np.cos(a), np.sin(a)) for a in np.linspace(0, 2 * np.pi, 25)],
    "book": [(-0.75, -1.05), (0.75, -1.05), (0.75, 1.05), (-0.75, 1.05)],
    "kite": [(0, -1.25), (0.85, -0.25), (0, 1.55), (-0.85, -0.25)],
}
"""Corners of things, by the words of those texts too."""

COUNTS = range(2, 10)
SIZE, EDGE, APART = 9, 18, 26
"""Pixels: of a thing's half, from a middle to the edge, and between the middles of two."""

SENTENCE = "The product is a {color} {thing}. The color is {color}. The quantity is {count}."
"""As in those texts, from which JSON is to be extracted; see `copying.SENTENCES`."""


class Drawn(NamedTuple):
    """A picture and what it shows."""

    pixels: UInt8[np.ndarray, "height width 3"]
    color: str
    thing: str
    count: int

    @property
    def sentence(self) -> str:
        """What it shows in words."""
        return SENTENCE.format(color=self.color, thing=self.thing, count=self.count)


def drawn(rng: np.random.Generator) -> Drawn:
    """Two to nine balls, books or kites of a color, on a ground between sand and grey."""
    color, thing = (str(rng.choice(list(names))) for names in (SHADES, OUTLINES))
    count = int(rng.choice(COUNTS))
    ground, shade = rng.integers(140, 190) + rng.integers(-12, 13, 3), np.array(SHADES[color])
    pixels = np.broadcast_to(ground, (HEIGHT, WIDTH, 3)).copy()
    shade = shade + rng.integers(-12, 13, 3)
    for x, y in _places(rng, count):
        around = pixels[y - EDGE : y + EDGE + 1, x - EDGE : x + EDGE + 1]
        around[_shape(thing)] = shade
    return Drawn(np.clip(pixels, 0, 255).astype(np.uint8), color, thing, count)


@cache
def _shape(thing: str) -> Bool[np.ndarray, "side side"]:
    """Which pixels around its middle a thing covers: those within all sides of its outline."""
    corners = SIZE * np.array(OUTLINES[thing])
    y, x = np.mgrid[-EDGE : EDGE + 1, -EDGE : EDGE + 1]
    sides = zip(corners, np.roll(corners, -1, axis=0), strict=True)
    areas = [(c - a) * (y - b) - (d - b) * (x - a) for (a, b), (c, d) in sides]
    return np.all(np.array(areas) >= 0, axis=0)


def _places(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Middles of things that do not touch, each drawn anew until it fits."""
    found: list[np.ndarray] = []
    while len(found) < count:
        place = rng.integers((EDGE, EDGE), (WIDTH - EDGE, HEIGHT - EDGE))
        if all(np.hypot(*(place - other)) >= APART for other in found):
            found.append(place)
        elif rng.random() < 0.01:  # some beginnings leave no room for all
            found.clear()
    return found
