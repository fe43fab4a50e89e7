"""Image inputs of plans, and the encoder cache on the device."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from shared.boundary.program import Program, StepKind
from shared.models.image_processor import ImageProcessorConfig
from shared.models.vision_config import VisionConfig
from shared.spec.vision_encoder import Pixels


@dataclass(frozen=True)
class EncoderCacheSpec:
    """Encoder cache: image embeddings on the device, stored until prompts have read them.

    Attributes:
      vision: Config of the vision encoder.
      processor: Image processor config; backends do not read it.
      num_rows: Rows of the cache, one per image token, including the reserved row 0.
    """

    vision: VisionConfig
    processor: ImageProcessorConfig
    num_rows: int


@dataclass(frozen=True)
class ImageInputs:
    """Image inputs of a prefill. Text tokens have M-RoPE positions equal to their sequence
    positions.

    Attributes:
      sources: Encoder-cache row that replaces each token's embedding; 0 for the token's own
        embedding.
      mrope_positions: M-RoPE positions of each token; see `shared.spec.mrope`.
      next_embed_sources: Same as `sources`, for the token after each row's chunk, which drafters
        read.
      mrope_position_deltas: M-RoPE position delta of each row: rotary minus sequence position of
        later tokens, stored per slot.
    """

    sources: Int32[np.ndarray, " T"]
    mrope_positions: Int32[np.ndarray, "T 3"]
    next_embed_sources: Int32[np.ndarray, " B"]
    mrope_position_deltas: Int32[np.ndarray, " B"]


@dataclass(frozen=True)
class EncodeImage:
    """Encodes one image, or runs some blocks of its encoding; reads no row of the plan.

    The activations of an image that is encoded in several steps stay on the device between them.
    There is room for one such image: starting another one discards it.

    Attributes:
      pixels: Padded pixels of the image; None if the step continues an encoding.
      place: Encoder-cache row of the first image token; 0 discards the output. Read by the step
        that runs the last block.
    """

    pixels: Pixels | None
    place: Int32[np.ndarray, " 1"]


def max_begun(programs: Iterable[Program], vision: VisionConfig) -> int:
    """Returns the patches of the largest image that is encoded in several steps; 0 if none is."""
    cut = (p.tokens for p in programs if p.work is StepKind.ENCODE and len(p.blocks) < vision.depth)
    return max(cut, default=0)
