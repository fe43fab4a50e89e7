"""The vision tower of Qwen3.5: one picture becomes rows that stand in the prompt.

A picture is cut into patches, each of which is a row; the blocks let every patch see the whole
picture, and the merger makes one row of the prompt of a square of patches. A picture is encoded
alone, so that its bits depend on nothing else. What follows from its size alone (where patches lie
in the learned table, by what angles they turn) and what a byte becomes is worked out on the host,
once for both backends; a device gets the picture's bytes, and cuts them itself.

Source: Qwen3-VL's tower, without the outputs that go to the first text layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Float32, Int, Int32, UInt8

from shared.models.parameters import BIAS
from shared.models.pictures import PictureConfig
from shared.models.rotary import RotaryConfig
from shared.models.vision import EPS, THETA, VisionConfig
from shared.spec import attention, layers, linear
from shared.spec.linear import Matrix
from shared.spec.model import matrix

Weights = Mapping[str, Float[np.ndarray, "..."]]


@dataclass(frozen=True)
class Pixels:
    """One picture as it travels to a device: a byte a number, and what follows from its sides.

    What a row of patches has is worked out once for all of them, and so it is with columns: lines
    are the picture's rows of patches, then its columns. Padding may stand behind all of either.

    Attributes:
      bytes: Red, green and blue of each pixel, row by row.
      sides: How many rows and columns of patches there are.
      levels: What the tower reads for each value of a byte, by channel.
      corners: The two rows, or columns, of the learned table between which each line lies.
      shares: Of each of them.
      cos, sin: Of the angles by which the patches of each line turn.
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
        """Without padding."""
        return int(self.sides.prod())

    def padded(self, size: int, vision: VisionConfig) -> "Pixels":
        """The same with padding behind, for `size` patches in all."""
        lines = vision.most_lines(size) - len(self.corners)
        names = ("corners", "shares", "cos", "sin")
        longer = {name: np.pad(getattr(self, name), ((0, lines), (0, 0))) for name in names}
        spare = vision.picture_bytes(size) - len(self.bytes)
        return replace(self, bytes=np.pad(self.bytes, (0, spare)), **longer)


@dataclass(frozen=True)
class Patches:
    """The patches of one picture, those that become one row of the prompt side by side.

    Attributes:
      pixels: The numbers of each patch: by channel, frame, row and column.
      corners: The four rows of the learned table between which each patch lies.
      shares: Of each of them.
      cos, sin: Of the angles by which each patch turns, half of them by its row and half by its
        column.
      count: How many patches there are; rows behind them are padding.
    """

    pixels: Float[np.ndarray, "R numbers"]
    corners: Int[np.ndarray, "R 4"]
    shares: Float[np.ndarray, "R 4"]
    cos: Float[np.ndarray, "R half"]
    sin: Float[np.ndarray, "R half"]
    count: Int[np.ndarray, " 1"]


@dataclass(frozen=True)
class Begun:
    """A picture between two blocks of the tower, with what each of them is told.

    Attributes:
      rows: Of its patches.
      cos, sin, count: As the patches'.
    """

    rows: Float[np.ndarray, "R hidden"]
    cos: Float[np.ndarray, "R half"]
    sin: Float[np.ndarray, "R half"]
    count: Int[np.ndarray, " 1"]


