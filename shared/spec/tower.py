"""The vision tower of Qwen3.5: one picture becomes rows that stand in the prompt.

A picture is cut into patches, each of which is a row; the blocks let every patch see the whole
picture, and the merger makes one row of the prompt of a square of patches. A picture is encoded
alone, so that its bits depend on nothing else. What follows from its size alone (where each patch
lies in the learned table, by what angle it turns) is worked out on the host, once for both
backends.

Source: Qwen3-VL's tower, without the outputs that go to the first text layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int, UInt8

from shared.models.parameters import BIAS
from shared.models.pictures import PictureConfig
from shared.models.rotary import RotaryConfig
from shared.models.vision import EPS, THETA, VisionConfig
from shared.spec import attention, layers, linear
from shared.spec.linear import Matrix
from shared.spec.model import matrix

Weights = Mapping[str, Float[np.ndarray, "..."]]


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

    def padded(self, size: int) -> "Patches":
        """The same with rows of padding behind, `size` in all."""

        def longer(x: np.ndarray) -> np.ndarray:
            return np.pad(x, [(0, size - len(x)), (0, 0)])

        rows = {x: longer(getattr(self, x)) for x in ("pixels", "corners", "shares", "cos", "sin")}
        return replace(self, **rows)


def patches(
    picture: UInt8[np.ndarray, "height width 3"], vision: VisionConfig, pictures: PictureConfig
) -> Patches:
    """The patches of a picture whose sides are those of `PictureConfig.fitted`.

    A still picture is one frame, repeated as often as a patch spans.
    """
    size, merge = vision.patch_size, vision.merge_size
    height, width = (side // size for side in picture.shape[:2])
    cut = picture.reshape(height // merge, merge, size, width // merge, merge, size, 3)
    # By block, patch of the block, channel and pixel, while a value is one byte.
    ordered = np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, 3, 1, size**2)
    values = ordered.astype(np.float32)
    mean, deviation = (
        np.array(x, np.float32)[:, None, None] for x in (pictures.mean, pictures.deviation)
    )
    values /= np.float32(255)
    values -= mean
    values /= deviation
    frames = np.repeat(values, vision.frames, axis=2)
    row, column = _places(height, width, merge)
    corners, shares = _table_places(row, column, height, width, vision.table_side)
    cos, sin = _angles(row, column, vision)
    return Patches(
        pixels=frames.reshape(height * width, -1),
        corners=corners,
        shares=shares,
        cos=cos,
        sin=sin,
        count=np.array([height * width], np.int32),
    )


def _places(
    height: int, width: int, merge: int
) -> tuple[Int[np.ndarray, " R"], Int[np.ndarray, " R"]]:
    """The row and the column of each patch, in the order in which patches stand."""
    grid = np.indices((height, width), np.int32)
    cut = grid.reshape(2, height // merge, merge, width // merge, merge)
    row, column = cut.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return row, column


def _table_places(
    row: Int[np.ndarray, " R"],
    column: Int[np.ndarray, " R"],
    height: int,
    width: int,
    side: int,
) -> tuple[Int[np.ndarray, "R 4"], Float[np.ndarray, "R 4"]]:
    """Where patches lie in a table whose corners are the picture's, whatever its size."""
    down = np.linspace(0, side - 1, height, dtype=np.float32)[row]
    across = np.linspace(0, side - 1, width, dtype=np.float32)[column]
    top, left = np.floor(down), np.floor(across)
    bottom, right = (np.minimum(x + 1, np.float32(side - 1)) for x in (top, left))
    below, beside = down - top, across - left
    corners = [y * side + x for y in (top, bottom) for x in (left, right)]
    shares = [y * x for y in (1 - below, below) for x in (1 - beside, beside)]
    return np.stack(corners, axis=1).astype(np.int32), np.stack(shares, axis=1)


def _angles(
    row: Int[np.ndarray, " R"], column: Int[np.ndarray, " R"], vision: VisionConfig
) -> tuple[Float[np.ndarray, "R half"], Float[np.ndarray, "R half"]]:
    rotary = RotaryConfig(theta=THETA, width=vision.head_size // 2)
    by_row, by_column = (layers.rotary_angles(place, rotary) for place in (row, column))
    cos, sin = (np.concatenate(both, axis=1) for both in zip(by_row, by_column, strict=True))
    return cos, sin


def encoded(
    config: VisionConfig, weights: Weights, picture: Patches
) -> Float[np.ndarray, "tokens out"]:
    """The rows that stand in the prompt in the place of a picture's tokens, in their order.

    Args:
      weights: By the names of `shared.models.tower.tower_parameters`.
      picture: With any number of rows of padding, which become rows of no use behind the others.
    """
    x = linear.product(picture.pixels, _single(weights, "vision.patches"))
    x = x + _placed(weights["vision.places"], picture.corners, picture.shares)
    for block in range(config.depth):
        x = _block(config, weights, block, x, picture)
    x = _normed(weights, "vision.merger_norm", x)
    wide = linear.product(
        x.reshape(-1, config.merged * config.hidden), _single(weights, "vision.merger.up")
    )
    return linear.product(layers.gelu(wide), _single(weights, "vision.merger.down"))


def _placed(
    table: Float[np.ndarray, "places hidden"],
    corners: Int[np.ndarray, "R 4"],
    shares: Float[np.ndarray, "R 4"],
) -> Float[np.ndarray, "R hidden"]:
    """The learned place of each patch, between the four rows of the table around it."""
    return (table[corners] * shares[..., None]).sum(axis=1)


def _block(
    config: VisionConfig,
    weights: Weights,
    block: int,
    x: Float[np.ndarray, "R hidden"],
    picture: Patches,
) -> Float[np.ndarray, "R hidden"]:
    normed = _normed(weights, "vision.attention_norm", x, block)
    qkv = linear.product(normed, matrix(weights, "vision.attention.inputs", block))
    q, k, v = qkv.reshape(len(x), 3, config.num_heads, config.head_size).transpose(1, 0, 2, 3)
    q, k = (layers.apply_rotary(each, picture.cos, picture.sin) for each in (q, k))
    mixed = attention.attend_all(q, k, v, picture.count).reshape(x.shape)
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
