"""A convolution along the rows of a block, whose coefficients each row moves, and a layer with it.

It stands before and behind each part of a layer of a DFlash2 head.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from jaxtyping import Float

from shared.drafts.block import BlockConfig
from shared.models.config import ModelConfig
from shared.spec import layers, linear, model
from shared.spec.attention import Rows
from shared.spec.eagle import HeadWeights
from shared.spec.linear import Stream
from shared.spec.model import KV, Hidden


def convolved(
    values: Float[np.ndarray, "R hidden"],
    base: Float[np.ndarray, "taps hidden"],
    moved: Float[np.ndarray, "R taps groups"],
    size: int,
    added: Float[np.ndarray, "R hidden"] | None,
) -> Float[np.ndarray, "R hidden"]:
    """Each row's sum of itself and the rows before it in its block, column by column; float32.

    Tap t reads the row t places before, and nothing before the block's first row: there is no
    context and no state. Its coefficient is `base`, and what the reading row moves it by.

    Args:
      moved: For groups of neighbouring columns.
      size: Rows of a block.
      added: What the sums begin with; None: nothing.

    Source: DFlash2, z-lab; the equations are those of its model.
    """
    width, slot = values.shape[1] // moved.shape[2], np.arange(len(values)) % size
    total = np.zeros(values.shape, np.float32) if added is None else added.astype(np.float32)
    for tap, own in enumerate(base):
        read = np.where(slot[:, None] >= tap, np.roll(values, tap, axis=0), 0)
        total += own * read
        total += np.repeat(moved[:, tap], width, axis=1) * read
    return total


def layer(
    sizes: ModelConfig,
    block: BlockConfig,
    weights: HeadWeights,
    number: int,
    x: Hidden,
    rows: Rows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """One layer of a DFlash2 head: each part stands between two convolutions, and is added then.

    Args:
      sizes: Of the head's layers.
      number: The layer's.
      x: The residual stream.
      rows: Where its rows stand, and what they see.
    """
    read, behind = _around(sizes, block, weights, "attention", number, x)
    own, nothing = (sizes, sizes.attention, weights, "layer.", number), Stream(np.zeros_like(x))
    mixed, kv = model.attention_layer(*own, read, nothing, rows, kv)
    x = behind(mixed.rows, x)
    read, behind = _around(sizes, block, weights, "mlp", number, x)
    gate_up, down = (model.matrix(weights, f"layer.mlp.{x}", number) for x in ("gate_up", "down"))
    fed = linear.product(linear.gated_product(Stream(read), None, gate_up), down)
    return behind(fed, x), kv


NORMS = {"attention": "input_norm", "mlp": "post_attention_norm"}
"""Through which the parts of a layer read the stream."""


def _around(
    sizes: ModelConfig, block: BlockConfig, weights: HeadWeights, part: str, number: int, x: Hidden
) -> tuple[Hidden, Callable[[Hidden, Hidden], Hidden]]:
    """What a part reads, and what is made of what it gives and of the stream.

    What moves the coefficients of both convolutions is read before the part.
    """
    assert block.conv is not None  # a DFlash2 head has it
    normed = model.norm(sizes, x, weights[f"layer.{NORMS[part]}"][number])
    base, moving = (weights[f"conv.{number}.{part}.{x}"] for x in ("base", "moved"))
    moved = layers.linear(normed, moving).reshape(len(x), 2, block.conv.taps, -1)

    def side(at: int, values: Hidden, added: Hidden | None) -> Hidden:
        return convolved(values, base[at], moved[:, at], block.size, added)

    return side(0, normed, None), partial(side, 1)
