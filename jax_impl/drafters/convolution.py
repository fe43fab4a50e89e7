"""A layer of a DFlash2 head; as `shared.spec.convolution`."""

from collections.abc import Callable
from functools import partial

import jax
from jaxtyping import Float

from jax_impl.layers import Sight, attention
from jax_impl.ops import alone, convolution, linear, ranks
from jax_impl.ops.layers import rms_norm
from jax_impl.ops.linear import Stream, product
from jax_impl.ops.mix import PagedKV
from jax_impl.records import Around, Conv, Layer
from shared.models.config import ModelConfig

Hidden = Float[jax.Array, "R hidden"]


def layer(
    sizes: ModelConfig,
    weights: Layer,
    around: Around,
    place: int,
    size: int,
    x: Hidden,
    sight: Sight,
) -> tuple[Hidden, PagedKV]:
    """Each part stands between two convolutions, and is added then.

    Every rank makes whole convolutions, and of its products its share.

    Args:
      place: The layer's number.
      size: Rows of a block.
    """
    group, norms = sight.group, (alone(weights.input_norm), alone(weights.post_norm))
    normed = rms_norm(x, norms[0], sizes.rms_eps)
    read, behind = _around(around.attention, normed, size)
    qkv = product(read, weights.mixer.inputs)
    mixed, kv = attention(sizes, sight, place, weights.mixer, qkv, sight.kv)
    mixed = ranks.gathered(group, mixed)
    x = behind(ranks.gathered(group, product(mixed, weights.mixer.out)), x)
    normed = rms_norm(x, norms[1], sizes.rms_eps)
    read, behind = _around(around.mlp, normed, size)
    fed = linear.gated_product(Stream(read, group=group), None, weights.feed.gate_up)
    return behind(ranks.gathered(group, product(fed, weights.feed.down)), x), kv


def _around(
    conv: Conv, normed: Hidden, size: int
) -> tuple[Hidden, Callable[[Hidden, Hidden], Hidden]]:
    """What a part reads, and what is made of what it gives and of the stream.

    What moves the coefficients of both convolutions is read before the part.
    """
    moved = product(normed, conv.moved).reshape(len(normed), 2, conv.base.shape[1], -1)

    def side(at: int, values: Hidden, added: Hidden | None) -> Hidden:
        total = convolution.convolved(values, conv.base[at], moved[:, at], size, added)
        return total.astype(values.dtype)

    return side(0, normed, None), partial(side, 1)
