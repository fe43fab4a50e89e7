"""How a checkpoint wants pictures: to which sizes they are brought, what their values become."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shared.models.fields import Json, flag, is_number, object_of, positive, read_json
from shared.models.vision import VisionConfig

FILE = "preprocessor_config.json"
JOINT, FIELD = "processor_config.json", "image_processor"
"""Where transformers 5 writes the same: a file for all kinds of input, and the name in it."""

PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")

MOST_STRETCHED = 200
"""A picture whose longer side is more than so many times the shorter is refused."""

LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
"""Of a picture where a file says nothing of them, as `Qwen2VLImageProcessor` has them."""
LOW_DETAIL_PIXELS = 512 * 512
"""Most pixels of an image that a request sends with `detail: "low"`, as OpenAI's API has it."""

BICUBIC = 3
"""Pillow's number of the filter, which is also the one that files have."""


class PictureRefused(ValueError):
    """A picture that is not taken; one sentence."""


@dataclass(frozen=True, kw_only=True)
class PictureConfig:
    """What the settings of a checkpoint's image processor say.

    Attributes:
      factor: Sides become multiples of so many pixels, those of one row of the prompt.
      least, most: Pixels of a picture; one with fewer is enlarged, one with more is shrunk. Where
        no multiple lies between them, `most` counts.
      mean, deviation: Of each channel; a value v of 0 to 255 becomes (v / 255 - mean) / deviation.
    """

    factor: int
    least: int
    most: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The height and width that a picture is brought to.

        Raises:
          PictureRefused: It is far longer than it is wide, or the other way.

        Source: Qwen2-VL, Wang et al. 2024, arXiv:2409.12191; its processor's rounding.
        """
        sides, factor = (height, width), self.factor
        if max(sides) > MOST_STRETCHED * min(sides):
            raise PictureRefused(
                f"the picture has {width} x {height} pixels, and one side may be at most "
                f"{MOST_STRETCHED} times the other"
            )
        rows, columns = (round(side / factor) for side in sides)  # halves go to the even number
        most = max(1, self.most // factor**2)
        if rows * columns * factor**2 < self.least:
            grown = math.sqrt(self.least / (height * width))
            rows, columns = (math.ceil(side * grown / factor) for side in sides)
        if rows * columns * factor**2 > self.most:
            shrunk = math.sqrt(height * width / self.most)
            rows, columns = (max(1, math.floor(side / shrunk / factor)) for side in sides)
        # One of the two is 1 where more are left: that side was shorter than a row's.
        return min(rows, most) * factor, min(columns, most) * factor

    def low_detail(self) -> PictureConfig:
        """The same for images whose client wants few tokens."""
        return replace(self, most=min(self.most, LOW_DETAIL_PIXELS))

    def num_tokens(self, height: int, width: int) -> int:
        """Rows of the prompt that a picture of fitted sides takes."""
        return height * width // self.factor**2


def pictures_from_folder(folder: str | Path, vision: VisionConfig) -> PictureConfig:
    """Reads what a folder whose tower is `vision` says of pictures.

    That is `image_processor` of `processor_config.json`, or else `preprocessor_config.json`; of
    both, transformers takes the first.

    Raises:
      ValueError: It is missing or asks for what is not done here; one sentence.
    """
    own, joint = Path(folder) / FILE, Path(folder) / JOINT
    if joint.is_file() and (settings := object_of(read_json(joint), FIELD, JOINT)):
        return read_pictures(settings, vision, f"{FIELD} of {JOINT}")
    if not own.is_file():
        raise ValueError(
            f"the model folder {folder} has no {FILE}, which says what pictures become, and no "
            f"{FIELD} in a {JOINT}"
        )
    return read_pictures(read_json(own), vision)


def read_pictures(config: Json, vision: VisionConfig, place: str = FILE) -> PictureConfig:
    """Parses the settings of an image processor; raises as `pictures_from_folder`.

    Args:
      place: Where they stand, for the reader.
    """
    kind = config.get("image_processor_type")
    if kind not in PROCESSORS:
        raise ValueError(
            f"image_processor_type in {place} must be one of {', '.join(PROCESSORS)}, got {kind!r}"
        )
    for field in ("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"):
        if not flag(config, field, True, place):
            raise ValueError(f"{field}: false in {place} is not supported")
    if config.get("resample", BICUBIC) != BICUBIC:
        raise ValueError(f"resample in {place} must be {BICUBIC} (bicubic)")
    factor = config.get("rescale_factor", 1 / 255)
    if not is_number(factor, float) or abs(factor * 255 - 1) > 1e-6:
        raise ValueError(f"rescale_factor in {place} must be 1 / 255, got {factor!r}")
    sizes = {
        "patch_size": vision.patch_size,
        "merge_size": vision.merge_size,
        "temporal_patch_size": vision.frames,
    }
    for field, size in sizes.items():
        if positive(config, field, size, place) != size:
            raise ValueError(f"{field} in {place} is not that of the vision tower, {size}")
    # Counts of pixels, whatever the newer names say. The older names go first, as in transformers,
    # whose own numbers count where there are neither.
    size = object_of(config, "size", place)
    if size and size.keys() != {"shortest_edge", "longest_edge"}:
        raise ValueError(f"size in {place} must have shortest_edge and longest_edge, got {size!r}")
    least = positive(size, "shortest_edge", LEAST_PIXELS, place)
    most = positive(size, "longest_edge", MOST_PIXELS, place)
    least = positive(config, "min_pixels", least, place)
    most = positive(config, "max_pixels", most, place)
    if least > most:
        raise ValueError(f"{place} asks for at least {least} pixels and for at most {most}")
    return PictureConfig(
        factor=vision.patch_size * vision.merge_size,
        least=least,
        most=most,
        mean=_channels(config, "image_mean", place),
        deviation=_channels(config, "image_std", place),
    )


def _channels(config: Json, field: str, place: str) -> tuple[float, ...]:
    values: Any = config.get(field)
    if not isinstance(values, list) or len(values) != 3:
        raise ValueError(f"{field} in {place} must list a number for each of the three channels")
    if not all(is_number(x, (int, float)) and 0 < x <= 1 for x in values):
        raise ValueError(f"{field} in {place} must list numbers above 0 and up to 1")
    return tuple(map(float, values))
