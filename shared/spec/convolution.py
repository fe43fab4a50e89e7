"""A convolution along the rows of a block, whose coefficients each row moves, and a layer with it.

It stands before and behind each part of a layer of a DFlash2 head.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from shared.drafts.block import BlockConfig
from shared.models.config import ModelConfig
from shared.spec import layers, linear, model
from shared.spec.attention import Rows
from shared.spec.eagle import HeadWeights
from shared.spec.linear import Stream
from shared.spec.model import KV, Hidden

Norm = Float[np.ndarray, " hidden"]


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


def before(
    normed: Float[np.ndarray, "R hidden"],
    base: Float[np.ndarray, "2 taps hidden"],
    moved: Float[np.ndarray, "R 2 taps groups"],
    size: int,
) -> Float[np.ndarray, "R hidden"]:
    """What a part of a layer reads: the first of its two convolutions.

    Args:
      normed: The residual stream behind the part's norm.
      base, moved, size: As `convolved`, of both convolutions.
    """
    return convolved(normed, base[0], moved[:, 0], size, None)


def behind(
    given: Float[np.ndarray, "R hidden"],
    base: Float[np.ndarray, "2 taps hidden"],
    moved: Float[np.ndarray, "R 2 taps groups"],
    size: int,
    x: Float[np.ndarray, "R hidden"],
    norm: Float[np.ndarray, " hidden"],
    eps: float,
) -> tuple[Float[np.ndarray, "R hidden"], Float[np.ndarray, "R hidden"]]:
    """The stream with what a part gives, through the second convolution; and that stream normed.

    Args:
      given: What the part gives.
      base, moved, size: As `convolved`, of both convolutions.
      x: The residual stream.
      norm: Scale of the norm through which the stream is read next.
      eps: Of that norm.
    """
    x = convolved(given, base[1], moved[:, 1], size, x)
    return x, layers.rms_norm(x, norm, eps)


def layer(
    sizes: ModelConfig,
    block: BlockConfig,
    weights: HeadWeights,
    number: int,
    x: Hidden,
    normed: Hidden,
    rows: Rows,
    kv: KV,
) -> tuple[Hidden, Hidden, KV]:
    """One layer of a DFlash2 head: each part stands between two convolutions, and is added then.

    Args:
      sizes: Of the head's layers.
      number: The layer's.
      x, normed: The residual stream, as it is and behind the layer's first norm.
      rows: Where its rows stand, and what they see.

    Returns:
      The stream, as it is and behind the norm of the next layer or of the head; and the KV.
    """
    read, added = _around(sizes, block, weights, "attention", number, normed)
    own, nothing = (sizes, sizes.attention, weights, "layer.", number), Stream(np.zeros_like(x))
    mixed, kv = model.attention_layer(*own, read, nothing, rows, kv)
    x, normed = added(mixed.rows, x, weights["layer.post_attention_norm"][number])
    read, added = _around(sizes, block, weights, "mlp", number, normed)
    gate_up, down = (model.matrix(weights, f"layer.mlp.{x}", number) for x in ("gate_up", "down"))
    fed = linear.product(linear.gated_product(Stream(read), None, gate_up), down)
    norms = [*weights["layer.input_norm"], weights["final_norm"]]
    return *added(fed, x, norms[number + 1]), kv


def _around(
    sizes: ModelConfig,
    block: BlockConfig,
    weights: HeadWeights,
    part: str,
    number: int,
    normed: Hidden,
) -> tuple[Hidden, Callable[[Hidden, Hidden, Norm], tuple[Hidden, Hidden]]]:
    """What a part reads, and what is made of what it gives, of the stream and of its next norm.

    What moves the coefficients of both convolutions is read before the part.
    """
    assert block.conv is not None  # a DFlash2 head has it
    base, moving = (weights[f"conv.{number}.{part}.{x}"] for x in ("base", "moved"))
    moved = layers.linear(normed, moving).reshape(len(normed), 2, block.conv.taps, -1)

    def added(given: Hidden, x: Hidden, norm: Norm) -> tuple[Hidden, Hidden]:
        scale = model.scale(sizes, norm)
        return behind(given, base, moved, block.size, x, scale, sizes.rms_eps)

    return before(normed, base, moved, block.size), added
