"""The golden pictures, and what the model that they are for says of them."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from shared.models.families import vision_from_folder
from shared.models.pictures import PictureConfig, read_pictures
from shared.models.vision import VisionConfig

GOLDEN = Path(__file__).parents[1] / "golden"
MODEL, PICTURES = GOLDEN / "qwen3_5_dense", GOLDEN / "qwen3_5_vision"
WANT = dict(np.load(PICTURES / "vectors.npz"))


def vision() -> VisionConfig:
    found = vision_from_folder(MODEL)
    assert found is not None
    return found


def picture_config() -> PictureConfig:
    given = json.loads((PICTURES / "config.json").read_text(encoding="utf-8"))
    return read_pictures(given["preprocessor_config"], vision())


def resized(picture: np.ndarray) -> np.ndarray:
    """A picture at the size that the checkpoint wants."""
    height, width = picture_config().fitted(*picture.shape[:2])
    return np.asarray(Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC))
