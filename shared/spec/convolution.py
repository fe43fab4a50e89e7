"""Dynamic short convolution along the rows of a draft block, and the DFlash2 layer around it.

A convolution precedes and another follows each part (attention, MLP) of a layer of a DFlash2 head.
Each row adds its own dynamic coefficients to the learned ones.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

from shared.drafts.dflash2 import ConvConfig
from shared.drafts.dflash_config import BlockConfig
from shared.models.config import ModelConfig
from shared.spec import layers, linear, model
from shared.spec.attention import AttentionRows
from shared.spec.cache_pools import KV
from shared.spec.eagle import HeadWeights
from shared.spec.linear import NormedStream
from shared.spec.model import Hidden

Norm = Float[np.ndarray, " hidden"]


def convolved(
    values: Float[np.ndarray, "R hidden"],
    base: Float[np.ndarray, "taps hidden"],
    moved: Float[np.ndarray, "R taps groups"],
    size: int,
    added: Float[np.ndarray, "R hidden"] | None,
) -> Float[np.ndarray, "R hidden"]:
    """Convolves each row with the rows before it in its block, per column, in float32.

    Tap t reads the row t places before. Rows before the block's first row count as 0: the block has
    no context and no state. The coefficient is `base` plus the reading row's dynamic part.

    Args:
      values: Input rows.
      base: Learned coefficients.
      moved: Dynamic coefficients for groups of neighbouring columns.
      size: Rows of a block.
      added: Initial value of the sums; None for 0.

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
    """Applies the first convolution of a part, which computes its input.

    Args:
      normed: Residual stream after the part's norm.
      base, moved, size: See `convolved`; coefficients of both convolutions.
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
    """Applies the second convolution of a part's output, adds the residual, and applies the next
    norm.

    Args:
      given: Output of the part.
      base, moved, size: See `convolved`; coefficients of both convolutions.
      x: Residual stream.
      norm: Scale of the next norm.
      eps: Epsilon of that norm.

    Returns:
      The new residual stream, and its norm.
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
    rows: AttentionRows,
    kv: KV,
) -> tuple[Hidden, Hidden, KV]:
    """Computes one layer of a DFlash2 head, with a convolution before and after each part.

    Args:
      sizes: Config of the head's layers.
      block: Block of the head.
      weights: Weights of the head.
      number: Index of the layer.
      x, normed: Residual stream, and its norm for this layer.
      rows: Positions and visibility of the rows.
      kv: KV of the head.

    Returns:
      The residual stream, its norm for the next layer or for the output, and the KV.
    """
    read, added = _around(sizes, block, weights, "attention", number, normed)
    no_stream = NormedStream(np.zeros_like(x))
    mixed, kv = model.attention_layer(
        sizes, sizes.attention, weights, "layer.", number, read, no_stream, rows, kv
    )
    x, normed = added(mixed.rows, x, weights["layer.post_attention_norm"][number])
    read, added = _around(sizes, block, weights, "mlp", number, normed)
    gate_up, down = (model.matrix(weights, f"layer.mlp.{x}", number) for x in ("gate_up", "down"))
    mlp = linear.product(linear.act_and_mul_linear(NormedStream(read), None, gate_up), down)
    norms = [*weights["layer.input_norm"], weights["final_norm"]]
    return *added(mlp, x, norms[number + 1]), kv


def _around(
    sizes: ModelConfig,
    block: BlockConfig,
    weights: HeadWeights,
    part: str,
    number: int,
    normed: Hidden,
) -> tuple[Hidden, Callable[[Hidden, Hidden, Norm], tuple[Hidden, Hidden]]]:
    """Returns a part's input, and a function that adds the part's output to the stream and norms
    it.

    The dynamic coefficients of both convolutions are computed before the part.
    """
    conv = block.part(ConvConfig)
    assert conv is not None  # required for DFlash2
    base, moving = (weights[f"conv.{number}.{part}.{x}"] for x in ("base", "moved"))
    moved = layers.linear(normed, moving).reshape(len(normed), 2, conv.taps, -1)

    def added(given: Hidden, x: Hidden, norm: Norm) -> tuple[Hidden, Hidden]:
        scale = model.scale(sizes, norm)
        return behind(given, base, moved, block.size, x, scale, sizes.rms_eps)

    return before(normed, base, moved, block.size), added