def pixels_of(
    picture: UInt8[np.ndarray, "height width 3"], vision: VisionConfig, pictures: PictureConfig
) -> Pixels:
    """What a device is told of a picture whose sides are those of `PictureConfig.fitted`."""
    sides = np.array(picture.shape[:2], np.int32) // vision.patch_size
    places = np.concatenate([np.arange(side, dtype=np.int32) for side in sides])
    at = [np.linspace(0, vision.table_side - 1, side, dtype=np.float32) for side in sides]
    corners, shares = _table_lines(np.concatenate(at), vision.table_side)
    rotary = RotaryConfig(theta=THETA, width=vision.head_size // 2)
    cos, sin = layers.rotary_angles(places, rotary)
    return Pixels(
        bytes=np.ascontiguousarray(picture).reshape(-1),
        sides=sides,
        levels=_levels(pictures),
        corners=corners,
        shares=shares,
        cos=cos,
        sin=sin,
    )


def _levels(pictures: PictureConfig) -> Float32[np.ndarray, "3 256"]:
    mean, deviation = (
        np.array(x, np.float32)[:, None] for x in (pictures.mean, pictures.deviation)
    )
    return (np.arange(256, dtype=np.float32) / np.float32(255) - mean) / deviation


def _table_lines(
    at: Float32[np.ndarray, " lines"], side: int
) -> tuple[Int32[np.ndarray, "lines 2"], Float32[np.ndarray, "lines 2"]]:
    """Between which rows or columns of the learned table lines lie, and the shares of the two."""
    before = np.floor(at)
    behind = np.minimum(before + 1, np.float32(side - 1))
    share = at - before
    corners = np.stack([before, behind], axis=1).astype(np.int32)
    return corners, np.stack([1 - share, share], axis=1)


def patches(vision: VisionConfig, picture: Pixels) -> Patches:
    """Cuts a picture into patches, as many as it has bytes for with its padding.

    A still picture is one frame, repeated as often as a patch spans. A patch of padding is the last
    one again. The table of places has the picture's corners at its own, whatever the size.
    """
    size, merge = vision.patch_size, vision.merge_size
    rows, columns = np.maximum(picture.sides, merge)  # a plan of nothing but padding has none
    number = np.minimum(np.arange(vision.num_patches(len(picture.bytes))), rows * columns - 1)
    block, within = number // merge**2, number % merge**2
    row = block // (columns // merge) * merge + within // merge
    column = block % (columns // merge) * merge + within % merge
    # A patch's part of a row of pixels is one piece of the picture's bytes.
    pieces = picture.bytes[: len(number) * vision.patch_bytes].reshape(-1, size, 3)
    piece = (row[:, None] * size + np.arange(size)) * columns + column[:, None]
    by_channel = pieces[piece].transpose(0, 3, 1, 2)  # [R, 3, rows of pixels, columns]
    values = picture.levels[np.arange(3)[:, None, None], by_channel]
    frames = np.repeat(values[:, :, None], vision.frames, axis=2)
    across = rows + column
    (top, left), (above, before) = ((x[row], x[across]) for x in (picture.corners, picture.shares))
    cos, sin = (np.concatenate([x[row], x[across]], axis=1) for x in (picture.cos, picture.sin))
    return Patches(
        pixels=frames.reshape(len(number), -1),
        corners=(top[:, :, None] * vision.table_side + left[:, None]).reshape(-1, 4),
        shares=(above[:, :, None] * before[:, None]).reshape(-1, 4),
        cos=cos,
        sin=sin,
        count=np.array([rows * columns], np.int32),
    )


def encoded(
    config: VisionConfig, weights: Weights, picture: Patches
) -> Float[np.ndarray, "tokens out"]:
    """The rows that stand in the prompt in the place of a picture's tokens, in their order.

    Args:
      weights: By the names of `shared.models.tower.tower_parameters`.
      picture: With any number of rows of padding, which become rows of no use behind the others.
    """
    x = advanced(weights, begun(weights, picture), range(config.depth))
    return finished(config, weights, x)


def begun(weights: Weights, picture: Patches) -> Begun:
    """A picture before the first block."""
    x = linear.product(picture.pixels, _single(weights, "vision.patches"))
    x = x + layers.blended(weights["vision.places"], picture.corners, picture.shares)
    return Begun(rows=x, cos=picture.cos, sin=picture.sin, count=picture.count)


def advanced(weights: Weights, picture: Begun, blocks: range) -> Begun:
    """A picture behind these blocks, which are the next ones."""
    x = picture.rows
    for block in blocks:
        x = _block(weights, block, x, picture)
    return replace(picture, rows=x)


def finished(
    config: VisionConfig, weights: Weights, picture: Begun
) -> Float[np.ndarray, "tokens out"]:
    """The rows of the prompt, of a picture behind the last block."""
    x = _normed(weights, "vision.merger_norm", picture.rows)
    wide = linear.product(
        x.reshape(-1, config.merged * config.hidden), _single(weights, "vision.merger.up")
    )
    return linear.product(layers.gelu(wide), _single(weights, "vision.merger.down"))


def _block(
    weights: Weights, block: int, x: Float[np.ndarray, "R hidden"], picture: Begun
) -> Float[np.ndarray, "R hidden"]:
    normed = _normed(weights, "vision.attention_norm", x, block)
    qkv = linear.product(normed, matrix(weights, "vision.attention.inputs", block))
    mixed = attention.attend_all(qkv, picture.cos, picture.sin, picture.count)
    x = x + linear.product(mixed, matrix(weights, "vision.attention.out", block))
    normed = _normed(weights, "vision.mlp_norm", x, block)
    wide = layers.gelu_tanh(linear.product(normed, matrix(weights, "vision.mlp.up", block)))
    return x + linear.product(wide, matrix(weights, "vision.mlp.down", block))


def _single(weights: Weights, name: str) -> Matrix:
    return Matrix(weights[name], weights[f"{name}{BIAS}"])


def _normed(
    weights: Weights, name: str, x: Float[np.ndarray, "R hidden"], block: int | None = None
) -> Float[np.ndarray, "R hidden"]:
    weight, bias = (weights[f"{name}{end}"] for end in ("", BIAS))
    if block is not None:
        weight, bias = weight[block], bias[block]
    return layers.layer_norm(x, weight, bias, EPS)
