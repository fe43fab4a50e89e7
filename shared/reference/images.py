"""Images in the reference backend: encoding into its encoder cache, and image inputs of prompts."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.boundary.images import EncodeImage, EncoderCacheSpec, ImageInputs
from shared.reference.device_state import DeviceState
from shared.spec import vision_encoder
from shared.spec.layers import ImageEmbeds
from shared.spec.model import Weights


def encode(
    work: EncodeImage,
    blocks: range,
    images: EncoderCacheSpec | None,
    weights: Weights | None,
    state: DeviceState,
) -> None:
    """Runs blocks of the vision encoder; after the last block, stores the embeddings in the
    cache.
    """
    assert images is not None  # only a vision-language model has the program
    assert weights is not None
    vision, place = images.vision, int(work.place[0])
    image = state.begun
    if work.pixels is not None:
        image = vision_encoder.embed_patches(weights, vision_encoder.patches(vision, work.pixels))
    assert image is not None  # set by this step or an earlier one
    image = vision_encoder.run_blocks(weights, image, blocks)
    if blocks.stop < vision.depth:
        state.begun = image
    elif place:
        count = int(image.count[0]) // vision.merged
        state.pool[place : place + count] = vision_encoder.project(vision, weights, image)[:count]


@dataclass(frozen=True)
class ImageContext:
    """Image inputs of some rows of a prompt; empty for a text-only model.

    Attributes:
      turns: M-RoPE positions.
      shown: Image embeddings that replace token embeddings.
    """

    turns: Int[np.ndarray, "R 3"] | None = None
    shown: ImageEmbeds | None = None

    @classmethod
    def of(
        cls, images: ImageInputs | None, pool: Float[np.ndarray, "rows hidden"], at: slice
    ) -> "ImageContext":
        """Returns the image inputs of a chunk's tokens."""
        if images is None:
            return cls()
        return cls(images.mrope_positions[at], ImageEmbeds(pool, images.sources[at]))

    def part(self, first: int, end: int | None) -> "ImageContext":
        """Returns the image inputs of a range of the rows; `end` None is the last row."""
        if self.turns is None or self.shown is None:
            return self
        shown = ImageEmbeds(self.shown.pool, self.shown.sources[first:end])
        return ImageContext(self.turns[first:end], shown)

    def before(self, next_source: int) -> "ImageContext":
        """Returns the image inputs with the embeddings of each row's next token, for drafters."""
        if self.shown is None:
            return self
        sources = np.append(self.shown.sources[1:], next_source)
        return ImageContext(self.turns, ImageEmbeds(self.shown.pool, sources))
