"""Image processor config of a checkpoint: target sizes and normalisation of images."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from shared.models.config_fields import Json, flag, is_number, object_of, positive
from shared.models.model_folder import ModelFolder
from shared.models.vision_config import VisionConfig

FILE = "preprocessor_config.json"
JOINT, FIELD = "processor_config.json", "image_processor"
"""File and field in which transformers 5 stores the same settings: one file for all modalities."""

PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast")

MOST_STRETCHED = 200
"""Maximum aspect ratio of an image."""

LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280
"""Default bounds of an image's pixels, those of `Qwen2VLImageProcessor`."""
LOW_DETAIL_PIXELS = 512 * 512
"""Maximum pixels of an image sent with `detail: "low"`, as in OpenAI's API."""

DIGEST_BYTES = 32
"""Bytes of an image's digest."""

BICUBIC = 3
"""Pillow's number of the bicubic filter, which config files use too."""


class InvalidImageError(ValueError):
    """An image is invalid or unsupported; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class ImageProcessorConfig:
    """Settings of a checkpoint's image processor.

    Attributes:
      multiple: Sides are resized to multiples of this number of pixels, the side of one image
        token.
      min_pixels, max_pixels: Bounds of an image's pixels; smaller images are enlarged, larger ones
        are shrunk. If no multiple lies between them, `max_pixels` applies.
      mean, deviation: Mean and standard deviation per channel; a value v of 0 to 255 becomes (v /
        255 - mean) / deviation.
    """

    multiple: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def smart_resize(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width that an image is resized to ("smart resize").

        Raises:
          ImageRefused: The aspect ratio is too large.

        Source: Qwen2-VL, Wang et al. 2024, arXiv:2409.12191; rounding as in its processor.
        """
        sides, factor = (height, width), self.multiple
        if max(sides) > MOST_STRETCHED * min(sides):
            raise InvalidImageError(
                f"the image has {width} x {height} pixels; one side must be at most "
                f"{MOST_STRETCHED} times the other"
            )
        rows, columns = (round(side / factor) for side in sides)  # rounds half to even
        most = max(1, self.max_pixels // factor**2)
        if rows * columns * factor**2 < self.min_pixels:
            grown = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grown / factor) for side in sides)
        if rows * columns * factor**2 > self.max_pixels:
            shrunk = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrunk / factor)) for side in sides)
        # If the product still exceeds the maximum, one of them is 1: that side was shorter than a
        # token's.
        return min(rows, most) * factor, min(columns, most) * factor

    def low_detail(self) -> ImageProcessorConfig:
        """Returns the settings for images of low detail, which take fewer tokens."""
        return replace(self, max_pixels=min(self.max_pixels, LOW_DETAIL_PIXELS))

    def num_tokens(self, height: int, width: int) -> int:
        """Returns the number of image tokens for a resized image."""
        return height * width // self.multiple**2


def images_from_folder(folder: ModelFolder, vision: VisionConfig) -> ImageProcessorConfig:
    """Reads the image processor settings of a model folder.

    They are `image_processor` in `processor_config.json`, or else `preprocessor_config.json`.
    transformers prefers the first if both exist.

    Args:
      folder: The model folder.
      vision: Config of the model's vision encoder.

    Raises:
      ValueError: The settings are missing or not supported.
    """
    if settings := object_of(folder.optional(JOINT), FIELD, JOINT):
        return read_images(settings, vision, f"{FIELD} of {JOINT}")
    if not (folder.path / FILE).is_file():
        raise ValueError(
            f"the model folder {folder.path} has no image processor settings; add {FILE}, or "
            f"{FIELD} in {JOINT}"
        )
    return read_images(folder.optional(FILE), vision)


def read_images(config: Json, vision: VisionConfig, place: str = FILE) -> ImageProcessorConfig:
    """Parses the settings of an image processor; raises the errors of `images_from_folder`.

    Args:
      config: The settings.
      vision: Config of the model's vision encoder.
      place: File or field, for messages.
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
            raise ValueError(f"{field} in {place} must be that of the vision encoder ({size})")
    # The values are numbers of pixels, although the newer names suggest sides. The older names take
    # precedence and missing values have defaults, both as in transformers.
    size = object_of(config, "size", place)
    if size and size.keys() != {"shortest_edge", "longest_edge"}:
        raise ValueError(f"size in {place} must have shortest_edge and longest_edge, got {size!r}")
    least = positive(size, "shortest_edge", LEAST_PIXELS, place)
    most = positive(size, "longest_edge", MOST_PIXELS, place)
    least = positive(config, "min_pixels", least, place)
    most = positive(config, "max_pixels", most, place)
    if least > most:
        raise ValueError(
            f"the minimum pixels ({least}) in {place} must not exceed the maximum ({most})"
        )
    return ImageProcessorConfig(
        multiple=vision.patch_size * vision.merge_size,
        min_pixels=least,
        max_pixels=most,
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
