"""Synthetic images with captions: several objects of one shape and one color."""

from functools import cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, UInt8

WIDTH, HEIGHT = 192, 96
"""Size in pixels. Patches of 32 x 32 pixels give 18 image tokens, one per token of `SENTENCE`."""

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
"""RGB values of the color words in the demo model's training data."""

OUTLINES = {
    "ball": [(np.cos(a), np.sin(a)) for a in np.linspace(0, 2 * np.pi, 25)],
    "book": [(-0.75, -1.05), (0.75, -1.05), (0.75, 1.05), (-0.75, 1.05)],
    "kite": [(0, -1.25), (0.85, -0.25), (0, 1.55), (-0.85, -0.25)],
}
"""Corners of the objects, by their words in the training data."""

COUNTS = range(2, 10)
SIZE, EDGE, APART = 9, 18, 26
"""Pixels: half an object, least distance of a center to the border, and between two centers."""

SENTENCE = "The product is a {color} {thing}. The color is {color}. The quantity is {count}."
"""Caption, in the form of the JSON extraction tasks of the training data (`copying.SENTENCES`)."""


class SyntheticImage(NamedTuple):
    """An image and the fields of its caption."""

    pixels: UInt8[np.ndarray, "height width 3"]
    color: str
    thing: str
    count: int

    @property
    def sentence(self) -> str:
        """The caption."""
        return SENTENCE.format(color=self.color, thing=self.thing, count=self.count)


def generate_image(rng: np.random.Generator) -> SyntheticImage:
    """Draws two to nine balls, books or kites of one color on a background of sand to grey."""
    color, thing = (str(rng.choice(list(names))) for names in (SHADES, OUTLINES))
    count = int(rng.choice(COUNTS))
    ground, shade = rng.integers(140, 190) + rng.integers(-12, 13, 3), np.array(SHADES[color])
    pixels = np.broadcast_to(ground, (HEIGHT, WIDTH, 3)).copy()
    shade = shade + rng.integers(-12, 13, 3)
    for x, y in _places(rng, count):
        around = pixels[y - EDGE : y + EDGE + 1, x - EDGE : x + EDGE + 1]
        around[_shape(thing)] = shade
    return SyntheticImage(np.clip(pixels, 0, 255).astype(np.uint8), color, thing, count)


@cache
def _shape(thing: str) -> Bool[np.ndarray, "side side"]:
    """Returns the mask of the pixels around a center that are within all sides of an outline."""
    corners = SIZE * np.array(OUTLINES[thing])
    y, x = np.mgrid[-EDGE : EDGE + 1, -EDGE : EDGE + 1]
    sides = zip(corners, np.roll(corners, -1, axis=0), strict=True)
    areas = [(c - a) * (y - b) - (d - b) * (x - a) for (a, b), (c, d) in sides]
    return np.all(np.array(areas) >= 0, axis=0)


def _places(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    """Samples centers of objects that do not touch; rejects a center that is too close."""
    found: list[np.ndarray] = []
    while len(found) < count:
        place = rng.integers((EDGE, EDGE), (WIDTH - EDGE, HEIGHT - EDGE))
        if all(np.hypot(*(place - other)) >= APART for other in found):
            found.append(place)
        elif rng.random() < 0.01:  # some first choices leave no room for the rest
            found.clear()
    return found
