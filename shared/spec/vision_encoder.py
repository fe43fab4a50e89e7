"""Vision encoder (ViT) of Qwen3.5: converts one image into image embeddings for the prompt.

An image is divided into patches, one row each. In the blocks every patch attends to the whole
image, and the merger combines a square of patches into one image token. Each image is encoded
alone, so its bits depend on nothing else. The host computes what depends only on the image size
(positions in the learned embedding, rotary angles) and the normalisation of byte values, once for
both backends. A device receives the bytes of the image and extracts the patches itself.

Source: Qwen3-VL's vision encoder, without the outputs for the first text layers (DeepStack).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Int, Int32, UInt8

from shared.models.image_processor import ImageProcessorConfig
from shared.models.rotary import RotaryConfig
from shared.models.stacks import BIAS
from shared.models.vision_config import EPS, THETA, VisionConfig
from shared.spec import attention, layers, linear
from shared.spec.linear import Matrix
from shared.spec.model import matrix

Weights = Mapping[str, Float[np.ndarray, "..."]]


@dataclass(frozen=True)
class Pixels:
    """One resized image in device format: one byte per channel, and inputs that depend on its size.

    Position inputs are computed per line: lines are the image's rows of patches, then its columns
    of patches. Padding may follow in all arrays.

    Attributes:
      bytes: Red, green and blue of each pixel, in row-major order.
      sides: Number of rows and of columns of patches.
      levels: Normalised value of each byte value, per channel.
      corners: The two rows (or columns) of the position embedding table around each line.
      shares: Interpolation weights of the two.
      cos, sin: Rotary cos and sin of each line.
    """

    bytes: UInt8[np.ndarray, " bytes"]
    sides: Int32[np.ndarray, " 2"]
    levels: Float32[np.ndarray, "3 256"]
    corners: Int32[np.ndarray, "lines 2"]
    shares: Float32[np.ndarray, "lines 2"]
    cos: Float32[np.ndarray, "lines quarter"]
    sin: Float32[np.ndarray, "lines quarter"]

    @property
    def num_patches(self) -> int:
        """Number of patches without padding."""
        return int(self.sides.prod())

    def padded(self, size: int, vision: VisionConfig) -> "Pixels":
        """Returns the image padded to `size` patches."""
        lines = vision.max_lines(size) - len(self.corners)
        names = ("corners", "shares", "cos", "sin")
        longer = {name: np.pad(getattr(self, name), ((0, lines), (0, 0))) for name in names}
        spare = vision.image_bytes(size) - len(self.bytes)
        return replace(self, bytes=np.pad(self.bytes, (0, spare)), **longer)


@dataclass(frozen=True)
class Patches:
    """Patches of one image; patches of the same image token are consecutive.

    Attributes:
      pixels: Values of each patch: by channel, frame, row and column.
      corners: The four entries of the position embedding table around each patch.
      shares: Interpolation weights of the four.
      cos, sin: Rotary cos and sin of each patch, half by its row and half by its column.
      count: Number of patches; later rows are padding.
    """

    pixels: Float[np.ndarray, "R numbers"]
    corners: Int[np.ndarray, "R 4"]
    shares: Float[np.ndarray, "R 4"]
    cos: Float[np.ndarray, "R half"]
    sin: Float[np.ndarray, "R half"]
    count: Int[np.ndarray, " 1"]


@dataclass(frozen=True)
class EncoderState:
    """Activations of an image between two blocks.

    Attributes:
      rows: Hidden states of its patches.
      cos, sin, count: Same as in `Patches`.
    """

    rows: Float[np.ndarray, "R hidden"]
    cos: Float[np.ndarray, "R half"]
    sin: Float[np.ndarray, "R half"]
    count: Int[np.ndarray, " 1"]


def pixels_of(
    image: UInt8[np.ndarray, "height width 3"],
    vision: VisionConfig,
    images: ImageProcessorConfig,
) -> Pixels:
    """Builds the device format of an image whose size is a result of
    `ImageProcessorConfig.fitted`.
    """
    sides = np.array(image.shape[:2], np.int32) // vision.patch_size
    places = np.concatenate([np.arange(side, dtype=np.int32) for side in sides])
    at = [np.linspace(0, vision.table_side - 1, side, dtype=np.float32) for side in sides]
    corners, shares = _table_lines(np.concatenate(at), vision.table_side)
    rotary = RotaryConfig(theta=THETA, width=vision.head_size // 2)
    cos, sin = layers.rotary_angles(places, rotary)
    return Pixels(
        bytes=np.ascontiguousarray(image).reshape(-1),
        sides=sides,
        levels=_levels(images),
        corners=corners,
        shares=shares,
        cos=cos,
        sin=sin,
    )


def _levels(images: ImageProcessorConfig) -> Float32[np.ndarray, "3 256"]:
    mean, deviation = (np.array(x, np.float32)[:, None] for x in (images.mean, images.deviation))
    return (np.arange(256, dtype=np.float32) / np.float32(255) - mean) / deviation


def _table_lines(
    at: Float32[np.ndarray, " lines"], side: int
) -> tuple[Int32[np.ndarray, "lines 2"], Float32[np.ndarray, "lines 2"]]:
    """Returns the two table rows or columns around each line, and their interpolation weights."""
    before = np.floor(at)
    after = np.minimum(before + 1, np.float32(side - 1))
    share = at - before
    corners = np.stack([before, after], axis=1).astype(np.int32)
    return corners, np.stack([1 - share, share], axis=1)


def patches(vision: VisionConfig, image: Pixels) -> Patches:
    """Extracts the patches of an image, including padding patches.

    A still image is one frame, repeated over the frames of a patch. A padding patch repeats the
    last one. The corners of the image map to the corners of the position embedding table, whatever
    the size.
    """
    size, merge = vision.patch_size, vision.merge_size
    rows, columns = np.maximum(image.sides, merge)  # a padding plan has no patches
    number = np.minimum(np.arange(vision.num_patches(len(image.bytes))), rows * columns - 1)
    block, within = number // merge**2, number % merge**2
    row = block // (columns // merge) * merge + within // merge
    column = block % (columns // merge) * merge + within % merge
    # A patch's part of a pixel row is contiguous in the image's bytes.
    pieces = image.bytes[: len(number) * vision.patch_bytes].reshape(-1, size, 3)
    piece = (row[:, None] * size + np.arange(size)) * columns + column[:, None]
    by_channel = pieces[piece].transpose(0, 3, 1, 2)  # [R, 3, rows of pixels, columns]
    values = image.levels[np.arange(3)[:, None, None], by_channel]
    frames = np.repeat(values[:, :, None], vision.frames, axis=2)
    across = rows + column
    (top, left), (above, before) = ((x[row], x[across]) for x in (image.corners, image.shares))
    cos, sin = (np.concatenate([x[row], x[across]], axis=1) for x in (image.cos, image.sin))
    return Patches(
        pixels=frames.reshape(len(number), -1),
        corners=(top[:, :, None] * vision.table_side + left[:, None]).reshape(-1, 4),
        shares=(above[:, :, None] * before[:, None]).reshape(-1, 4),
        cos=cos,
        sin=sin,
        count=np.array([rows * columns], np.int32),
    )


def encoded(
    config: VisionConfig, weights: Weights, image: Patches
) -> Float[np.ndarray, "tokens out"]:
    """Encodes an image to its embeddings, in the order of its image tokens.

    Args:
      config: Config of the vision encoder.
      weights: Arrays by the names of `shared.models.vision_parameters.tower_parameters`.
      image: Patches with any padding, whose output rows are undefined.
    """
    x = run_blocks(weights, embed_patches(weights, image), range(config.depth))
    return project(config, weights, x)


def embed_patches(weights: Weights, image: Patches) -> EncoderState:
    """Embeds the patches: patch projection plus interpolated position embedding."""
    x = linear.product(image.pixels, _single(weights, "vision.patches"))
    x = x + layers.bilinear_pos_embed(weights["vision.places"], image.corners, image.shares)
    return EncoderState(rows=x, cos=image.cos, sin=image.sin, count=image.count)


def run_blocks(weights: Weights, image: EncoderState, blocks: range) -> EncoderState:
    """Runs the given blocks, which must be the next ones."""
    x = image.rows
    for block in blocks:
        x = _block(weights, block, x, image)
    return replace(image, rows=x)


def project(
    config: VisionConfig, weights: Weights, image: EncoderState
) -> Float[np.ndarray, "tokens out"]:
    """Merges the patches into image embeddings, after the last block."""
    x = _normed(weights, "vision.merger_norm", image.rows)
    wide = linear.product(
        x.reshape(-1, config.merged * config.hidden), _single(weights, "vision.merger.up")
    )
    return linear.product(layers.gelu(wide), _single(weights, "vision.merger.down"))


def _block(
    weights: Weights, block: int, x: Float[np.ndarray, "R hidden"], image: EncoderState
) -> Float[np.ndarray, "R hidden"]:
    normed = _normed(weights, "vision.attention_norm", x, block)
    qkv = linear.product(normed, matrix(weights, "vision.attention.inputs", block))
    mixed = attention.bidirectional_attention(qkv, image.cos, image.sin, image.count)
    x = x + linear.product(mixed, matrix(weights, "vision.attention.out", block))
    normed = _normed(weights, "vision.mlp_norm", x, block)
    wide = layers.gelu_tanh(linear.product(normed, matrix(weights, "vision.mlp.up", block)))
    return x + linear.product(wide, matrix(weights, "vision.mlp.down", block))


def _single(weights: Weights, name: str) -> Matrix:
    return Matrix.plain(weights[name], weights[f"{name}{BIAS}"])


def _normed(
    weights: Weights, name: str, x: Float[np.ndarray, "R hidden"], block: int | None = None
) -> Float[np.ndarray, "R hidden"]:
    weight, bias = (weights[f"{name}{end}"] for end in ("", BIAS))
    if block is not None:
        weight, bias = weight[block], bias[block]
    return layers.layer_norm(x, weight, bias, EPS)
