"""The golden images, and the golden numbers of their model."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from shared.models.families import vision_from_folder
from shared.models.image_processor import ImageProcessorConfig, read_images
from shared.models.vision_config import VisionConfig
from shared.spec import vision_encoder
from shared.spec.vision_encoder import Patches, Pixels

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL, IMAGES = GOLDEN / "qwen3_5_dense", GOLDEN / "qwen3_5_vision"
WANT = dict(np.load(IMAGES / "vectors.npz"))


def vision() -> VisionConfig:
    found = vision_from_folder(MODEL)
    assert found is not None
    return found


def image_config() -> ImageProcessorConfig:
    given = json.loads((IMAGES / "config.json").read_text(encoding="utf-8"))
    return read_images(given["preprocessor_config"], vision())


def resized(image: np.ndarray) -> np.ndarray:
    """An image resized as the checkpoint requires."""
    height, width = image_config().smart_resize(*image.shape[:2])
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def fitted(number: int) -> np.ndarray:
    """A golden image as the processor fits it that made the golden numbers, of 0 to 255.

    It resizes with another library than Pillow: one level of 255 here and there.
    """
    config, size, merge = image_config(), vision().patch_size, vision().merge_size
    patches = WANT[f"pixels_{number}"].reshape(-1, 3, vision().frames, size, size)[:, :, 0]
    of_channel = [np.array(x)[:, None, None] for x in (config.deviation, config.mean)]
    values = np.rint(255 * (patches * of_channel[0] + of_channel[1])).astype(np.uint8)
    _, rows, columns = WANT[f"grid_{number}"] // merge
    blocks = values.reshape(rows, columns, merge, merge, 3, size, size)
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * merge * size, -1, 3)


def pixels_of(image: np.ndarray) -> Pixels:
    """Returns the pixel arguments of an image that already has the checkpoint's size."""
    return vision_encoder.pixels_of(image, vision(), image_config())


def patches_of(image: np.ndarray) -> Patches:
    """The patches of such an image, by the specification."""
    return vision_encoder.patches(vision(), pixels_of(image))
